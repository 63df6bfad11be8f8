"""Find what responses to one prompt have in common, so that an update computes it once.

All responses share their prompt. Some begin alike, too: episodes in which the model's first turn and the reply to it
are the same, or answers with the same first words. Attention knows one level of sharing: a prefix and what continues
it. So responses that share more than the others may get a prefix of their own. That computes the prompt once more, and
is done where it saves tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dapo.types import Group, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One rollout to pack."""

    group: Group
    index: int
    weight: float
    is_current: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.group.prompt.tokens

    @property
    def rollout(self) -> Rollout:
        return self.group.rollouts[self.index]

    @property
    def inputs(self) -> int:
        """Response tokens that are inputs: all but the last."""
        return len(self.rollout) - 1

    def of_own(self, values_L: np.ndarray) -> np.ndarray:
        """Return the values at the model's own tokens."""
        return values_L[self.rollout.is_own] if self.rollout.given else values_L


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Rollouts that continue one prefix: their prompt and the first `shared` tokens of their responses."""

    shared: int
    items: Sequence[Item]

    @property
    def prefix(self) -> int:
        """The number of tokens that are computed once."""
        return len(self.items[0].prompt) + self.shared

    @property
    def tokens(self) -> int:
        """The number of tokens to compute."""
        return self.prefix + sum(item.inputs - self.shared for item in self.items)


def bundle(items: Iterable[Item], share: bool = True) -> list[Bundle]:
    """Divide rollouts into bundles that compute the fewest tokens. Equal prompts come side by side."""
    if not share:
        return [Bundle(0, [item]) for item in items]
    bundles: list[Bundle] = []
    for members in by_prompt(items):
        inputs = [item.rollout.tokens[:-1] for item in members]
        bundles += [Bundle(n, [members[i] for i in each]) for n, each in divide(len(members[0].prompt), inputs)]
    return bundles


def by_prompt(items: Iterable[Item]) -> list[list[Item]]:
    """Return the items of each prompt, in the order in which the prompts are seen first."""
    found: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        found.setdefault(item.prompt, []).append(item)
    return list(found.values())


def divide(prompt: int, responses: Sequence[np.ndarray]) -> list[tuple[int, list[int]]]:
    """Divide responses to a prompt of `prompt` tokens into parts that compute the fewest tokens.

    Return for each part how many tokens at their beginning its responses share, and the responses. A part computes the
    prompt, the shared tokens, and the rest of each of its responses.
    """
    order = sorted(range(len(responses)), key=lambda i: responses[i].tobytes())  # equal beginnings are neighbors
    common = [_common(responses[i], responses[j]) for i, j in pairwise(order)]
    if len(set(common)) < 2:  # no response shares more with one than with another
        return [(common[0] if common else 0, list(range(len(responses))))]
    leaves = [_Node(prompt + len(responses[i]), response=i) for i in order]
    found: dict[int, tuple[int, list[int]]] = {}
    todo: list[tuple[_Node, _Node | None]] = [(_tree(leaves, [prompt + count for count in common]), None)]
    while todo:
        node, above = todo.pop()
        if (above.depth if above else 0) < node.until:
            above = node
        if node.response is None:
            todo += [(child, above) for child in node.children]
        else:
            shared = above.depth - prompt if above else 0
            found.setdefault(id(above or node), (shared, []))[1].append(node.response)
    return sorted(((shared, sorted(members)) for shared, members in found.values()), key=lambda part: part[1][0])


@dataclass(slots=True, eq=False)
class _Node:
    """A node of the tree of token sequences: a response, or a prefix of several, `depth` tokens from the beginning.

    Computing a prefix costs `depth` tokens, and saves as many for each response that continues it. A response continues
    the deepest prefix above it that is computed. So what is best below a node depends only on the depth d of the one
    that is computed above it (0: none). It saves the sum over `steps` (from, count) of count * max(0, d - from),
    compared with d = 0: beyond depth `from`, `count` more responses continue the prefix above. The node's own prefix is
    computed if d < `until`.
    """

    depth: int
    response: int | None = None
    children: list[_Node] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)  # sorted
    until: float = 0.0

    def solve(self) -> None:
        """Find what is best below this node, given that it is known below its children."""
        if self.response is not None:
            self.steps = [(0.0, 1)]
            return
        steps = sorted(step for child in self.children for step in child.steps if step[0] < self.depth)
        # Computing this prefix saves as many tokens as it spares below, minus its own.
        saved = sum(count * (self.depth - begin) for begin, count in steps) - self.depth
        if saved > 0:
            self.until, continuing, kept = _reaching(steps, saved)
            steps = [(self.until, continuing), *kept]
        self.steps = steps


def _reaching(steps: list[tuple[float, int]], total: float) -> tuple[float, int, list[tuple[float, int]]]:
    """Return the depth d at which the sum of count * max(0, d - from) is `total`, the count there, and later steps."""
    slope = below = 0.0  # the sum is slope * d - below
    for place, (begin, count) in enumerate(steps):
        if slope and slope * begin - below >= total:
            return (total + below) / slope, round(slope), steps[place:]
        slope, below = slope + count, below + count * begin
    return (total + below) / slope, round(slope), []


def _tree(leaves: list[_Node], common: list[int]) -> _Node:
    """Return the root of the solved tree of sorted leaves. Neighbors share `common` tokens, prompt included."""
    path: list[_Node] = []  # from the root to the last prefix, not solved yet
    for leaf, depth in zip(leaves, [*common, 0], strict=True):
        leaf.solve()
        node = leaf
        while path and path[-1].depth > depth:
            path[-1].children.append(node)
            node = path.pop()
            node.solve()
        if not path or path[-1].depth < depth:
            path.append(_Node(depth))
        path[-1].children.append(node)
    return path[0].children[0]


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens two arrays share at their beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
