import json
import socket
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
    """A real one. `answer(request, number)` gives status and body, or writes to the connection itself."""
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
def test_a_server_that_fails_for_a_while_is_asked_again(status):
    with server(lambda _, number: (status, {}) if number < 4 else (200, {"scores": [1, 0]})) as (url, requests):
        assert [score.value for score in ask(url)] == [1.0, 0.0]
    assert len(requests) == 4


def test_a_server_that_fails_for_good_costs_the_group_after_five_tries():
    with server(lambda *_: (503, {})) as (url, requests):
        scores = ask(url)
    assert [score.error for score in scores] == [f"{url}: HTTP status 503 (tried 5 times)"] * 2
    assert len(requests) == 5


def test_a_request_that_is_refused_is_not_repeated():
    with server(lambda *_: (404, {})) as (url, requests):
        scores = ask(url)
    assert [score.error for score in scores] == [f"{url}: HTTP status 404"] * 2
    assert len(requests) == 1


def test_nobody_there_is_a_reason():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [score, _] = ask(f"http://127.0.0.1:{port}/")
    assert (
        score.error
        == f"http://127.0.0.1:{port}/: ConnectionRefusedError: [Errno 111] Connection refused (tried 5 times)"
    )


def test_a_connection_that_breaks_off_is_tried_again():
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
def test_an_answer_that_is_none_costs_the_group_and_says_what_was_expected(content, reason):
    with server(lambda *_: (200, content)) as (url, requests):
        scores = ask(url)
    assert all(score.error.startswith(f"{url}: {reason}; expected") for score in scores)
    assert 'expected {"scores": [...]} with 2 entries' in scores[0].error
    assert len(requests) == 1


def test_one_odd_score_costs_its_own_response():
    with server(lambda *_: (200, b'{"scores": [NaN, null, "x", {"acc": 1}, 2.5]}')) as (url, _):
        scores = ask(url, rollouts=[make.rollout([1])] * 5)
    assert [score.value for score in scores] == [None, None, None, None, 2.5]
    assert scores[1].error == "the reward does not apply here: it returned None"


@pytest.mark.parametrize("drip", [False, True])
def test_a_slow_server_is_waited_for_three_times_the_deadline_and_no_longer(drip):
    over = threading.Event()

    def answer(handler, _):
        if drip:  # always a byte in time, never an end
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while not over.wait(0.05):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        over.wait(10)

    start = time.monotonic()
    with server(answer) as (url, _):
        try:
            scores = ask(url, timeout=0.1)
        finally:
            over.set()
    assert [score.error for score in scores] == [f"{url}: no answer within 0.3 s (tried 5 times)"] * 2
    assert 5 * 0.3 <= time.monotonic() - start < 8


def test_groups_do_not_wait_for_each_other():
    over = threading.Event()

    def answer(_, number):
        if number == 1:
            over.wait(10)
        return 200, {"scores": [number, number]}

    with server(answer) as (url, requests), closing(EndpointJudge(url, 20.0)) as judge:
        slow = judge.submit(PROMPT, ROLLOUTS)
        while not requests:
            time.sleep(0.01)
        quick = judge.submit(PROMPT, ROLLOUTS)
        assert quick.result(timeout=10)[0].value == 2.0
        assert not slow.done()
        over.set()
        assert slow.result(timeout=10)[0].value == 1.0


def test_closing_ends_the_waiting_between_tries():
    with server(lambda *_: (503, {})) as (url, requests):
        judge = EndpointJudge(url, 5.0, backoff=1000.0)
        future = judge.submit(PROMPT, ROLLOUTS)
        while not requests:
            time.sleep(0.01)
        judge.close()
    assert "the judge was closed" in future.result(timeout=1)[0].error
    assert "the judge was closed" in judge.submit(PROMPT, ROLLOUTS).result(timeout=1)[0].error
