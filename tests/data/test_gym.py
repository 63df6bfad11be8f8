import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dapo.config import Source
from dapo.data.dataset import load_eval_sets, load_train_stream
from dapo.data.encode import encode
from dapo.data.gym import BLOCK, REFUSED, Gym
from dapo.data.prompt_format import PromptFormat
from dapo.errors import DataError
from tests.data.test_dataset import TOKENIZER, config, texts

factory = pytest.importorskip("reasoning_gym.factory")
USABLE = sorted(set(factory.DATASETS) - set(REFUSED))
# Prints the fingerprint of one item of every task. Run in another process.
MAKE_ALL = """
import json, sys
from dapo.config import Source
from dapo.data.gym import Gym
from dapo.data.prompt_format import PromptFormat
made = {}
for task in json.loads(sys.argv[1]):
    gym = Gym(Source(path="gym:" + task), (7, "train", 0))
    made[task] = gym.question(3, PromptFormat()).extra["gym"]["check"]
print("\\n" + json.dumps(made))
"""


def stream(source, **options):
    return load_train_stream(config(source, max_prompt_length=4000, **options), TOKENIZER)


def test_an_item_has_its_question_its_answer_and_its_origin():
    drawn = stream({"path": "gym:chain_sum", "params": {"min_terms": 2, "max_terms": 2}}).take(1)[0]
    origin = drawn.extra["gym"]
    dataset = factory.create_dataset("chain_sum", seed=origin["seed"], **origin["params"])
    entry = dataset[origin["index"]]
    assert (texts([drawn]), drawn.answer) == ([entry["question"]], entry["answer"])
    assert (drawn.data_source, drawn.is_text, origin["task"]) == ("gym:chain_sum", True, "chain_sum")
    assert origin["params"] == {"min_terms": 2, "max_terms": 2, "size": BLOCK}
    assert json.loads(json.dumps(drawn.extra)) == drawn.extra


def test_every_task_makes_the_same_question_in_another_process():
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    command = [sys.executable, "-W", "ignore", "-c", MAKE_ALL, json.dumps(USABLE)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    elsewhere = json.loads(output.splitlines()[-1])
    for task in USABLE:
        gym = Gym(Source(path=f"gym:{task}"), (7, "train", 0))
        assert gym.question(3, PromptFormat()).extra["gym"]["check"] == elsewhere[task], task


def test_an_endless_task_resumes_at_any_position_across_blocks():
    whole = stream("gym:chain_sum")
    drawn = texts(whole.take(2 * BLOCK + 20))
    assert whole.positions == [2 * BLOCK + 20]
    assert len(set(drawn)) > 2 * BLOCK
    resumed = stream("gym:chain_sum")
    resumed.positions = [BLOCK - 3]
    assert texts(resumed.take(BLOCK)) == drawn[BLOCK - 3 : 2 * BLOCK - 3]


def test_phase_evaluation_set_seed_and_source_index_give_different_items():
    sized = {"path": "gym:chain_sum", "size": 30}
    settings = config("gym:chain_sum", evaluate={"x": sized, "y": sized}, max_prompt_length=4000)
    sets = load_eval_sets(settings, TOKENIZER)
    twice = stream(["gym:chain_sum", "gym:chain_sum"]).take(60)
    other = stream("gym:chain_sum", seed=1).take(30)
    found = [sets["x"], sets["y"], twice[::2], twice[1::2], other]
    assert len({text for prompts in found for text in texts(prompts)}) > 145
    assert texts(twice[::2]) == texts(stream("gym:chain_sum").take(30))


def test_the_digest_depends_on_task_parameters_and_seed():
    one = stream("gym:chain_sum")
    assert one.digest == stream("gym:chain_sum").digest
    others = [
        stream("gym:chain_sum", seed=1),
        stream("gym:gcd"),
        stream({"path": "gym:chain_sum", "params": {"max_terms": 3}}),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_an_endless_task_has_no_list_of_questions():
    with pytest.raises(
        DataError, match=r"^gym:chain_sum is endless, so it cannot be evaluated as a whole; set eval\.data$"
    ):
        stream("gym:chain_sum").questions()


def test_with_a_size_a_task_is_a_finite_dataset():
    found = stream({"path": "gym:tower_of_hanoi", "size": 40})
    assert len(found.questions()) == len(set(texts(found.questions()))) < 40
    assert found.notes[0].startswith("gym:tower_of_hanoi: 40 items, ")
    epoch = len(found.questions())
    assert sorted(texts(found.take(epoch))) == sorted(texts(found.questions()))


def test_evaluation_questions_are_distinct_and_never_drawn_in_training():
    # There are only 100 questions, so that most items are duplicates.
    few = {"path": "gym:products", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    settings = config(few, evaluate={"held": few | {"size": 60}}, max_prompt_length=4000)
    held = load_eval_sets(settings, TOKENIZER)["held"]
    assert len(set(texts(held))) == 60
    training = load_train_stream(settings, TOKENIZER, held)
    drawn = training.take(300)
    assert not set(texts(drawn)) & set(texts(held))
    assert training.positions == [300]
    resumed = load_train_stream(settings, TOKENIZER, held)
    resumed.positions = [150]
    assert texts(resumed.take(150)) == texts(drawn)[150:]


def test_a_task_whose_questions_are_all_held_out_or_too_long_stops_instead_of_searching_forever():
    few = {"path": "gym:products", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    too_many = config(few, evaluate={"held": few | {"size": 101}}, max_prompt_length=4000)
    with pytest.raises(
        DataError, match=r"gym:products: asked for 101 distinct questions, but after \d+ the next 1,000"
    ):
        load_eval_sets(too_many, TOKENIZER)
    sized = few | {"size": 5000}
    everything = load_train_stream(config(sized, max_prompt_length=4000), TOKENIZER).questions()
    training = load_train_stream(config(few, max_prompt_length=4000), TOKENIZER, everything)
    with pytest.raises(
        DataError, match=r"gym:products: 1,000 items in a row cannot be used .*: held out for evaluation"
    ):
        training.take(1)
    with pytest.raises(DataError, match=r"the last one: longer than data\.max_prompt_length"):
        load_train_stream(config(few, max_prompt_length=5), TOKENIZER).take(1)
    with pytest.raises(DataError, match=r"gym:products, item 0: the prompt has \d+ tokens, more than"):
        load_train_stream(config(few, max_prompt_length=5, overlong_prompts="raise"), TOKENIZER).take(1)


def test_the_sample_answer_is_not_part_of_the_uid():
    # Two processes find different ladders for the same words.
    question = Gym(Source(path="gym:word_ladder"), (0, "train", 0)).question(0, PromptFormat())
    first, second = encode([question, replace(question, answer="COLD,CORD,WARM")], TOKENIZER)
    assert first.uid == second.uid


def test_a_question_with_an_empty_answer_is_skipped():
    # In some bases, reasoning-gym writes the number 0 as an empty string.
    drawn = stream({"path": "gym:base_conversion", "params": {"min_value": 0, "max_value": 3}}).take(60)
    assert all(prompt.answer.strip() for prompt in drawn)
    sized = stream({"path": "gym:base_conversion", "size": 60, "params": {"min_value": 0, "max_value": 3}})
    assert "that the task failed to generate left out" in sized.notes[0]


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_a_task_that_cannot_be_trusted_is_refused_with_the_reason(task):
    assert task in factory.DATASETS
    with pytest.raises(DataError, match=rf"^gym:{task}: this task cannot be used, because it ") as caught:
        stream(f"gym:{task}")
    assert REFUSED[task] in str(caught.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"path": "gym:chain_sums"}, r"gym:chain_sums: no such task in reasoning-gym; did you mean 'chain_sum'\?"),
        (
            {"path": "gym:chain_sum", "params": {"max_term": 3}},
            r"gym:chain_sum: unknown parameter 'max_term'; the task takes min_terms, .*; did you mean 'max_terms'\?",
        ),
        (
            {"path": "gym:chain_sum", "params": {"seed": 3}},
            r"params must not contain 'seed'; the seed is derived from run",
        ),
        ({"path": "gym:chain_sum", "params": {"size": 3}}, r"params must not contain 'size'"),
        (
            {"path": "gym:chain_sum", "params": {"min_terms": 5, "max_terms": 2}},
            r"gym:chain_sum: the task rejects params \{'min_terms': 5, 'max_terms': 2\} \(AssertionError: ",
        ),
        ({"path": "gym:chain_sum", "params": {"min_terms": float("inf")}}, r"params must be JSON values"),
    ],
)
def test_a_wrong_task_or_parameter_is_one_sentence(source, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        Gym(Source.model_construct(weight=1.0, size=None, **({"params": {}} | source)), (0, "train", 0))
    assert "\n" not in str(caught.value)


def test_evaluation_needs_a_size():
    with pytest.raises(DataError, match=r"gym:chain_sum: give a `size` to evaluate on it"):
        load_eval_sets(config("gym:chain_sum", evaluate="gym:chain_sum"), TOKENIZER)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(DataError, match=r"gym:chain_sum: needs the package reasoning-gym: pip install -e '.*\[gym\]'"):
        stream("gym:chain_sum")
