"""Episodes of several turns, with a real engine on a tiny model and a real environment in threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from dapo.config import Config, apply_override, option_names
from dapo.data.stream import PromptStream, ShuffledSource
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.errors import ClusterError, ClusterLost
from dapo.evaluation.evaluate import evaluate
from dapo.model.attention import ATTENTION_NAME
from dapo.model.template import TurnTemplate
from dapo.sampling.episodes import Environment, Episodes
from dapo.sampling.inflight import InflightSampler
from dapo.sampling.strict import DynamicSampler
from dapo.system import progress
from dapo.types import Prompt, SamplingParams, Score
from tests.letters import Letters
from tests.make import Scripted
from tests.sampling.test_strict import assert_tokens_add_up
from tests.tiny import EOS_ID, tiny_llama, tiny_tokenizer

MODEL = tiny_llama(attn_implementation=ATTENTION_NAME).requires_grad_(False)
TOKENIZER = tiny_tokenizer()
STOP = frozenset({EOS_ID, *range(4, 34)})
LIMIT = 90
PARAMS = SamplingParams(max_tokens=LIMIT)


def engine_for(max_concurrent=7):
    return EmbeddedEngine(MODEL, TOKENIZER, STOP, 0, max_concurrent)


def prompts(count=5):
    return [Prompt(f"p{i}", (), (40 + i, 41, 42), answer=i) for i in range(count)]


def judged(prompt, rollout):
    return Score(100.0 + len(rollout.text), acc=True)


def environment(pool, **options):
    return Environment(pool, TurnTemplate(TOKENIZER), **options)


def play(pool, count=4, n=3, engine=None, params=PARAMS, **options):
    """Play some groups to their end, and return rollouts and scores by serial and index."""
    episodes = Episodes(engine or engine_for(), Scripted(judged), environment(pool, **options))
    asked = dict(enumerate(prompts(count)))
    episodes.submit(asked, n, params)
    found = []
    while ended := episodes.poll():
        found += ended
    assert not episodes.groups and not episodes.asked and not episodes.decoding
    rollouts = {(rollout.serial, rollout.index): rollout for rollout in found}
    scores = {}
    for serial, prompt in asked.items():
        members = [rollouts[serial, index] for index in range(n)]
        scores |= zip([(serial, i) for i in range(n)], episodes.score(prompt, members).result(timeout=10), strict=True)
    assert not episodes.scores
    return rollouts, scores


def test_an_episode_is_the_turns_of_the_model_with_the_replies_between_them():
    pool = Letters()
    rollouts, scores = play(pool)
    assert {len(rollout.turns) for rollout in rollouts.values()} >= {1, 2, 3}
    for key, rollout in rollouts.items():
        texts = [turn["text"] for turn in rollout.turns]
        counts = [sum(c.isalpha() for c in text) for text in texts]
        # The conversation as the chat template renders it, from the first turn on.
        messages = []
        for turn in rollout.turns:
            messages += [{"role": "assistant", "content": turn["text"]}, *turn["messages"]]
        assert rollout.text == texts[-1] and rollout.turns[-1]["messages"] == []
        assert [m["content"] for m in messages if m["role"] == "user"] == [f"{count} letters" for count in counts[:-1]]
        assert len(rollout.given) == len(texts) - 1
        for (start, end), count in zip(rollout.given, counts, strict=False):
            given = f"<|im_start|>user\n{count} letters<|im_end|>\n<|im_start|>assistant\n"
            is_ended = rollout.tokens[start - 1] == EOS_ID
            assert TOKENIZER.decode(rollout.tokens[start:end]) == ("\n" if is_ended else "<|im_end|>\n") + given
        if rollout.finish_reason == "stop":
            expected = judged(None, rollout) if key[0] % 2 else Score(float(sum(counts)), acc=sum(counts) > 3)
            assert scores[key] == expected
    assert sorted(pool.ended) == sorted(rollouts) and not pool.totals


def test_the_time_at_which_replies_arrive_changes_nothing():
    quick, _ = play(Letters(), count=6)
    pool = Letters(delay=0.01)
    slow, _ = play(pool, count=6)
    assert quick.keys() == slow.keys()
    for key, rollout in quick.items():
        assert np.array_equal(rollout.tokens, slow[key].tokens)
        assert np.array_equal(rollout.logprobs, slow[key].logprobs), "the batch was composed differently"
        assert rollout.turns == slow[key].turns
    assert pool.most_at_once > 1


def test_an_engine_that_is_not_repeatable_reads_replies_as_they_come():
    engine = engine_for()
    engine.is_repeatable = False
    quick, expected = play(Letters())
    slow, scores = play(Letters(delay=0.02), engine=engine)
    assert scores == expected
    assert all(np.array_equal(rollout.tokens, slow[key].tokens) for key, rollout in quick.items())


def test_an_episode_that_has_no_tokens_left_is_cut_off_and_scored_by_the_environment():
    params = replace(PARAMS, max_tokens=38)
    rollouts, scores = play(Letters(), count=8, params=params)
    cut_off = {key: rollout for key, rollout in rollouts.items() if rollout.finish_reason == "length"}
    assert cut_off and all(len(rollout) <= 38 for rollout in rollouts.values())
    assert all(scores[key] == Score(-1.0, acc=False) for key in cut_off)
    # Some were cut off in the middle of a turn, others because what was given left no room for a token.
    assert {len(rollout) == 38 for rollout in cut_off.values()} == {True, False}
    for rollout in cut_off.values():
        assert rollout.turns[-1]["messages"] == [] and len(rollout.turns) == len(rollout.given) + 1
        assert not rollout.given or rollout.given[-1][1] < len(rollout)


def test_a_turn_that_ends_itself_with_the_last_token_is_not_cut_off():
    whole, expected = play(Letters(), count=8)
    several = [key for key, rollout in whole.items() if rollout.finish_reason == "stop" and rollout.given]
    assert len(several) >= 3
    for key in several[:3]:
        length = len(whole[key])
        rollouts, scores = play(Letters(), count=8, params=replace(PARAMS, max_tokens=length))
        assert np.array_equal(rollouts[key].tokens, whole[key].tokens) and rollouts[key].finish_reason == "stop"
        assert scores[key] == expected[key]


def test_a_turn_that_is_too_long_ends_and_the_environment_replies_to_it():
    rollouts, _ = play(Letters(), count=8, max_turn_tokens=5)
    assert {rollout.finish_reason for rollout in rollouts.values() if len(rollout) < LIMIT - 40} == {"stop"}
    for rollout in rollouts.values():
        bounds = [0, *(at for span in rollout.given for at in span), len(rollout)]
        assert all(end - start <= 5 for start, end in zip(bounds[::2], bounds[1::2], strict=True))
        for start, end in rollout.given:  # such a turn is ended for the model
            is_ended = rollout.tokens[start - 1] == EOS_ID
            assert (rollout.tokens[start] == EOS_ID) != is_ended and end > start
    assert any(rollout.given for rollout in rollouts.values())


def test_the_last_turn_says_why_the_episode_ended():
    rollouts, _ = play(Letters(max_turns=2), count=8, params=replace(PARAMS, max_tokens=38))
    for rollout in rollouts.values():
        letters = sum(character.isalpha() for character in rollout.text)
        ended = "no turns left" if letters % 2 else "by the environment"
        assert rollout.turns[-1]["ended"] == ("no tokens left" if rollout.finish_reason == "length" else ended)
        assert not any("ended" in turn for turn in rollout.turns[:-1])
    found = {rollout.turns[-1]["ended"] for rollout in rollouts.values()}
    assert found == {"by the environment", "no turns left", "no tokens left"}


def test_rewards_of_turns_are_recorded_and_added_to_the_score_of_environment_or_judge():
    params = replace(PARAMS, max_tokens=60)
    plain, expected = play(Letters(), count=8, params=params)
    rollouts, scores = play(Letters(reward=0.125), count=8, params=params)
    kinds = set()
    for key, rollout in rollouts.items():
        assert np.array_equal(rollout.tokens, plain[key].tokens)
        counts = [sum(c.isalpha() for c in turn["text"]) for turn in rollout.turns]
        rewards = {i: turn["reward"] for i, turn in enumerate(rollout.turns) if "reward" in turn}
        # Every turn that is replied to has one, also if the reply leaves no room for another turn.
        assert rewards == {i: 0.125 * counts[i] for i in rewards} and {*range(len(counts) - 1)} <= {*rewards}
        extras = {"turn_rewards": sum(rewards.values())} if rewards else {}
        total = expected[key].value + sum(rewards.values())
        assert scores[key] == replace(expected[key], value=total, extras=extras)
        kinds.add((rollout.turns[-1]["ended"], key[0] % 2, bool(rewards)))
    assert {("by the environment", 0, True), ("by the environment", 1, True), ("no tokens left", 0, True)} <= kinds


def test_rewards_of_turns_do_not_help_an_episode_that_cannot_be_judged():
    judge = Scripted(lambda prompt, rollout: Score(None, error="no judge"))
    episodes = Episodes(engine_for(), judge, environment(Letters(reward=1.0)))
    asked = {1: prompts()[1]}  # an odd serial, which the judge scores
    episodes.submit(asked, 6, PARAMS)
    rollouts = []
    while ended := episodes.poll():
        rollouts += ended
    assert any("reward" in turn for rollout in rollouts for turn in rollout.turns)
    scores = episodes.score(asked[1], rollouts).result(timeout=10)
    is_judged = [rollout.finish_reason == "stop" for rollout in rollouts]
    assert any(is_judged)
    assert [score == Score(None, error="no judge") for score in scores] == is_judged


def test_a_judge_that_fails_ends_the_wait_for_scores():
    class Lost(Scripted):
        def submit(self, prompt, rollouts):
            future = Future()
            future.set_exception(ClusterError("the judges are lost"))
            return future

    episodes = Episodes(engine_for(), Lost(judged), environment(Letters()))
    asked = {1: prompts()[1]}
    episodes.submit(asked, 4, PARAMS)
    rollouts = []
    while ended := episodes.poll():
        rollouts += ended
    with pytest.raises(ClusterError, match="the judges are lost"):
        episodes.score(asked[1], rollouts).result(timeout=10)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_reply_that_takes_long_is_named_while_it_is_waited_for(monkeypatch, is_repeatable):
    monkeypatch.setattr(progress, "SLOW", 0.01)
    engine, said = engine_for(), []
    engine.is_repeatable = is_repeatable
    episodes = Episodes(engine, Scripted(judged), environment(Letters(delay=0.3)), said.append)
    episodes.submit(dict(enumerate(prompts(1))), 2, PARAMS)
    while episodes.poll():
        pass
    assert {*said} == {"waiting 0 s for letters", "sampling"} and said[-1] == "sampling"
    assert episodes.take_wait() > 0.01


def test_rewards_that_take_long_are_named_while_they_are_waited_for(monkeypatch):
    class Slow(Scripted):
        def submit(self, prompt, rollouts):
            future, known = Future(), super().submit(prompt, rollouts)
            threading.Timer(0.2, lambda: future.set_result(known.result())).start()
            return future

    monkeypatch.setattr(progress, "SLOW", 0.01)
    said = []
    sampler = sampler_for(None)
    sampler.episodes.judge, sampler.on_wait = Slow(judged), said.append
    sampler.fill(1, version=0)
    assert {*said} == {"waiting 0 s for rewards"}
    said.clear()
    evaluate(engine_for(), Slow(judged), prompts(2), 2, PARAMS, 0, "held_out", on_wait=said.append)
    assert {*said} == {"waiting for rewards", "waiting 0 s for rewards"}


def test_a_reward_that_is_called_at_once_is_named_before_it_is_called():
    shown, during = [], []

    def slow(prompt, rollout):
        during.append(shown[-1])
        return judged(prompt, rollout)

    def show(done: int, total: int) -> None:
        shown.append(f"{done} of {total}")

    sampler = sampler_for(None)
    sampler.episodes.judge = Scripted(slow)
    sampler.episodes.on_wait = shown.append
    sampler.on_progress = show
    sampler.fill(1, version=0)
    assert {*during} == {"waiting for rewards"}
    assert shown[-1] != "waiting for rewards"
    during.clear()
    evaluate(engine_for(), Scripted(slow), prompts(2), 2, PARAMS, 0, "held_out", show, on_wait=shown.append)
    assert {*during} == {"waiting for rewards"}
    assert shown[-1] == "4 of 4"


def test_a_template_that_rejects_a_message_costs_the_episode():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}"
        + tokenizer.chat_template
    )
    pool = Letters(role="tool")
    episodes = Episodes(engine_for(), Scripted(judged), Environment(pool, TurnTemplate(tokenizer)))
    episodes.submit(dict(enumerate(prompts(1))), 6, PARAMS)
    rollouts = []
    while ended := episodes.poll():
        rollouts += ended
    scores = episodes.score(prompts(1)[0], rollouts).result()
    reasons = {score.error for score in scores if not score.judged}
    assert reasons == {"the model's chat template rejects the environment's messages (no tools here)"}
    assert all(len(rollout.turns) == 1 for rollout in rollouts)


class Lost:
    """A judge whose workers are gone."""

    def submit(self, prompt, rollouts):
        future = Future()
        future.set_exception(ClusterLost("reward worker 0 died"))
        return future


def test_a_judge_that_is_lost_ends_the_wait_for_a_group_that_the_environment_scored_in_part():
    episodes = Episodes(engine_for(), Lost(), environment(Letters()))
    asked = dict(enumerate(prompts(4)))
    episodes.submit(asked, 6, replace(PARAMS, max_tokens=38))
    ended = []
    while found := episodes.poll():
        ended += found
    groups = [[rollout for rollout in ended if rollout.serial == serial] for serial in asked]
    in_part = [each for each in groups if len({(r.serial, r.index) in episodes.scores for r in each}) == 2]
    assert in_part
    for group in in_part:
        with pytest.raises(ClusterLost, match="reward worker 0 died"):
            episodes.score(asked[group[0].serial], group).result(timeout=10)


def test_canceled_groups_leave_nothing_behind():
    pool, engine = Letters(delay=0.01), engine_for(30)
    episodes = Episodes(engine, Scripted(judged), environment(pool))
    episodes.submit(dict(enumerate(prompts())), 4, PARAMS)
    episodes.poll()
    episodes.cancel(range(5))
    assert episodes.poll() == [] and not episodes.groups and not episodes.scores
    assert not engine.parked and not engine.decoder.parked and not engine.active and not engine.prompts
    assert not pool.totals
    episodes.submit({9: prompts()[0]}, 2, PARAMS)
    assert episodes.poll()


def sampler_for(pool, *overrides, kind=DynamicSampler):
    base = {
        "model": {"path": "tiny"},
        "data": {"train": "none", "train_batch_size": 4, "max_response_length": LIMIT},
        "rollout": {"n": 3, "max_concurrent": 7},
        "reward": {"length_shaping": "buffer", "overlong_buffer": {"len": 80}},
        "algorithm": {"filter_groups": {"metric": "score"}},
    }
    for override in overrides:
        apply_override(base, override, option_names())
    config = Config.parse(base)
    stream = PromptStream([ShuffledSource(prompts(), config.run.seed)])
    surroundings = environment(pool) if pool else None
    return kind(config, engine_for(), Scripted(judged), stream, environment=surroundings)


@pytest.mark.parametrize("kind", [DynamicSampler, InflightSampler])
def test_steps_of_episodes_count_only_the_model_s_own_tokens(kind):
    first, second = (sampler_for(Letters(delay=delay), kind=kind) for delay in (0.0, 0.003))
    for step in (1, 2, 3):
        sampled = first.fill(step, version=step - 1)
        again = second.fill(step, version=step - 1)
        assert_tokens_add_up(sampled.tokens)
        fresh = [group for group in sampled.groups if group.serial in sampled.fresh]
        rollouts = [rollout for group in fresh for rollout in group.rollouts]
        metrics = sampled.metrics()
        assert sampled.tokens["tokens/generated"] == sum(rollout.sampled for rollout in rollouts)
        assert metrics["tokens/given"] == sum(end - start for r in rollouts for start, end in r.given) > 0
        assert metrics["turns/mean"] == np.mean([len(rollout.turns) for rollout in rollouts]) > 1
        assert metrics["turns/exhausted"] == np.mean([r.turns[-1]["ended"] == "no turns left" for r in rollouts])
        assert metrics["tools/calls"] == sum(len(r.turns) for r in rollouts) - sum(
            r.turns[-1]["calls"] == [] for r in rollouts
        )
        assert 0 < metrics["tools/errors"] < metrics["tools/calls"]
        assert metrics["time/environment_wait"] >= 0
        for group in fresh:
            for rollout, score, reward in zip(group.rollouts, group.scores, group.rewards, strict=True):
                over = rollout.sampled - (LIMIT - 80)
                assert reward == pytest.approx(score.value + min(0.0, max(-1.0, -over / 80)))
        # Bit for bit, whatever the time of the replies.
        assert [group.serial for group in again.batch] == [group.serial for group in sampled.batch]
        for one, other in zip(sampled.batch, again.batch, strict=True):
            for a, b in zip(one.rollouts, other.rollouts, strict=True):
                assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
        for sampler in (first, second):
            sampler.engine.sync_weights(step)


def test_a_run_without_an_environment_has_no_metrics_of_one():
    names = sampler_for(None).fill(1, version=0).metrics()
    assert not {name for name in names if name.startswith(("turns/", "tools/", "time/")) or name == "tokens/given"}


def test_an_evaluation_plays_episodes_too():
    pool = Letters()
    report = evaluate(
        engine_for(), Scripted(judged), prompts(4), 3, PARAMS, 0, "held_out", environment=environment(pool)
    )
    assert len(report.samples) == 12 and sorted(pool.ended) == [(i, j) for i in range(4) for j in range(3)]
    assert any(sample.rollout.given for sample in report.samples)
    expected = np.mean([sample.rollout.sampled for sample in report.samples])
    assert report.metrics["response_length/mean"] == pytest.approx(expected)
    assert {sample.score.value >= 100 for sample in report.samples} == {True, False}
