import json

import pytest

from dapo.errors import RewardError
from dapo.rewards.gym import RAISES_OVER_JUNK, gym_reward
from dapo.system.digest import text_digest

factory = pytest.importorskip("reasoning_gym.factory")
SINGLE_LINE = ("chain_sum", "leg_counting", "spell_backward", "countdown", "prime_factorization", "complex_arithmetic")
JUNK = (
    "xyzzy",
    "[[",
    "{}",
    '{"a": 1}',
    "7",
    "9" * 400,
    "9" * 5000,
    "1/0",
    "\\frac{",
    "None",
    '["a"]',
    '{"Agent[0.5, 0.5]": 3}',
)


def item(task, index=0, **params):
    """Return the generated item and its origin in the form that a prompt carries."""
    entry = factory.create_dataset(task, seed=5, **params)[index]
    origin = {"task": task, "params": params, "seed": 5, "index": index, "check": text_digest(entry["question"])}
    return entry, json.loads(json.dumps(origin))


@pytest.mark.parametrize("task", SINGLE_LINE)
def test_a_right_answer_gets_the_full_score_however_it_is_labeled(task):
    entry, gym = item(task, size=20)
    gold = entry["answer"]
    for completion in (f"Hm, 3 or 4.\nAnswer: {gold}", f"Hm.\n<answer>{gold}</answer>", f"\\boxed{{{gold}}}", gold):
        result = gym_reward(completion, gold, gym=gym, threshold=1.0, extract=None)
        assert result == {"score": 1.0, "acc": True, "extracted": gold}


def test_without_extraction_the_same_answer_would_be_scored_lower():
    entry, gym = item("chain_sum", size=20)
    sentence = f"The answer is {entry['answer']}"
    assert gym_reward(sentence, entry["answer"], gym=gym)["acc"]
    assert 0 < gym_reward(sentence, entry["answer"], gym=gym, extract=("whole",))["score"] < 1


def test_an_answer_of_several_lines_is_not_cut_at_the_first():
    entry, gym = item("mini_sudoku", size=20)
    assert "\n" in entry["answer"]
    for completion in (entry["answer"], f"Here:\n<answer>\n{entry['answer']}\n</answer>"):
        assert gym_reward(completion, entry["answer"], gym=gym)["acc"]


def test_a_wrong_or_missing_answer_scores_zero():
    entry, gym = item("chain_sum", size=20)
    wrong = gym_reward(f"Answer: {int(entry['answer']) + 1}", entry["answer"], gym=gym)
    assert (wrong["score"], wrong["acc"]) == (0.0, False)
    assert gym_reward("", entry["answer"], gym=gym) == {"score": 0.0, "acc": False, "extracted": None}


def test_an_answer_is_right_if_its_score_reaches_the_threshold():
    entry, gym = item("word_sorting", size=20)
    padded = f"the sorted words are: {entry['answer']}"
    result = gym_reward(padded, entry["answer"], gym=gym, extract=("whole",))
    assert 0 < result["score"] < 1 and not result["acc"]
    assert gym_reward(padded, entry["answer"], gym=gym, threshold=result["score"], extract=("whole",))["acc"]


def test_a_task_without_a_gold_answer_judges_by_its_rules():
    entry, gym = item("rubiks_cube", size=20)
    assert entry["answer"] is None
    solution = entry["metadata"]["example_correct_answer"]
    assert gym_reward(f"Answer: {solution}", None, gym=gym)["acc"]
    assert not gym_reward("Answer: U", None, gym=gym)["acc"]


@pytest.mark.parametrize("task", sorted(RAISES_OVER_JUNK))
def test_junk_that_makes_a_scorer_raise_counts_as_wrong(task):
    dataset = factory.create_dataset(task, seed=5, size=20)
    raised = []
    for index in range(20):
        entry, gym = item(task, index, size=20)
        for junk in JUNK:
            try:
                dataset.score_answer(junk, entry)
            except Exception:
                raised.append(junk)
                assert gym_reward(junk, entry["answer"], gym=gym, extract=("whole",))["score"] == 0.0
    assert raised, "no junk raised: remove the task from RAISES_OVER_JUNK"


def test_an_answer_that_a_scorer_accepts_by_mistake_is_wrong():
    entry, gym = item("complex_arithmetic", size=20)
    dataset = factory.create_dataset("complex_arithmetic", seed=5, size=20)
    assert dataset.score_answer("nan", entry) == 1.0
    assert gym_reward("Answer: NaN", entry["answer"], gym=gym)["score"] == 0.0


def test_any_other_exception_of_a_scorer_is_raised(monkeypatch):
    entry, gym = item("chain_sum", size=20)

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(factory.DATASETS["chain_sum"][0], "score_answer", broken)
    with pytest.raises(ZeroDivisionError):
        gym_reward(entry["answer"], entry["answer"], gym=gym)


def test_one_answer_does_not_change_how_the_next_is_judged(monkeypatch):
    entry, gym = item("chain_sum", size=20)

    def modify_the_item(_, answer, entry):
        gold, entry["answer"] = entry["answer"], "used up"
        return float(answer == gold)

    monkeypatch.setattr(factory.DATASETS["chain_sum"][0], "score_answer", modify_the_item)
    assert [gym_reward(entry["answer"], entry["answer"], gym=gym)["acc"] for _ in range(2)] == [True, True]


def test_an_item_that_differs_from_the_prompt_is_never_judged():
    entry, gym = item("chain_sum", size=20)
    with pytest.raises(RewardError, match="gym:chain_sum: item 1 of seed 5 is a different question here"):
        gym_reward(entry["answer"], entry["answer"], gym=gym | {"index": 1})
