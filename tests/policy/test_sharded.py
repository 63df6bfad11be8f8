"""The sharded policy in real processes: every result equals that of one process with all the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from dapo.config import LoraConfig
from dapo.errors import ConfigError
from dapo.kernels.rounding import round_dithered
from dapo.model.lora import add_adapters, merged
from dapo.policy.budget import Budget
from dapo.policy.build import build_policy
from dapo.policy.packing import micro_batches
from dapo.policy.policy import Policy
from dapo.policy.sharded import ShardedPolicy
from dapo.policy.tally import Tally
from dapo.system.tensors import write_tensors
from tests import ranks
from tests.policy.test_update import config, for_dapo, random_groups
from tests.tiny import save_tiny, tiny_qwen3

FREE = {"algorithm__max_logprob_gap": 100.0, "optim__lr": 1e-3, "optim__warmup_steps": 0}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"tied": True, "optim__grad_clip": 0.1, **FREE},
    "untied": {"tied": False, "algorithm__loss_agg_mode": "seq-mean-token-sum", **FREE},
    "many small": {"algorithm__loss_agg_mode": "seq-mean-token-mean", "optim__max_tokens_per_micro_batch": 20, **FREE},
    "recomputed": {"optim__recompute_activations": "always", **FREE},
    "idle ranks": {"groups": (2, 1, 3), **FREE},
    "two epochs": {**FREE, "optim__ppo_epochs": 2, "optim__ppo_mini_batch_size": 3, "optim__lr": 1e-4},
    "reference": {"algorithm__kl_loss_coef": 0.1, **FREE},
    "adapters": {"lora": 3, "algorithm__kl_loss_coef": 0.1, **FREE},
    "gspo": {"algorithm__loss": "gspo", "algorithm__clip_ratio_low": 0.3, "algorithm__clip_ratio_high": 0.5, **FREE},
    "gmpo": {"algorithm__loss": "gmpo", **FREE},
    "corrected": {
        **FREE,
        "algorithm__importance_correction": "sequence-truncated",
        "algorithm__kl_loss_coef": 0.1,
        "optim__ppo_mini_batch_size": 3,
        "optim__lr": 1e-4,
    },
    "bf16": {"dtype": torch.bfloat16, **FREE},
    "not finite": {"non_finite": True, **FREE},
    "gap": {},
}


def build(kind: type[Policy], *, tied=True, lora=0, dtype=torch.float32, groups=(1, 5, 4), non_finite=False, **options):
    """Return a policy whose sizes are not divisible by the number of ranks, and groups to learn from."""
    make = lambda seed: for_dapo(  # noqa: E731
        tiny_qwen3(seed, tie_word_embeddings=tied, vocab_size=133, intermediate_size=70).to(dtype)
    )
    cfg = config(**options)
    model = make(0)
    if lora:
        torch.manual_seed(3)
        model = add_adapters(model, LoraConfig(rank=lora))
        for name, parameter in model.named_parameters():  # B starts at zero, and then A has no gradient
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
    policy = kind(model, cfg)
    if cfg.needs_reference and not lora:
        reference = make(1).requires_grad_(False)
        if isinstance(policy, ShardedPolicy):
            policy.add_reference(reference)
        else:
            policy.reference = reference
    made = random_groups(*groups)
    if non_finite:
        made = [replace(g, advantages=np.full_like(g.advantages, np.inf)) for g in made]
    if cfg.needs_reference:
        found = policy.reference_logprobs(made)
        if isinstance(policy, ShardedPolicy):  # only rank 0 has them
            box = [found]
            torch.distributed.broadcast_object_list(box)
            found = box[0]
        made = [replace(g, ref_logprobs=refs) for g, refs in zip(made, found, strict=True)]
    return policy, made


def learn(kind: type[Policy], case: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients of the first mini-batch, and the state after an update."""
    policy, groups = build(kind, **case)
    part = Tally()
    for batch, result in policy._gradients(groups, 0, part):
        part.count(batch, result, is_first=True, record=False)
    policy._reduce(part)
    named = list(zip(policy.optimizer.names, policy.optimizer.masters, strict=True))
    grads = {name: full(master.grad) for name, master in named if master.grad is not None}
    policy.optimizer.zero_grad()
    update = policy.update(groups, 1, 0)
    with policy.optimizer.exact_masters():
        weights = {name: full(master) for name, master in named}
    return {
        "loss": part.loss,
        "grads": grads,
        "weights": weights,
        "exported": {name: tensor.clone() for name, tensor in policy.weights()},
        "metrics": update.metrics,
        "stats": update.token_stats,
        "stop": update.stop,
        "references": [g.ref_logprobs for g in groups],
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def learn_all() -> dict[str, dict[str, Any]]:
    return {name: learn(ShardedPolicy, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return {name: learn(Policy, case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    return ranks.run(request.param, tmp_path_factory.mktemp("ranks"), learn_all)


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("bf16", "not finite", "gap")])
def test_gradients_weights_and_metrics_are_those_of_one_process_for_any_number_of_ranks(expected, found, case):
    one, many = expected[case], found[case]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert many["grads"].keys() == one["grads"].keys()
    assert any(grad.abs().max() > 1e-3 for grad in one["grads"].values())
    for name, grad in one["grads"].items():
        torch.testing.assert_close(many["grads"][name], grad, atol=1e-5, rtol=1e-4, msg=lambda t, n=name: f"{n}: {t}")
        # Adam's first step is the sign of the gradient. For a tiny gradient, rounding decides the sign.
        steady = grad.abs() > 1e-5
        torch.testing.assert_close(many["weights"][name][steady], one["weights"][name][steady], atol=1e-5, rtol=0)
    for name, tensor in one["exported"].items():
        assert many["exported"][name].shape == tensor.shape
        assert (many["exported"][name] - tensor).abs().mean() < 1e-5
    assert many["exported"].keys() == one["exported"].keys()
    assert many["metrics"].keys() == one["metrics"].keys()
    for name, value in one["metrics"].items():
        if name != "tokens/computed":  # a prompt whose responses are on two ranks is computed on both
            assert many["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert many["stats"].keys() == one["stats"].keys()
    for key, stats in one["stats"].items():
        np.testing.assert_allclose(many["stats"][key].logprobs, stats.logprobs, atol=1e-5)
        np.testing.assert_allclose(many["stats"][key].entropy, stats.entropy, atol=1e-5)


@pytest.mark.parametrize("case", ["reference", "adapters"])
def test_the_reference_s_log_probabilities_are_those_of_one_process(expected, found, case):
    for one, many in zip(expected[case]["references"], found[case]["references"], strict=True):
        for values, others in zip(one, many, strict=True):
            np.testing.assert_allclose(others, values, atol=1e-5)


def test_bf16_is_computed_in_bf16_over_float32_shards(expected, found):
    one, many = expected["bf16"], found["bf16"]
    for name, grad in one["grads"].items():
        assert many["grads"][name].dtype == many["weights"][name].dtype == torch.float32
        # Ranks compute with transformers' modules and one process with the fused ones, which round at other places.
        assert (many["grads"][name] - grad).norm() < 0.1 * grad.norm(), name
    assert {tensor.dtype for tensor in many["exported"].values()} == {torch.bfloat16}
    for name, tensor in many["exported"].items():
        assert torch.equal(tensor, dithered(many["weights"][name])), name


def dithered(masters: torch.Tensor) -> torch.Tensor:
    rounded = torch.empty_like(masters, dtype=torch.bfloat16)
    round_dithered(masters, rounded)
    return rounded


def round_masters(adapters: bool) -> dict[str, Any]:
    """Move masters by less than rounding to the nearest would keep. Returns them, and the weights in use and exported.

    Of adapters, the masters are the merged weights.
    """
    policy, _ = build(ShardedPolicy, dtype=torch.bfloat16, lora=3 * adapters, **FREE)
    with policy.optimizer.exact_masters():
        for name, master in zip(policy.optimizer.names, policy.optimizer.masters, strict=True):
            torch.manual_seed(len(name))
            change = distribute_tensor(torch.randn(master.shape), master.device_mesh, master.placements)
            master.data.add_(1e-5 * change)
        masters = {name: full(tensor) for name, tensor in merged(policy.model).items()}
    used = policy.root(lambda: {name: full(p) for name, p in policy.causal_lm.named_parameters()})
    return {"masters": masters, "used": used, "exported": {name: tensor.clone() for name, tensor in policy.weights()}}


@pytest.mark.parametrize("adapters", [False, True])
def test_the_same_masters_give_the_same_bf16_weights_on_any_number_of_ranks(tmp_path, adapters):
    found = [ranks.run(count, tmp_path / f"{count}", round_masters, adapters) for count in (1, 2, 4)]
    changed = 0.0
    for name, exported in found[0]["exported"].items():
        masters = found[0]["masters"][name]
        changed += float((exported != masters.bfloat16()).float().mean())
        for one in found:
            assert torch.equal(one["exported"][name], exported), name
            assert adapters or torch.equal(one["exported"][name], dithered(masters)), name
            if name in one["used"] and not name.startswith("model.layers"):  # those of layers are gathered later
                assert torch.equal(one["used"][name], exported), name
    assert changed > 0, "nothing was rounded otherwise than to the nearest"


def test_a_gradient_that_is_not_finite_changes_no_weight_on_any_rank(expected, found):
    assert found["not finite"]["metrics"]["updates/non_finite"] == 1
    assert found["not finite"]["metrics"]["updates"] == 0
    start = dict(build(Policy, **CASES["tied"])[0].model.named_parameters())
    for name, tensor in found["not finite"]["weights"].items():
        assert torch.equal(tensor, start[name]), name


def test_all_ranks_see_the_gap_of_all_tokens(expected, found):
    assert found["gap"]["stop"] is not None
    for name in ("logprob_gap/mean", "logprob_gap/max"):
        assert found["gap"]["metrics"][name] == pytest.approx(expected["gap"]["metrics"][name], rel=1e-5)
    assert found["gap"]["metrics"]["updates"] == 0


@pytest.mark.parametrize(("count", "budget"), [(2, 30), (3, 4096), (4, 12), (7, 40)])
def test_every_rollout_is_packed_once_and_ranks_get_equally_many_micro_batches_of_balanced_size(count, budget):
    groups = random_groups(4, 9, 6)
    shares = [
        micro_batches(groups, "token-mean", budget, 0, torch.empty(0), rank=rank, ranks=count) for rank in range(count)
    ]
    assert len({len(share) for share in shares}) == 1
    packed = [(r.serial, r.index) for share in shares for batch in share for r in batch.rollouts]
    assert sorted(packed) == sorted((g.serial, i) for g in groups for i in np.flatnonzero(g.trains))
    assert float(sum(b.weights_R.sum() for share in shares for b in share)) == pytest.approx(1)
    tokens = [sum(len(batch.tokens_T) for batch in share if batch.rollouts) for share in shares]
    whole = sum(len(b.tokens_T) for b in micro_batches(groups, "token-mean", 10**9, 0, torch.empty(0)))
    longest = max(len(g.prompt.tokens) + len(r) for g in groups for r in g.rollouts)
    if budget == 4096:  # small micro-batches repeat prompts, which the balancing does not count
        assert max(tokens) <= whole / count + longest


def shrink_budget() -> list[Any]:
    policy, _ = build(ShardedPolicy, **FREE)
    policy.budget = Budget(1000, room=1000 * 2.0**20)
    taken = 2**32 + (100 << 20) * (1 + policy.rank)  # the estimate on rank 0, twice that on rank 1
    tally = Tally()
    policy._shrink_budget(100, taken, tally)
    found: list[Any] = [None] * policy.ranks
    torch.distributed.all_gather_object(found, (policy.budget.max_tokens, len(tally.notes)))
    return found


def test_if_one_rank_needs_more_memory_than_estimated_all_ranks_use_smaller_micro_batches(tmp_path):
    assert ranks.run(2, tmp_path, shrink_budget) == [(500, 1), (500, 1)]


def test_offload_is_refused_for_a_single_learner():
    with pytest.raises(ConfigError, match=r"cluster.offload needs weights that several processes share"):
        config(cluster__offload=True)


def on_gpu(offload: bool) -> dict[str, Any]:
    """Return gradients, metrics and weights of both kinds of policy in bf16 on one GPU."""
    torch.cuda.set_device(0)
    options = {"cluster__learners": 2, "cluster__offload": offload, **FREE}
    policies = {
        "plain": Policy(for_dapo(tiny_qwen3(head_dim=64).bfloat16().cuda()), config(**FREE)),
        "sharded": ShardedPolicy(for_dapo(tiny_qwen3(head_dim=64).bfloat16()), config(**options), device="cuda:0"),
    }
    found: dict[str, Any] = {}
    for name, policy in policies.items():
        policy._gradients(random_groups(1, 5, 4), 0, Tally())
        named = zip(policy.optimizer.names, policy.optimizer.masters, strict=True)
        found[name] = {n: full(m.grad).cpu() for n, m in named if m.grad is not None}
        policy.optimizer.zero_grad()
        found[f"{name} metrics"] = policy.update(random_groups(1, 5, 4), 1, 0).metrics
        found[f"{name} weights"] = {n: t.cpu() for n, t in policy.weights()}
    assert policies["sharded"].weight.device.type == ("cpu" if offload else "cuda")
    assert policies["sharded"].notes(0)
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu_shards_in_bf16_have_the_gradients_of_the_fused_policy(tmp_path, offload):
    found = ranks.run(1, tmp_path, on_gpu, offload, backend="cpu:gloo,cuda:nccl")
    for name, grad in found["plain"].items():
        assert (found["sharded"][name] - grad).norm() < 0.1 * grad.norm(), name
    assert found["sharded metrics"]["entropy"] == pytest.approx(found["plain metrics"]["entropy"], rel=0.01)
    for name, tensor in found["plain weights"].items():
        assert (found["sharded weights"][name].float() - tensor.float()).abs().mean() < 1e-3, name


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"model__dtype": "bfloat16"},
    "adapters": {"model__lora": {"rank": 3}},
}
SHORT = {"model__device": "cpu", "data__max_prompt_length": 64, "data__max_response_length": 64}


def resume_and_update(start: Path, folder: Path, is_saved: bool) -> dict[str, Any]:
    """Resume from `start`, make an update, save in `folder`. Returns optimizer state and weights before and after."""
    found = {}
    for name, options in KINDS.items():
        place = folder / name
        (place / "trainer").mkdir(parents=True, exist_ok=True)
        cfg = config(**FREE, **SHORT, **options, model__path=str(folder.parent / "model"))
        loaded, policy = build_policy(cfg, start / name if is_saved else None)
        if is_saved:
            policy.restore(start / name)
        before = everything(policy)
        policy.update(random_groups(2, 4, 4), 1, 0)
        for file, tensors in policy.save(place).items():
            write_tensors(place / file, tensors)
        if getattr(policy, "rank", 0) == 0:
            loaded.tokenizer.save_pretrained(place)
        found[name] = {"before": before, "after": everything(policy)}
    return found


def everything(policy: Policy) -> dict[str, torch.Tensor]:
    weights = list(policy.weights())
    with policy.optimizer.exact_masters():
        state = policy._optimizer_state() if isinstance(policy, ShardedPolicy) else policy.optimizer.state_dict()
        return {name: full(tensor) for name, tensor in (*state.items(), *weights)}


def test_a_run_resumes_exactly_with_any_other_number_of_ranks(tmp_path):
    save_tiny(tmp_path / "model", vocab_size=133)
    ends = {}
    for before, count in (("", 1), ("1", 2), ("2", 3), ("3", 1)):
        start, place = tmp_path / f"after {before}", tmp_path / f"after {count}"
        if count == 1:
            found = resume_and_update(start, place, bool(before))
        else:
            found = ranks.run(count, tmp_path / f"ranks {count}", resume_and_update, start, place, bool(before))
        for name in KINDS:
            if before:
                assert found[name]["before"].keys() == ends[name].keys()
                for key, tensor in ends[name].items():
                    assert torch.equal(found[name]["before"][key], tensor), f"{before} -> {count}, {name}: {key}"
            ends[name] = found[name]["after"]
        if before != "3":
            files = [path.suffix for path in place.rglob("*") if path.is_file()]
            assert set(files) <= {".safetensors", ".json", ".jinja"}
            assert files.count(".safetensors") == sum(2 + (name == "adapters") for name in KINDS) + 3 * (count - 1)
