"""Every judge reads what follows the thought: the properties of the split, and every rule and signature."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.config import RewardConfig
from dapo.rewards.function import FunctionJudge
from dapo.rewards.judge import build_judge
from dapo.rewards.rules import RULES, make_rule
from dapo.rewards.thought import split_thought, with_reply_start
from dapo.types import Prompt, Score
from tests import make

TAGS = ("<think>", "</think>")
PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer="34")
OPEN = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer="34", opens_thought=True)

texts = st.text("ab <", max_size=6)
pieces = st.lists(st.one_of(texts, st.sampled_from(TAGS)), max_size=8)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "reply"),
    [
        ("34", False, "", "34"),
        ("34", True, "34", None),
        ("", True, "", None),
        ("<think>hm</think>34", False, "hm", "34"),
        ("hm</think>34", True, "hm", "34"),
        ("hm</think>34", False, "hm", "34"),
        ("\n<think>\nhm\n</think>\n\n34", False, "\nhm\n", "\n\n34"),
        ("<think>so 34? no wait", False, "so 34? no wait", None),
        ("<think>hm</think>", False, "hm", ""),
        ("<think>a</think>33<think>b</think>34", False, "a</think>33<think>b", "34"),
        ("<think>a</think>34<think>b", False, "a</think>34<think>b", None),
        ("<think>a<think>b</think>33</think>34", False, "a<think>b</think>33", "34"),
        ("34 <think>", False, "34 <think>", None),
        ("Sure. <think>a</think>34", False, "Sure. <think>a", "34"),
    ],
)
def test_the_last_tag_decides(text, is_open, thought, reply):
    assert split_thought(text, TAGS, is_open) == (thought, reply)
    assert split_thought(text, (), is_open) == split_thought(text, None, is_open) == ("", text)


@given(pieces, st.booleans())
def test_what_follows_an_end_is_the_reply_and_what_follows_a_beginning_is_not(parts, is_open):
    text = "".join(parts)
    thought, reply = split_thought(text, TAGS, is_open)
    assert thought in text and (reply is None or text.endswith(reply))
    assert reply is None or not any(tag in reply for tag in TAGS)
    assert split_thought(f"{text}</think>x", TAGS, is_open).reply == "x"
    assert split_thought(f"{text}<think>x", TAGS, is_open).reply is None
    if any(tag in text for tag in TAGS):
        assert split_thought(text, TAGS, not is_open).reply == reply  # the prompt matters only without a tag
        assert reply is None or text.endswith(f"</think>{reply}")
    else:
        assert reply == (None if is_open else text)


ANSWERS = {"choice": ("B", "C"), "exact": ("yes", "no")}
OTHER_RULES = sorted(set(RULES) - {"gym", "code"})


def check_rule(judge, gold, right, wrong):
    """The answer counts only after the end of the last thought."""
    assert judge(f"<think>{wrong}</think>\n{right}", gold)["acc"] is True
    assert judge(f"{wrong}</think>{right}", gold, opens_thought=True)["acc"] is True
    assert judge(right, gold)["acc"] is True
    for text in (
        f"<think>{right}</think>\n{wrong}", f"<think>{right}", f"<think>{right}</think>", f"{right}<think>",
        f"<think>so {right}? no wait", f"<think></think>{right}<think>{right}",
    ):  # fmt: skip
        assert judge(text, gold)["acc"] is False
        assert judge(text, gold)["score"] == judge(wrong, gold)["score"]
    assert judge(right, gold, opens_thought=True)["acc"] is False


@pytest.mark.parametrize("name", OTHER_RULES)
@pytest.mark.parametrize("tags", [TAGS, ("[THINK]", "[/THINK]")])
def test_every_rule_reads_only_the_reply(name, tags):
    right, wrong = ANSWERS.get(name, ("34", "35"))
    options = RewardConfig(regex="Answer: (.*)", think_tags=tags)
    rule = make_rule(name, options)

    def judge(text, answer, **row):
        return rule(text.replace("<think>", tags[0]).replace("</think>", tags[1]), answer, **row)

    plain = name in ("choice", "exact")
    check_rule(judge, right, *(answer if plain else f"Answer: {answer}" for answer in (right, wrong)))


def test_the_code_rule_reads_only_the_reply():
    rule = make_rule("code", RewardConfig(code_unsafe=True))
    right, wrong = (f"```python\nprint({number})\n```" for number in (34, 35))
    check_rule(rule, {"inputs": [""], "outputs": ["34"]}, right, wrong)


def test_a_thought_without_an_end_does_not_match_a_pattern_that_matches_nothing():
    rule = make_rule("regex", RewardConfig(regex="x*"))
    assert rule("<think>", "")["acc"] is False
    assert rule("<think></think>", "")["acc"] is True


def test_without_tags_a_rule_reads_everything():
    rule = make_rule("integer", RewardConfig(think_tags=None))
    assert rule("<think>so 34", "34", opens_thought=True)["acc"] is True


def test_a_gold_answer_that_cannot_be_read_is_an_error_also_where_the_thought_does_not_end():
    with pytest.raises(ValueError, match="integer expects a whole number"):
        make_rule("integer", RewardConfig())("<think>34", "none")


def test_the_judge_of_a_run_knows_that_the_prompt_opened_a_thought():
    judge = build_judge(RewardConfig(use="integer", workers=1))
    rollouts = [make.rollout([1], text=text) for text in ("34", "35</think>34", "34</think>35")]
    try:
        closed, opened = (judge.submit(prompt, rollouts).result() for prompt in (PROMPT, OPEN))
    finally:
        judge.close()
    assert [score.acc for score in closed] == [True, True, False]
    assert [score.acc for score in opened] == [False, True, False]


def one(completion, thought, reply):
    return {"score": 1.0, "seen": repr((completion, thought, reply))}


def verl(data_source, solution_str, ground_truth, thought, reply):
    return {"score": 1.0, "seen": repr((solution_str, thought, reply))}


def trl(prompts, completions, thought, reply):
    whole = [completion[0]["content"] for completion in completions]
    return [{"score": 1.0, "seen": repr(row)} for row in zip(whole, thought, reply, strict=True)]


@pytest.mark.parametrize("function", [one, verl, trl])
def test_a_function_of_any_signature_may_name_thought_and_reply(function):
    found = FunctionJudge(function, 10.0, TAGS).submit(
        Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=1, extra={"reply": "a column"}),
        [make.rollout([1], text=text) for text in ("<think>a</think>b", "<think>a", "b")],
    )
    seen = [score.extras["seen"] for score in found.result()]
    assert seen == [
        repr(("<think>a</think>b", "a", "b")), repr(("<think>a", "a", None)), repr(("b", "", "b"))
    ]  # fmt: skip


def test_a_function_that_names_neither_gets_neither():
    seen = {}
    judge = FunctionJudge(partial(lambda seen, completion, **row: seen.update(row) or 0.0, seen), 10.0, TAGS)
    judge.submit(OPEN, [make.rollout([1], text="x")]).result()
    assert not seen.keys() & {"thought", "reply", "opens_thought"}


def test_scores_of_responses_with_a_thought_say_where_the_reply_starts():
    rollouts = [make.rollout([1], text=text) for text in ("34", "<think>a</think>34", "<think>a", "a</think>")]
    scores = [Score(1.0, extras={"mine": 2}), Score(1.0), Score(None, error="broken"), Score(0.0)]
    marked = with_reply_start(PROMPT, rollouts, scores, TAGS)
    assert [score.extras for score in marked] == [
        {"mine": 2}, {"reply_start": 16}, {"reply_start": None}, {"reply_start": 9}
    ]  # fmt: skip
    opened, *_ = with_reply_start(OPEN, rollouts, scores, TAGS)
    assert opened.extras == {"mine": 2, "reply_start": None}
    assert with_reply_start(OPEN, rollouts, scores, None) == scores
    [reserved] = with_reply_start(PROMPT, rollouts[:1], [Score(1.0, extras={"reply_start": "mine"})], TAGS)
    assert reserved.extras == {}
