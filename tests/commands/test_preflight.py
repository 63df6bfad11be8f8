"""The checks of a dry run: all that is missing is named, and nothing is loaded or left on the disk."""

from __future__ import annotations

import json
import shutil

import pytest

from dapo.commands.preflight import check_run
from dapo.config import Config
from dapo.errors import RewardError
from dapo.store.database import RunDatabase
from dapo.system import machine
from dapo.training.trainer import Trainer
from tests import runs
from tests.tiny import tiny_tokenizer


def test_a_disk_without_room_for_two_checkpoints_is_a_warning_and_without_one_is_missing(tmp_path, monkeypatch):
    config = runs.load(tmp_path, "run.steps=1")
    usage = shutil.disk_usage(tmp_path)
    for free, is_ready in ((500_000, True), (100_000, False)):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        sentence = f"only {free // 1000} kB are free in {tmp_path}/runs, but two checkpoints take"
        found = check_run(config)
        assert [sentence in each for each in (found.warnings if is_ready else found.missing)] == [True]
        assert bool(found.missing) is not is_ready
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=500_000))
    trainer = Trainer(config)
    trainer.train()
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        (message,) = (event["message"] for event in database.events() if event["kind"] == "disk")
    assert message.startswith("only 500 kB are free")


def test_too_little_memory_is_missing(tmp_path, monkeypatch):
    config = runs.load(tmp_path)
    assert check_run(config).missing == []
    monkeypatch.setattr("dapo.commands.preflight.memory", lambda: (10**6, 100_000))
    (sentence,) = check_run(config).missing
    assert (
        sentence.startswith(f"training {tmp_path}/model takes 430 kB of memory") and "only 100 kB are free" in sentence
    )


def test_a_parameter_that_is_no_column_is_missing_whether_or_not_the_model_is_here(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer, level):\n    return 1.0")
    sentence = "reward.py:reward takes 'level', which is not a column of the data (columns: answer, prompt)"
    (missing,) = check_run(Config.load(recipe)).missing
    assert sentence in missing
    elsewhere = check_run(Config.load(recipe, ["model.path=someone/somewhere"]))
    assert [sentence in each for each in elsewhere.missing] == [True]
    assert elsewhere.warnings[0].startswith("model: someone/somewhere is not on this machine")
    found = check_run(Config.load(recipe, ["data.columns={prompt: prompt, level: answer, answer: prompt}"]))
    assert found.missing == []


def test_rows_without_the_gold_answer_that_the_reward_needs_are_counted_in_a_warning(tmp_path):
    recipe = runs.recipe(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('"answer": 1', '"answer": null').replace('"answer": 4', '"level": 4'))
    sentence = "data: 2 of 6 training questions have no gold answer, which math needs, so their responses will stay"
    for options in ([], ["model.path=someone/somewhere"]):
        found = check_run(Config.load(recipe, [*options, "reward.use=math"]))
        assert [sentence in each for each in found.warnings if each.startswith("data:")] == [True]
        assert found.missing == []
    (tmp_path / "reward.py").write_text("def reward(completion, answer=None):\n    return 1.0")
    assert check_run(Config.load(recipe)).warnings == []


def test_data_without_gold_answers_is_refused_if_the_reward_needs_them(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer):\n    return 1.0")
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('"answer"', '"answr"'))
    sentence = (
        "reward.py:reward takes the gold answer as 'answer', but no row has one (columns: answr, prompt); did you mean "
        "'answr'? data.columns='{answer: answr}' renames it"
    )
    for options in ([], ["model.path=someone/somewhere"]):
        found = check_run(Config.load(recipe, options))
        assert [each.endswith(sentence) for each in found.missing] == [True]
        assert not any(found.missing[0] in line for line in found.lines())  # it is raised, and so printed once
        (missing,) = check_run(Config.load(recipe, [*options, "reward.use=math"])).missing
        assert missing.startswith("reward.use: math takes the gold answer")
        renamed = check_run(Config.load(recipe, [*options, "data.columns={answer: answr}"]))
        assert renamed.missing == []
    with pytest.raises(RewardError, match="but no row has one"):
        Trainer(Config.load(recipe)).train()
    (tmp_path / "reward.py").write_text("def reward(completion, answer=None):\n    return 1.0")
    assert check_run(Config.load(recipe)).missing == []


def test_a_bad_row_is_not_taken_for_data_without_answers(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer):\n    return 1.0")
    (tmp_path / "data.jsonl").write_text("oops\n")
    (sentence,) = check_run(Config.load(recipe, ["model.path=someone/somewhere"])).missing
    assert "not valid JSON" in sentence


def test_an_environment_needs_no_gold_answers(tmp_path):
    recipe = runs.recipe(tmp_path, reward="def reward(completion, answer):\n    return 1.0")
    data = tmp_path / "data.jsonl"
    data.write_text(data.read_text().replace('"answer"', '"answr"'))
    (tmp_path / "echo.py").write_text("def reply(messages, row):\n    return 1.0\n")
    for model in ([], ["model.path=someone/somewhere"]):
        assert check_run(Config.load(recipe, [f"environment.use={tmp_path}/echo.py:reply", *model])).missing == []


def test_bad_rows_of_training_and_evaluation_are_both_missing(tmp_path):
    (tmp_path / "eval.csv").write_text("question,answer\nwhat?,\n")
    options = [f"eval.data={tmp_path}/eval.csv", "data.overlong_prompts=raise", "data.max_prompt_length=5"]
    recipe = runs.recipe(tmp_path)
    first, second = check_run(Config.load(recipe, options)).missing
    assert first == f"{tmp_path}/eval.csv, line 2: column 'answer' is null"
    assert second.startswith(f"{tmp_path}/data.jsonl, line 1: the prompt has ")
    assert check_run(Config.load(recipe, [*options, "model.path=someone/somewhere"])).missing == [first]


def test_a_run_that_exists_is_missing_only_under_a_name_that_was_given_and_can_be_resumed(tmp_path):
    config = runs.load(tmp_path, "run.steps=1")
    Trainer(config).train()
    before = sorted(config.run_dir.rglob("*"))
    assert any("gets the next free name" in note for note in check_run(config).notes)
    (sentence,) = check_run(config, has_given_name=True).missing
    assert "already holds a run" in sentence
    (sentence,) = check_run(config, resume=True).missing
    assert "has already finished 1 step;" in sentence
    longer = runs.load(tmp_path, "run.steps=2")
    assert f"run: {config.run_dir} can resume" in check_run(longer, resume=True).notes
    assert sorted(config.run_dir.rglob("*")) == before


def test_a_part_of_the_algorithm_that_cannot_be_loaded_is_missing(tmp_path):
    config = runs.load(tmp_path, f"algorithm.loss={tmp_path}/none.py:loss")
    assert any("algorithm.loss" in sentence and "none.py" in sentence for sentence in check_run(config).missing)


def test_the_environment_is_loaded_and_begins_the_episodes(tmp_path):
    recipe = runs.recipe(tmp_path)
    found = check_run(Config.load(recipe, ["environment.use=python", "model.path=someone/somewhere"]))
    assert found.missing == [] and "environment: python, with the tools python" in found.notes
    (missing,) = check_run(Config.load(recipe, ["environment.use=python"])).missing
    assert missing.startswith("environment.use offers tools, but the model's chat template does not read them")
    (missing,) = check_run(Config.load(recipe, [f"environment.use={tmp_path}/nothing.py:Guess"])).missing
    assert missing.startswith(f"environment.use: there is no file {tmp_path}/nothing.py")
    (tmp_path / "refuses.py").write_text("def start(row):\n    raise ValueError('no')\ndef reply(messages, row): ...\n")
    for model in ([], ["model.path=someone/somewhere"]):
        options = [f"environment.use={tmp_path}/refuses.py:reply", *model]
        (missing,) = check_run(Config.load(recipe, options)).missing
        assert missing == f"{tmp_path}/data.jsonl, line 1: environment.use: ValueError: no (refuses.py:2)"


def test_adapters_on_layers_that_the_model_does_not_have_are_missing(tmp_path):
    targets = "model.lora.target_modules=[q_proj, w_query]"
    (sentence,) = check_run(runs.load(tmp_path, "model.lora.rank=4", targets)).missing
    assert sentence.startswith("model.lora.target_modules: the model has no linear layer 'w_query'; it has ")
    assert check_run(runs.load(tmp_path, "model.lora.rank=4", targets.replace(", w_query", ""))).missing == []


def test_a_chat_template_that_rewrites_earlier_turns_is_missing_if_there_can_be_several(tmp_path):
    recipe = runs.recipe(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|{{ m.role }}|>{{ m.content }}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "echo.py").write_text("def reply(messages, row):\n    return 'again'\n")
    use = f"environment.use={tmp_path}/echo.py:reply"
    (missing,) = check_run(Config.load(recipe, [use])).missing
    assert "cannot be continued token by token" in missing and "environment.max_turns" in missing
    assert check_run(Config.load(recipe, [use, "environment.max_turns=1"])).missing == []


def test_a_reward_is_named_unless_the_environment_scores_every_episode(tmp_path):
    rows = "".join(json.dumps({"prompt": "guess", "answer": i}) + "\n" for i in (1, 2, 3))
    recipe = runs.recipe(tmp_path)
    (tmp_path / "data.jsonl").write_text(rows)
    guess, plain = (check_run(Config.load(recipe, options)) for options in (["environment.use=guess"], []))
    assert guess.missing == [] and "environment: guess" in guess.notes
    assert not any(note.startswith("reward:") for note in guess.notes)
    assert any(note.startswith("reward:") for note in plain.notes)
