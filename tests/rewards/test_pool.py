import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from dapo.config import RewardConfig
from dapo.errors import RewardError
from dapo.rewards import process_pool as pool_module
from dapo.rewards.pool import WorkerPool
from dapo.types import Prompt
from tests import make

PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=5, data_source="mine", extra={"level": 3})
TIMEOUT = 1.0

# One reward that can fail in every way. The text of the response chooses how.
REWARD = """
import json, math, os, signal, sys, threading, time

def fork_and_return():
    os.fork()
    return 7.0  # the child returns too

def fork_and_stay():
    if os.fork() == 0:
        time.sleep(3600)
    return 7.0

def grow():
    return bytearray(2**33)  # refused at once: filling memory step by step takes longer on a busy machine

def deeper(n):
    return deeper(n + 1) + 1

def without_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

def keep_threads_running():
    for _ in range(3):
        threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(10**6)], daemon=True).start()
    return 7.0

def shout():
    for _ in range(500):
        print("x" * 100_000)
        sys.stderr.write("y" * 1000)
    return 7.0

def lie():
    for fd in range(3, 50):
        try:
            os.write(fd, b"[0, 99.0, true, null, {}]\\\\nwhat?\\\\n")
        except OSError:
            pass
    return 7.0

class Odd(Exception):
    def __str__(self):
        raise ValueError

def odd():
    raise Odd

FAULTS = {
    "exception": lambda: 1 / 0,
    "odd exception": odd,
    "nan": lambda: math.nan,
    "huge": lambda: 10**400,
    "text": lambda: "five",
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(3),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loop": lambda: any(iter(int, 1)),
    "loop without sigterm": without_sigterm,
    "sleep": lambda: time.sleep(3600),
    "bignum": lambda: 9 ** 9 ** 9 ** 9,
    "memory": grow,
    "recursion": lambda: deeper(0),
    "close all": lambda: os.closerange(0, 1000),
    "lie": lie,
    "fork": fork_and_return,
    "fork and stay": fork_and_stay,
    "shout": shout,
    "threads": keep_threads_running,
    "long text": lambda: {"score": 7.0, "why": "z" * 10_000_000},
    "many extras": lambda: {"score": 7.0, **{str(i): i for i in range(5000)}},
}

def reward(completion, answer):
    if completion in FAULTS:
        return FAULTS[completion]()
    return {"score": float(completion), "acc": float(completion) == answer, "pid": os.getpid()}

def modules(completion):
    return {"score": 1.0, "torch": "torch" in sys.modules, "modules": len(sys.modules)}

def environment(completion):
    return {"score": 1.0, "hash": hash("x"), "argv": len(sys.argv), "stdin": len(sys.stdin.read())}
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "faults.py"
    path.write_text(REWARD)
    return f"{path}:reward"


@pytest.fixture(scope="module")
def pool(spec):
    options = RewardConfig(workers=2, timeout=TIMEOUT, memory_gb=0.5)
    pool = WorkerPool([spec, spec.replace(":reward", ":modules"), spec.replace(":reward", ":environment")], options)
    yield pool
    pool.close()


def submit(pool, spec, texts, prompt=PROMPT):
    return pool.submit(spec, prompt, [make.rollout([1], text=text, index=i) for i, text in enumerate(texts)])


def test_a_rule_that_a_response_keeps_busy_for_too_long_scores_it_wrong():
    with closing(WorkerPool(["regex"], RewardConfig(workers=1, timeout=TIMEOUT, regex="(?:a+)+$"))) as pool:
        scores = submit(pool, "regex", ["aaa", "a" * 40 + "b", "aaaa"]).result(timeout=60)
    assert [(score.value, score.acc, score.error) for score in scores] == [
        (1.0, True, None),
        (0.0, False, None),
        (1.0, True, None),
    ]
    assert scores[1].extras["gave_up"] == "timeout"


def test_scores_come_back_in_order_with_accuracy_and_extras(pool, spec):
    scores = submit(pool, spec, ["4", "5", "6"]).result(timeout=20)
    assert [(score.value, score.acc) for score in scores] == [(4.0, False), (5.0, True), (6.0, False)]
    assert all(score.extras["pid"] != os.getpid() for score in scores)
    assert submit(pool, spec, []).result(timeout=1) == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("exception", "ZeroDivisionError: division by zero (faults.py:"),
        ("odd exception", "Odd: (its message cannot be shown)"),
        ("nan", "the reward returned nan"),
        ("huge", "the reward returned an enormous number"),
        ("text", "the reward returned str, not a number"),
        ("exit", "SystemExit: 3 (faults.py:"),
        ("_exit", "the judging process died (exit code 3)"),
        ("segfault", "the judging process died (signal 11, Segmentation fault): File"),
        ("killed", "the judging process died (signal 9, Killed)"),
        ("loop", "timed out after 1 s"),
        ("loop without sigterm", "timed out after 1 s"),
        ("sleep", "timed out after 1 s"),
        ("bignum", "timed out after 1 s"),
        ("memory", "MemoryError:"),
        ("recursion", "RecursionError: maximum recursion depth exceeded"),
        ("close all", "the judging process"),
        ("lie", "the judging process sent an invalid message"),
        ("fork", 7.0),
        ("fork and stay", 7.0),
        ("shout", 7.0),
        ("threads", 7.0),
        ("long text", 7.0),
        ("many extras", "the reward returned a dict with 5001 entries, more than 100"),
    ],
)
def test_a_fault_affects_only_its_own_response(pool, spec, fault, expected):
    start = time.monotonic()
    before = submit(pool, spec, ["1", "2"])
    faulty = submit(pool, spec, ["3", "4", fault, "5", "6"])
    after = submit(pool, spec, ["7", "8"])
    scores = faulty.result(timeout=30)
    judged = [score.value for i, score in enumerate(scores) if i != 2]
    others = [score.value for future in (before, after) for score in future.result(timeout=30)]
    assert (judged, others) == ([3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 7.0, 8.0])
    if isinstance(expected, float):
        assert scores[2].value == expected
    else:
        assert not scores[2].judged
        assert scores[2].value is None
        assert scores[2].error.startswith(expected)
        assert len(scores[2].error) < 600
    assert time.monotonic() - start < 10


def test_a_long_text_in_the_extras_is_truncated(pool, spec):
    [score] = submit(pool, spec, ["long text"]).result(timeout=20)
    assert score.extras["why"] == "z" * 10_000 + "…"


def test_a_child_that_a_reward_forks_sends_no_score(spec):
    with closing(WorkerPool([spec], RewardConfig(workers=1))) as pool:
        before, _, after = submit(pool, spec, ["1", "fork", "2"]).result(timeout=20)
        time.sleep(0.2)  # time for the child to return, too
        [later] = submit(pool, spec, ["3"]).result(timeout=20)
    assert before.extras["pid"] == after.extras["pid"] == later.extras["pid"]


def test_a_reward_imports_what_the_training_script_can_but_not_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('a file in the working directory')")
    library = tmp_path / "library"
    library.mkdir()
    (library / "of_mine.py").write_text("VALUE = 0.5")
    mine = tmp_path / "rewards"
    mine.mkdir()
    (mine / "helper.py").write_text("FACTOR = 3.0")
    (mine / "mine.py").write_text(
        "import random, of_mine\ndef reward(completion):\n    import helper\n    return of_mine.VALUE * helper.FACTOR"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(library))
    with closing(WorkerPool(["rewards/mine.py:reward"], RewardConfig(workers=1))) as pool:
        assert submit(pool, "rewards/mine.py:reward", ["x"]).result(timeout=20)[0].value == 1.5


def test_a_process_that_cannot_be_started_is_retried_and_then_reported(spec, monkeypatch):
    popen, calls = subprocess.Popen, []

    def short(*args, **kwargs):
        calls.append(1)
        if len(calls) <= failures:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", short)
    failures = 2
    with closing(WorkerPool([spec], RewardConfig(workers=1))) as pool:
        assert submit(pool, spec, ["1"]).result(timeout=20)[0].value == 1.0
    failures = 100
    with pytest.raises(RewardError, match=r"a worker process cannot be started .*temporarily unavailable"):
        WorkerPool([spec], RewardConfig(workers=1))


def test_workers_do_not_import_torch_and_share_one_hash_seed(pool, spec):
    scores = [
        score
        for future in [submit(pool, spec.replace(":reward", ":modules"), "abcdefgh") for _ in range(4)]
        for score in future.result(timeout=20)
    ]
    assert all(score.extras["torch"] is False and score.extras["modules"] > 100 for score in scores)
    scores = submit(pool, spec.replace(":reward", ":environment"), "abcdefgh").result(timeout=20)
    assert len({score.extras["hash"] for score in scores}) == 1
    assert all(score.extras["stdin"] == 0 for score in scores)


def test_a_slow_group_does_not_delay_another(pool, spec):
    slow = submit(pool, spec, ["sleep"])
    quick = submit(pool, spec, ["1", "2"])
    assert [score.value for score in quick.result(timeout=20)] == [1.0, 2.0]
    assert not slow.done()
    assert slow.result(timeout=20)[0].error == "timed out after 1 s"


def test_the_deadline_is_per_response_and_not_per_group(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef reward(completion):\n    time.sleep(0.15)\n    return 1.0")
    with closing(WorkerPool([f"{tmp_path}/slow.py:reward"], RewardConfig(workers=1, timeout=0.5))) as pool:
        scores = submit(pool, f"{tmp_path}/slow.py:reward", "abcde").result(timeout=20)
    assert [score.value for score in scores] == [1.0] * 5


def test_a_row_arrives_unchanged_except_for_types_unknown_to_json(tmp_path):
    (tmp_path / "row.py").write_text(
        "def reward(completion, answer, prompt, data_source, **row):\n"
        "    return {'score': 1.0, 'all': repr((completion, answer, prompt, data_source, sorted(row.items())))}"
    )
    spec = f"{tmp_path}/row.py:reward"
    messages = ({"role": "system", "content": "é\n"}, {"role": "user", "content": "\ud800\u2028?"})
    extra = {"numbers": [1, 2.5, None], "path": Path("a/b"), "nested": {"x": True}}
    prompt = Prompt("u", messages, (1,), {"a": [1]}, "mine", extra)
    with closing(WorkerPool([spec], RewardConfig(workers=1))) as pool:
        [score] = submit(pool, spec, ["text \x00 \U0001f600"], prompt).result(timeout=20)
        odd = submit(pool, spec, ["1", "2"], Prompt("u", messages, (1,), {(1, 2): 3}))
        assert all("the row cannot be sent to the judge (TypeError: keys" in s.error for s in odd.result(timeout=20))
        assert submit(pool, spec, ["1"]).result(timeout=20)[0].judged
    columns = [("nested", {"x": True}), ("numbers", [1, 2.5, None]), ("path", "a/b")]
    expected = repr(("text \x00 \U0001f600", {"a": [1]}, list(messages), "mine", columns))
    assert score.extras["all"] == expected.encode("utf-8", "replace").decode()


def test_killing_workers_from_outside_changes_no_score(tmp_path):
    (tmp_path / "steady.py").write_text(
        "import time\ndef reward(completion, answer):\n    time.sleep(0.002)\n    return float(completion) * answer"
    )
    spec = f"{tmp_path}/steady.py:reward"
    groups = [[str(8 * g + i) for i in range(8)] for g in range(150)]
    with closing(WorkerPool([spec], RewardConfig(workers=2, timeout=5.0))) as pool:
        futures = [submit(pool, spec, group) for group in groups]

        def kill_one() -> bool:
            busy = [worker for worker in list(pool.workers) if worker.has_begun]
            if busy:
                os.kill(random.choice(busy).process.pid, signal.SIGKILL)
            return bool(busy)

        for _ in range(4):
            wait_until(kill_one)
            done = sum(future.done() for future in futures)
            # A response is tried twice, so wait until the one that was hit has had its second try.
            wait_until(lambda done=done: sum(future.done() for future in futures) >= done + 4)
        scores = [[score.value for score in future.result(timeout=30)] for future in futures]
    assert scores == [[float(text) * 5 for text in group] for group in groups]


def test_a_response_is_not_blamed_for_a_crash_that_another_one_caused(tmp_path):
    (tmp_path / "bomb.py").write_text(
        "import os, threading, time\n"
        "def reward(completion):\n"
        "    if completion == 'bomb':\n"
        "        threading.Timer(0.1, os._exit, [1]).start()\n"
        "        return 0.0\n"
        "    time.sleep(0.3)\n"
        "    return 1.0\n"
    )
    spec = f"{tmp_path}/bomb.py:reward"
    with closing(WorkerPool([spec], RewardConfig(workers=1, timeout=5.0))) as pool:
        scores = submit(pool, spec, ["bomb", "innocent", "third"]).result(timeout=20)
    assert [score.value for score in scores] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "there is no file"),
        ("def reward(:", r"cannot be imported \(SyntaxError"),
        ("import sys; sys.exit(4)", r"cannot be imported \(SystemExit: 4"),
        ("def other(completion): ...", "has no function or class 'reward'; available: other"),
        ("def reward(text): ...", r"takes \(text\); expected reward\(completion, answer"),
        ("import os; os._exit(4)", r"the judging process died \(exit code 4\)"),
        ("x = bytearray(2**40)", r"cannot be imported \(MemoryError: \); reward.memory_gb is 4, perhaps too little"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ],
)
def test_an_unusable_file_is_refused_when_the_pool_is_built(tmp_path, source, sentence):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(RewardError, match=sentence) as caught:
        WorkerPool([f"{path}:reward"], RewardConfig(workers=2))
    assert "\n" not in str(caught.value)


def test_a_file_whose_import_hangs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "START_TIMEOUT", 0.3)
    (tmp_path / "endless.py").write_text("while True: pass")
    with pytest.raises(RewardError, match=r"endless\.py was still being imported after 0\.3 s"):
        WorkerPool([f"{tmp_path}/endless.py:reward"], RewardConfig(workers=2))


def test_import_time_does_not_count_toward_the_timeout(tmp_path):
    (tmp_path / "heavy.py").write_text("import time\ntime.sleep(0.6)\ndef reward(completion): return 1.0")
    spec = f"{tmp_path}/heavy.py:reward"
    with closing(WorkerPool([spec], RewardConfig(workers=2, timeout=0.3))) as pool:
        assert [score.value for score in submit(pool, spec, "abcd").result(timeout=20)] == [1.0] * 4


def test_if_workers_cannot_start_queued_responses_become_unjudged_and_the_pool_recovers(tmp_path):
    path = tmp_path / "fickle.py"
    source = "import os\ndef reward(completion):\n    return os._exit(1) if completion == 'die' else 1.0"
    path.write_text(source)
    spec = f"{path}:reward"
    with closing(WorkerPool([spec], RewardConfig(workers=1))) as pool:
        assert submit(pool, spec, ["1"]).result(timeout=20)[0].judged
        path.write_text("raise OSError('the disk is gone')")
        for _ in range(2):
            scores = submit(pool, spec, ["die", "2", "3"]).result(timeout=20)
            assert len(scores) == 3
            assert all("the disk is gone" in score.error for score in scores)
        path.write_text(source)
        assert [score.value for score in submit(pool, spec, "12").result(timeout=20)] == [1.0, 1.0]


def test_an_idle_worker_that_dies_is_replaced_when_there_is_work(spec):
    with closing(WorkerPool([spec], RewardConfig(workers=1))) as pool:
        for _ in range(2):
            [worker] = pool.workers
            os.kill(worker.process.pid, signal.SIGKILL)
            wait_until(lambda: not pool.workers)
            assert submit(pool, spec, ["1"]).result(timeout=20)[0].value == 1.0


def test_close_leaves_no_process_and_no_open_future(spec):
    pool = WorkerPool([spec], RewardConfig(workers=2, timeout=60.0))
    stuck, waiting = submit(pool, spec, ["1", "fork and stay", "loop", "2"]), submit(pool, spec, ["loop", "loop"])
    wait_until(lambda: len(pool.workers) == 2 and all(worker.has_begun for worker in pool.workers))
    groups = [worker.process.pid for worker in pool.workers]
    wait_until(lambda: sum(len(members(group)) for group in groups) >= 3)  # including the child that stays
    pool.close()
    pool.close()
    assert all(future.done() for future in (stuck, waiting))
    assert any(score.error == "the judge was closed before it judged this response" for score in stuck.result())
    wait_until(lambda: [members(group) for group in groups] == [[], []])  # a killed process ends a moment later
    assert submit(pool, spec, ["1"]).result(timeout=1)[0].error == "the judge was closed before it judged this response"


def test_workers_do_not_outlive_a_training_process_that_is_killed(tmp_path, spec):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, sys, time
        from dapo.config import RewardConfig
        from dapo.rewards.pool import WorkerPool
        from tests import make
        pool = WorkerPool([{spec!r}], RewardConfig(workers=2, timeout=60.0))
        for texts in (["fork and stay", "loop"], ["1", "loop"]):
            pool.submit({spec!r}, make.prompt(), [make.rollout([1], text=text) for text in texts])
        while sum(worker.has_begun for worker in pool.workers) < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        print(json.dumps([worker.process.pid for worker in pool.workers]), flush=True)
        time.sleep(60)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as process:
        groups = json.loads(process.stdout.readline())
        assert sum(len(members(group)) for group in groups) >= 3
        process.kill()
    wait_until(lambda: not any(members(group) for group in groups))


def members(group: int) -> list[int]:
    """Return the processes of this process group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.01)


def test_too_many_workers_are_refused(monkeypatch):
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 2)
    with pytest.raises(RewardError, match=r"reward\.workers is 1000; with 2 CPU cores, use at most 64"):
        WorkerPool(["exact"], RewardConfig(workers=1000))
