"""Per-token queries return the recorded values, and the clips that the loss applied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo.algorithm.loss import LossConfig, policy_loss
from dapo.errors import CheckpointError
from dapo.store.database import RunDatabase
from dapo.view.curves import curves
from dapo.view.groups import GroupFilter, groups
from dapo.view.runs import find_run
from dapo.view.source import Run
from dapo.view.tokens import _clip_options, clips, tokens
from tests.tiny import tiny_tokenizer
from tests.view.made import create, make_group, make_report


@pytest.mark.parametrize("advantage", [1.3, 1e-4, 0.0, -0.7, -2.0])
@pytest.mark.parametrize("dual", [10.0, 1.5, None])
def test_the_clips_are_those_of_the_loss(advantage: float, dual: float | None):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4_000, generator=generator) * 3
    new = old + torch.randn(4_000, generator=generator)
    new[:3] = torch.tensor([-60.0, 60.0, float("nan")])
    config = LossConfig(clip_low=0.2, clip_high=0.28, clip_c=dual)
    _, metrics = policy_loss(new, old, torch.full_like(old, advantage), None, config)
    marks = clips(metrics["ratio"].numpy(), advantage, config)
    for name in ("low", "high", "dual"):
        expected = metrics.get(f"clip_fraction/{name}", torch.zeros(4_000))
        assert [mark == name for mark in marks] == expected.bool().tolist(), name
    seen = {name for name in marks if name}
    assert seen == ({"high"} if advantage > 0 else set() if advantage == 0 else {"low", "dual"} if dual else {"low"})


@pytest.mark.parametrize(
    ("options", "has_clips"),
    [
        ({}, True),
        ({"algorithm.loss": "grpo", "algorithm.importance_correction": "auto"}, True),
        ({"algorithm.loss": "gspo"}, False),
        ({"algorithm.importance_correction": "token-masked"}, False),
        ({"algorithm.importance_correction": "auto", "rollout.engine": "vllm"}, False),
        ({"algorithm.importance_correction": "auto", "cluster.rollout_workers.vllm": 2}, False),
    ],
)
def test_clips_are_shown_only_where_the_loss_clips_the_ratio_of_trainer_to_sampler(options, has_clips):
    bounds = {"algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.28, "algorithm.clip_ratio_c": None}
    assert (_clip_options(bounds | options) is not None) == has_clips


def test_the_clips_of_a_real_run_match_its_clip_fraction_metrics(trained: Run):
    shares = {curve.name: dict(zip(curve.steps, curve.values, strict=True)) for curve in curves(
        trained, ["clip_fraction/low", "clip_fraction/high", "clip_fraction/dual"]
    )}  # fmt: skip
    seen = set()
    for step in range(1, 5):
        lines = groups(trained, GroupFilter(verdicts=("kept",)), limit=1_000).rows
        marks = [
            mark
            for line in lines
            if line.decided_step == step
            for sample in range(line.responses)
            for mark in tokens(trained, line.serial, sample, str).clips or ()
        ]
        assert marks
        for name in ("low", "high", "dual"):
            share = sum(mark == name for mark in marks) / len(marks)
            assert share == pytest.approx(shares[f"clip_fraction/{name}"][step], abs=1e-6), (step, name)
            seen |= {name} if share else set()
    assert seen == {"low", "high", "dual"}, "each of the three clips must occur in this run"


def test_the_token_values_of_a_real_response_are_those_recorded(trained: Run):
    tokenizer = tiny_tokenizer()
    with RunDatabase.open_readonly(trained.path) as database:
        serial = next(group["serial"] for group in database.groups(verdict="kept"))
        for row in database.rollouts(serial):
            found = tokens(
                trained, serial, row["sample"], lambda token: tokenizer.decode([token], skip_special_tokens=True)
            )
            assert found.ids.tolist() == row["tokens"].tolist()
            assert (found.start, found.length, len(found.pieces)) == (0, row["length"], row["length"])
            assert "".join(found.pieces) == row["text"]
            assert found.advantage == row["advantage"]
            for name in ("sampler_logprobs", "policy_logprobs", "entropy"):
                np.testing.assert_array_equal(getattr(found, name), row[name])
            difference = row["policy_logprobs"].astype(np.float64) - row["sampler_logprobs"]
            np.testing.assert_allclose(found.ratio, np.exp(difference), rtol=1e-5)


def test_a_slice_of_a_response_has_the_same_values_as_the_whole(tmp_path: Path):
    group = make_group(1)
    rollout = replace(group.rollouts[1], weight_version=5, switches=(1, 3, 3))
    with create(tmp_path) as database:
        database.record_step(make_report(1, [replace(group, rollouts=(group.rollouts[0], rollout))]))
    run = find_run(tmp_path, "made")
    whole = tokens(run, 1, 1, str)
    assert whole.versions.tolist() == rollout.versions.tolist() == [5, 6, 6, 8]
    part = tokens(run, 1, 1, str, start=1, limit=2)
    assert (part.start, part.length, part.pieces) == (1, 4, whole.pieces[1:3])
    for name in ("ids", "versions", "sampler_logprobs", "policy_logprobs", "ratio", "entropy"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[1:3])
    assert part.clips == whole.clips[1:3]
    assert tokens(run, 1, 1, str, start=9).pieces == ()


def test_what_was_not_stored_or_not_trained_on_is_none(tmp_path: Path, trained: Run):
    with create(tmp_path, "run.store_tokens=kept") as database:
        database.record_step(make_report(1, [make_group(1, verdict="all_right"), make_group(2, verdict="carried")]))
    run = find_run(tmp_path, "made")
    assert tokens(run, 1, 0, str) is None
    waiting = tokens(run, 2, 0, str)
    assert (waiting.policy_logprobs, waiting.ratio, waiting.entropy, waiting.clips) == (None,) * 4
    assert len(waiting.sampler_logprobs) == 3
    with pytest.raises(CheckpointError, match="there is no response 7 of a group 1"):
        tokens(run, 1, 7, str)
