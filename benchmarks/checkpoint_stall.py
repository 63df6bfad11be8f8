"""python -m benchmarks.checkpoint_stall: how long training stands still for a checkpoint, and how long the write takes.

Random weights in the shape of a 1.5B model in bf16 on a GPU (22 GB of disk, and as much memory), of 135M in float32
on a CPU (1.6 GB). The moments come from real updates. `--folder` is on the disk to measure. `before` is how
checkpoints were written up to 0.1.0: safetensors' own writer, every file read again for its checksum, all in the
thread that trains. Sampling goes on when `save` returns, and an update when the copy is made; so training stalls by
what the copy takes longer than the sampling of the next step. While a checkpoint is written, updates are made and
timed. Every file is compared with the weights and the optimizer in the end.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from benchmarks.gpu_common import (
    QWEN2_1_5B,
    SMOLLM2_135M,
    Row,
    default_device,
    print_rows,
    random_groups,
    random_model,
    synchronize,
    word_tokenizer,
)
from dapo.checkpoint.folder import read_state
from dapo.checkpoint.saver import Saver
from dapo.checkpoint.state import DrawerState, SamplerState, TrainerState
from dapo.checkpoint.weights import OPTIMIZER
from dapo.config import Config
from dapo.policy.policy import Policy
from dapo.system.files import sync_tree
from dapo.system.machine import size_text
from dapo.types import EventKind


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("--folder", type=Path, help="where to write, by default the folder of temporary files")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--without-before", action="store_true", help="do not measure how checkpoints were written")
    chosen = options.parse_args()
    device = default_device()
    shape = QWEN2_1_5B if device.type == "cuda" else SMOLLM2_135M
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="dapo-checkpoints-") as folder:
        rows = measure(shape, device, Path(folder), chosen.repeats, has_before=not chosen.without_before)
    print_rows("checkpoints", rows)


def measure(
    shape: PretrainedConfig, device: torch.device, folder: Path, repeats: int, *, has_before: bool = True
) -> list[Row]:
    model = random_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    sizes = {"train_batch_size": 1, "max_prompt_length": 64, "max_response_length": 64}
    config = Config.parse({"run": {"steps": 1}, "model": {"path": "random"}, "data": {"train": "none", **sizes}})
    policy, tokenizer = Policy(model, config), word_tokenizer(shape.vocab_size)
    groups = random_groups(1, 2, 16, 16, shape.vocab_size)

    def update() -> float:
        began = time.perf_counter()
        policy.update(groups, step=1, version=0)
        synchronize(device)
        return time.perf_counter() - began

    idle = median([update() for _ in range(5)][2:])
    before = _before(policy, tokenizer, folder / "before") if has_before else None
    saver = Saver(folder / "checkpoints", policy, tokenizer, _say)
    stalls, copies, writes, busy = [], [], [], []
    for step in range(1, repeats + 2):  # the last one stays unchanged, to be compared
        began = time.perf_counter()
        saver.save(_state(step), in_background=True)
        stalls.append(time.perf_counter() - began)
        saver.wait_for_copy()
        copies.append(time.perf_counter() - began)
        while step <= repeats and saver.collect(wait=False) is None:
            busy.append(update())
        saver.collect(wait=True)
        writes.append(saver.metrics()["timing_s/checkpoint_write"])
        if step <= repeats:
            shutil.rmtree(folder / "checkpoints" / f"step_{step}")
    saved = folder / "checkpoints" / f"step_{repeats + 1}"
    _compare(saved, policy)
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    note = f"{size_text(size)}, all files compared; seconds to write: {', '.join(f'{write:.1f}' for write in writes)}"
    goals: dict[str, Any] = {"must": 2.0, "aim": 1.0, "lower_is_better": True}
    rows = [
        Row("until the next step can sample", max(stalls), "s", note=note, **goals),
        Row("until it can update, first checkpoint", copies[0], "s"),
        Row("until it can update, later checkpoints", max(copies[1:]), "s"),
        Row("write, in the background", median(writes), "s"),
        Row("update while nothing is written", idle, "s"),
        Row("update while a checkpoint is written", median(busy or [math.nan]), "s", note=f"median of {len(busy)}"),
    ]
    if before is not None:
        rows.append(Row("stall before", before, "s"))
        rows.append(Row("stall before / until an update now", before / max(copies[1:]), "x"))
    return rows


def _before(policy: Policy, tokenizer: Any, folder: Path) -> float:
    """Write one checkpoint as older versions did, and return the seconds."""
    from dapo.checkpoint.folder import _files
    from dapo.system.digest import file_digest

    began = time.perf_counter()
    (folder / "trainer").mkdir(parents=True)
    policy.causal_lm.save_pretrained(folder)
    save_file(policy.optimizer.state_dict(), folder / OPTIMIZER)
    tokenizer.save_pretrained(folder)
    for path in _files(folder):
        file_digest(path)
    sync_tree(folder)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def _state(step: int) -> TrainerState:
    drawer = DrawerState([0], data_digest="", considered=0, ledger={})
    sampler = SamplerState(drawer, next_serial=0, recent=[], carried=[])
    return TrainerState(step, step, empty_in_a_row=0, non_finite_in_a_row=0, sampler=sampler)


def _compare(saved: Path, policy: Policy) -> None:
    """Check the checksums, and every tensor against the policy, which has not changed since."""
    read_state(saved)
    optimizer, weights = load_file(saved / OPTIMIZER), load_file(saved / "model.safetensors")
    own = policy.optimizer.state_dict()
    assert own.keys() == optimizer.keys()
    for name, tensor in (*own.items(), *policy.weights()):
        assert torch.equal((optimizer if name in own else weights)[name], tensor.detach().cpu()), name


def _say(kind: EventKind, message: str) -> None:
    print(f"{kind}: {message}")


if __name__ == "__main__":
    main()
