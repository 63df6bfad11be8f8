"""Ways to damage a run's database, or to make it hostile.

Each case changes a copy of a small good run: every column of every table gets wrong values, pages are overwritten, and
the structure is attacked with endless views, page bombs, special files and configurations that explode.
"""

from __future__ import annotations

import os
import random
import re
import socket
import sqlite3
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from dapo.store.schema import SCHEMA
from tests.view.made import HOSTILE

SAVED = "step_3"  # the checkpoint of the good run
EVERY = 8  # every n-th of the 560 cases of the grammar is tried; 1 tries all and takes minutes

Change = Callable[[Path], object]  # gets the folder of the copy
# The schema without types and NOT NULL, so that any value can be stored.
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
    """Execute statements on the database, with foreign keys off so that they may leave it inconsistent."""
    database = sqlite3.connect(folder / "run.db", isolation_level=None)
    database.execute("PRAGMA foreign_keys = OFF")
    for change in changes:
        database.execute(*((change,) if isinstance(change, str) else change))
    database.close()


def write_schema(folder: Path, made: dict[str, str]) -> None:
    """Replace the declarations of tables without touching their rows."""
    database = sqlite3.connect(folder / "run.db", isolation_level=None)
    database.execute("PRAGMA writable_schema = ON")
    for name, statement in made.items():
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (statement, name))
    database.execute("PRAGMA writable_schema = RESET")
    database.close()


def value_in(table: str, column: str, value: Any, where: str = "1") -> Change:
    """Store a value of any type, or NULL: declare the tables without types for the update, then with types again."""

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


def page_bomb(name: str) -> Change:
    """Stack 8 levels of inner pages on a leaf, each with up to 200 pointers to the one below: a scan never ends."""

    def change(folder: Path) -> None:
        path = folder / "run.db"
        database = sqlite3.connect(path)
        (root_page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
        database.close()
        content = bytearray(path.read_bytes())
        leaf = bytes(content[(root_page - 1) * size : root_page * size])
        kind = leaf[0]
        assert kind in (10, 13), "each table and index of the good run must be a single leaf page"
        first = struct.unpack(">H", leaf[8:10])[0]
        # A cell of an inner page is a child page and a key. The key of an index page is an entry; any entry will do.
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
        start = (number - 1) * size + (100 if number == 1 else 0)  # keep the file header
        content[start : number * size] = rest[: number * size - start]
        path.write_bytes(content)

    return change


def noise(seed: int) -> Change:
    """Change 40 random bytes."""

    def change(folder: Path) -> None:
        path = folder / "run.db"
        content, draw = bytearray(path.read_bytes()), random.Random(seed)
        for _ in range(40):
            content[draw.randrange(100, len(content))] = draw.randrange(256)
        path.write_bytes(content)

    return change


def replaced(make: Callable[[Path], object], name: str = "run.db") -> Change:
    """Put another kind of file system object in place of a file."""

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
    os.chdir(path.parent)  # a socket's address is limited to about 100 bytes, so bind by a relative name
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def config(text: str) -> Change:
    return lambda folder: edit(folder, ("UPDATE meta SET value = ? WHERE key = 'config'", (text,)))


def option(key: str, value: str) -> Change:
    """Replace one option of the stored configuration."""

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
COMPANIONS = ("-wal", "-shm", "-journal")  # files that SQLite opens next to run.db

# Cases that at least one reader must refuse.
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
        for version in (0, 1, 2, 3, 5, -1, 2**31 - 1)
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
    **{f"FIFO {end}": replaced(os.mkfifo, f"run.db{end}") for end in COMPANIONS},
    **{f"folder {end}": replaced(Path.mkdir, f"run.db{end}") for end in COMPANIONS},
    **{f"link {end}": replaced(lambda path: path.symlink_to("nothing"), f"run.db{end}") for end in COMPANIONS},
    "no facts": lambda folder: edit(folder, "DELETE FROM meta"),
    **{f"configuration: {name}": config(text) for name, text in CONFIGS.items() if name not in (
        "merge bomb", "long number", "large number", "date", "bytes", "many keys", "keys")},
    **{f"page bomb in {name}": page_bomb(name) for name in ("groups_by_generated_step", "rollouts_figures")},
    **{f"page bomb in the table {name}": page_bomb(name) for name in ("steps", "groups", "prompts", "events")},
}  # fmt: skip

GRAMMAR: dict[str, Change] = {
    **{
        f"{table}.{column} is {kind}": value_in(table, column, value)
        for table, columns in tables().items()
        for column in columns
        for kind, value in WRONG.items()
        # A rowid can only be an integer.
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
# Cases that may be read or refused, but must not raise anything else.
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
    **{f"page bomb in the table {name}": page_bomb(name) for name in ("evaluations", "metrics", "rollouts", "meta")},
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

# Cases that are also opened in the page.
SHOWN = {
    name: MUST_FAIL[name]
    for name in (
        "steps is an endless view", "metrics is missing", "version 2", "no bytes", "cut at 0.5", "a FIFO", "FIFO -wal",
        "configuration: alias bomb", "configuration: contains itself",
    )
}  # fmt: skip
