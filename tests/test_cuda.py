"""On a GPU: the same engine and update, compared with plain transformers on the same device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dapo.config import Config, ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.model.attention import ATTENTION_NAME
from dapo.model.loading import load_model
from dapo.policy.policy import Policy
from dapo.types import Request, SamplingParams
from tests import plain
from tests.policy.test_update import config, packed_gradients, random_groups
from tests.tiny import EOS_ID, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drain(engine, *requests):
    engine.submit(requests)
    found = []
    while finished := engine.poll():
        found += finished
    return found


def test_greedy_tokens_and_log_probabilities_on_the_gpu_are_those_of_transformers():
    model = tiny_llama().cuda()
    twin = plain.plain_copy(model, torch.float32).cpu()
    model.set_attn_implementation(ATTENTION_NAME)
    engine = EmbeddedEngine(model, tiny_tokenizer(), frozenset({EOS_ID}), seed=0, max_concurrent=7)
    prompts = [tuple(range(5, 5 + 3 * i)) for i in range(1, 6)]
    for rollout in drain(engine, *(Request(i, p, 4, SamplingParams(max_tokens=12)) for i, p in enumerate(prompts))):
        with torch.no_grad():
            (expected,) = plain.logprobs(twin, prompts[rollout.serial], [rollout.tokens.tolist()])
        np.testing.assert_allclose(rollout.logprobs, expected.numpy(), atol=1e-4)


def test_the_update_on_the_gpu_has_the_oracle_s_gradient():
    model = plain.in_float64(tiny_llama())
    twin = plain.plain_copy(model)
    model.cuda().set_attn_implementation(ATTENTION_NAME)
    groups = random_groups(3, 5, 4)
    _, grads = packed_gradients(model, groups, config())
    for name, expected in plain.gradients(twin, plain.mini_batch_loss(twin, groups, "token-mean")).items():
        torch.testing.assert_close(grads[name].cpu(), expected, atol=1e-6, rtol=1e-6)


def test_in_bf16_sampler_and_trainer_stay_close_on_the_real_model(smollm2_dir):
    loaded = load_model(ModelConfig(path=str(smollm2_dir), device="cuda"))
    assert loaded.model.dtype == torch.bfloat16
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, loaded.stop_ids, seed=0, max_concurrent=64)
    prompt = tuple(loaded.tokenizer("The capital of France is")["input_ids"])
    rollouts = drain(engine, Request(0, prompt, 32, SamplingParams(max_tokens=64)))
    from dapo.algorithm.filtering import GroupRules, form_group
    from dapo.types import Prompt, Score

    scores = [Score(float(i % 2)) for i in range(32)]
    members = sorted(rollouts, key=lambda rollout: rollout.index)
    group = form_group(0, Prompt("p", (), prompt, None), members, scores, GroupRules(64))
    policy = Policy(loaded.model, Config.parse({"model": {"path": "x"}, "data": {"train": "x"}}))
    metrics = policy.update([group], step=1, version=0).metrics
    print(f"mean gap {metrics['logprob_gap/mean']:.5f}, max {metrics['logprob_gap/max']:.4f}")
    assert metrics["logprob_gap/mean"] < policy.config.algorithm.max_logprob_gap
    assert metrics["updates"] == 1
