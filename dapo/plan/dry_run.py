"""The plan of `dapo train --dry-run`: tokens per step, memory by part and the size of a checkpoint."""

from __future__ import annotations

from dapo.config import Config
from dapo.model.memory import GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES, checkpoint_bytes, kv_bytes
from dapo.plan.shapes import Shape, find_shape
from dapo.system.machine import size_text


def plan_text(config: Config) -> str:
    return "\n".join([*_token_lines(config), *_memory_lines(config), *_cluster_lines(config)])


def _cluster_lines(config: Config) -> list[str]:
    if config.cluster.learners == 1 and not config.rollout_engines:
        return []
    return ["  cluster   that is the total of all processes; `dapo plan` shows what each GPU does"]


def _token_lines(config: Config) -> list[str]:
    data, n = config.data, config.rollout.n
    limit = config.algorithm.filter_groups.max_num_gen_batches
    most = f"at most {limit * config.gen_batch_size:,} prompts" if limit > 0 else "prompts without limit"
    trained = data.train_batch_size * n
    updates = -(-data.train_batch_size // config.mini_batch_size) * config.optim.ppo_epochs
    return [
        "plan, per step:",
        f"  sampling  {most} x {n} responses of up to {data.max_response_length:,} tokens, until "
        f"{data.train_batch_size} groups are kept",
        f"  training  {data.train_batch_size} prompts x {n} responses, up to "
        f"{trained * data.max_response_length:,} response tokens and "
        f"{data.train_batch_size * data.max_prompt_length:,} prompt tokens (each prompt once), {updates} updates",
    ]


def _memory_lines(config: Config) -> list[str]:
    shape = find_shape(config.model.path)
    if shape is None:
        return [f"  memory    not known for {config.model.path}: not downloaded yet, or an unsupported architecture"]
    parts = training_memory(config, shape) | {
        "key/value cache at most": _cached_tokens(config) * kv_bytes(shape, 4 if _is_float32(config) else 2)
    }
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
    return [
        f"  memory    about {size_text(sum(parts.values()))} and the activations of a micro-batch: {listed} "
        f"({shape.parameters / 1e6:.0f}M parameters)"
    ]


def training_memory(config: Config, shape: Shape) -> dict[str, int]:
    """Return the bytes that training needs besides caches and activations, by part."""
    parameters, full = shape.parameters, config.model.lora.rank == 0
    is_float32 = _is_float32(config)  # then the weights are their own masters
    weights, trained = parameters * (4 if is_float32 else 2), parameters if full else 0
    return {
        "weights": weights,
        "masters": 0 if is_float32 else MASTER_BYTES * trained,
        "gradients": GRADIENT_BYTES * trained,
        "moments": MOMENT_BYTES * trained,
        "reference": weights if config.needs_reference and full else 0,
    }


def planned_checkpoint(config: Config, shape: Shape) -> int:
    """Return the bytes of a checkpoint; adapters are small in comparison."""
    trained = shape.parameters if config.model.lora.rank == 0 else 0
    return checkpoint_bytes(shape.parameters, trained, 4 if _is_float32(config) else 2)


def _cached_tokens(config: Config) -> int:
    """Return the most tokens that the key/value cache holds. On a GPU: whole pages, with a prompt per response."""
    data, n = config.data, config.rollout.n
    if on_gpu(config):
        from dapo.engine.embedded.pages import PAGE, longest_pages

        return PAGE * (1 + config.concurrent * longest_pages(config.longest))
    concurrent = min(config.rollout.max_concurrent or 64, config.gen_batch_size * n)
    return concurrent * data.max_response_length + -(-concurrent // n) * data.max_prompt_length


def _is_float32(config: Config) -> bool:
    return config.model.dtype == "float32" or (config.model.dtype == "auto" and not on_gpu(config))


def on_gpu(config: Config) -> bool:
    if config.model.device != "auto":
        return config.model.device != "cpu"
    import torch

    return torch.cuda.is_available()
