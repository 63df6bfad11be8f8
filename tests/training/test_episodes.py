"""Whole runs in an environment: carried over, saved, resumed and read back."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from dapo import Trainer
from dapo.errors import ConfigError
from dapo.store.database import RunDatabase
from tests import runs
from tests.tiny import save_tiny

ENVIRONMENT = """
from dapo.environments.environment import End

class Letters:
    '''Ends with an even number of letters in a turn. The score is the number of all letters, or the judge's.'''

    def __init__(self, row):
        self.row, self.total = row, 0

    def reply(self, text):
        count = sum(character.isalpha() for character in text)
        self.total += count
        if count % 2 == 0:
            return End(None if self.row["answer"] == 2 else self.total / 4, acc=self.total % 3 == 1)
        return f"{count}!"
"""


def load(folder, *overrides, **sections):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "letters.py").write_text(ENVIRONMENT, encoding="utf-8")
    options = {
        "environment": {"use": f"{folder / 'letters.py'}:Letters", "max_turns": 3, "max_turn_tokens": 6, "workers": 1},
        "data": {"max_response_length": 90, "train_batch_size": 3, "gen_batch_size": 8},  # carries at step 2
        "run": {"steps": 4, "save_every": 2, "store_tokens": "all"},
        "algorithm": {"filter_groups": {"metric": "score"}},
    }
    for name, section in sections.items():
        options[name] = {**options.get(name, {}), **section}
    return runs.load(folder, *overrides, **options)


def stored(run_dir):
    """Return what is stored of every response, by group and sample, without the time of the environment."""
    with RunDatabase.open_readonly(run_dir / "run.db") as database:
        rows = {
            (row["serial"], row["sample"]): row for g in database.groups() for row in database.rollouts(g["serial"])
        }
    for row in rows.values():
        for turn in row["turns"]:
            turn.pop("seconds")
    return rows


def test_a_run_of_episodes_resumes_bit_for_bit(tmp_path):
    whole, resumed = (load(tmp_path, f"run.name={name}") for name in ("whole", "resumed"))
    Trainer(whole, quiet=True).train()
    shutil.copytree(whole.run_dir, resumed.run_dir)
    shutil.rmtree(resumed.run_dir / "checkpoints" / "step_4")
    trainer = Trainer(resumed, quiet=True, resume=True)
    assert any(rollout.given and rollout.turns for group in trainer.sampler.carried for rollout in group.rollouts)
    trainer.train()
    assert runs.metrics(whole.run_dir) == runs.metrics(resumed.run_dir)
    expected, found = stored(whole.run_dir), stored(resumed.run_dir)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        for name, value in row.items():
            assert np.array_equal(value, found[key][name]), (key, name)
    ours, theirs = (runs.weights(config.run_dir, 4) for config in (whole, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def given_tokens(row):
    return sum(end - start for start, end in row["given"])


def test_episodes_are_stored_with_what_was_given_and_said(tmp_path):
    config = load(tmp_path)
    Trainer(config, quiet=True).train()
    rows = stored(config.run_dir)
    assert {len(row["turns"]) for row in rows.values()} == {1, 2, 3}
    for row in rows.values():
        assert len(row["given"]) == len(row["turns"]) - 1
        assert row["length"] == len(row["tokens"]) - given_tokens(row)
        assert row["text"] == row["turns"][-1]["text"]
        for start, end in row["given"]:
            assert (row["sampler_logprobs"][start:end] == 0).all()
    trained = [row for row in rows.values() if row["entropy"] is not None]
    assert trained and any(row["given"] for row in trained)
    for step in (step for step in runs.metrics(config.run_dir) if step["groups/generated"]):
        assert step.get("logprob_gap/max", 0.0) < 1e-4 and step["tokens/given"] > 0 and step["turns/mean"] > 1


def test_a_chat_template_that_cannot_be_continued_is_refused_before_anything_is_written(tmp_path):
    save_tiny(tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ messages|length }}")
    config = load(tmp_path)
    with pytest.raises(ConfigError, match=r"environment.use: the chat template of .* cannot be continued token by"):
        Trainer(config, quiet=True)
    assert not (config.run_dir / "run.db").exists()
