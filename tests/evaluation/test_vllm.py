"""`dapo eval` with real vLLM: greedy samples are those of the embedded engine, and vLLM is started once."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from dapo.evaluation import parts
from dapo.evaluation.compare import evaluate_models
from tests.saved import SavedRun

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; `make test-cluster` installs its CPU build"
)
VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
EMBEDDED = ["rollout.engine=embedded", "rollout.vllm={}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    rows = [{"prompt": f"question {'x' * i}", "answer": i} for i in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    saved = SavedRun(
        folder,
        shape={"hidden_size": 128},  # a head size that vLLM's kernels support
        data={"train": "gone.jsonl", "max_prompt_length": 64, "max_response_length": 8},
        rollout={"engine": "vllm", "vllm": VLLM},
        reward={"use": "exact", "workers": 1},
        eval={"k": 2, "data": str(folder / "questions.jsonl"), "temperature": 0.0},
    )
    saved.save(1)
    saved.move()
    saved.save(4)
    return saved


def texts(found) -> list[list[str]]:
    (results,) = found.results.values()
    return [[sample.rollout.text for sample in result.report.samples] for result in results]


@pytest.fixture
def built(monkeypatch):
    """The configurations of the engines that are built while the test runs."""
    configs, build = [], parts.assemble_samplers
    monkeypatch.setattr(parts, "assemble_samplers", lambda *given: configs.append(given[0]) or build(*given))
    return configs


def test_checkpoints_of_a_run_that_sampled_with_vllm_are_sampled_by_one_vllm(run, built, tmp_path):
    models = [f"{run.path}@1", f"{run.path}@4", f"{run.path}@1"]
    found = texts(evaluate_models(models, out=tmp_path / "vllm"))
    assert [config.rollout.engine for config in built] == ["vllm"]
    assert found == texts(evaluate_models(models, EMBEDDED, out=tmp_path / "embedded"))
    assert found[0] != found[1]


def test_a_plain_model_is_sampled_by_vllm_if_an_override_says_so(run, built, tmp_path):
    model, options = str(run.path.parent / "model"), ["data.max_prompt_length=64", "data.max_response_length=8"]
    data, options = str(run.path.parent / "questions.jsonl"), [*options, "eval.temperature=0", "reward.use=exact"]
    vllm = [f"rollout.vllm={json.dumps(VLLM)}", "rollout.engine=vllm"]
    found = texts(evaluate_models([model], [*options, *vllm], data=data, k=2, out=tmp_path / "vllm"))
    assert found == texts(evaluate_models([model], options, data=data, k=2, out=tmp_path / "embedded"))
    assert [config.rollout.engine for config in built] == ["vllm", "embedded"]
