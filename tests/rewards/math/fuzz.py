"""python -m tests.rewards.math.fuzz [COUNT] [SEED]: judge generated and mutated answers, and check what must hold.

- Expressions from a grammar, rewritten or changed, get the verdict that plain floating-point arithmetic gives.
- Mutated answers raise nothing, and no text is right for two different gold answers.
- No judgment takes longer than a second.

The verdicts are a function of the seed: `digest` is the same in any order, in any process and with any hash seed.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dapo.rewards.math.compare import math_reward
from tests.rewards.math.cases import RIGHT, WRONG

# No two of these are equal, and none has a unit, percent sign or base that an answer might leave out.
GOLDS = r"""
34 ¦ -7 ¦ 0 ¦ 1034 ¦ 6 ¦ 12345678901234567890 ¦ 0.25 ¦ 3.5 ¦ \frac{3}{7} ¦ -\frac{1}{2} ¦ \frac{1}{1048576} ¦ 2^{64}
2\frac{1}{3} ¦ \sqrt{2} ¦ 2\sqrt{3} ¦ \frac{1 + \sqrt{5}}{2} ¦ 10\pi ¦ \frac{\pi}{4} ¦ \log_2 3 ¦ e^2 ¦ 3+4i ¦ -i
x+1 ¦ 2x+3 ¦ (x+1)^3 ¦ \frac{1}{2x} ¦ n! ¦ \binom{n}{2} ¦ \sin^2 x ¦ \cos 2x ¦ |x-5| ¦ x^2-y^2 ¦ \frac{1}{2^{98}}
y = 2x - 13 ¦ x^2+y^2=25 ¦ x \le y ¦ \pm 4 ¦ [0,1) ¦ (0,1] ¦ (-\infty, 5) ¦ [3, 4) \cup (4, 9] ¦ \emptyset ¦ \{4,5,7\}
(1,2) ¦ (2, \frac{11 \pi}{8}) ¦ 8, 9 ¦ \begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix} ¦ \text{Monday} ¦ east ¦ AB ¦ 3:30
\frac{x}{y} ¦ e^x ¦ \ln x ¦ 5:1
"""
POOL = [gold for line in GOLDS.strip().splitlines() for gold in line.split(" ¦ ")]
FRAGMENTS = r"""
\frac \sqrt { } ( ) [ ] \{ \} 1 2 34 0 x y n + - * / ^ _ = < \le , ; \cup \pm % \% ° \circ \pi \infty ! | & \\ $ . : ' 5
\begin{pmatrix} \end{pmatrix} \text{ \boxed{ \left \right and or \in i e \overline{3} ≈ ≠ million dozens cm € \sin \log_
\lfloor \binom{ {{ }} ‐ ​ ½ ² \emptyset \approx \int_0^1 \sum_{i=1} 999999999 ^{^ !! 10^{20} \exp \cot radians sevenths
"""
PIECES = FRAGMENTS.split()
SEEDS = [*POOL, *(gold for gold, _ in RIGHT + WRONG), *(text for _, text in RIGHT + WRONG)]


def mutated(rng: random.Random, text: str) -> str:
    """Return the text with one to four pieces deleted, inserted, repeated, moved, or taken from another answer."""
    for _ in range(rng.randint(1, 4)):
        i, j = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:i] + text[j:]
        elif kind <= 2:
            text = text[:i] + rng.choice(PIECES) + text[i:]
        elif kind == 3:
            text = text[:i] + text[i:j] * rng.choice((2, 2, 3, 30)) + text[j:]
        elif kind == 4:
            text = text[j:] + text[i:j] + text[:i]
        elif kind == 5:
            text = text[:i] + rng.choice(SEEDS) + text[j:]
        else:
            text = text[:i] + "".join(rng.choices(PIECES, k=rng.randint(1, 30))) + text[j:]
    return text[:1200]


Node = Any  # a number, a variable, or (operator, operands)

LEAVES = ["x", "y", "n", 1, 2, 3, 5, 7, 12, "pi", "e"]
BINARY, UNARY = ["+", "-", "*", "/"], ["sqrt", "sin", "cos", "square", "cube", "negative", "exp"]


def tree(rng: random.Random, size: int) -> Node:
    if size <= 1:
        return rng.choice(LEAVES)
    if rng.random() < 0.25:
        return (rng.choice(UNARY), tree(rng, size - 1))
    left = rng.randint(1, size - 1)
    return (rng.choice(BINARY), tree(rng, left), tree(rng, size - left))


def rewritten(rng: random.Random, node: Node) -> Node:
    """Return an equal tree in another form."""
    if not isinstance(node, tuple):
        return ("/", ("*", node, 6), 6) if rng.random() < 0.1 else node
    operator, *operands = node
    operands = [rewritten(rng, operand) for operand in operands]
    kind = rng.random()
    if operator in "+*" and kind < 0.5:
        operands.reverse()
    elif operator == "-" and kind < 0.5:
        return ("+", ("negative", operands[1]), operands[0])
    elif operator == "/" and kind < 0.3:
        return ("*", operands[0], ("/", 1, operands[1]))
    elif operator == "square" and kind < 0.5:
        return ("*", operands[0], operands[0])
    elif operator == "sin" and kind < 0.3:
        return ("negative", ("sin", ("negative", operands[0])))
    elif operator == "*" and isinstance(operands[1], tuple) and operands[1][0] in "+-":
        inner, a, b = operands[1]
        return (inner, ("*", operands[0], a), ("*", operands[0], b))
    return (operator, *operands)


def changed(rng: random.Random, node: Node) -> Node:
    """Return the tree with one leaf or operator changed."""
    if not isinstance(node, tuple):
        return rng.choice(LEAVES)
    operator, *operands = node
    if rng.random() < 0.3:
        return (rng.choice(BINARY if len(operands) == 2 else UNARY), *operands)
    i = rng.randrange(len(operands))
    operands[i] = changed(rng, operands[i])
    return (operator, *operands)


def latex(rng: random.Random, node: Node) -> str:
    """Write the tree in LaTeX, with brackets around every operand that could need them."""
    if not isinstance(node, tuple):
        return {"pi": "\\pi"}.get(str(node), str(node))
    operator, *operands = node
    texts = [latex(rng, operand) for operand in operands]
    if operator == "/":
        return f"\\{rng.choice(['frac', 'dfrac'])}{{{texts[0]}}}{{{texts[1]}}}"
    if operator == "sqrt":
        return f"\\sqrt{{{texts[0]}}}"
    if operator == "exp":
        return f"e^{{{texts[0]}}}"
    texts = [f"\\left({t}\\right)" if isinstance(o, tuple) else t for t, o in zip(texts, operands, strict=True)]
    if operator in ("sin", "cos"):
        return f"\\{operator}{texts[0] if isinstance(operands[0], tuple) else f'({texts[0]})'}"
    if operator in ("square", "cube"):
        return f"{texts[0]}^{'{2}' if operator == 'square' else 3}"
    if operator == "negative":
        return f"\\left(-{texts[0]}\\right)"
    sign = {"*": rng.choice([" \\cdot ", "*", " \\times "])}.get(operator, f" {operator} ")
    return sign.join(texts)


def value(node: Node, point: dict[str, float]) -> float:
    """Evaluate a tree, or raise ArithmeticError or ValueError where floating point would lose a term."""
    if not isinstance(node, tuple):
        return point[node] if node in point else {"pi": math.pi, "e": math.e}.get(node) or float(node)
    operator, *operands = node
    values = [value(operand, point) for operand in operands]
    if operator in BINARY:
        x, y = values
        if operator in "+-" and x and y and not 1e-6 < abs(x / y) < 1e6:
            raise ArithmeticError
        return {"+": x + y, "-": x - y, "*": x * y}[operator] if operator != "/" else x / y
    [x] = values
    if operator in ("sin", "cos") and not 1e-3 < abs(x) < 1e3:
        raise ArithmeticError
    powers = {"square": x**2, "cube": x**3, "negative": -x}
    return powers[operator] if operator in powers else getattr(math, operator)(x)


def are_equal(left: Node, right: Node) -> bool | None:
    """Compare two trees in floating-point arithmetic; return None where it is too inexact to tell."""
    verdicts = []
    for point in (
        {"x": 1.37, "y": 2.71, "n": 0.83},
        {"x": -0.77, "y": 1.19, "n": 2.3},
        {"x": 0.43, "y": -1.6, "n": -0.9},
    ):
        try:
            a, b = value(left, point), value(right, point)
        except (ArithmeticError, ValueError):
            return None
        size, difference = max(abs(a), abs(b)), abs(a - b)
        if not 1e-6 < size < 1e9 or 1e-10 < difference / size < 1e-4:
            return None
        verdicts.append(difference / size <= 1e-10)
    return all(verdicts) if len(set(verdicts)) == 1 or not all(verdicts) else None


def judgments(seed: int, count: int) -> Iterator[tuple[str, str, bool | None]]:
    """Yield gold answer, response, and whether it is right where that is known."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        if rng.random() < 0.5:
            gold = tree(rng, rng.randint(2, 8))
            answer = rewritten(rng, gold) if rng.random() < 0.5 else changed(rng, gold)
            expected = are_equal(gold, answer)
            # A gold answer that is a number must be answered by a number, and a rewritten one is not.
            if any(name in latex(random.Random(0), gold) for name in "xyn"):
                yield latex(rng, gold), f"\\boxed{{{latex(rng, answer)}}}", expected
                made += 1
            continue
        text = mutated(rng, rng.choice(SEEDS))
        form = rng.choice(["Answer: {}", "\\boxed{{{}}}", "So it is ${}$.", "Answer:\n{}"])
        for gold in rng.sample(POOL, 12):
            yield gold, form.format(text), None
            made += 1


def run(seed: int, count: int, *, backward: bool = False) -> tuple[dict[str, int], str, list[str]]:
    """Judge, and return the totals, a digest of all verdicts in their own order, and a line per violation."""
    cases = list(enumerate(judgments(seed, count)))
    verdicts: dict[int, str] = {}
    faults, accepted = [], {}
    totals: Counter[str] = Counter()
    for i, (gold, response, expected) in reversed(cases) if backward else cases:
        start = time.process_time()
        try:
            outcome = math_reward(response, gold)
        except Exception as error:
            faults.append(f"raised {error!r}: {gold!r}, {response!r}")
            continue
        seconds = time.process_time() - start
        reason = outcome.get("gave_up", "")
        verdicts[i] = f"{outcome['acc']} {reason}"
        totals.update(["judged", "right" if outcome["acc"] else "wrong", *([f"gave up: {reason}"] if reason else [])])
        if seconds > 1:
            faults.append(f"took {seconds:.1f} s: {gold!r}, {response!r}")
        if reason == "error":
            faults.append(f"failed inside: {gold!r}, {response!r}")
        if expected is not None and not reason:
            totals["with a known verdict"] += 1
            if expected != outcome["acc"]:
                faults.append(f"should be {'right' if expected else 'wrong'}: {gold!r}, {response!r}")
        if outcome["acc"] and gold in POOL and accepted.setdefault(response, gold) != gold:
            faults.append(f"right for {gold!r} and {accepted[response]!r}: {response!r}")
    digest = hashlib.sha256("\n".join(verdicts[i] for i in sorted(verdicts)).encode()).hexdigest()[:16]
    return dict(totals), digest, faults


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    totals, digest, faults = run(seed, count, backward="backward" in sys.argv)
    print(f"seed {seed}: {totals}, digest {digest}, {len(faults)} violations")
    for fault in faults[:40]:
        print(" ", fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
