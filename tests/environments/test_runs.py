"""Whole runs of a tiny model with an environment in real processes."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from dapo.errors import RewardError
from dapo.rewards.sandbox.sandbox import DESCRIPTIONS, Sandbox
from dapo.store.database import RunDatabase
from dapo.training.trainer import Trainer
from tests import runs

ENVIRONMENT = """
import os
from dapo import End, Turn

class Letters:
    '''Ask for letters until there are enough of them. One episode in some kills its process.'''

    def __init__(self, row):
        self.row, self.letters, self.turns = row, 0, 0

    def start(self):
        return f"letters, {self.row['answer']}"

    def reply(self, text):
        self.turns += 1
        self.letters += sum(character.isalpha() for character in text)
        if text.startswith("q") or self.turns > 9:
            os._exit(1)
        if self.letters >= 3:
            return End(self.letters / 9, acc=self.letters % 2 == 0, turns=self.turns)
        return Turn(f"more {self.letters}", reward=0.25)

def broken(messages, row):
    raise ValueError("no reply today")
"""


def load(folder, *overrides, use="Letters"):
    folder.mkdir(exist_ok=True)
    (folder / "letters.py").write_text(ENVIRONMENT)
    options = {"use": f"{folder}/letters.py:{use}", "max_turns": 3, "max_turn_tokens": 3, "workers": 2}
    data = {"max_response_length": 70}
    return runs.load(
        folder,
        *overrides,
        environment=options,
        data={"train": f"{folder}/data.jsonl", "train_batch_size": 4, "gen_batch_size": 6, **data},
    )


def test_a_run_records_its_episodes_and_resumes_bit_for_bit(tmp_path):
    whole = load(tmp_path, "run.name=whole", "run.steps=2", "run.save_every=1", "eval.k=1")
    Trainer(whole, quiet=True).train()
    with RunDatabase.open_readonly(whole.run_dir / "run.db") as database:
        groups = list(database.groups())
        rollouts = [rollout for group in groups for rollout in database.rollouts(group["serial"])]
    prompts = [group["messages"] for group in groups]
    assert {messages[0]["content"][:8] for messages in prompts} == {"letters,"}
    assert {len(rollout["turns"]) for rollout in rollouts} == {1, 2, 3}
    assert all(len(rollout["given"]) == len(rollout["turns"]) - 1 for rollout in rollouts if rollout["error"] is None)
    died = [rollout for rollout in rollouts if rollout["error"]]
    assert all("the environment's process died (exit code 1)" in rollout["error"] for rollout in died)
    assert all(rollout["turns"][-1]["text"].startswith("q") for rollout in died)
    for rollout in rollouts:
        rewards = [turn.get("reward") for turn in rollout["turns"]]
        assert rewards[:-1] == [0.25] * (len(rewards) - 1)
        if rollout["error"] is None and rewards[0] is not None:
            given = sum(filter(None, rewards))
            assert rollout["extras"]["turn_rewards"] == given
            letters = 9 * (rollout["score"] - given)
            assert letters == pytest.approx(round(letters)) and letters >= 0
    last = runs.metrics(whole.run_dir)[-1]
    assert 1 <= last["turns/mean"] <= 3 and last["tools/calls"] == 0

    half = load(tmp_path, "run.name=half", "run.steps=1", "run.save_every=1", "eval.k=1")
    Trainer(half, quiet=True).train()
    resumed = load(tmp_path, "run.name=half", "run.steps=2", "run.save_every=1", "eval.k=1")
    Trainer(resumed, resume=True, quiet=True).train()
    assert runs.metrics(whole.run_dir) == runs.metrics(half.run_dir)
    assert runs.verdicts(whole.run_dir) == runs.verdicts(half.run_dir)
    ours, theirs = runs.weights(whole.run_dir, 2), runs.weights(half.run_dir, 2)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_whose_model_runs_programs_says_which_isolation_is_in_force(tmp_path):
    with closing(Sandbox()) as sandbox:
        try:
            sandbox.open()
        except RewardError:
            pytest.skip("this machine offers no isolation")
        expected = DESCRIPTIONS[sandbox.isolation]
    options = {"use": "python", "workers": 1}
    config = runs.load(tmp_path, "run.steps=1", "algorithm.filter_groups.enable=false", environment=options)
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + template.read_text())
    Trainer(config, quiet=True).train()
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        assert [event["message"] for event in database.events() if event["kind"] == "sandbox"] == [expected]


def test_an_environment_that_never_replies_ends_the_run_with_its_reason(tmp_path):
    reason = r"the environment scored none of the first 6 groups; .* ValueError: no reply today \(letters\.py:\d+\)"
    with pytest.raises(RewardError, match=reason):
        Trainer(load(tmp_path, use="broken"), quiet=True).train()
