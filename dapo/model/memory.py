"""The bytes that things take, each formula once: training state, keys and values, activations, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dapo.model.meter import head_size, inner_width, key_heads

GIB = 2**30
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # per trained parameter, in float32; there are two moments
CONTEXT_BYTES = GIB // 2  # what a process takes of a GPU before its first tensor: CUDA's context and kernels
USABLE = 0.9  # share of a GPU's memory that is planned with; the rest is for fragmentation and libraries
BASE_SHARE = 0.25  # weights beneath adapters that take more of the free memory than this are in the host's memory
HEAD_BYTES, LEAST_HEAD_BYTES = 4 * GIB, GIB // 2  # the logits of a chunk, and their gradient: at most, and at least
MAX_TOKENS = 1 << 17  # of a micro-batch
ENOUGH_TOKENS = 1 << 14  # fewer do not keep a large GPU busy: then activations are recomputed
LEAST_TOKENS = 1 << 12  # of a micro-batch; the optimizer's moments leave the GPU to make room for so many
PREFILL_TOKENS, PREFILL_GRAPH_TOKENS = 1 << 14, 1 << 12  # most prompt tokens of a pass, and of a pass that is a graph


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
    """Return the parameters of LoRA adapters on all linear layers. Each has `rank` rows and columns."""
    hidden, inner, size = config.hidden_size, inner_width(config), head_size(config)
    queries, keys = size * config.num_attention_heads, size * key_heads(config)
    sides = 2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner)
    return config.num_hidden_layers * rank * sides


def forward_bytes(config: Any, width: int) -> int:
    """Estimate the bytes per token of a pass that keeps nothing for a backward: those of the layer that is running."""
    hidden, inner = config.hidden_size, inner_width(config)
    keys, queries = (heads * head_size(config) for heads in (key_heads(config), config.num_attention_heads))
    return 8 * hidden + width * (2 * hidden + 4 * inner + 3 * queries + 4 * keys)


def sampling_bytes(config: Any, width: int, rows: int, prefill_tokens: int) -> int:
    """Estimate what sampling takes besides the cache: float32 logits and a pass of `rows`, and passes over prompts.

    Decode steps and small prefills are CUDA graphs, which keep their memory.
    """
    tokens = rows + min(PREFILL_GRAPH_TOKENS, prefill_tokens) + prefill_tokens
    return rows * config.vocab_size * 4 + tokens * forward_bytes(config, width)


def cache_room(config: Any, width: int, left: float, fraction: float, rows: int, longest: int) -> tuple[int, int]:
    """Return the most bytes of the cache and the most prompt tokens of a pass, where `left` bytes are for both.

    The cache takes at most `fraction` of them. `longest`: tokens of the longest sequence, which is never split.
    """
    prefill_tokens = max(longest, min(PREFILL_TOKENS, int((1 - fraction) * left / 2 / forward_bytes(config, width))))
    working = sampling_bytes(config, width, rows, prefill_tokens)
    return max(0, int(min(fraction * left, left - working))), prefill_tokens


@dataclass(frozen=True, slots=True)
class Division:
    """How a GPU that samples and trains in turns divides the memory that weights and masters leave."""

    offloads: bool = False  # AdamW's moments are in the host's memory
    lends: bool = False  # the cache is freed for each update, and the gradients are freed after it
    reserved: int = 0  # bytes that the cache must leave free


def divide(
    free: float, gradients: float, moments: float, per_token: float, *, may_lend: bool, longest: int = 0
) -> Division:
    """Return the division. `per_token`: bytes of activations that are recomputed; `may_lend`: nothing is in flight.

    Moments stay on the GPU if a small update fits beside them, or if they are small themselves. The cache keeps its
    memory during an update if half of what is then left, the other half being the cache, holds twice LEAST_TOKENS.
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
    """Return how an update uses `room` bytes. `kept` and `recomputed` are bytes of activations per token.

    `given`: the option for the tokens, or 0. `most`: tokens of the largest update. `longest`: tokens of the longest
    sequence, which is never split. Tokens are fewer than 1 where nothing fits.
    """
    head = int(min(HEAD_BYTES, max(LEAST_HEAD_BYTES, room / 8)))
    fits = max(0, int((room - head) / kept))
    recompute = always or (may_recompute and fits < max(longest, given or min(ENOUGH_TOKENS, most)))
    if recompute:
        fits = max(0, int((room - head) / recomputed))
    return MicroBatch(given or min(MAX_TOKENS, fits), recompute, head)
