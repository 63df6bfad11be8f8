"""Reward functions of TRL and verl, unchanged, where the packages are installed."""

import importlib

import pytest

from dapo.rewards.function import FunctionJudge
from dapo.types import Prompt
from tests import make

RIGHT, WRONG = r"<think>one third</think> \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"
PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), r"\frac{1}{3}", "lighteval/MATH", {})


def scores(function, texts, tokens=((1, 2, 3, 4), (5, 5, 5, 5, 5)), answer=PROMPT.answer, source=PROMPT.data_source):
    prompt = Prompt("u", PROMPT.messages, (1,), answer, source, {"extra_info": {"index": 1}})
    rollouts = [make.rollout(ids, text=text) for ids, text in zip(tokens, texts, strict=True)]
    return FunctionJudge(function, 10.0).submit(prompt, rollouts).result()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("think_format_reward", None, [1.0, 0.0]),
        ("accuracy_reward", None, [1.0, 0.0]),
        ("reasoning_accuracy_reward", None, [1.0, 0.0]),
        ("get_soft_overlong_punishment", {"max_completion_len": 5, "soft_punish_cache": 2}, [-0.5, -1.0]),
        ("get_repetition_penalty_reward", {"ngram_size": 2}, [0.0, -0.75]),
        ("get_cosine_scaled_reward", {"max_len": 8}, [0.75, -0.654]),
    ],
)
def test_functions_of_trl(name, arguments, expected):
    rewards = pytest.importorskip("trl.rewards")
    if not hasattr(rewards, name):
        pytest.skip(f"this version of TRL has no {name}")
    function = getattr(rewards, name) if arguments is None else getattr(rewards, name)(**arguments)
    found = scores(function, [RIGHT, WRONG])
    assert [score.error for score in found] == [None, None]
    assert [score.value for score in found] == pytest.approx(expected, abs=1e-3)
    if name == "accuracy_reward":
        assert found[0].extras["solution"] == PROMPT.answer  # by log_extra


@pytest.mark.parametrize(
    ("module", "name", "texts", "answer", "source", "expected"),
    [
        ("gsm8k", "compute_score", ["#### 5", "#### 6"], "5", "openai/gsm8k", [1.0, 0.0]),
        ("math_reward", "compute_score", [RIGHT, WRONG], PROMPT.answer, "", [1.0, 0.0]),
        ("math_batch", "compute_score_batched", [RIGHT, WRONG], PROMPT.answer, "", [1.0, 0.0]),
        ("math_dapo", "compute_score", ["Answer: 34", "Answer: 35"], "34", "", [1.0, -1.0]),
        (
            "search_r1_like_qa_em",
            "compute_score",
            ["<answer>Paris</answer>", "<answer>Rome</answer>"],
            {"target": ["Paris"]},
            "",
            [1.0, 0.0],
        ),
    ],
)
def test_functions_of_verl(module, name, texts, answer, source, expected):
    pytest.importorskip("verl.utils.reward_score")
    function = getattr(importlib.import_module(f"verl.utils.reward_score.{module}"), name)
    found = scores(function, texts, answer=answer, source=source)
    assert [score.error for score in found] == [None, None]
    assert [score.value for score in found] == expected
    if module == "math_dapo":
        assert [score.acc for score in found] == [True, False]


def test_verls_default_function_judges_by_the_data_source():
    default_compute_score = pytest.importorskip("verl.utils.reward_score").default_compute_score
    right, wrong = scores(default_compute_score, ["#### 5", "#### 6"], answer="5", source="openai/gsm8k")
    assert (right.value, wrong.value) == (1.0, 0.0)
    unknown, _ = scores(default_compute_score, ["5", "6"], source="nobody's")
    assert unknown.error.startswith("NotImplementedError: Reward function is not implemented for")
