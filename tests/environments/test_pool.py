"""Tests of the pool: what environments that work get and give, and what each one that does not costs."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import closing

import pytest

from dapo.config import Config
from dapo.environments.pool import CLOSED, WorkerEnvironments, build_environment
from dapo.environments.protocol import ROW_PROMPT
from dapo.errors import EpisodeError
from dapo.types import Prompt, Score

TIMEOUT = 1.0

# One environment that can fail in every way. The text of the model's turn chooses how.
ENVIRONMENT = """
import asyncio, json, math, os, random, shutil, signal, sys, time
from pathlib import Path
from dapo import End, Turn

FILE = Path(__file__)

def fork():
    os.fork()
    return "both return"

def shout():
    for _ in range(200):
        print("x" * 100_000)
        sys.stderr.write("y" * 1000)
    return "done"

def lie():
    for fd in range(3, 50):
        try:
            os.write(fd, b'[0, {"score": [99.0, true, null, {}], "seconds": 0.0}]\\\\nwhat?\\\\n')
        except OSError:
            pass
    return "done"

FAULTS = {
    "raise": lambda: 1 / 0,
    "parse": lambda: json.loads("{"),
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "memory": lambda: bytearray(2**33),
    "nothing": lambda: [],
    "none": lambda: None,
    "number": lambda: 5,
    "numbers": lambda: ["a", 5],
    "megabytes": lambda: "z" * 10_000_000,
    "bad role": lambda: {"role": "oracle", "content": "a"},
    "bad content": lambda: [{"role": "user", "content": 5}],
    "no content": lambda: [{"role": "user"}],
    "more keys": lambda: [{"role": "user", "content": "a", "audio": "b"}],
    "the past": lambda: [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I give up"}],
    "turn": lambda: Turn("on", 0.5),
    "turn without reward": lambda: Turn(["on"]),
    "turn nan": lambda: Turn("on", math.nan),
    "turn text": lambda: Turn("on", "good"),
    "turn none": lambda: Turn("on", None),
    "turn empty": lambda: Turn([], 1.0),
    "turn turn": lambda: Turn(Turn("on"), 1.0),
    "nan": lambda: End(math.nan),
    "text score": lambda: End("good"),
    "bad acc": lambda: End(1.0, acc=2),
    "no score": lambda: End(acc=True, steps=3),
    "fork": fork,
    "shout": shout,
    "lie": lie,
    "surrogate": lambda: "\\\\ud800",
}

class Faulty:
    def __init__(self, row):
        self.row, self.seen = row, []

    def start(self):
        if self.row["answer"] == "bad":
            raise KeyError("no start")
        return None

    def reply(self, text):
        self.seen.append(text)
        if text.startswith("end"):
            return End(len(self.seen), acc=True, seen=" ".join(self.seen))
        if text.startswith("die once"):
            marker = FILE.with_name(text[9:])
            if not marker.exists():
                marker.touch()
                os._exit(1)
        if text == "delete":
            FILE.unlink()
        if text == "random":
            return str(random.random())
        return FAULTS.get(text, lambda: f"turn {len(self.seen)}")()

class Opening:
    def __init__(self, row):
        self.row = row
        row["prompt"].clear()  # its own copy

    def start(self):
        return [{"role": "system", "content": "Be brief."}, f"{self.row['level']} {self.row['data_source']}"]

    async def reply(self, text):
        if text == "sleep":
            await asyncio.sleep(3600)
        if text == "block":
            time.sleep(3600)
        if text == "slow":
            await asyncio.sleep(0.6)
        await asyncio.sleep(0.01)
        return End(None) if text == "end" else "next"

    async def cut_off(self):
        return End(0.25)

class Unsteady(Opening):
    count = 0
    def start(self):
        Unsteady.count += 1
        return f"number {Unsteady.count}"

class BadCutOff(Faulty):
    def cut_off(self):
        return 1.0

def start(row):
    return f"Say {row['answer']}."

def converse(messages, row):
    if messages[-1]["content"] == "edit":
        messages[0]["content"] = "Say nothing."
        messages.append({"role": "user", "content": "go on"})
        return messages
    if messages[-1]["content"] == "close":
        return Turn("Nearly.", reward=0.25)
    if messages[-1]["content"] == row["answer"]:
        return End(1.0, length=len(messages), first=messages[0]["content"])
    return "Again."

class NoReply:
    def __init__(self, row):
        pass

class NoRow:
    def reply(self, text):
        return "a"

def one(messages):
    return "a"
"""
FIRST = ({"role": "user", "content": "?"},)
PROMPT = Prompt("u", FIRST, (1,), answer="5", data_source="mine", extra={"level": 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments")
    (path / "faults.py").write_text(ENVIRONMENT)
    return path


def opened(use: str, think_tags: list[str] | None = None, **options) -> WorkerEnvironments:
    values = {"workers": 1, "timeout": TIMEOUT, "memory_gb": 1.0, **options}
    sections = {"environment": {"use": use, **values}, "reward": {"think_tags": think_tags}}
    pool = build_environment(Config.from_values({"model": {"path": "m"}, "data": {"train": "d"}, **sections}))
    assert pool is not None
    return pool


@pytest.fixture(scope="module")
def pool(folder):
    with closing(opened(f"{folder}/faults.py:Faulty", workers=2)) as pool:
        yield pool


def replies(pool, texts, episode=(0, 0), prompt=PROMPT):
    pool.start(episode, prompt)
    found = [pool.reply(episode, text, turn).result(timeout=60) for turn, text in enumerate(texts, start=1)]
    pool.end(episode)
    return found


def test_without_a_section_there_is_no_environment():
    assert build_environment(Config.from_values({"model": {"path": "m"}, "data": {"train": "d"}})) is None


def test_an_episode_keeps_its_state_and_ends_with_a_score_and_extras(pool):
    first, second, last = replies(pool, ["a", "b", "end"])
    assert (first.messages, first.ended, first.score) == (({"role": "user", "content": "turn 1"},), False, None)
    assert second.messages[0]["content"] == "turn 2"
    assert last.score == Score(3.0, True, extras={"seen": "a b end"})
    assert last.ended and not last.messages and last.seconds < TIMEOUT


def test_episodes_do_not_share_state(pool):
    for index in range(8):
        pool.start((1, index), PROMPT)
    first = [pool.reply((1, index), f"a{index}", 1) for index in range(8)]
    assert {future.result(timeout=60).messages[0]["content"] for future in first} == {"turn 1"}
    last = [pool.reply((1, index), "end", 2) for index in range(8)]
    assert [future.result(timeout=60).score.extras["seen"] for future in last] == [f"a{i} end" for i in range(8)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", r"ZeroDivisionError: division by zero \(faults.py:\d+\)"),
        ("parse", r"JSONDecodeError: .* \(faults.py:\d+\)"),
        ("exit", r"SystemExit: 3"),
        ("_exit", r"the environment's process died \(exit code 3\)"),
        ("killed", r"the environment's process died \(signal 9, Killed\)"),
        ("hang", r"timed out after 1 s"),
        ("memory", r"MemoryError: more than environment.memory_gb allows"),
        ("nothing", r"returned no messages"),
        ("none", r"returned NoneType; expected text, messages, or End"),
        ("number", r"returned int; expected text, messages, or End"),
        ("numbers", r"a list with int"),
        ("megabytes", r"returned 10,000,000 characters, more than 65,536"),
        ("bad role", r"role 'oracle'; expected user, tool, system"),
        ("bad content", r"content is int; expected text"),
        ("no content", r"without content"),
        ("more keys", r"a message with 'audio'"),
        ("the past", r"what the model said cannot be changed"),
        ("turn nan", r"the environment rewarded a turn with nan; expected a finite number"),
        ("turn text", r"the environment rewarded a turn with str, not a number"),
        ("turn none", r"the environment rewarded a turn with NoneType, not a number"),
        ("turn empty", r"returned no messages"),
        ("turn turn", r"returned Turn; expected text, messages, or End"),
        ("nan", r"the environment ended with nan; expected a finite number"),
        ("text score", r"the environment ended with str, not a number"),
        ("bad acc", r"acc = 2; expected a number from 0 to 1"),
        ("no score", r"but no score; give End\(score, ...\)"),
        ("lie", r"sent an invalid message"),
    ],
)
def test_a_failure_costs_its_own_episode_and_says_why(pool, text, reason):
    pool.start((2, 1), PROMPT)
    assert pool.reply((2, 1), "a", 1).result(timeout=60).messages
    (failed,) = replies(pool, [text], (2, 0))
    assert failed.ended and failed.score.value is None and re.search(reason, failed.score.error), failed.score.error
    assert {*re.findall(r"\w+\.py", failed.score.error)} <= {"faults.py"}
    other = pool.reply((2, 1), "end", 2).result(timeout=60)
    assert other.score == Score(2.0, True, extras={"seen": "a end"})


@pytest.mark.parametrize("text", ["fork", "shout", "surrogate"])
def test_what_does_no_harm_is_let_be(pool, text):
    first, last = replies(pool, [text, "end"], (3, 0))
    assert not first.ended and last.score.value == 2.0
    first.messages[0]["content"].encode()


def test_an_environment_that_never_ends_is_ended_by_the_number_of_turns(pool, folder):
    *_, third, last = replies(pool, ["a", "b", "c", "d"])
    assert not third.ended
    assert (last.ended, last.score, last.messages) == (True, Score(0.0, False), ())
    assert last.is_out_of_turns and not third.is_out_of_turns
    with closing(opened(f"{folder}/faults.py:BadCutOff", max_turns=1)) as other:
        (last,) = replies(other, ["a"])
        assert "cut_off returned float; expected End" in last.score.error
        (last,) = replies(other, ["end"])
        assert last.score.value == 1.0 and not last.is_out_of_turns  # its own end comes first


def test_a_turn_can_be_rewarded_also_one_that_uses_up_the_turns(pool):
    first, second, third, last = replies(pool, ["turn", "turn without reward", "a", "turn"])
    assert (first.messages, first.reward, first.score) == (({"role": "user", "content": "on"},), 0.5, None)
    assert (second.reward, third.reward) == (0.0, None)
    assert (last.ended, last.score, last.reward, last.is_out_of_turns) == (True, Score(0.0, False), 0.5, True)


def test_a_process_that_has_to_start_again_is_named_while_it_is_waited_for(folder):
    with closing(opened(f"{folder}/faults.py:Faulty")) as pool:
        assert pool.waiting_for() == "the environment"
        pool.start((0, 0), PROMPT)
        pool.start((0, 1), PROMPT)
        failed, other = pool.reply((0, 0), "hang", 1), pool.reply((0, 1), "a", 1)
        seen = set()
        while not other.done():
            seen.add(pool.waiting_for())
            time.sleep(0.001)
        assert failed.result().ended and not other.result().ended
        assert seen == {"the environment", "the environment (1 of its processes starting)"}


def test_an_episode_without_tokens_left_is_cut_off(pool):
    pool.start((4, 0), PROMPT)
    assert pool.reply((4, 0), "a", 1).result(timeout=60).messages
    assert pool.cut_off((4, 0), "unfinis", 2).result(timeout=60).score == Score(0.0, False)


def test_episodes_of_a_lost_process_are_played_again(folder):
    with closing(opened(f"{folder}/faults.py:Faulty", max_turns=9)) as pool:
        for index in range(4):
            pool.start((0, index), PROMPT)
        assert pool.reply((0, 0), "a", 1).result(timeout=60).messages
        assert pool.reply((0, 2), "random", 1).result(timeout=60).messages
        assert pool.reply((0, 3), "turn", 1).result(timeout=60).reward == 0.5
        assert pool.reply((0, 1), "hang", 1).result(timeout=60).score.error == "timed out after 1 s"
        assert pool.reply((0, 0), "b", 2).result(timeout=60).messages[0]["content"] == "turn 2"
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)  # from outside, between two calls
        assert pool.reply((0, 0), "end", 3).result(timeout=60).score.extras["seen"] == "a b end"
        assert "gave other replies" in pool.reply((0, 2), "end", 2).result(timeout=60).score.error
        assert pool.reply((0, 3), "end", 2).result(timeout=60).score.extras["seen"] == "turn end"


def test_a_call_whose_process_dies_is_tried_once_more(pool, folder):
    first, last = replies(pool, ["die once marker", "end"], (5, 0))
    assert not first.ended and last.score.extras["seen"] == "die once marker end"


def test_an_environment_that_deletes_its_file_fails_when_a_process_has_to_be_replaced(tmp_path):
    (tmp_path / "faults.py").write_text(ENVIRONMENT)
    with closing(opened(f"{tmp_path}/faults.py:Faulty")) as pool:
        first, second = replies(pool, ["delete", "a"])
        assert not first.ended and not second.ended
        (failed,) = replies(pool, ["killed"], (0, 1))
        assert "there is no file" in failed.score.error
        (failed,) = replies(pool, ["a"], (0, 2))
        assert "there is no file" in failed.score.error


def test_async_environments_reply_concurrently_and_time_out_one_by_one(folder):
    with closing(opened(f"{folder}/faults.py:Opening", max_turns=2)) as pool:
        assert pool.first_messages(PROMPT).result(timeout=60) == (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "3 mine"},
        )
        prompt = Prompt(
            "u", pool.first_messages(PROMPT).result(), (1,), "5", "mine", {"level": 3, ROW_PROMPT: [*FIRST]}
        )
        for index in range(40):
            pool.start((0, index), prompt)
        begin = time.monotonic()
        futures = [pool.reply((0, i), "sleep" if i % 2 else "a", 1) for i in range(40)]
        found = [future.result(timeout=60) for future in futures]
        assert time.monotonic() - begin < 10 * TIMEOUT  # 20 of them, one after the other, take at least 20
        assert {reply.score.error for reply in found[1::2]} == {"timed out after 1 s"}
        assert {reply.messages[0]["content"] for reply in found[::2]} == {"next"}
        end = pool.reply((0, 0), "end", 2).result(timeout=60)
        assert end.ended and end.score is None  # the run's reward judges the last turn
        assert pool.reply((0, 2), "a", 2).result(timeout=60).score.value == 0.25


def test_repeated_turns_of_an_async_environment_have_their_own_time(folder):
    with closing(opened(f"{folder}/faults.py:Opening", max_turns=9)) as pool:
        first = pool.first_messages(PROMPT).result(timeout=60)
        pool.start((0, 0), Prompt("u", first, (1,), "5", "mine", {"level": 3}))
        for turn in (1, 2, 3):
            assert pool.reply((0, 0), "slow", turn).result(timeout=60).messages
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        assert pool.reply((0, 0), "slow", 4).result(timeout=60).messages  # 2.4 s in all, and TIMEOUT is for each turn


def test_an_async_environment_that_blocks_its_process_costs_only_itself(folder):
    with closing(opened(f"{folder}/faults.py:Opening", timeout=0.5)) as pool:
        first = pool.first_messages(PROMPT).result(timeout=60)
        prompt = Prompt("u", first, (1,), "5", "mine", {"level": 3})
        for index in range(4):
            pool.start((0, index), prompt)
        futures = [pool.reply((0, i), "block" if i == 2 else "a", 1) for i in range(4)]
        found = [future.result(timeout=60) for future in futures]
        assert [reply.ended for reply in found] == [False, False, True, False]
        assert "timed out" in found[2].score.error


def test_first_messages_that_differ_between_episodes_of_a_row_end_the_episode(folder):
    with closing(opened(f"{folder}/faults.py:Unsteady")) as pool:
        first = pool.first_messages(PROMPT).result(timeout=60)
        (reply,) = replies(pool, ["a"], prompt=Prompt("u", first, (1,), "5", "mine"))
        assert "begins the same row with other messages" in reply.score.error


def test_a_row_that_cannot_begin_is_an_error(pool):
    with pytest.raises(EpisodeError, match=r"environment\.use: KeyError: 'no start' .faults\.py"):
        pool.first_messages(Prompt("u", FIRST, (1,), "bad")).result(timeout=60)


def test_functions_get_the_conversation_and_cannot_change_it(folder):
    with closing(opened(f"{folder}/faults.py:converse")) as pool:
        first = pool.first_messages(PROMPT).result(timeout=60)
        assert first[0]["content"] == "Say 5."
        prompt = Prompt("u", first, (1,), "5")
        again, last = replies(pool, ["4", "5"], prompt=prompt)
        assert again.messages[0]["content"] == "Again."
        assert last.score == Score(1.0, extras={"length": 4, "first": "Say 5."})
        nearly, last = replies(pool, ["close", "5"], prompt=prompt)
        assert nearly.reward == 0.25 and last.score.extras["length"] == 4
        (edited,) = replies(pool, ["edit"], prompt=prompt)
        assert "cannot be changed" in edited.score.error


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("faults.py:NoReply", r"the class .*NoReply has no method reply\(self, text\)"),
        ("faults.py:NoRow", r"NoRow must take \(row\)"),
        ("faults.py:one", r"one must take \(messages, row\)"),
        ("faults.py:Gues", r"has no function or class 'Gues'; available: .*Faulty"),
        ("missing.py:Guess", r"there is no file"),
        ("broken.py:Guess", r"cannot be imported \(ValueError: no\)"),
    ],
)
def test_what_is_no_environment_is_refused(folder, name, reason):
    (folder / "broken.py").write_text("raise ValueError('no')")
    with pytest.raises(EpisodeError, match=reason):
        opened(f"{folder}/{name}")


def test_closing_answers_what_is_open(folder):
    pool = opened(f"{folder}/faults.py:Faulty", timeout=60.0)
    pool.start((0, 0), PROMPT)
    futures = [pool.reply((0, 0), "hang", 1), pool.reply((0, 0), "a", 1)]
    pool.close()
    assert {future.result(timeout=5).score.error for future in futures} == {CLOSED}
    assert pool.reply((0, 0), "a", 1).result(timeout=5).score.error == CLOSED
    pool.end((0, 0))


def test_an_environment_that_never_replies_is_not_waited_for_in_every_episode(folder):
    with closing(opened(f"{folder}/faults.py:Faulty", workers=2, timeout=0.2)) as pool:
        for index in range(12):
            pool.start((0, index), PROMPT)
        replies = [pool.reply((0, index), "hang", 1) for index in range(12)]
        reasons = [score.error or "" for reply in replies if (score := reply.result(timeout=60).score)]
        assert len(reasons) == 12
        assert sum("timed out after 0.2 s" in reason for reason in reasons) <= 2 * 2 + 1
        assert "not asked, because the environment has not replied so far and 4 calls timed out" in reasons
        pool.start((1, 0), PROMPT)
        assert pool.reply((1, 0), "a", 1).result(timeout=60).messages  # later calls are tried again
