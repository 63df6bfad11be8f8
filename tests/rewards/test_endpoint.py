import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dapo.errors import RewardError
from dapo.rewards.endpoint import EndpointJudge
from dapo.types import Prompt
from tests import make

PROMPT = Prompt("u", ({"role": "user", "content": "?"},), (1,), answer=5, data_source="mine", extra={"level": 3})
ROLLOUTS = [make.rollout([1], text="5"), make.rollout([1], text="6")]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def server(answer):
    """Run a real HTTP server. `answer(handler, number)` returns status and body, or writes to the connection itself."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            reply = answer(self, len(requests))
            if reply is not None:
                status, content = reply
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/judge", requests
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def ask(url, timeout=5.0, rollouts=ROLLOUTS):
    with closing(EndpointJudge(url, timeout, backoff=0.01)) as judge:
        return judge.submit(PROMPT, rollouts).result(timeout=30)


def test_a_group_is_one_request_and_its_scores_come_back_in_order():
    with server(lambda *_: (200, {"scores": [1, {"score": 0.5, "acc": False, "why": "short"}]})) as (url, requests):
        first, second = ask(url)
    assert (first.value, first.acc) == (1.0, None)
    assert (second.value, second.acc, second.extras) == (0.5, False, {"why": "short"})
    sample = {
        "prompt": [{"role": "user", "content": "?"}],
        "completion": "5",
        "answer": 5,
        "data_source": "mine",
        "extra": {"level": 3},
    }
    assert requests == [{"samples": [sample, {**sample, "completion": "6"}]}]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_temporary_server_error_is_retried(status):
    with server(lambda _, number: (status, {}) if number < 4 else (200, {"scores": [1, 0]})) as (url, requests):
        assert [score.value for score in ask(url)] == [1.0, 0.0]
    assert len(requests) == 4


def test_a_permanent_server_error_makes_the_group_unjudged_after_five_tries():
    with server(lambda *_: (503, {})) as (url, requests):
        scores = ask(url)
    assert [score.error for score in scores] == [f"{url}: HTTP status 503 (tried 5 times)"] * 2
    assert len(requests) == 5


def test_a_client_error_is_not_retried():
    with server(lambda *_: (404, {})) as (url, requests):
        scores = ask(url)
    assert [score.error for score in scores] == [f"{url}: HTTP status 404"] * 2
    assert len(requests) == 1


def test_a_refused_connection_is_retried_and_then_reported():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [score, _] = ask(f"http://127.0.0.1:{port}/")
    assert score.error.startswith(f"http://127.0.0.1:{port}/: ConnectionRefusedError: ")
    assert score.error.endswith("(tried 5 times)")


def test_a_broken_connection_is_retried():
    def answer(handler, number):
        if number == 1:
            handler.connection.shutdown(socket.SHUT_RDWR)
            return None
        return 200, {"scores": [1, 0]}

    with server(answer) as (url, requests):
        assert [score.value for score in ask(url)] == [1.0, 0.0]
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "the answer is not JSON"),
        (b"\xff\xfe", "the answer is not JSON"),
        (b"[" * 100_000, "the answer is not JSON"),
        ([1, 0], "the answer has no list 'scores'"),
        ({"scores": 1}, "the answer has no list 'scores'"),
        ({"scores": [1]}, "the answer has 1 scores"),
    ],
)
def test_an_invalid_answer_makes_the_group_unjudged_and_the_reason_says_what_was_expected(content, reason):
    with server(lambda *_: (200, content)) as (url, requests):
        scores = ask(url)
    assert all(score.error.startswith(f"{url}: {reason}; expected") for score in scores)
    assert 'expected {"scores": [...]} with 2 entries' in scores[0].error
    assert len(requests) == 1


def test_an_invalid_score_makes_only_its_own_response_unjudged():
    with server(lambda *_: (200, b'{"scores": [NaN, null, "x", {"acc": 1}, 2.5]}')) as (url, _):
        scores = ask(url, rollouts=[make.rollout([1])] * 5)
    assert [score.value for score in scores] == [None, None, None, None, 2.5]
    assert scores[1].error == "the reward does not apply here: it returned None"


@contextmanager
def raw_server(serve):
    """Pass every connection to `serve(connection, stop)`, which returns when the event is set. Yield host:port."""
    stop, threads = threading.Event(), []

    def handle(connection):
        with connection, suppress(OSError):
            serve(connection, stop)

    def accept():
        while not stop.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def endless(start, more, pause=0.002):
    """Send `start` and then `more` forever: bytes always arrive in time, but the answer never completes."""

    def serve(connection, stop):
        connection.recv(2**16)
        connection.sendall(start)
        while not stop.wait(pause):
            connection.sendall(more)

    return serve


def silent(connection, stop):
    stop.wait()


def flood(connection, stop):
    connection.settimeout(0.05)  # the client may have stopped reading
    while not stop.is_set():
        with suppress(TimeoutError):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "silence": silent,
    "status line": endless(b"HTTP/1.1 200 ", b"O"),
    "header": endless(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "headers": endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "chunk size": endless(CHUNKED + b"5;x=", b"a"),
    "chunks": endless(CHUNKED, b"1\r\n \r\n"),
    "trailer": endless(CHUNKED + b"0\r\nX-Slow: ", b"a"),
    "100 Continue": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue at full speed": flood,
    "body": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "body without a length": endless(b"HTTP/1.0 200 OK\r\n\r\n", b" "),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_the_deadline_ends_an_answer_that_never_completes(what):
    with raw_server(ENDLESS[what]) as address:
        scores = ask(f"http://{address}/", timeout=0.02)
    assert [score.error for score in scores] == [f"http://{address}/: no answer within 0.06 s (tried 5 times)"] * 2


def test_the_deadline_ends_a_tls_handshake_that_never_completes():
    with raw_server(silent) as address:
        scores = ask(f"https://{address}/", timeout=0.02)
    assert scores[0].error == f"https://{address}/: no answer within 0.06 s (tried 5 times)"


def test_the_deadline_ends_a_request_that_the_server_does_not_read():
    long = make.rollout([1], text="x" * 2**24)  # more than the socket buffers hold
    with raw_server(silent) as address:
        scores = ask(f"http://{address}/", timeout=0.02, rollouts=[long])
    assert scores[0].error == f"http://{address}/: no answer within 0.06 s (tried 5 times)"


def test_an_answer_may_take_three_times_the_timeout():
    def answer(*_):
        time.sleep(0.6)
        return 200, {"scores": [1, 0]}

    with server(answer) as (url, _):
        assert [score.value for score in ask(url, timeout=0.5)] == [1.0, 0.0]


def once(answer):
    def serve(connection, stop):
        connection.recv(2**16)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)  # half-closed: reading still works
        stop.wait()

    return serve


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "RemoteProtocolError: Server disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "RemoteProtocolError: peer closed connection"),
        (b"HTTP/1.1 200 OK\r\nX-Huge: " + b"a" * 2**20 + b"\r\n\r\n", "RemoteProtocolError"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "RemoteProtocolError: illegal status line"),
    ],
)
def test_a_truncated_or_invalid_http_answer_is_retried_and_then_reported(answer, reason):
    with raw_server(once(answer)) as address:
        scores = ask(f"http://{address}/")
    assert scores[0].error.startswith(f"http://{address}/: {reason}")
    assert scores[0].error.endswith("(tried 5 times)")


def test_a_redirect_is_not_followed():
    def answer(handler, _):
        handler.send_response(307)
        handler.send_header("Location", handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with server(answer) as (url, requests):
        scores = ask(url)
    assert scores[0].error == f"{url}: HTTP status 307, a redirect; set reward.use to its target"
    assert len(requests) == 1


def test_closing_cancels_requests_in_flight_and_queued():
    with raw_server(silent) as address:
        judge = EndpointJudge(f"http://{address}/", timeout=1000.0)
        futures = [judge.submit(PROMPT, ROLLOUTS) for _ in range(20)]
        judge.close()
        judge.close()
        assert not judge.thread.is_alive()
        assert all("the judge was closed" in future.result(timeout=0)[0].error for future in futures)


# A process that exits while an endpoint or a name server does not answer.
LEAVE = """
import socket, sys, time
from dapo.rewards.endpoint import EndpointJudge
from dapo.types import Prompt
from tests import make
asked = []
if sys.argv[2] == "lookup":
    socket.getaddrinfo = lambda *args, **hints: asked.append(args) or time.sleep(1000)
judge = EndpointJudge(sys.argv[1], timeout=1000.0)
judge.submit(Prompt("u", (), (1,), 5), [make.rollout([1], text="5")])
while sys.argv[2] == "lookup" and not asked:
    time.sleep(0.01)
if sys.argv[2] == "silent":
    sys.stdin.readline()  # until the request has arrived
"""


@pytest.mark.parametrize("what", ["silent", "lookup"])
def test_a_process_can_exit_while_an_endpoint_hangs(what):
    arrived = threading.Event()

    def serve(connection, stop):
        connection.recv(2**16)
        arrived.set()
        stop.wait()

    with raw_server(serve) as address:
        url = f"http://{address}/" if what == "silent" else "http://judge.invalid/"
        process = subprocess.Popen(
            [sys.executable, "-c", LEAVE, url, what],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "no_proxy": "*"},
        )  # fmt: skip
        if what == "silent":
            assert arrived.wait(60)
        _, stderr = process.communicate("\n", timeout=60)
    assert (process.returncode, stderr) == (0, "")


TOKEN = "tok-3f9c1b7e5a"


def test_the_token_is_sent_and_masked_where_the_endpoint_echoes_it(monkeypatch):
    monkeypatch.setenv("DAPO_REWARD_TOKEN", f" {TOKEN}\n")  # whitespace around it, as from a file
    seen = []

    def answer(handler, _):
        seen.append(handler.headers["Authorization"])
        return 200, {"scores": [{"score": 1, "echo": seen[0]}, {seen[0]: 1}]}

    with server(answer) as (url, _):
        first, second = ask(url)
    assert seen == [f"Bearer {TOKEN}"]
    assert first.extras == {"echo": "Bearer [DAPO_REWARD_TOKEN]"}
    assert second.error == "the reward returned a dict without 'score' (keys: Bearer [DAPO_REWARD_TOKEN])"
    with raw_server(once(f"HTTP/1.1 {TOKEN}\r\n\r\n".encode())) as address:
        [score, _] = ask(f"http://{address}/")
    assert TOKEN not in score.error
    assert "[DAPO_REWARD_TOKEN]" in score.error


def test_without_a_token_no_authorization_header_is_sent(monkeypatch):
    monkeypatch.setenv("DAPO_REWARD_TOKEN", "")
    seen = []

    def answer(handler, _):
        seen.append(handler.headers["Authorization"])
        return 200, {"scores": [1, 0]}

    with server(answer) as (url, _):
        ask(url)
    assert seen == [None]


@pytest.mark.parametrize("token", ["two\nlines-of-it", "schlüssel", "with space"])
def test_a_token_with_invalid_characters_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("DAPO_REWARD_TOKEN", token)
    with pytest.raises(
        RewardError, match="DAPO_REWARD_TOKEN has characters that an HTTP header cannot carry"
    ) as caught:
        EndpointJudge("http://127.0.0.1:1/", 1.0)
    assert token not in str(caught.value)


def test_an_unusable_proxy_is_refused(monkeypatch):
    monkeypatch.setenv("http_proxy", "gopher://me:hidden@proxy:70")
    with pytest.raises(RewardError, match="the proxy set in the environment cannot be used") as caught:
        EndpointJudge("http://judge/", 1.0)
    assert "hidden" not in str(caught.value)


def test_groups_do_not_wait_for_each_other():
    stop = threading.Event()

    def answer(_, number):
        if number == 1:
            stop.wait(10)
        return 200, {"scores": [number, number]}

    with server(answer) as (url, requests), closing(EndpointJudge(url, 20.0)) as judge:
        slow = judge.submit(PROMPT, ROLLOUTS)
        while not requests:
            time.sleep(0.01)
        quick = judge.submit(PROMPT, ROLLOUTS)
        assert quick.result(timeout=10)[0].value == 2.0
        assert not slow.done()
        stop.set()
        assert slow.result(timeout=10)[0].value == 1.0


def test_closing_interrupts_the_delay_between_retries():
    with server(lambda *_: (503, {})) as (url, requests):
        judge = EndpointJudge(url, 5.0, backoff=1000.0)
        future = judge.submit(PROMPT, ROLLOUTS)
        while not requests:
            time.sleep(0.01)
        judge.close()
    assert "the judge was closed" in future.result(timeout=1)[0].error
    assert "the judge was closed" in judge.submit(PROMPT, ROLLOUTS).result(timeout=1)[0].error
