"""The trunk of a causal LM, from tokens to the last hidden states: as transformers computes it, or with fused kernels.

`trunk_of` returns the one trunk of a model, so that sampler and trainer run the same code on the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from dapo.kernels import native
from dapo.kernels.norm import add_rms_norm, add_rms_norm_backward
from dapo.kernels.rotary import HeadNorms, rotate, rotate_backward
from dapo.kernels.swiglu import swiglu, swiglu_backward
from dapo.model.attention import AttentionPlan
from dapo.model.joined import AdaptedWeight, AnyWeight, Weight, base_layer
from dapo.model.products import input_grad, linear, same_bits_for_any_rows

# These share one kind of layer: RMS norms, rotary attention with optional head norms, a gated feed-forward with SiLU.
FUSED_MODELS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # angles depend on the position only, so a table holds them


class Trunk(Protocol):
    weights: tuple[Weight, ...]  # weights whose gradients the trunk sums itself, in float32
    adapted: tuple[AdaptedWeight, ...]  # weights that adapters are merged into

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, *, recompute: bool = False) -> Tensor:
        """Return the last layer's hidden states [T, d] of packed tokens.

        With `recompute`, each layer's activations are computed again in the backward instead of being kept.
        """
        ...

    def early(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, layers: int) -> Tensor:
        """Return the residual stream [T, d] after the first `layers` layers."""
        ...


class PlainTrunk:
    """Any causal LM that uses transformers' attention interface. Autograd computes the gradients."""

    weights: tuple[Weight, ...] = ()
    adapted: tuple[AdaptedWeight, ...] = ()

    def __init__(self, causal_lm: Any) -> None:
        self.inner = causal_lm.base_model

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, *, recompute: bool = False) -> Tensor:
        out = self.inner(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, plan=plan)
        return out.last_hidden_state[0]

    def early(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, layers: int) -> Tensor:
        found: list[Tensor] = []

        def stop(layer: nn.Module, inputs: Any, output: Any) -> None:
            found.append(output if isinstance(output, Tensor) else output[0])
            raise _Stop

        hook = _decoder_layers(self.inner)[layers - 1].register_forward_hook(stop)
        try:
            self.hidden(tokens_T, positions_T, plan)
        except _Stop:
            pass
        finally:
            hook.remove()
        return found[0][0]


class _Stop(Exception):
    """Ends a forward pass after the last layer that is needed."""


def _decoder_layers(inner: nn.Module) -> nn.ModuleList:
    """Return the list of a model's decoder layers, which is the one whose attention modules know their index."""
    for part in inner.modules():
        if isinstance(part, nn.ModuleList) and any(hasattr(each, "layer_idx") for each in part.modules()):
            return part
    raise AssertionError(f"{type(inner).__name__} has no list of layers")


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Weight
    qkv: AnyWeight
    qkv_bias: Weight | None
    head_norms: tuple[Weight, Weight] | None  # for queries and keys
    norms: HeadNorms | None  # the same weights, in the form that the kernel takes
    cos_sin: Tensor | None  # None: a layer without rotary positions
    out: AnyWeight
    post_norm: Weight
    gate_up: AnyWeight
    down: AnyWeight

    @property
    def weights(self) -> tuple[AnyWeight, ...]:
        optional = (self.qkv_bias, *(self.head_norms or ()))
        present = (weight for weight in optional if weight is not None)
        return self.input_norm, self.qkv, *present, self.out, self.post_norm, self.gate_up, self.down


@dataclass(eq=False, slots=True)
class FusedTrunk:
    """A Llama-like decoder with few, fused kernels.

    The residual stream is float32, so that rounding errors do not add up over the layers. Matrix products use the
    weights' precision. Weights take no part in autograd: their gradients are added to `Weight.grad` where that is set.
    """

    embedding: Weight
    padding_index: int
    layers: tuple[_Layer, ...]
    final_norm: Weight
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    weights: tuple[Weight, ...] = field(init=False)
    adapted: tuple[AdaptedWeight, ...] = field(init=False)
    anchor: Tensor = field(init=False)  # an input that requires a gradient, without which autograd records nothing

    def __post_init__(self) -> None:
        per_layer = [weight for layer in self.layers for weight in layer.weights]
        self.adapted = tuple(weight for weight in per_layer if isinstance(weight, AdaptedWeight))
        plain = (weight.joined if isinstance(weight, AdaptedWeight) else weight for weight in per_layer)
        adapters = (part for weight in self.adapted for part in weight.trained)
        self.weights = (self.embedding, *plain, self.final_norm, *adapters)
        self.anchor = torch.zeros((), device=self.embedding.value.device, requires_grad=True)

    @classmethod
    def of(cls, causal_lm: Any) -> FusedTrunk:
        """Join the model's weights in place. The Hugging Face model still computes and saves as before."""
        config, inner = causal_lm.config, causal_lm.base_model
        head_dim = inner.layers[0].self_attn.head_dim
        table = _rotary_table(inner.rotary_emb, config.max_position_embeddings)
        return cls(
            embedding=Weight.of(inner.embed_tokens.weight),
            padding_index=-1 if inner.embed_tokens.padding_idx is None else inner.embed_tokens.padding_idx,
            layers=tuple(_join(layer, table, config.rms_norm_eps) for layer in inner.layers),
            final_norm=Weight.of(inner.norm.weight),
            eps=config.rms_norm_eps,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
        )

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, *, recompute: bool = False) -> Tensor:
        # `delta` is the output of the previous block. The next norm adds it to the residual stream.
        residual = _Embed.apply(self.anchor, tokens_T, self.embedding, self.padding_index)
        delta = None
        for index in range(len(self.layers)):
            if recompute and torch.is_grad_enabled():
                residual, delta = checkpoint(  # pyright: ignore[reportGeneralTypeIssues]
                    self._layer, index, residual, delta, positions_T, plan, use_reentrant=False
                )
            else:
                residual, delta = self._layer(index, residual, delta, positions_T, plan)
        normed, _ = _Norm.apply(residual, delta, self.final_norm, self.eps)
        return normed

    def early(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, layers: int) -> Tensor:
        residual = _Embed.apply(self.anchor, tokens_T, self.embedding, self.padding_index)
        delta = None
        for index in range(layers):
            residual, delta = self._layer(index, residual, delta, positions_T, plan)
        return residual if delta is None else residual + delta

    def _layer(
        self, index: int, residual: Tensor, delta: Tensor | None, positions_T: Tensor, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[index]
        normed, residual = _add_norm(residual, delta, layer.input_norm, self.eps)
        attended = self._attention(index, normed, positions_T, plan)
        delta = _Project.apply(attended, layer.out)
        normed, residual = _add_norm(residual, delta, layer.post_norm, self.eps)
        return residual, _FeedForward.apply(normed, layer.gate_up, layer.down)

    def _attention(self, index: int, normed: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        layer, scale = self.layers[index], self.head_dim**-0.5
        # Head norms come before the rotation, so a plan that rotates can take the raw heads only where there are none.
        if plan.applies_rotary and layer.norms is None:
            query, key, value = self._split(_linear(normed, layer.qkv, layer.qkv_bias))
            attended = plan.attend(index, query, key, value, scale, layer.cos_sin)
        else:
            projected = _RotaryProjection.apply(normed, positions_T, layer, self.heads, self.kv_heads)
            query, key, value = (part.transpose(0, 1)[None] for part in projected)
            attended = plan.attend(index, query, key, value, scale)
        return attended.reshape(len(normed), self.heads * self.head_dim)

    def _split(self, qkv_T: Tensor) -> tuple[Tensor, ...]:
        """Return query [1, H, T, D], key and value [1, Hkv, T, D], as views."""
        parts = qkv_T.view(len(qkv_T), -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return tuple(part.transpose(0, 1)[None] for part in parts)


_TRUNKS: WeakKeyDictionary[nn.Module, Trunk] = WeakKeyDictionary()


def trunk_of(causal_lm: Any) -> Trunk:
    """Return the model's trunk, built on the first call: fused where possible and faster, else transformers'."""
    if causal_lm not in _TRUNKS:
        is_fused = can_fuse(causal_lm) and _is_fast(causal_lm)
        if is_fused and causal_lm.device.type == "cuda":
            same_bits_for_any_rows()
        _TRUNKS[causal_lm] = FusedTrunk.of(causal_lm) if is_fused else PlainTrunk(causal_lm)
    return _TRUNKS[causal_lm]


def _is_fast(causal_lm: Any) -> bool:
    """Return whether the fused trunk is faster than transformers' for weights of this type on this device."""
    dtype, device = causal_lm.dtype, causal_lm.device
    if dtype == torch.float32:
        return native.can_attend(dtype, device, causal_lm.base_model.layers[0].self_attn.head_dim)
    return dtype == torch.bfloat16 and device.type in ("cuda", "cpu")


def use_plain_trunk(causal_lm: Any) -> None:
    """Compute this model with transformers' own modules, whatever was chosen before, as sharded weights need it."""
    _TRUNKS[causal_lm] = PlainTrunk(causal_lm)


def joined_weights(trunk: Trunk, head: Tensor) -> tuple[Weight, ...]:
    """Return all weights in training whose gradients are summed outside autograd: the trunk's, and an untied head's."""
    trained = tuple(weight for weight in trunk.weights if weight.parts[0].requires_grad)
    has_head = any(part is head for weight in trunk.weights for part in weight.parts)
    if not trained or has_head or not head.requires_grad:
        return trained
    assert isinstance(head, nn.Parameter)
    return *trained, Weight.of(head)


def can_fuse(causal_lm: Any) -> bool:
    """Return whether FusedTrunk computes exactly this model."""
    config = causal_lm.config
    if type(causal_lm).__name__ not in FUSED_MODELS or config.hidden_act != "silu":
        return False
    if getattr(causal_lm.base_model.rotary_emb, "rope_type", None) not in _STATIC_ROTARY:
        return False
    return all(_is_plain(layer) for layer in causal_lm.base_model.layers)


def _is_plain(layer: Any) -> bool:
    """Return whether products are plain, with or without LoRA, and only queries, keys and values may have biases."""
    attention, feed_forward = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj]
    if not all(_is_plain_product(part) for part in (*inputs, *others)):
        return False
    return all(part.bias is None for part in others) and len({part.bias is None for part in inputs}) == 1


def _is_plain_product(part: Any) -> bool:
    if isinstance(part, LoraLinear):
        return not part.lora_variant and type(part.get_base_layer()) is nn.Linear
    return type(part) is nn.Linear


def _join(layer: Any, table: Tensor, eps: float) -> _Layer:
    attention, feed_forward = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = Weight.of(attention.q_norm.weight), Weight.of(attention.k_norm.weight)
    return _Layer(
        input_norm=Weight.of(layer.input_layernorm.weight),
        qkv=_joined(*projections),
        qkv_bias=None if attention.q_proj.bias is None else Weight.of(*(base_layer(part).bias for part in projections)),
        head_norms=norms,
        norms=HeadNorms(norms[0].value, norms[1].value, eps) if norms else None,
        cos_sin=table if getattr(attention, "use_rope", True) else None,
        out=_joined(attention.o_proj),
        post_norm=Weight.of(layer.post_attention_layernorm.weight),
        gate_up=_joined(feed_forward.gate_proj, feed_forward.up_proj),
        down=_joined(feed_forward.down_proj),
    )


def _joined(*layers: Any) -> AnyWeight:
    if any(isinstance(layer, LoraLinear) for layer in layers):
        return AdaptedWeight.of(layers)
    return Weight.of(*(layer.weight for layer in layers))


@torch.no_grad()
def _rotary_table(rotary: Any, positions: int) -> Tensor:
    """Return [positions, D] in float32: the cosines of half a head, then the sines."""
    device = rotary.inv_freq.device
    cos, sin = rotary(torch.zeros(1, device=device), torch.arange(positions, device=device)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().contiguous()


def _linear(input_Ti: Tensor, weight: AnyWeight, bias: Weight | None = None) -> Tensor:
    return linear(input_Ti, weight.value, None if bias is None else bias.value)


def _add_norm(residual: Tensor, delta: Tensor | None, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = _Norm.apply(residual, delta, weight, eps)
    return normed, residual if total is None else total


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens_T: Tensor, weight: Weight, padding_index: int) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.weight, ctx.padding_index = weight, padding_index
        embedded = F.embedding(tokens_T, weight.value)
        return embedded.to(torch.promote_types(embedded.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (tokens_T,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is not None:
            grad = grads[0]
            if ctx.padding_index >= 0:  # nn.Embedding gives the padding token no gradient
                grad = grad * (tokens_T != ctx.padding_index)[:, None]
            weight.grad.index_add_(0, tokens_T, grad.to(weight.grad.dtype))
        return None, None, None, None


class _Norm(Function):
    """Add `delta` to the residual stream and normalize; return the normed rows and the sum.

    Without a delta the sum would be the residual itself. It is then None, and the caller keeps its residual.
    """

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, weight: Weight, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        normed, total, rstd_T = add_rms_norm(residual, delta, weight.value, eps)
        ctx.save_for_backward(total, rstd_T)
        ctx.weight, ctx.has_delta = weight, delta is not None
        ctx.set_materialize_grads(False)
        return normed, total if delta is not None else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, rstd_T = ctx.saved_tensors
        grad_normed, grad_total = grads
        if grad_normed is None:
            assert grad_total is not None
            return grad_total, grad_total.to(ctx.weight.value.dtype) if ctx.has_delta else None, None, None
        grad, narrow = add_rms_norm_backward(grad_normed, grad_total, total, rstd_T, ctx.weight.value, ctx.weight.grad)
        return grad, narrow if ctx.has_delta else None, None, None


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, input_Ti: Tensor, weight: AnyWeight) -> Tensor:
        ctx.save_for_backward(input_Ti)
        ctx.weight = weight
        return linear(input_Ti, weight.value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (input_Ti,) = ctx.saved_tensors
        ctx.weight.add_grad(grads[0], input_Ti)
        return input_grad(grads[0], ctx.weight.value), None


class _RotaryProjection(Function):
    """Project to query [T, H, D], key and value [T, Hkv, D], with head norms and rotation applied."""

    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, positions_T: Tensor, layer: _Layer, heads: int, kv_heads: int
    ) -> tuple[Tensor, ...]:
        qkv = _linear(normed, layer.qkv, layer.qkv_bias)
        rotated = rotate(qkv, positions_T, layer.cos_sin, heads, kv_heads, layer.norms)
        # The backward of a rotation needs only the angles; only that of head norms needs their input.
        ctx.save_for_backward(normed, positions_T, *((qkv,) if layer.head_norms is not None else ()))
        ctx.layer, ctx.heads, ctx.kv_heads = layer, heads, kv_heads
        head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
        value = qkv[:, (heads + kv_heads) * head_dim :]
        query, key = rotated.split([heads * head_dim, kv_heads * head_dim], dim=1)
        return tuple(part.unflatten(1, (-1, head_dim)) for part in (query, key, value))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, positions_T, *raw = ctx.saved_tensors
        layer: _Layer = ctx.layer
        grad_qkv = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        width = sum(grad[0].numel() for grad in grads[:2])
        norm_grads = None
        if layer.head_norms is not None and layer.head_norms[0].grad is not None:
            assert layer.head_norms[1].grad is not None
            norm_grads = layer.head_norms[0].grad, layer.head_norms[1].grad
        # Without head norms this works in place: the columns of grad_qkv are input and output.
        rotate_backward(
            grad_qkv[:, :width], raw[0] if raw else grad_qkv, positions_T, layer.cos_sin, ctx.heads, ctx.kv_heads,
            layer.norms, norm_grads, grad_qkv,
        )  # fmt: skip
        layer.qkv.add_grad(grad_qkv, normed)
        if layer.qkv_bias is not None and layer.qkv_bias.grad is not None:
            layer.qkv_bias.grad += grad_qkv.sum(0, dtype=layer.qkv_bias.grad.dtype)
        return input_grad(grad_qkv, layer.qkv.value), None, None, None, None


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, normed: Tensor, gate_up: AnyWeight, down: AnyWeight) -> Tensor:
        gated = linear(normed, gate_up.value)
        ctx.save_for_backward(normed, gated)
        ctx.gate_up, ctx.down = gate_up, down
        return linear(swiglu(gated), down.value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, gated = ctx.saved_tensors
        active, grad_gated = swiglu_backward(gated, input_grad(grads[0], ctx.down.value))
        ctx.down.add_grad(grads[0], active)
        ctx.gate_up.add_grad(grad_gated, normed)
        return input_grad(grad_gated, ctx.gate_up.value), None, None
