"""Escapes and bombs, tried for real in every kind of isolation that this machine offers."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dapo.errors import RewardError
from dapo.rewards.sandbox.sandbox import MAX_OUTPUT, MAX_THREADS, SAFE, Ending, Sandbox, SandboxError


def offered() -> list[str]:
    kinds = []
    for kind in SAFE:
        with closing(Sandbox(kinds=[kind])) as sandbox:
            try:
                sandbox.open()
            except RewardError:
                continue
            kinds.append(kind)
    return kinds


OFFERED = offered()
pytestmark = pytest.mark.skipif(not OFFERED, reason="this machine offers no isolation")


@pytest.fixture(params=OFFERED, scope="module")
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with closing(Sandbox(kinds=[request.param], memory_gb=0.25)) as opened:
        yield opened


def run(sandbox: Sandbox, source: str, stdin: str = "", cpu: float = 20.0, wall: float = 60.0) -> Ending:
    return sandbox.run_script(source, stdin, 0, cpu, wall)


def attempt(sandbox: Sandbox, source: str) -> str:
    """Run code that must fail, and return the name of what it raises."""
    body = "".join(f"\n    {line}" for line in source.splitlines())
    ending = run(sandbox, f"import os\ntry:{body}\nexcept Exception as error:\n    print(type(error).__name__)")
    assert ending.reason is None, ending
    return ending.output.decode().strip()


def test_a_program_reads_its_input_and_computes_with_the_standard_library(sandbox: Sandbox) -> None:
    source = (
        "import sys, random, decimal, threading, heapq, re, json, time, sqlite3, zoneinfo, resource\n"
        "sys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "def main():\n    print(sum(map(int, sys.stdin.read().split())), decimal.Decimal(1) / 8)\n"
        "    time.sleep(0.01)\n"
        "threading.Thread(target=main).start()\n"
    )
    assert run(sandbox, source, "1 2\n3") == Ending(b"6 0.125\n", pytest.approx(0, abs=20))


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)"])
def test_a_script_may_end_itself(sandbox: Sandbox, end: str) -> None:
    ending = run(sandbox, f"print(1)\n{end}\nprint(2)")
    assert (ending.output, ending.reason) == (b"1\n", None)


def test_a_large_input_and_one_that_is_not_read_are_both_fine(sandbox: Sandbox) -> None:
    text = "x" * 3_000_000
    assert run(sandbox, "print(len(input()))", text).output == b"3000000\n"
    assert run(sandbox, "print(1)", text).output == b"1\n"


def test_what_is_registered_for_the_exit_runs_also_after_an_error(sandbox: Sandbox) -> None:
    ending = run(sandbox, "import atexit\natexit.register(lambda: print('bye'))\nraise ValueError('no')")
    assert (ending.output, ending.reason, ending.detail) == (b"bye\n", "raised", "ValueError: no")


def test_random_numbers_and_hashes_are_the_same_in_every_run(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c', 'd'}))"
    assert run(sandbox, source).output == run(sandbox, source).output


def test_it_cannot_read_the_files_of_the_user_or_of_the_system(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    for path in (secret, Path(__file__), "/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "/dev/mem"):
        assert attempt(sandbox, f"open({str(path)!r}).read()") in ("FileNotFoundError", "PermissionError"), path
    assert attempt(sandbox, f"os.listdir({str(Path.home())!r})[99999]") in (
        "FileNotFoundError",
        "PermissionError",
        "IndexError",  # a home directory that holds the Python installation: only the way to it is visible
    )
    assert attempt(sandbox, "open(os.path.expanduser('~/.ssh/id_rsa'))") in ("FileNotFoundError", "PermissionError")


def test_it_inherits_neither_environment_nor_descriptors(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_REWARD_TOKEN", "hunter2")
    with closing(Sandbox(kinds=[sandbox.kinds[0]])) as fresh:
        ending = run(fresh, "import os\nprint(dict(os.environ), [os.fstat(fd) and fd for fd in range(3)])")
        assert b"hunter2" not in ending.output
        assert ending.reason is None
        assert (
            attempt(fresh, "for fd in range(3, 200):\n    try: os.fstat(fd)\n    except OSError: continue\n    0/0")
            == ""
        )


def test_it_cannot_write_outside_its_scratch_directory(sandbox: Sandbox) -> None:
    for path in ("/evil", "/usr/lib/evil", os.path.join(os.path.dirname(os.__file__), "evil.py"), "/dev/shm/evil"):
        assert attempt(sandbox, f"open({path!r}, 'w')") in ("OSError", "FileNotFoundError", "PermissionError"), path
    for call in ("os.chmod(os.__file__, 0o777)", "os.unlink(os.__file__)", "os.truncate(os.__file__, 0)"):
        assert attempt(sandbox, call) in ("OSError", "PermissionError"), call
    assert Path(os.__file__).stat().st_size > 10_000


def test_the_scratch_directory_is_small_and_new_for_every_program(sandbox: Sandbox) -> None:
    fill = "with open('/tmp/big', 'wb') as file:\n    for _ in range(1000): file.write(bytes(2**20))"
    assert attempt(sandbox, fill) in ("OSError", "PermissionError")
    many = "for n in range(10**5): open(f'/tmp/{n}', 'w').close()"
    assert attempt(sandbox, many) in ("OSError", "PermissionError")
    assert not Path("/tmp/big").exists()
    if sandbox.kinds == ["namespaces"]:
        assert run(sandbox, "import os\nopen('a', 'w').write('hi')\nprint(os.listdir('/tmp'))").output == b"['a']\n"
        assert run(sandbox, "import os\nprint(os.listdir('/tmp'))").output == b"[]\n"


def test_it_has_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for call in (
            "socket.socket()",
            "socket.socket(socket.AF_UNIX)",
            "socket.socketpair()",
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            "socket.getaddrinfo('example.com', 80)",
        ):
            assert attempt(sandbox, f"import socket\n{call}") in ("OSError", "gaierror"), call


@pytest.mark.parametrize(
    "call",
    [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.setsid()",
        "os.setuid(0)",
        "os.chroot('/')",
        "os.nice(-5)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_it_cannot_start_signal_or_change_processes(sandbox: Sandbox, call: str) -> None:
    assert attempt(sandbox, call) in ("OSError", "PermissionError", "FileNotFoundError", "ValueError"), call
    assert run(sandbox, "print(1)").output == b"1\n"


@pytest.mark.parametrize(
    "number", [101, 310, 311, 165, 272, 425, 321, 298, 323, 250, 157, 435, 56, 57, 58, 0x40000000 + 57]
)
def test_forbidden_system_calls_do_not_exist(sandbox: Sandbox, number: int) -> None:
    """ptrace, process_vm_*, mount, unshare, io_uring, bpf, perf, userfaultfd, keyctl, prctl, clone3, fork, x32."""
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    ending = run(
        sandbox,
        f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({number}, 17, 0, 0, 0), ctypes.get_errno())",
    )
    assert ending.output == b"-1 38\n", ending


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nwhile True: os.fork()", "raised"),
        ("while True: pass", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass", "timeout"),
        ("import time\ntime.sleep(1000)", "timeout"),
        ("import sys\nwhile True: sys.stdout.write('x' * 100_000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 100_000)", "output"),
        ("x = [0]\nwhile True: x += x", "memory"),
        ("x = bytearray(2**31)", "memory"),
        ("def f(): f()\nf()", "raised"),
        ("import ctypes\nctypes.string_at(0)", "crashed"),
        ("import os\nos.abort()", "crashed"),
        (
            "import _thread, time\n_thread.stack_size(2**15)\nwhile True: _thread.start_new_thread(time.sleep, (100,))",
            "threads",
        ),
        ("import os, time\nos.closerange(0, 100)\ntime.sleep(1000)", "crashed"),
        ("import sys\nsys.exit(1)", "raised"),
        ("import os\nos._exit(97)", "raised"),
        ("raise SystemExit('no')", "raised"),
        ("this is not Python", "raised"),
        ("x = 1\0", "raised"),
    ],
)
def test_a_bomb_ends_with_a_reason_and_the_next_program_runs(sandbox: Sandbox, source: str, reason: str) -> None:
    ending = run(sandbox, source, cpu=1.0, wall=0.5 if "sleep(1000)" in source else 60.0)
    assert ending.reason == reason, ending
    assert len(ending.output) < MAX_OUTPUT + 2**20
    assert run(sandbox, "print(1)").output == b"1\n"


def test_a_program_may_use_some_threads(sandbox: Sandbox) -> None:
    source = (
        "import threading, time\nthreading.stack_size(2**20)\n"
        f"threads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range({MAX_THREADS // 2})]\n"
        "for thread in threads: thread.start()\nfor thread in threads: thread.join()"
    )
    assert run(sandbox, source).reason is None


def test_a_program_dies_with_the_process_that_started_it(sandbox: Sandbox) -> None:
    script = (
        "import sys\nfrom dapo.rewards.sandbox.sandbox import *\n"
        f"children = Children(Sandbox(kinds=[{sandbox.kinds[0]!r}]).open())\n"
        "child = children.start({'role': 'script', 'source': 'import time; time.sleep(1000)'}, 100)\n"
        "print(child.pid, flush=True)\nsys.stdin.read()"
    )
    judge = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert judge.stdout is not None
    pid = int(judge.stdout.readline())
    os.kill(pid, 0)
    judge.send_signal(signal.SIGKILL)
    judge.communicate()
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("the process is still there")


def test_a_lost_zygote_is_an_error_of_the_sandbox_and_is_replaced(sandbox: Sandbox) -> None:
    zygote = sandbox.open()
    zygote.process.kill()
    zygote.process.wait()
    with pytest.raises(SandboxError, match=r"has died|does not answer"):
        run(sandbox, "print(1)")
    assert run(sandbox, "print(1)").output == b"1\n"
    assert sandbox.open() is not zygote


def test_descriptors_are_not_leaked(sandbox: Sandbox) -> None:
    run(sandbox, "print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for source in ("print(1)", "while True: print(1)", "import os; os.abort()"):
        run(sandbox, source, cpu=1.0)
        sandbox.run_tests(source, {"setup": "", "tests": ["assert 1"], "names": None}, 1, 60)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_isolation_nothing_runs_unless_allowed() -> None:
    with pytest.raises(RewardError, match=r"set reward\.code_unsafe"):
        Sandbox(kinds=[]).open()
    with closing(Sandbox(kinds=[], is_unsafe_allowed=True)) as sandbox:
        assert run(sandbox, "print(1)").output == b"1\n"
        assert sandbox.isolation == "none"
        source = "import os, time\npid = os.fork()\nprint(pid, flush=True) if pid else time.sleep(1000)"
        ending = run(sandbox, source, wall=0.5)
        assert ending.reason == "timeout"  # its child holds the pipes, and is killed
        wait_for_end(int(ending.output))


UNSHARE = shutil.which("unshare")


@pytest.mark.skipif(list(SAFE) != OFFERED or UNSHARE is None, reason="needs both kinds, and unshare")
@pytest.mark.parametrize(("allowed", "isolation"), [("1", "landlock"), ("0", "refused")])
def test_where_namespaces_are_forbidden_as_in_containers_landlock_is_used(allowed: str, isolation: str) -> None:
    script = (
        "import sys\nfrom dapo.errors import RewardError\nfrom dapo.rewards.sandbox.sandbox import Sandbox\n"
        "sandbox = Sandbox(kinds=['namespaces', 'landlock'][:1 + int(sys.argv[1])])\n"
        "try: sandbox.open()\nexcept RewardError as error: print('refused', error)\n"
        "else: print(sandbox.isolation, sandbox.run_script('print(6 * 7)', '', 0, 10, 60).output)"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [str(UNSHARE), "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", script, allowed]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(isolation), printed
    assert "b'42\\n'" in printed or "unshare: No space left on device" in printed
