"""Test dynamic sampling with a real engine on a tiny model, and a scripted reward so that verdicts are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.config import Config, apply_override, option_names
from dapo.data.stream import PromptStream, ShuffledSource
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import RewardError
from dapo.model.attention import ATTENTION_NAME
from dapo.sampling.round_size import groups_needed
from dapo.sampling.strict import DynamicSampler
from dapo.types import Prompt, Rollout, Score
from tests.make import Scripted, judge_by
from tests.tiny import EOS_ID, tiny_llama, tiny_tokenizer

MODEL = tiny_llama()
MODEL.set_attn_implementation(ATTENTION_NAME)


def sampler_for(
    judge: Callable[[Prompt, Rollout], Score], *overrides: str, learns_elsewhere: bool = False
) -> DynamicSampler:
    base = {
        "model": {"path": "tiny"},
        "data": {"train": "none", "train_batch_size": 4, "max_response_length": 6},
        "rollout": {"n": 3, "max_concurrent": 7},
    }
    for override in overrides:
        apply_override(base, override, option_names())
    config = Config.parse(base)
    engine = EmbeddedEngine(
        MODEL, tiny_tokenizer(), frozenset({EOS_ID, *range(4, 20)}), config.run.seed, config.rollout.max_concurrent
    )
    prompts = [Prompt(f"p{i}", (), (40 + i, 41, 42), answer=i) for i in range(5)]
    stream = PromptStream([ShuffledSource(prompts, config.run.seed)])
    return DynamicSampler(config, engine, Scripted(judge), stream, learns_elsewhere=learns_elsewhere)


def mixed_when(is_mixed: Callable[[int], bool]) -> Callable[[Prompt, Rollout], Score]:
    """Groups whose serial satisfies the predicate get differing scores; the others all get 0."""
    return lambda prompt, rollout: Score(float(rollout.index % 2) if is_mixed(rollout.serial) else 0.0)


def serials(groups):
    return [group.serial for group in groups]


def total(metrics, prefix):
    return sum(value for name, value in metrics.items() if name.startswith(prefix))


def assert_tokens_add_up(tokens):
    """carried_in + generated = trained + masked + dropped + stale + carried_out"""
    arrived = tokens["tokens/carried_in"] + tokens["tokens/generated"]
    kinds = ("trained", "masked", "stale", "carried_out")
    assert arrived == sum(tokens[f"tokens/{kind}"] for kind in kinds) + total(tokens, "tokens/dropped/")


def test_the_batch_is_filled_in_submission_order_and_surplus_is_carried_with_its_version():
    sampler = sampler_for(mixed_when(lambda serial: serial % 2 == 0), "data.gen_batch_size=11")
    first = sampler.fill(1, version=0)
    assert serials(first.batch) == [0, 2, 4, 6]
    carried = serials(sampler.carried)
    assert carried == [8, 10]
    sampler.engine.sync_weights(1)
    second = sampler.fill(2, version=1)
    assert serials(second.batch)[: len(carried)] == carried
    assert [group.weight_version for group in second.batch] == [0, 0, 1, 1]


def test_batches_and_round_sizes_match_a_recorded_sequence():
    sampler = sampler_for(mixed_when(lambda serial: serial % 3 > 0), "data.gen_batch_size=7")
    sizes: list[int] = []
    submit = sampler.engine.submit
    sampler.engine.submit = lambda requests: (sizes.append(len(requests)), submit(requests))[1]
    flow = []
    for step in range(1, 6):
        sampled = sampler.fill(step, version=step - 1)
        sampler.engine.sync_weights(step)
        flow.append((serials(sampled.batch), serials(sampler.carried)))
    assert flow == [
        ([1, 2, 4, 5], []), ([7, 8, 10, 11], [13]), ([13, 14, 16, 17], [19]), ([19, 20, 22, 23], [25]),
        ([25, 26, 28, 29], [31]),
    ]  # fmt: skip
    assert sizes == [7, 7, 6, 6, 6]


def test_groups_finish_out_of_order_but_are_kept_in_order():
    order = []
    judge = mixed_when(lambda serial: True)

    def recording(prompt, rollout):
        order.append(rollout.serial)
        return judge(prompt, rollout)

    sampled = sampler_for(recording, "data.gen_batch_size=8", "rollout.max_concurrent=24").fill(1, version=0)
    assert order != sorted(order), "this test needs groups that finish out of order"
    assert serials(sampled.batch) == [0, 1, 2, 3]


@given(
    pattern=st.lists(st.sampled_from(["mixed", "flat", "unjudged", "partly_judged"]), min_size=1, max_size=7),
    gen=st.integers(1, 9),
    staleness=st.integers(0, 2),
    limit=st.integers(0, 3),
    exhausted=st.sampled_from(["train_partial", "skip", "pad"]),
    overlong_filter=st.booleans(),
    advance=st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=40)
def test_no_token_is_lost_and_no_group_is_split_or_trained_twice(
    pattern, gen, staleness, limit, exhausted, overlong_filter, advance
):
    if limit == 0 and "mixed" not in pattern:
        return  # without a limit and without kept groups, sampling never ends, by design

    sampler = sampler_for(
        judge_by(pattern), f"data.gen_batch_size={gen}", f"algorithm.max_staleness={staleness}",
        f"algorithm.filter_groups.max_num_gen_batches={limit}", f"algorithm.filter_groups.on_exhausted={exhausted}",
        f"algorithm.overlong_filter={str(overlong_filter).lower()}",
    )  # fmt: skip
    trained: list[int] = []
    decided: list[int] = []
    generated = version = 0
    for step in range(1, 5):
        carried_in = sum(group.tokens for group in sampler.carried)
        try:
            sampled = sampler.fill(step, version)
        except RewardError:
            assert step == 1
            return
        assert_tokens_add_up(sampled.tokens)
        assert sampled.tokens["tokens/carried_in"] == carried_in
        assert sampled.tokens["tokens/carried_out"] == sum(group.tokens for group in sampler.carried)
        assert all(len(group.rollouts) == 3 for group in sampled.groups)
        assert all([r.index for r in group.rollouts] == [0, 1, 2] for group in sampled.groups)
        assert all(0 <= version - group.weight_version <= staleness for group in sampled.batch)
        assert len(sampled.batch) <= 4
        trained += serials(sampled.batch)
        decided += [group.serial for group in sampled.groups if group.verdict != "carried"]
        generated += int(sampled.tokens["tokens/generated"])
        if sampled.batch and advance[step - 1]:
            version += 1
            sampler.engine.sync_weights(version)
    assert len(trained) == len(set(trained))
    waiting = serials(sampler.carried)
    assert sorted([*decided, *waiting]) == list(range(sampler.next_serial))


def test_a_carried_group_older_than_the_limit_is_dropped_as_stale_and_counted():
    sampler = sampler_for(mixed_when(lambda serial: True), "data.gen_batch_size=7", "algorithm.max_staleness=1")
    sampler.fill(1, version=0)
    waiting = serials(sampler.carried)
    assert waiting == [4, 5, 6]
    sampled = sampler.fill(2, version=2)
    assert [group.serial for group in sampled.groups if group.verdict == "stale"] == waiting
    assert sampled.tokens["tokens/stale"] == sampled.tokens["tokens/carried_in"] > 0
    assert sampled.metrics()["groups/stale"] == 3


def test_without_staleness_surplus_is_dropped_and_rounds_are_whole_as_published():
    sampler = sampler_for(mixed_when(lambda serial: True), "data.gen_batch_size=7", "algorithm.max_staleness=0")
    for step in (1, 2):
        sampled = sampler.fill(step, version=step - 1)
        sampler.engine.sync_weights(step)
        assert len(sampled.batch) == 4
        assert sampled.metrics()["groups/dropped/surplus"] == 3
        assert sampled.tokens["tokens/dropped/surplus"] > 0
        assert not sampler.carried


def test_with_carry_over_the_round_size_follows_the_recent_keep_rate():
    sizes = []
    sampler = sampler_for(
        mixed_when(lambda serial: serial % 2 == 0), "data.gen_batch_size=8", "data.train_batch_size=6"
    )
    submit = sampler.engine.submit
    sampler.engine.submit = lambda requests: (sizes.append(len(requests)), submit(requests))[1]
    sampler.fill(1, version=0)
    # 8 submitted and 4 kept, so that 2 are missing. At this rate 7 groups give them nine times in ten.
    assert sizes[:2] == [8, groups_needed(2, kept=4, decided=8, most=8)] == [8, 7]


@pytest.mark.parametrize(("missing", "kept", "decided"), [(1, 1, 40), (8, 30, 60), (64, 100, 256), (64, 250, 256)])
def test_nine_rounds_in_ten_suffice_and_one_group_less_would_not(missing, kept, decided):
    size = groups_needed(missing, kept, decided, most=10_000)
    rng = np.random.default_rng(0)
    rates = rng.beta(kept + 1, decided - kept, 200_000)  # as likely as the recent groups make them
    assert (rng.binomial(size, rates) >= missing).mean() >= 0.9 - 0.003
    assert (rng.binomial(size - 1, rates) >= missing).mean() < 0.9 + 0.003


def test_the_size_of_a_round_is_bounded_and_exact_where_every_group_is_kept():
    assert groups_needed(64, kept=0, decided=256, most=256) == 256
    assert groups_needed(64, kept=256, decided=256, most=256) == 64
    assert groups_needed(64, kept=10, decided=10, most=16) == 16


def test_without_a_round_size_one_round_fills_nine_batches_in_ten_and_nothing_becomes_stale():
    rng = np.random.default_rng(5)
    mixed = rng.random(10_000) < 0.4
    # Pairs, many at once: which groups are kept depends on their serials only.
    options = ("data.train_batch_size=48", "rollout.n=2", "rollout.max_concurrent=32")
    sampler = sampler_for(mixed_when(lambda serial: bool(mixed[serial])), *options)
    rounds, dropped = [], 0
    for step in range(1, 46):
        sampled = sampler.fill(step, version=step - 1)
        sampler.engine.sync_weights(step)
        assert len(sampled.batch) == 48
        rounds.append(sampled.rounds)
        dropped += sampled.metrics().get("groups/dropped/stale", 0)
    assert np.mean(np.array(rounds[5:]) == 1) >= 0.85
    assert dropped == 0


def test_the_next_round_begins_in_the_tail_of_this_one_and_waits_for_all():
    sampler = sampler_for(mixed_when(lambda serial: serial >= 20), "rollout.max_concurrent=18")
    sampler.recent.extend([True] * 15 + [False])  # a keep rate that the first groups will not confirm
    in_flight = []
    submit = sampler.engine.submit

    def watching(requests):
        in_flight.append(sampler._unfinished_responses())
        submit(requests)

    sampler.engine.submit = watching
    sampled = sampler.fill(1, version=0)
    assert any(0 < count <= 9 for count in in_flight[1:]), "no round began in a tail"
    assert max(in_flight) <= 9
    assert serials(sampled.batch) == [20, 21, 22, 23]
    assert not sampler.pending
    assert [group.serial for group in sampled.groups] == list(range(sampler.next_serial))


@pytest.mark.parametrize(
    ("overrides", "learns_elsewhere"),
    [
        (("algorithm.max_staleness=0",), False),
        (("cluster.rollout_workers=1",), True),
        (("cluster.reward_workers=1",), True),  # it makes learner and engine actors, too
        ((), True),  # under torchrun
    ],
)
def test_whole_rounds_are_finished_first_without_carry_over_and_with_remote_engines(overrides, learns_elsewhere):
    options = "rollout.max_concurrent=18", *overrides
    sampler = sampler_for(mixed_when(lambda serial: serial >= 20), *options, learns_elsewhere=learns_elsewhere)
    sampler.recent.extend([True] * 15 + [False])
    submit = sampler.engine.submit
    in_flight = []
    sampler.engine.submit = lambda requests: (in_flight.append(sampler._unfinished_responses()), submit(requests))[1]
    assert serials(sampler.fill(1, version=0).batch) == [20, 21, 22, 23]
    assert not any(in_flight)


def test_on_exhausted_train_partial_trains_on_the_kept_groups_and_records_an_event():
    sampler = sampler_for(mixed_when(lambda serial: serial == 1), "algorithm.filter_groups.max_num_gen_batches=2")
    sampled = sampler.fill(1, version=0)
    assert serials(sampled.batch) == [1]
    (event,) = sampled.events
    assert event.kind == "exhausted"
    assert "2 rounds gave 1 of 4 groups" in event.message


@pytest.mark.parametrize("acc", [False, 0.5, True])
def test_groups_dropped_for_equal_acc_although_their_scores_differ_are_named_in_the_event(acc):
    def judge(prompt, rollout):
        return Score(rollout.index * float(rollout.serial % 2), acc=acc)

    limit = "algorithm.filter_groups.max_num_gen_batches=1"
    (event,) = sampler_for(judge, limit).fill(1, version=0).events
    advice = "2 of the dropped groups differ in score: set algorithm.filter_groups.metric to score to keep them"
    assert event.kind == "exhausted" and advice in event.message
    sampled = sampler_for(judge, limit, "algorithm.filter_groups.metric=score").fill(1, version=0)
    assert serials(sampled.batch) == [1, 3] and "differ in score" not in sampled.events[0].message


def test_on_exhausted_skip_makes_no_batch_and_carries_the_groups_over():
    sampler = sampler_for(
        mixed_when(lambda serial: serial % 4 == 0), "algorithm.filter_groups.max_num_gen_batches=1",
        "algorithm.filter_groups.on_exhausted=skip", "algorithm.filter_groups.min_batch_ratio=0.5",
        "algorithm.max_staleness=0",
    )  # fmt: skip
    first = sampler.fill(1, version=0)
    assert first.batch == ()
    assert serials(sampler.carried) == [0]
    second = sampler.fill(2, version=0)
    assert serials(second.batch) == [0, 4]


def test_on_exhausted_pad_adds_dropped_groups_up_to_the_ratio():
    sampler = sampler_for(
        mixed_when(lambda serial: serial == 2), "algorithm.filter_groups.max_num_gen_batches=1",
        "algorithm.filter_groups.on_exhausted=pad", "algorithm.filter_groups.min_batch_ratio=0.75",
    )  # fmt: skip
    sampled = sampler.fill(1, version=0)
    assert [(g.serial, g.verdict) for g in sampled.batch] == [(2, "kept"), (0, "padded"), (1, "padded")]
    assert all((group.advantages == 0).all() for group in sampled.batch[1:])
    assert_tokens_add_up(sampled.tokens)


def test_on_exhausted_raise_reports_the_accuracies():
    sampler = sampler_for(
        mixed_when(lambda serial: serial == 0), "algorithm.filter_groups.max_num_gen_batches=1",
        "algorithm.filter_groups.on_exhausted=raise",
    )  # fmt: skip
    sampled = sampler.fill(1, version=0)
    assert "1 round gave 1 of 4 groups" in sampled.stop
    assert "0.00: 3, 0.33: 1" in sampled.stop
    assert serials(sampler.carried) == [0]
    assert_tokens_add_up(sampled.tokens)


def test_a_reward_that_judges_nothing_in_the_first_round_stops_the_run_with_its_first_reason():
    sampler = sampler_for(lambda prompt, rollout: Score(None, error="ZeroDivisionError: division by zero"))
    with pytest.raises(RewardError, match="judged none of the first 4 groups; the first reason: ZeroDivisionError"):
        sampler.fill(1, version=0)


def test_the_length_of_thoughts_is_a_metric_only_where_there_are_thoughts():
    judge = mixed_when(lambda serial: True)
    plain = sampler_for(judge).fill(1, version=0)
    assert not any(name.startswith("thought_length") for name in plain.metrics())
    # With such tags about every response opens or closes a thought.
    sampled = sampler_for(judge, 'reward.think_tags=["a", "e"]').fill(1, version=0)
    thoughts, unfinished = [], []
    for group in sampled.groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            text = rollout.text
            assert ("reply_start" in score.extras) == ("a" in text or "e" in text)
            if "reply_start" in score.extras:
                is_finished = text.rfind("e") > text.rfind("a")
                assert score.extras["reply_start"] == (text.rfind("e") + 1 if is_finished else None)
                thoughts.append(len(rollout) * ((text.rfind("e") + 1) / len(text) if is_finished else 1))
                unfinished.append(not is_finished)
    assert 0 < sum(unfinished) < len(unfinished)
    assert sampled.metrics()["thought_length/mean"] == pytest.approx(sum(thoughts) / len(thoughts))
    assert sampled.metrics()["thought_length/unfinished_ratio"] == sum(unfinished) / len(unfinished)


def test_responses_end_at_the_stop_strings_of_the_configuration():
    sampled = sampler_for(mixed_when(lambda serial: True), 'rollout.stop=["a", "bc"]', "data.max_response_length=40")
    texts = [rollout.text for group in sampled.fill(1, version=0).groups for rollout in group.rollouts]
    assert any(text.endswith("a") for text in texts)
    assert not any("a" in text[:-1] or "bc" in text[:-1] for text in texts)


def test_later_unjudged_rollouts_are_counted_with_their_reason_and_left_out_of_the_statistics():
    def judge(prompt, rollout):
        return Score(None, error="timeout") if rollout.index == 0 else Score(float(rollout.index))

    sampled = sampler_for(judge).fill(1, version=0)
    assert len(sampled.batch) == 4
    assert all(group.trains.tolist() == [False, True, True] for group in sampled.batch)
    assert sampled.metrics()["rollouts/unjudged"] == 4
    assert sampled.tokens["tokens/masked"] == sum(len(group.rollouts[0]) for group in sampled.batch)
    assert [event.message for event in sampled.events] == ["4 rollouts could not be judged: 4 x timeout"]


def test_responses_that_a_rule_gave_up_on_are_judged_and_counted_by_reason():
    def judge(prompt, rollout):
        reason = ("size", "depth", None)[rollout.index]
        return Score(float(rollout.index), acc=rollout.index == 2, extras={"gave_up": reason} if reason else {})

    metrics = sampler_for(judge).fill(1, version=0).metrics()
    assert (metrics["reward/gave_up/size"], metrics["reward/gave_up/depth"]) == (4, 4)
    assert metrics["rollouts/unjudged"] == 0


def test_the_ledger_skips_flat_prompts_counts_them_and_still_explores():
    overrides = ["algorithm.ledger={enable: true, explore: 0.2}", "algorithm.filter_groups.max_num_gen_batches=4"]
    sampler = sampler_for(lambda prompt, rollout: Score(float(prompt.answer == 0 and rollout.index == 0)), *overrides)
    drawn: list[int] = []
    sampler.on_group = lambda group: drawn.append(group.prompt.answer)
    skipped = 0
    for step in range(1, 13):
        skipped += int(sampler.fill(step, version=step - 1).metrics()["groups/skipped"])
        sampler.engine.sync_weights(step)
    assert sum(sampler.drawer.stream.positions) == len(drawn) + skipped
    useful = drawn.count(0) / len(drawn)
    assert skipped > 0
    assert useful > 0.4  # one of five prompts is useful, so without the ledger it would be 0.2
    assert all(drawn.count(answer) >= 3 for answer in range(5))
    assert sampler.drawer.ledger.history("p0").flat_in_a_row == 0
    assert sampler.drawer.ledger.history("p1").flat_in_a_row == drawn.count(1)


def test_without_the_ledger_no_prompt_is_skipped():
    sampler = sampler_for(lambda prompt, rollout: Score(0.0), "algorithm.filter_groups.max_num_gen_batches=2")
    sampled = sampler.fill(1, version=0)
    assert sampled.metrics()["groups/skipped"] == 0
    assert sum(sampler.drawer.stream.positions) == sampled.metrics()["groups/generated"] == 8


def test_groups_are_judged_while_others_are_still_sampled():
    sampler = sampler_for(mixed_when(lambda serial: True), "data.gen_batch_size=8", "rollout.max_concurrent=3")
    events: list[str] = []
    poll, submit = sampler.engine.poll, sampler.judge.submit
    sampler.engine.poll = lambda: (events.append("poll"), poll())[1]
    sampler.judge.submit = lambda *group: (events.append("judge"), submit(*group))[1]
    sampler.fill(1, version=0)
    assert "poll" in events[events.index("judge") :]


def solved_sampler(every: int) -> DynamicSampler:
    """Return a sampler of which one group in `every` is mixed, and the others are all right."""

    def judge(prompt: Prompt, rollout: Rollout) -> Score:
        return Score(1.0, acc=rollout.serial % every > 0 or rollout.index > 0)

    return sampler_for(judge)


def events_of(sampler: DynamicSampler, steps: range) -> list[tuple[str, int]]:
    events = []
    for step in steps:
        events += sampler.fill(step, version=step - 1).events
        sampler.engine.sync_weights(step)
    return [(event.kind, event.step) for event in events]


def test_a_run_says_once_that_its_task_is_nearly_solved():
    sampler = solved_sampler(every=10)
    steps = [sampler.fill(step, version=0) for step in (1, 2, 3, 4)]
    events = [event for sampled in steps for event in sampled.events]
    assert [(event.kind, event.step) for event in events] == [("solved", 3)]
    metrics = [sampled.metrics() for sampled in steps[:3]]
    dropped, fresh = (int(sum(m[f"groups/{name}"] for m in metrics)) for name in ("dropped/all_right", "generated"))
    assert 0.8 * fresh <= dropped < fresh
    assert f"in the last 3 steps, {dropped} of {fresh} sampled groups were dropped because" in events[0].message


def test_a_run_with_fewer_groups_that_are_all_right_is_not_called_solved():
    assert events_of(solved_sampler(every=3), range(1, 7)) == []


def test_a_resumed_run_counts_its_own_steps_before_it_says_that_its_task_is_solved():
    first = solved_sampler(every=10)
    assert events_of(first, range(1, 3)) == []
    second = solved_sampler(every=10)
    second.restore(first.state(), version=2)
    assert events_of(second, range(3, 7)) == [("solved", 5)]
