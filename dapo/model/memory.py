"""Formulas for memory in bytes: training state, keys and values, activations, logits; and how a GPU is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dapo.model.meter import head_size, inner_width, key_heads

GIB = 2**30
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # per trained parameter, in float32; there are two moments
CONTEXT_BYTES = GIB // 2  # what a process takes of a GPU before its first tensor: CUDA's context and kernels
USABLE = 0.9  # share of a GPU's memory that is planned with; the rest is for fragmentation and libraries
BASE_SHARE = 0.25  # base weights of adapters go to the host's memory if they need more of the free memory than this
HEAD_BYTES, LEAST_HEAD_BYTES = 4 * GIB, GIB // 2  # most and least for the logits of a chunk with their gradient
MAX_TOKENS = 1 << 17  # of a micro-batch
ENOUGH_TOKENS = 1 << 14  # of a micro-batch; if fewer fit, which leaves a GPU idle, activations are recomputed
LEAST_TOKENS = 1 << 12  # of a micro-batch; if fewer fit, the optimizer's moments move to the host's memory
PREFILL_TOKENS, PREFILL_GRAPH_TOKENS = 1 << 14, 1 << 12  # most prompt tokens in a pass, and in a captured pass
FEATURE_TOKENS = 1 << 13  # most prompt tokens in a pass that computes features


def kv_bytes(config: Any, width: int) -> int:
    """Return the bytes of one token's keys and values, at `width` bytes per number."""
    return 2 * config.num_hidden_layers * key_heads(config) * head_size(config) * width


def checkpoint_bytes(parameters: int, trained: int, width: int) -> int:
    """Return the bytes of a checkpoint: weights at `width` bytes each, moments, and master copies of narrow weights."""
    masters = 0 if width == 4 else MASTER_BYTES
    return parameters * width + trained * (MOMENT_BYTES + masters)


def activation_bytes(config: Any, width: int, *, recompute: bool, is_fused: bool = True) -> int:
    """Estimate the bytes held per packed token between forward and backward, by counting what each layer saves.

    `width`: bytes per number. `is_fused`: whether the fused trunk runs the model, not autograd.
    """
    hidden, inner = config.hidden_size, inner_width(config)
    keys, queries = (heads * head_size(config) for heads in (key_heads(config), config.num_attention_heads))
    # Two float32 sums of the residual stream; then two norms, queries, keys and values (which may be copied for each
    # response), the attention output, gate and up.
    saved = 8 * hidden + width * (2 * hidden + 2 * queries + 6 * keys + 2 * inner)
    # Temporary, of the layer that is running: the gradients of the gated feed-forward and of the residual stream.
    passing = width * (4 * inner + 2 * queries + 8 * hidden)
    if not is_fused:  # autograd keeps every intermediate result
        saved *= 3
    layers = config.num_hidden_layers
    return layers * (4 + width) * hidden + saved + passing if recompute else layers * saved + passing


def adapter_parameters(config: Any, rank: int) -> int:
    """Return the number of parameters of LoRA adapters of this rank on all linear layers."""
    hidden, inner, size = config.hidden_size, inner_width(config), head_size(config)
    queries, keys = size * config.num_attention_heads, size * key_heads(config)
    sides = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return config.num_hidden_layers * rank * sides


def forward_bytes(config: Any, width: int) -> int:
    """Estimate the bytes per token of a pass without a backward: only the running layer's are held."""
    hidden, inner = config.hidden_size, inner_width(config)
    keys, queries = (heads * head_size(config) for heads in (key_heads(config), config.num_attention_heads))
    return 8 * hidden + width * (2 * hidden + 4 * inner + 3 * queries + 4 * keys)


def sampling_bytes(config: Any, width: int, rows: int, prefill_tokens: int) -> int:
    """Estimate the bytes of sampling besides the cache: logits and activations of `rows` responses, and of prefills.

    Decode steps and small prefills are CUDA graphs, which hold their memory all the time.
    """
    tokens = rows + min(PREFILL_GRAPH_TOKENS, prefill_tokens) + prefill_tokens
    return rows * config.vocab_size * 4 + tokens * forward_bytes(config, width)


def cache_room(config: Any, width: int, left: float, fraction: float, rows: int, longest: int) -> tuple[int, int]:
    """Divide `left` bytes: return the size of the cache in bytes, and the most prompt tokens of a prefill pass.

    The cache takes at most `fraction` of them. `longest`: tokens of the longest sequence, which is never split.
    """
    prefill_tokens = max(longest, min(PREFILL_TOKENS, int((1 - fraction) * left / 2 / forward_bytes(config, width))))
    working = sampling_bytes(config, width, rows, prefill_tokens)
    return max(0, int(min(fraction * left, left - working))), prefill_tokens


@dataclass(frozen=True, slots=True)
class Division:
    """The use of the memory that weights and masters leave free on a GPU that samples and trains."""

    offloads: bool = False  # AdamW's moments are in the host's memory
    lends: bool = False  # the cache is freed for each update, and the gradients are freed after it
    reserved: int = 0  # bytes that the cache must leave free


def divide(
    free: float, gradients: float, moments: float, per_token: float, *, may_lend: bool, longest: int = 0
) -> Division:
    """Decide where the moments are, and whether the cache is freed for updates.

    `per_token`: bytes of a token's activations if they are recomputed. `may_lend`: no response is in flight during an
    update. Moments stay on the GPU if a small update fits beside them, or if they are small themselves. The cache keeps
    its memory during an update if it leaves enough for twice LEAST_TOKENS while it takes half of what is free then.
    Both leave room for `longest` tokens, because a response is never split; in flight at most a third of `free`.
    """
    small = min(LEAST_HEAD_BYTES + LEAST_TOKENS * per_token, free / 3)
    whole = longest * per_token
    whole += min(HEAD_BYTES, max(LEAST_HEAD_BYTES, whole / 7))  # an eighth of the sum, as in `micro_batch`
    whole = min(whole, free - gradients if may_lend else free / 3)
    update = gradients + max(small, whole)
    with_cache = 1 if may_lend else 1.25  # in flight, the cache is there too
    offloads = moments > GIB and free - moments < with_cache * update
    held = 0 if offloads else moments
    lends = may_lend and (free - gradients - held - HEAD_BYTES) / 2 < max(2 * LEAST_TOKENS, longest) * per_token
    return Division(offloads, lends, int(held + (0 if lends else update)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The split of an update: at most `tokens` in one pass, and `head_bytes` for the logits of a chunk."""

    tokens: int
    recompute: bool
    head_bytes: int


def micro_batch(
    room: float,
    kept: float,
    recomputed: float,
    given: int,
    *,
    may_recompute: bool,
    always: bool,
    most: float = MAX_TOKENS,
    longest: int = 0,
) -> MicroBatch:
    """Return how an update is split to fit into `room` bytes; it has 0 tokens if not even one fits.

    `kept`, `recomputed`: bytes of a token's activations without and with recomputing them. `given`: the user's number
    of tokens, or 0. `most`: tokens of the largest update. `longest`: tokens of the longest sequence, which is never
    split.
    """
    head = int(min(HEAD_BYTES, max(LEAST_HEAD_BYTES, room / 8)))
    fits = max(0, int((room - head) / kept))
    recompute = always or (may_recompute and fits < max(longest, given or min(ENOUGH_TOKENS, most)))
    if recompute:
        fits = max(0, int((room - head) / recomputed))
    return MicroBatch(given or min(MAX_TOKENS, fits), recompute, head)
