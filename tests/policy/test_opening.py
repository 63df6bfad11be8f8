"""Building a policy in several processes: who reads the weights, who holds which, and how much memory that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import modeling_utils

from dapo.policy.build import build_policy
from tests import ranks
from tests.policy.test_sharded import FREE, SHORT, full
from tests.policy.test_update import config, random_groups
from tests.tiny import save_tiny

SOURCES: dict[str, dict[str, Any]] = {
    "tied": {},
    "says it is tied": {},
    "bf16": {"model__dtype": "bfloat16"},
    "adapters": {"model__lora": {"rank": 3}},
}


def no_weights_here(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a rank other than 0 read weights")


def open_policies(folder: Path) -> dict[str, Any]:
    """Build policies with a reference as a run does, and return what each rank then holds."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        modeling_utils.safe_open = no_weights_here  # pyright: ignore[reportPrivateImportUsage]
    found = {}
    for name, options in SOURCES.items():
        cfg = config(**FREE, **SHORT, **options, algorithm__kl_loss_coef=0.1, model__path=str(folder / name))
        loaded, policy = build_policy(cfg)
        held = {
            "weights": dict(policy.weights()),
            "buffers": dict(policy.causal_lm.named_buffers()),
            "adapters": {n: full(p) for n, p in policy.model.named_parameters() if ".lora_" in n},
            "stop_ids": loaded.stop_ids,
        }
        references = policy.reference_logprobs(random_groups(1, 3, 4))
        found[name] = {"held": gathered(held), "references": references}
    return found


def gathered(value: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def test_only_rank_0_reads_weights_and_all_ranks_compute_with_them(tmp_path):
    for name in SOURCES:
        save_tiny(tmp_path / name, "qwen2", vocab_size=133, tie_word_embeddings=name == "tied")
    # In transformers, weights that are saved and differ are not tied, whatever the configuration says.
    options = json.loads((tmp_path / "says it is tied" / "config.json").read_text())
    (tmp_path / "says it is tied" / "config.json").write_text(json.dumps(options | {"tie_word_embeddings": True}))
    one, two = open_policies(tmp_path), ranks.run(2, tmp_path / "ranks", open_policies, tmp_path)
    for name, expected in one.items():
        (alone,) = expected["held"]
        assert ("lm_head.weight" in alone["weights"]) == (name != "tied")
        for held in two[name]["held"]:
            assert held["stop_ids"] == alone["stop_ids"]
            for kind in ("weights", "buffers", "adapters"):
                assert held[kind].keys() == alone[kind].keys()
                for key, tensor in alone[kind].items():
                    assert torch.equal(held[kind][key], tensor), f"{name}: {key}"
        for values, others in zip(expected["references"], two[name]["references"], strict=True):
            bound = 0.1 if name == "bf16" else 1e-5
            np.testing.assert_allclose(np.concatenate(others), np.concatenate(values), atol=bound)


def memory_to_open(folder: Path) -> list[float]:
    """Return for each rank by how many bytes its peak memory exceeds its memory before."""
    options = {**FREE, **SHORT}
    build_policy(config(**options, model__path=str(folder / "tiny")))  # imports and one-time setup
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    policy = build_policy(config(**options, model__path=str(folder / "large")))[1]
    peak = resident("VmHWM") - before
    assert policy.ranks == 2
    return gathered(peak)


def resident(key: str) -> float:
    """Return a size in bytes from /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024.0 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
def test_ranks_that_read_nothing_never_hold_the_whole_model(tmp_path):
    save_tiny(tmp_path / "tiny")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    size = (save_tiny(tmp_path / "large", vocab_size=8000, **shape) / "model.safetensors").stat().st_size
    assert size > 150e6
    first, second = ranks.run(2, tmp_path / "ranks", memory_to_open, tmp_path)
    assert first > size, "rank 0 reads the whole model, so its peak must show it"
    assert 0.5 * size < second < 0.9 * size, "rank 1 holds its half, one whole weight, and what malloc keeps"
