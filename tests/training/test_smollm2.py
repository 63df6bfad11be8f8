"""Tests with a real model, SmolLM2-135M-Instruct, of what other tests show for tiny random weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo.algorithm.filtering import GroupRules, form_group
from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.loading import load_model
from dapo.policy.policy import Policy
from dapo.policy.tally import Tally
from dapo.store.database import RunDatabase
from dapo.types import Prompt, Request, SamplingParams, Score
from tests import plain

QUESTIONS = ["What is 3 + 4?", "Name an animal, and tell me in a few words where it lives."]


@pytest.fixture(scope="module")
def loaded(smollm2_dir):
    return load_model(ModelConfig(path=str(smollm2_dir), device="cpu"))


@pytest.fixture(scope="module")
def twin(smollm2_dir):
    return load_model(ModelConfig(path=str(smollm2_dir), device="cpu"), attention="sdpa").model


def encode(loaded, text):
    messages = [{"role": "user", "content": text}]
    return tuple(
        loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def drain(loaded, requests):
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, loaded.stop_ids, seed=0, max_concurrent=5)
    engine.submit(requests)
    found = []
    while finished := engine.poll():
        found += finished
    return sorted(found, key=lambda rollout: (rollout.serial, rollout.index))


def test_greedy_answers_are_those_of_transformers_generate(loaded, twin):
    prompts = [encode(loaded, question) for question in QUESTIONS]
    found = drain(
        loaded, [Request(i, p, 1, SamplingParams(temperature=0, max_tokens=16)) for i, p in enumerate(prompts)]
    )
    for prompt, rollout in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        out = twin.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16)
        assert rollout.tokens.tolist() == out[0, len(prompt) :].tolist()


def test_sampler_trainer_and_plain_transformers_agree_on_log_probabilities_and_gradients(loaded, twin):
    prompts = [encode(loaded, question) for question in QUESTIONS]
    rollouts = drain(loaded, [Request(i, p, 3, SamplingParams(max_tokens=8)) for i, p in enumerate(prompts)])
    groups = []
    for serial, prompt in enumerate(prompts):
        members = [rollout for rollout in rollouts if rollout.serial == serial]
        record = Prompt(str(serial), (), prompt, None)
        groups.append(form_group(serial, record, members, [Score(float(i)) for i in range(3)], GroupRules(8)))
    policy = Policy(loaded.model, Config.parse({"model": {"path": "x"}, "data": {"train": "x"}}))
    results = policy._gradients(groups, 0, Tally())
    trainer = np.concatenate([result.logprobs_R.numpy() for _, result in results])
    sampler = np.concatenate([batch.old_logprobs_R.numpy() for batch, _ in results])
    np.testing.assert_allclose(trainer, sampler, atol=1e-4)
    with torch.no_grad():
        expected = [plain.logprobs(twin, g.prompt.tokens, [r.tokens.tolist() for r in g.rollouts]) for g in groups]
    np.testing.assert_allclose(trainer, torch.cat([row for rows in expected for row in rows]).numpy(), atol=1e-4)
    grads = plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean"))
    found = {name: parameter.grad for name, parameter in loaded.model.named_parameters()}
    for name, grad in grads.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[name], grad.float(), atol=1e-4 * max(scale, 1.0), rtol=0)
    policy.optimizer.zero_grad()


def test_the_demo_s_first_step_learns(smollm2_dir, tmp_path):
    """Run the recipe for one round and one step: a real update of a real model, recorded and saved."""
    from dapo import Trainer

    overrides = [
        "run.steps=1", f"run.dir={tmp_path}", "eval.k=0", "algorithm.filter_groups.enable=false",
        "data.train_batch_size=2", "data.gen_batch_size=2", "optim.ppo_mini_batch_size=0", "rollout.n=4",
        "model.device=cpu",
    ]  # fmt: skip
    trainer = Trainer(Config.load("recipes/guess_five.yaml", overrides))
    result = trainer.train()
    with RunDatabase.open_readonly(result.run_dir / "run.db") as database:
        step = next(database.steps())
    assert result.steps == 1
    assert step["logprob_gap/mean"] < 1e-4
    assert step["updates"] == 1
    assert step["tokens/trained"] == step["tokens/generated"] > 0
    saved = load_model(ModelConfig(path=str(tmp_path / "guess_five" / "checkpoints" / "step_1"), device="cpu"))
    assert saved.tokenizer.chat_template is not None
