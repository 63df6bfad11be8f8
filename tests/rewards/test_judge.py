import asyncio
import importlib.util
import os
import time
from contextlib import closing

import pytest

from dapo.config import RewardConfig, Source
from dapo.data.gym import Gym
from dapo.data.prompt_format import PromptFormat
from dapo.errors import RewardError
from dapo.rewards.judge import build_judge, short_names
from dapo.types import Prompt
from tests import make
from tests.rewards.test_endpoint import server

PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer="5", data_source="mine")

# Functions of every signature in one file.
REWARDS = """
import asyncio, os, time

def length(completion):
    return {"score": float(len(completion)), "why": "counted", "extracted": completion[:1]}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    is_right = solution_str == ground_truth
    return {"score": float(is_right), "acc": is_right, "extracted": solution_str}

def trl(completions, completion_ids, **kwargs):
    if any(completion == [{"role": "assistant", "content": "die"}] for completion in completions):
        os._exit(1)
    if any(completion == [{"role": "assistant", "content": "slow"}] for completion in completions):
        time.sleep(60)
    return [None if not ids[0] else sum(ids) for ids in completion_ids]

def never(completions):
    return [None for _ in completions]

async def slowly(completion):
    if completion == "block":
        time.sleep(60)
    if completion == "die":
        os._exit(1)
    await asyncio.sleep(60 if completion == "late" else 0.3)
    return float(completion)

async def slowly_all(completions):
    await asyncio.sleep(0.1)
    return [1.0 for _ in completions]

def only_short(completion):
    if len(completion) > 3:
        raise ValueError("too long")
    return 1.0
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def judge_all(options, texts, prompt=PROMPT, function=None):
    rollouts = [make.rollout([i, 9], text=text) for i, text in enumerate(texts)]
    with closing(build_judge(options, function)) as judge:
        return judge.submit(prompt, rollouts).result(timeout=60)


def options(use, **more):
    return RewardConfig(use=use, workers=1, **more)


def test_rules_and_functions_from_files_run_in_other_processes(path):
    right, wrong = judge_all(options("math"), ["Answer: 5", r"So it is $\\frac{1}{2}$"])
    assert (right.value, right.acc, right.extras) == (1.0, True, {"extracted": "5"})
    assert (wrong.value, wrong.acc) == (0.0, False)
    first, second = judge_all(options(f"{path}:compute_score"), ["5", "6"])
    assert (first.value, first.acc, second.value, second.acc) == (1.0, True, 0.0, False)


def test_a_function_object_takes_precedence_and_runs_in_this_process():
    [score] = judge_all(options("math"), ["x"], function=lambda completion: {"score": 1.0, "pid": os.getpid()})
    assert score.extras == {"pid": os.getpid()}


def test_a_trl_function_is_called_with_the_whole_group_and_none_is_unjudged(path):
    scores = judge_all(options(f"{path}:trl"), ["a", "b", "c"])
    assert [score.value for score in scores] == [None, 10.0, 11.0]
    assert scores[0].error == "the reward does not apply here: it returned None"


def test_a_batched_call_that_dies_or_hangs_makes_its_group_unjudged(path):
    dead = judge_all(options(f"{path}:trl"), ["a", "die"])
    assert [score.error for score in dead] == ["the judging process died (exit code 1)"] * 2
    slow = judge_all(options(f"{path}:trl", timeout=0.3), ["a", "slow"])
    assert [score.error for score in slow] == ["timed out after 0.6 s for 2 responses"] * 2


def test_an_async_function_judges_a_group_concurrently(path):
    start = time.monotonic()
    scores = judge_all(options(f"{path}:slowly"), [str(i) for i in range(16)])
    assert [score.value for score in scores] == [float(i) for i in range(16)]
    assert time.monotonic() - start < 16 * 0.3
    assert [score.value for score in judge_all(options(f"{path}:slowly_all"), "ab")] == [1.0, 1.0]


def test_an_async_call_that_times_out_dies_or_blocks_makes_only_its_response_unjudged(path, monkeypatch):
    monkeypatch.setattr("dapo.rewards.task.GRACE", 0.3)
    scores = judge_all(options(f"{path}:slowly", timeout=0.5), ["1", "late", "block", "2", "die", "3"])
    assert [score.value for score in scores] == [1.0, None, None, 2.0, None, 3.0]
    assert [scores[i].error for i in (1, 2)] == ["timed out after 0.5 s"] * 2
    assert scores[4].error == "the judging process died (exit code 1)"


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
def test_auto_judges_gym_questions_by_their_own_scorer_and_others_by_math():
    item = Gym(Source(path="gym:gcd"), (0,)).question(0, PromptFormat())
    # The scorer regenerates the item and uses its answer. `math` uses the prompt's answer.
    gym = Prompt("g", item.messages, (1,), answer="5", data_source=item.data_source, extra=item.extra)
    assert item.answer != "5"
    texts = [f"Answer: {item.answer}", "Answer: 5"]
    with closing(build_judge(options("auto"))) as judge:
        rollouts = [make.rollout([1], text=text, index=i) for i, text in enumerate(texts)]
        by_gym, by_math = judge.submit(gym, rollouts), judge.submit(PROMPT, rollouts)
        assert [score.acc for score in by_gym.result(timeout=60)] == [True, False]
        assert [score.acc for score in by_math.result(timeout=60)] == [False, True]


def test_a_weighted_sum_records_the_score_of_every_term(path):
    use = {f"{path}:length": 0.5, "exact": 2.0, f"{path}:trl": -1.0}
    first, second = judge_all(options(use), ["5", "abc"])
    assert (first.value, first.acc) == (0.5 * 1 + 2.0 * 1, True)  # trl does not apply to the first response
    assert (second.value, second.acc) == (0.5 * 3 + 2.0 * 0 - (1 + 9), False)
    assert first.extras == {"score/length": 1.0, "score/exact": 1.0, "why": "counted", "extracted": "5"}
    assert second.extras == {
        "score/length": 3.0, "score/exact": 0.0, "score/trl": 10.0, "why": "counted", "extracted": "a"
    }  # fmt: skip


def test_a_response_that_one_term_cannot_judge_is_unjudged_and_the_reason_names_the_term(path):
    short, long = judge_all(options({f"{path}:length": 1.0, f"{path}:only_short": 1.0}), ["a", "abcd"])
    assert short.value == 2.0
    assert long.value is None
    assert long.error.startswith("only_short: ValueError: too long (mine.py:")


def test_a_sum_without_an_applicable_term_is_unjudged(path):
    [score] = judge_all(options({f"{path}:never": 1.0}), ["a"])
    assert score.error == "the reward does not apply here: it returned None"


def test_terms_have_short_names_where_these_are_unique():
    specs = ["math", "a/x.py:score", "model:org/rm-8b", "http://judge.local:80/v1"]
    assert short_names(specs) == ["math", "score", "rm-8b", "judge.local"]
    assert short_names(["a/x.py:score", "b/y.py:score", "math"]) == ["a/x.py:score", "b/y.py:score", "math"]


def test_an_endpoint_is_a_judge(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with server(lambda *_: (200, {"scores": [0.25]})) as (url, _):
        assert judge_all(options(url), ["a"])[0].value == 0.25


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            "maths",
            r"reward\.use is 'maths', which is not a judge; did you mean 'math'\? expected auto, math, .*model:PATH",
        ),
        ("something", r"reward\.use is 'something', which is not a judge; expected auto, math, math_dapo"),
        ("", "which is not a judge"),
        ("model:", "which is not a judge"),
        ("http://", r"is not an endpoint URL \(it has no host\)"),
        ("http://[::1", r"is not an endpoint URL \(Invalid IPv6 URL\)"),
        ("http://host:99999/x", r"is not an endpoint URL \(Port out of range"),
        ("http://host:port/x", r"is not an endpoint URL \(Port could not be cast"),
        ("http://a b/x", "only ASCII characters and no spaces"),
        ("python:reward", "was a Python function; pass it to Trainer again, or name it as path/to/file.py:function"),
        ("reward.py", "expected path/to/file.py:function"),
        ("gone.py:reward", "there is no file gone.py"),
        ({"exact": 1.0, "gone.py:reward": 0.5}, "there is no file gone.py"),
        ("regex", "reward.regex"),
    ],
)
def test_an_invalid_judge_is_refused_when_it_is_built(use, sentence):
    with pytest.raises(RewardError, match=sentence) as caught:
        build_judge(options(use))
    assert "\n" not in str(caught.value)


def test_an_async_function_object_has_a_deadline():
    async def forever(completion):
        await asyncio.sleep(60)

    assert judge_all(options("math", timeout=0.2), ["a"], function=forever)[0].error == "timed out after 0.2 s"
