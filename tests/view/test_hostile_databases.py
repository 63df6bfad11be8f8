"""Databases that are damaged or made to do harm: every reader answers or gives one sentence, and good runs stay listed.

Each case copies a tiny good run and changes it: every column of every table gets wrong values, pages are overwritten,
and then come attacks on the structure: endless views, circles of pages, odd files, bombs in the configuration.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from nicegui import json as page_json
from nicegui import ui
from nicegui.testing import user_simulation

from dapo.checkpoint.card import model_card
from dapo.errors import CheckpointError, ConfigError
from dapo.store import connection
from dapo.store.database import RunDatabase
from dapo.store.encoding import to_json
from dapo.store.schema import SCHEMA
from dapo.terminal.history import json_lines, print_history
from dapo.types import EvalReport, Event
from dapo.view import report, runs
from dapo.view.curves import (
    curves,
    differences,
    evaluations,
    metric_names,
    spread,
    tokens_over_steps,
    verdicts_over_steps,
)
from dapo.view.export import curves_csv, group_json
from dapo.view.groups import GroupFilter, count_groups, data_sources, extremes, group, groups, verdicts
from dapo.view.health import event_kinds, events, unjudged
from dapo.view.page import decode
from dapo.view.page.charts import Look
from dapo.view.page.health import _event, _signs
from dapo.view.page.panels import all_charts, load
from dapo.view.page.prompts import history_chart
from dapo.view.page.runs import _row
from dapo.view.page.server import register
from dapo.view.page.tokens import figure_of, tokens_html
from dapo.view.prompts import history, prompts
from dapo.view.source import Run, configuration, progress
from dapo.view.tokens import tokens
from tests.view.made import HOSTILE, create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent
SAVED = "step_3"
FORBIDDEN = re.compile("[\x00-\x1f\x7f]")
LIMIT_S = 0.1  # instead of 10: many cases run into it
EVERY = 8  # each n-th of the 560 cases of the grammar is tried; 1 tries all, in minutes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good run."""
    folder = tmp_path_factory.mktemp("runs")
    with create(folder, name="good") as database:
        for step in (1, 2, 3):
            made = [make_group(2 * step), make_group(2 * step + 1, accs=(True, None))]
            metrics = {"reward/mean": step / 8, "tokens/generated": 12.0, "tokens/trained": 7.0, "timing_s/train": 0.5}
            database.record_step(make_report(step, made, metrics, [Event("unjudged", "one was not judged", step)]))
        scores = {"avg@2": 0.5, "avg@2/low": 0.25, "avg@2/high": 0.75, "reward/mean": float("nan"), "unjudged": 1.0}
        database.record_eval(EvalReport(3, "set", scores, ()))
        (folder / "good" / "config.yaml").write_text(database.meta()["config"], encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "library_addresses", dict)  # a megabyte, which has nothing to do with the run
    monkeypatch.setattr(connection, "READ_SECONDS", LIMIT_S)
    monkeypatch.setattr(connection, "_BUSY_SECONDS", LIMIT_S)
    monkeypatch.setattr(runs, "_SECONDS", LIMIT_S)


# The readers. Each gets the run's folder and does what a command or a view of the page does.

Reader = Callable[[Path], Any]


def of_run(ask: Callable[[Run], Any]) -> Reader:
    """As the page asks; what it would send to the browser must be JSON."""

    def reader(folder: Path) -> None:
        page_json.dumps(_plain(ask(runs.find_run(folder.parent, folder.name))))

    return reader


def of_database(ask: Callable[[RunDatabase], Any]) -> Reader:
    def reader(folder: Path) -> None:
        with RunDatabase.open_readonly(folder / "run.db") as database:
            ask(database)

    return reader


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _history(folder: Path) -> None:
    output = io.StringIO()
    print_history(Console(file=output), folder)
    assert "\x1b" not in output.getvalue(), "what steers a terminal is named instead"


def _listed(folder: Path) -> None:
    """The page of all runs: the good one is on it whatever the other one is like."""
    found = {each.name: each for each in runs.summaries(folder.parent)}
    assert found["good"].problem is None
    assert (found["good"].step, found["good"].status) == (3, "crashed")
    page_json.dumps([_row(each) for each in found.values()])
    problem = found[folder.name].problem
    if problem is not None:
        raise CheckpointError(problem)


def _tokens(run: Run) -> None:
    read = decode.decoder(run.path.parent.parent, lambda path: Path(path), run)
    for serial in (2, 3):
        found = tokens(run, serial, 0, read)
        if found is not None:
            for figure in ("log-probability", "ratio", "entropy", "advantage"):
                tokens_html(found, *figure_of(found, figure))


READERS: dict[str, Reader] = {
    "list": _listed,
    "metrics --json": lambda folder: list(json_lines(folder)),
    "metrics": _history,
    "report": lambda folder: report.write_report(folder, folder.parent.parent / "report.html"),
    "model card": lambda folder: model_card(folder, folder / "checkpoints" / SAVED, adapters=False),
    "database": of_database(
        lambda database: (
            database.meta(), list(database.steps()), list(database.events()), list(database.evals()),
            list(database.groups()), [list(database.rollouts(serial)) for serial in range(2, 8)],
        )
    ),
    "progress": of_run(progress),
    "configuration": of_run(lambda run: to_json(configuration(run))),
    "charts": of_run(lambda run: all_charts([load(run)], Look(0.5, is_log=True))),
    "names": of_run(metric_names),
    "csv": of_run(lambda run: curves_csv(curves(run, metric_names(run)))),
    "spreads": of_run(lambda run: [spread(run, column) for column in ("reward", "score", "acc", "length")]),
    "parts": of_run(lambda run: [verdicts_over_steps(run), tokens_over_steps(run)]),
    "evaluations": of_run(evaluations),
    "differences": of_run(lambda run: differences([run, runs.find_run(run.path.parent.parent, "good")])),
    "groups": of_run(groups),
    "newest groups": of_run(lambda run: groups(run, GroupFilter(min_accuracy=0.1, data_source=""), newest_first=True)),
    "search": of_run(lambda run: groups(run, GroupFilter(text="response 1"))),
    "counts": of_run(lambda run: [count_groups(run), verdicts(run), data_sources(run)]),
    "extremes": of_run(lambda run: extremes(run, 2)),
    "group": of_run(lambda run: [group_json(group(run, serial)) for serial in range(2, 8)]),
    "tokens": of_run(_tokens),
    "prompts": of_run(lambda run: [prompts(run, order) for order in ("hardest", "solved", "flickering")]),
    "history": of_run(lambda run: history_chart(history(run, "p2"))),
    "events": of_run(lambda run: [event_kinds(run), [_event(each) for each in events(run)]]),
    "health": of_run(lambda run: [unjudged(run), _signs(run)]),
}  # fmt: skip


def read_all(folder: Path) -> list[str]:
    """What the readers say against the run: nothing of those that could read it."""
    found = []
    for name, reader in READERS.items():
        try:
            reader(folder)
        except (CheckpointError, ConfigError) as error:
            sentence = str(error)
            assert not FORBIDDEN.search(sentence), (name, sentence)
            assert len(sentence) < 600 + len(str(folder)), (name, sentence)
            found.append(sentence)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return found


# The cases. Each changes the copy of the good run in a folder.

Change = Callable[[Path], object]
LOOSE = re.sub(r" NOT NULL", "", re.sub(r"\b(TEXT|REAL|INTEGER)\b(?! PRIMARY KEY)", "BLOB", SCHEMA))


def tables() -> dict[str, list[str]]:
    made = sqlite3.connect(":memory:")
    made.executescript(SCHEMA)
    names = [name for (name,) in made.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: [row[1] for row in made.execute(f"PRAGMA table_info({name})")] for name in names}


def statements(text: str) -> dict[str, str]:
    made = sqlite3.connect(":memory:")
    made.executescript(text)
    return dict(made.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def edit(folder: Path, *changes: str | tuple[str, tuple[Any, ...]]) -> None:
    """Run statements on the database with its own schema, whatever they leave there."""
    database = sqlite3.connect(folder / "run.db", isolation_level=None)
    database.execute("PRAGMA foreign_keys = OFF")
    for change in changes:
        database.execute(*((change,) if isinstance(change, str) else change))
    database.close()


def write_schema(folder: Path, made: dict[str, str]) -> None:
    """Give tables another declaration, without touching their rows."""
    database = sqlite3.connect(folder / "run.db", isolation_level=None)
    database.execute("PRAGMA writable_schema = ON")
    for name, statement in made.items():
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (statement, name))
    database.execute("PRAGMA writable_schema = RESET")
    database.close()


def value_in(table: str, column: str, value: Any, where: str = "1") -> Change:
    """Every type and NULL can be stored while the tables are declared without types; then they are declared again."""

    def change(folder: Path) -> None:
        write_schema(folder, statements(LOOSE))
        edit(folder, (f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (value,)))
        write_schema(folder, statements(SCHEMA))

    return change


WRONG: dict[str, Any] = {
    "text": "no number",
    "blob": b"\xff\x00\x80",
    "null": None,
    "largest": 2**63 - 1,
    "absurd": -1e300,
    "infinite": float("inf"),
    "hostile": HOSTILE[0] + HOSTILE[1] + HOSTILE[2],
}
JSON: dict[str, str] = {
    "cut off": '[{"a": ',
    "number": "7",
    "null": "null",
    "list": '[1, null, "x", 1e999, -5]',
    "object": '{"a": "b", "avg@2": "x", "": {}}',
    "deep": "[" * 100_000 + "]" * 100_000,
    "rather deep": "[" * 500 + "]" * 500,
    "long number": '{"avg@2": ' + "9" * 5_000 + "}",
    "large number": '{"avg@2": ' + "9" * 4_000 + "}",
    "half an interval": '{"avg@2": 1, "avg@2/low": 1, "unjudged": 1e999, "problems": "nan"}',
}
JSON_COLUMNS = {
    "prompts": ("messages", "answer", "extra"), "rollouts": ("switches", "extras"), "evaluations": ("metrics",)
}  # fmt: skip

NUMBERS = (("groups", "serial"), ("steps", "step"), ("evaluations", "id"), ("events", "id"))
ENDLESS = "WITH RECURSIVE endless (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless)"


def computed(table: str, column: str, value: str) -> Change:
    return lambda folder: edit(folder, f"UPDATE {table} SET {column} = {value}")


def endless_view(table: str, columns: list[str]) -> Change:
    shown = ", ".join(f"n AS {column}" for column in columns)
    return lambda folder: edit(
        folder, f"DROP TABLE {table}", f"CREATE VIEW {table} AS {ENDLESS} SELECT {shown} FROM endless"
    )


def redeclared(table: str, old: str, new: str) -> Change:
    return lambda folder: write_schema(folder, {table: statements(SCHEMA)[table].replace(old, new)})


def circle(name: str) -> Change:
    """Pages that lead to each other again and again: following them all would take for ever."""

    def change(folder: Path) -> None:
        path = folder / "run.db"
        database = sqlite3.connect(path)
        (root_page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        database.close()
        content = bytearray(path.read_bytes())
        leaf = bytes(content[(root_page - 1) * size : root_page * size])
        kind = leaf[0]
        assert kind in (10, 13), "the good run is so small that its tables are one page each"
        first = struct.unpack(">H", leaf[8:10])[0]
        # A cell of an inner page: a page, and a key (of an index: the entry in between, any will do).
        key = b"\x01" if kind == 13 else leaf[first : first + 2 + leaf[first]]
        levels, fan = 8, min(200, (size - 12) // (len(key) + 6))
        pages = len(content) // size
        numbers = [root_page, *range(pages + 1, pages + levels + 1)]
        content += bytes(levels * size)
        for number, child in pairwise(numbers):
            cells = struct.pack(">I", child) + key
            start = size - fan * len(cells)
            page = struct.pack(">BHHHBI", kind - 8, 0, fan, start, 0, child)
            page += b"".join(struct.pack(">H", start + place * len(cells)) for place in range(fan))
            content[(number - 1) * size : number * size] = page.ljust(start, b"\0") + cells * fan
        content[(numbers[-1] - 1) * size : numbers[-1] * size] = leaf
        content[28:32] = struct.pack(">I", len(content) // size)
        path.write_bytes(content)

    return change


def page_with(number: int, fill: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "run.db"
        content = bytearray(path.read_bytes())
        size = 4096
        rest = {"zeros": bytes(size), "ones": b"\xff" * size, "noise": random.Random(number).randbytes(size)}[fill]
        start = (number - 1) * size + (100 if number == 1 else 0)  # the header stays
        content[start : number * size] = rest[: number * size - start]
        path.write_bytes(content)

    return change


def noise(seed: int) -> Change:
    """Some bytes anywhere are others."""

    def change(folder: Path) -> None:
        path = folder / "run.db"
        content, draw = bytearray(path.read_bytes()), random.Random(seed)
        for _ in range(40):
            content[draw.randrange(100, len(content))] = draw.randrange(256)
        path.write_bytes(content)

    return change


def replaced(make: Callable[[Path], object], name: str = "run.db") -> Change:
    """Another kind of thing in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def cut(share: float) -> Change:
    return replaced_bytes(lambda content: content[: int(len(content) * share)])


def replaced_bytes(make: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / "run.db").write_bytes(make((folder / "run.db").read_bytes()))


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def config(text: str) -> Change:
    return lambda folder: edit(folder, ("UPDATE meta SET value = ? WHERE key = 'config'", (text,)))


def option(key: str, value: str) -> Change:
    """One option of the stored configuration is something else."""

    def change(folder: Path) -> None:
        text = (folder / "config.yaml").read_text(encoding="utf-8")
        *sections, last = key.split(".")
        start = 0
        for section in sections:
            start = text.index(f"{section}:", start)
        found = re.compile(rf"\b{last}:.*(\n +- .*)*").search(text, start)
        config(text[: found.start()] + f"{last}: {value}" + text[found.end() :])(folder)

    return change


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGS = {
    "alias bomb": BOMB,
    "contains itself": "&a {run: *a}",
    "list that contains itself": "run: &a [*a]",
    "merge bomb": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b, *b]}",
    "deep lists": "[" * 50_000,
    "deep mappings": "{a: " * 50_000,
    "deep blocks": "".join(f"{' ' * depth}a:\n" for depth in range(2_000)),
    "rather deep": "a: " + "[" * 300 + "]" * 300,
    "code": "!!python/object/apply:os.system ['exit 1']",
    "long number": f"run: {{steps: {'9' * 5_000}}}",
    "large number": f"run: {{steps: {'9' * 4_000}}}",
    "no date": "run: {steps: 2024-99-99}",
    "date": "run: {steps: 2024-01-01, name: 2024-01-01}",
    "bytes": "run: {name: !!binary aGVsbG8=}",
    "list": "[1, 2]",
    "word": "word",
    "nothing": "",
    "long": "run: {name: " + "x" * 2**20 + "}",
    "many keys": "\n".join(f"k{number}: 1" for number in range(5_000)),
    "control signs": "run: {name: \x1b[31m}",
    "keys of all kinds": "{1: 2, null: 3, [1]: 4}",
    "keys": "{1: 2, null: 3, 1.5: 4, run: {true: 1}}",
}
OPTIONS = {
    "run.steps": ("word", "{a: 1}", "1e400", ".nan", "-5"),
    "run.name": ("{a: [1, 2]}", "'<script>alert(1)</script>'"),
    "model.path": ("[1]", '"a\\0b"', "'" + "x" * 10_000 + "'", "null"),
    "data.max_response_length": ("[1]", "word", ".inf", "null"),
    "reward.length_shaping": ("[buffer]", "{a: 1}", "word"),
    "algorithm.clip_ratio_low": ("word", "null", ".nan"),
    "algorithm.clip_ratio_c": ("word", "-1e300"),
}
BESIDE = ("-wal", "-shm", "-journal")

MUST_FAIL: dict[str, Change] = {
    **{f"{table} is an endless view": endless_view(table, columns) for table, columns in tables().items()},
    **{f"{table} is missing": (lambda folder, table=table: edit(folder, f"DROP TABLE {table}")) for table in tables()},
    "prompt_history is endless": lambda folder: edit(
        folder, "DROP VIEW prompt_history", f"CREATE VIEW prompt_history AS {ENDLESS} SELECT n FROM endless"
    ),
    "an index is missing": lambda folder: edit(folder, "DROP INDEX groups_by_prompt"),
    "an index is another": lambda folder: edit(
        folder, "DROP INDEX groups_by_prompt", "CREATE INDEX groups_by_prompt ON groups (abs(serial))"
    ),
    "a virtual table": lambda folder: edit(
        folder, "DROP TABLE events", "CREATE VIRTUAL TABLE events USING fts5 (id, step, time, kind, message)"
    ),
    "a computed column": lambda folder: edit(
        folder, "DROP TABLE events",
        "CREATE TABLE events (id INTEGER PRIMARY KEY, step INTEGER, time REAL, kind TEXT,"
        " message TEXT AS (hex(zeroblob(100000000))))",
    ),
    "a table under another's name": redeclared("steps", "step INTEGER PRIMARY KEY", "step REAL"),
    "a table that is declared with rubbish": lambda folder: write_schema(folder, {"steps": "CREATE TABLE steps (("}),
    "a table without a declaration": lambda folder: write_schema(folder, {"steps": ""}),
    **{
        f"version {version}": (lambda folder, version=version: edit(folder, f"PRAGMA user_version = {version}"))
        for version in (0, 1, 2, 4, -1, 2**31 - 1)
    },
    "of another program": lambda folder: edit(folder, "PRAGMA application_id = 7"),
    "no bytes": replaced_bytes(lambda content: b""),
    "one byte": replaced_bytes(lambda content: content[:1]),
    "header only": replaced_bytes(lambda content: content[:100]),
    "text": replaced_bytes(lambda content: b"step,reward\n" * 1_000),
    "zeros": replaced_bytes(lambda content: bytes(len(content))),
    "random": replaced_bytes(lambda content: random.Random(0).randbytes(len(content))),
    **{f"cut at {share}": cut(share) for share in (0.1, 0.25, 0.5, 0.75)},
    "page size 1": replaced_bytes(lambda content: content[:16] + b"\0\1" + content[18:]),
    "a schema in UTF-16": replaced_bytes(lambda content: content[:59] + b"\2" + content[60:]),
    "a folder": replaced(Path.mkdir),
    "a FIFO": replaced(os.mkfifo),
    "a socket": replaced(listen),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a link to nothing": replaced(lambda path: path.symlink_to("nothing")),
    "a link to a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    **{f"FIFO {end}": replaced(os.mkfifo, f"run.db{end}") for end in BESIDE},
    **{f"folder {end}": replaced(Path.mkdir, f"run.db{end}") for end in BESIDE},
    **{f"link {end}": replaced(lambda path: path.symlink_to("nothing"), f"run.db{end}") for end in BESIDE},
    "no facts": lambda folder: edit(folder, "DELETE FROM meta"),
    **{f"configuration: {name}": config(text) for name, text in CONFIGS.items() if name not in (
        "merge bomb", "long number", "large number", "date", "bytes", "many keys", "keys")},
    **{f"circle in {name}": circle(name) for name in ("groups_by_generated_step", "rollouts_figures")},
    **{f"circle in the table {name}": circle(name) for name in ("steps", "groups", "prompts", "events")},
}  # fmt: skip

GRAMMAR: dict[str, Change] = {
    **{
        f"{table}.{column} is {kind}": value_in(table, column, value)
        for table, columns in tables().items()
        for column in columns
        for kind, value in WRONG.items()
        # A row's own number is always a whole one.
        if (table, column) not in NUMBERS or kind == "largest"
    },
    **{
        f"{table}.{column} is JSON: {kind}": value_in(table, column, text)
        for table, columns in JSON_COLUMNS.items()
        for column in columns
        for kind, text in JSON.items()
    },
    **{
        f"a later {table}.{column} is {kind}": value_in(table, column, WRONG[kind], where)
        for table, column, where in (("steps", "time", "step = 2"), ("metrics", "name", "step = 3"))
        for kind in ("text", "null", "blob", "hostile")
    },
    **{
        f"page {number} is {fill}": page_with(number, fill)
        for number in range(1, 34)
        for fill in ("zeros", "ones", "noise")
    },
    **{f"noise {seed}": noise(seed) for seed in range(20)},
}
MAY_FAIL: dict[str, Change] = {
    **dict(list(GRAMMAR.items())[::EVERY]),
    **{
        f"{table}.{column} is no UTF-8": computed(table, column, "CAST(x'ff1b5b33316dfe0a' AS TEXT)")
        for table, column in (
            ("events", "message"), ("rollouts", "text"), ("groups", "verdict"), ("evaluations", "name")
        )
    },
    **{
        f"{table}.{column} is gigantic": computed(table, column, "hex(zeroblob(9000000))")
        for table, column in (("events", "message"), ("prompts", "messages"))
    },
    **{f"circle in the table {name}": circle(name) for name in ("evaluations", "metrics", "rollouts", "meta")},
    **{
        f"configuration: {name}": config(CONFIGS[name])
        for name in ("merge bomb", "long number", "large number", "date", "bytes", "many keys", "keys")
    },
    **{f"{key}: {value[:30]}": option(key, value) for key, values in OPTIONS.items() for value in values},
    "a trigger": lambda folder: edit(
        folder, f"CREATE TRIGGER steps AFTER INSERT ON steps BEGIN {ENDLESS[:0]} DELETE FROM steps; END"
    ),
    "tables of the user's own": lambda folder: edit(folder, f"CREATE VIEW mine AS {ENDLESS} SELECT n FROM endless"),
    "statistics": lambda folder: edit(folder, "ANALYZE"),
    "the last step there can be": lambda folder: edit(
        folder,
        f"INSERT INTO steps VALUES ({2**63 - 1}, 1e300)",
        f"INSERT INTO metrics VALUES ('reward/mean', {2**63 - 1}, 9e999)",
    ),
    "steps before the first": lambda folder: edit(folder, f"INSERT INTO steps VALUES ({-2**63}, -1e300)"),
    "a WAL of rubbish": lambda folder: (folder / "run.db-wal").write_bytes(b"rubbish" * 1_000),
    "a WAL that begins well": lambda folder: (folder / "run.db-wal").write_bytes(
        struct.pack(">IIIIIIII", 0x377F0682, 3007000, 4096, 0, 1, 2, 3, 4) + random.Random(0).randbytes(9_000)
    ),
    "a WAL and an index of rubbish": lambda folder: [
        (folder / f"run.db{end}").write_bytes(random.Random(0).randbytes(32_768)) for end in ("-wal", "-shm")
    ],
    "an index that is too short": lambda folder: [
        (folder / f"run.db{end}").write_bytes(b"x" * 100) for end in ("-wal", "-shm")
    ],
    "a journal of rubbish": lambda folder: (folder / "run.db-journal").write_bytes(b"rubbish" * 1_000),
    "a lock that is a FIFO": replaced(os.mkfifo, ".lock"),
    "a tokenizer that is a FIFO": replaced(os.mkfifo, f"checkpoints/{SAVED}/tokenizer.json"),
}  # fmt: skip

SHOWN = {
    name: MUST_FAIL[name]
    for name in (
        "steps is an endless view", "metrics is missing", "version 2", "no bytes", "cut at 0.5", "a FIFO", "FIFO -wal",
        "configuration: alias bomb", "configuration: contains itself",
    )
}  # fmt: skip


@pytest.fixture
def bad(root: Path) -> Iterator[Path]:
    folder = shutil.copytree(root / "good", root / "bad")
    yield folder
    shutil.rmtree(folder)


def test_the_good_run_is_read_by_all(root: Path, bad: Path):
    assert read_all(bad) == []
    assert sorted(os.listdir(bad)) == ["config.yaml", "run.db"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", MUST_FAIL)
def test_what_is_no_run_s_database_is_refused_in_a_sentence(bad: Path, case: str):
    MUST_FAIL[case](bad)
    assert len(read_all(bad)) > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", MAY_FAIL)
def test_wrong_values_and_damage_are_read_or_refused_in_a_sentence(bad: Path, case: str):
    MAY_FAIL[case](bad)
    read_all(bad)


def test_every_page_of_a_bad_run_says_what_is_wrong_while_the_good_one_is_shown(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The real page, driven by NiceGUI's own simulated visitor."""
    shutil.copytree(root / "good", tmp_path / "good")
    names = {f"bad {place}": case for place, case in enumerate(SHOWN)}
    for name, case in names.items():
        SHOWN[case](shutil.copytree(root / "good", tmp_path / name))
    os.mkdir(os.fsencode(tmp_path) + b"/no \xff UTF-8")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/no \xff UTF-8/run.db")).touch()
    lists: list[list[dict[str, Any]]] = []
    monkeypatch.setattr("dapo.view.page.runs.fill", lambda table, rows: lists.append(rows))

    async def visit() -> None:
        async with user_simulation() as user:
            register(tmp_path, lambda path: None)
            await user.open("/")
            for _ in range(200):
                if lists:
                    break
                await asyncio.sleep(0.05)
            for view in ("curves", "groups/2", "prompts", "health"):
                await user.open(f"/run/good/{view}")
                await user.should_see("step 3", retries=100)
                await user.should_not_see("cannot be read")
                for name, case in names.items():
                    if view == "curves" or not case.startswith("configuration"):  # the other views need none
                        await user.open(f"/run/{name}/{view}")
                        await user.should_see(kind=ui.label, content="run.db", retries=100)

    asyncio.run(visit())
    rows = {row["name"]: row for row in lists[0]}
    assert rows.keys() == {"good", "no \\udcff UTF-8", *names}
    assert (rows["good"]["status"], rows["good"]["step"]) == ("crashed", 3)
    for name in rows.keys() - {"good"}:
        assert rows[name]["status"] == "unreadable"
        assert len(rows[name]["model"]) > 20
    page_json.dumps(lists[0])


def test_the_commands_give_one_sentence_and_exit_code_2(bad: Path, tmp_path: Path):
    endless_view("steps", ["step", "time"])(bad)
    for command in (["metrics"], ["metrics", "--json"], ["report", "--out", str(tmp_path / "report.html")]):
        found = subprocess.run(
            [sys.executable, "-m", "dapo", *command, str(bad)], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert (found.returncode, found.stdout) == (2, ""), command
        assert (
            found.stderr
            == f"error: {bad}/run.db: its table steps is not as dapo makes it, so this is not a run's database\n"
        )
    assert list(tmp_path.iterdir()) == []
