"""Prompt features: the hidden state of a prompt's last token after the middle layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dapo.model.attention import Family
from dapo.model.forward import packed_plan
from dapo.model.memory import FEATURE_TOKENS
from dapo.model.trunk import trunk_of

DEPTH = 5 / 7  # share of the layers: the middle layers tell most about difficulty, the last ones about the next token


@torch.no_grad()
def prompt_features(causal_lm: Any, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the hidden state [N, d] of each prompt's last token at `DEPTH`, in float32."""
    device = causal_lm.get_input_embeddings().weight.device
    layers = max(1, round(DEPTH * causal_lm.config.get_text_config().num_hidden_layers))
    found = []
    for part in _parts(prompts):
        lengths = np.array([len(prompt) for prompt in part])
        ends = np.cumsum(lengths)
        families = [Family((int(end - length), int(length))) for end, length in zip(ends, lengths, strict=True)]
        tokens_T = torch.tensor(np.concatenate(part), dtype=torch.long, device=device)
        positions_T = torch.tensor(np.concatenate([np.arange(length) for length in lengths]), device=device)
        plan = packed_plan(causal_lm, families, positions_T)
        hidden_T = trunk_of(causal_lm).early(tokens_T, positions_T, plan, layers)
        found.append(hidden_T[torch.tensor(ends - 1, device=device)].float().cpu().numpy())
    return np.concatenate(found)


def _parts(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the prompts in order, in parts of at most FEATURE_TOKENS tokens or one prompt."""
    part, tokens = list[Sequence[int]](), 0
    for prompt in prompts:
        if part and tokens + len(prompt) > FEATURE_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(prompt)
        tokens += len(prompt)
    yield part
