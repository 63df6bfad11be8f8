"""A run as one HTML file that needs nothing else: no server, no network, no other file."""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

from dapo.errors import CheckpointError, ConfigError
from dapo.store.encoding import to_json
from dapo.view.curves import EvalCurve, evaluations
from dapo.view.groups import GroupDetail, Response, extremes, group
from dapo.view.health import EventRow, UnjudgedReason, events, unjudged
from dapo.view.page.charts import Look
from dapo.view.page.panels import all_charts, load
from dapo.view.page.text import moment, number, shown
from dapo.view.runs import RunSummary, find_run, summary
from dapo.view.source import Run, configuration

GROUPS = 3
_RESPONSES = 16
_CHARACTERS = 2_000
_EVENTS = 200
_TIME = "%Y-%m-%d %H:%M UTC"
_ROUTINE = ("plan", "data", "configuration", "finished")  # events that are no warnings
_LIBRARY = "nicegui-echart"
_UNESCAPED = "!$&'()*+,-./:;=?@[]_`{|}~^"  # in a data address inside JSON inside HTML


def write_report(folder: Path, out: Path) -> None:
    """Of the run in `folder`, into the file `out`."""
    folder = Path(folder).resolve()
    name = folder.name
    if not (folder / "run.db").exists():
        raise CheckpointError(f"{folder}: there is no run database here; expected one run's folder, as in runs/my")
    run = find_run(folder, name)
    found = summary(folder, name)
    if found.problem is not None:
        raise CheckpointError(found.problem)
    charts = list(all_charts([load(run)], Look()).values())
    best, worst = ([group(run, serial) for serial in serials] for serials in extremes(run, GROUPS))
    body = [
        _facts(found),
        _section("Warnings", _warnings(events(run, limit=_EVENTS, newest_first=True), unjudged(run))),
        _section("Curves", f'<div class="charts">{"<div class=chart></div>" * len(charts)}</div>'),
        _section("Evaluations", _evaluations(evaluations(run))),
        _section("Groups with the highest reward", "".join(map(_group, best))),
        _section("Groups with the lowest reward", "".join(map(_group, worst))),
        _section("Configuration", _configuration(run)),
    ]
    shell = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = shell.substitute(
        nonce=secrets.token_urlsafe(16),
        title=_text(name),
        made=moment(time.time(), _TIME),
        body="\n".join(body),
        imports=_script_json({"imports": library_addresses()}),
        charts=_script_json(charts),
    )
    out.write_text(page, encoding="utf-8")


def library_addresses() -> dict[str, str]:
    """ECharts as NiceGUI carries it, each of its files as an address that holds the whole file."""
    spec = importlib.util.find_spec("nicegui")
    if spec is None or spec.origin is None:
        raise ConfigError("the report's charts come with NiceGUI: pip install nicegui")
    folder = Path(spec.origin).parent / "elements" / "echart" / "dist"
    addresses, waiting = {}, {_LIBRARY: "index.js"}
    while waiting:
        name, file = waiting.popitem()
        # A file without a place of its own cannot find its neighbors: they get bare names, which the map resolves.
        source = re.sub(r'(from|import) ?"\./([^"]+)"', r'\1"\2"', (folder / file).read_text(encoding="utf-8"))
        addresses[name] = "data:text/javascript;charset=utf-8," + quote(source, safe=_UNESCAPED)
        # Those that are imported only when asked for (3D charts) are left out.
        waiting |= {each: each for each in re.findall(r'from"([^"]+\.js)"', source) if each not in addresses}
    return addresses


def _script_json(value: object) -> str:
    """As it may stand in a script element: nothing in it can end the element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _text(value: str, most: int = _CHARACTERS) -> str:
    return escape(shown(value, most))


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content or '<p class=quiet>none</p>'}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; those of the columns in `numbers` stand at the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        marks = (" class=number" if place in numbers else "" for place in range(len(row)))
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, row, strict=True)) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table>{cells('th', headings)}{body}</table>" if body else ""


def _facts(found: RunSummary) -> str:
    facts = [
        ("status", found.status or "–"),
        ("model", _text(found.model)),
        ("recipe", _text(found.recipe)),
        ("step", f"{found.step:,} of {found.planned:,}"),
        ("last reward", number(found.reward)),
        ("started", moment(found.started, _TIME)),
        ("last change", moment(found.changed, _TIME)),
    ]
    return '<div class="facts">' + "".join(f"<div><span>{k}</span>{v}</div>" for k, v in facts) + "</div>"


def _warnings(found: Sequence[EventRow], reasons: Sequence[UnjudgedReason]) -> str:
    warned = [each for each in reversed(found) if each.kind not in _ROUTINE]
    rows = [(f"{each.step:,}", _text(each.kind, 60), _text(each.message)) for each in warned]
    unjudged_rows = [
        (f"{each.responses:,}", f"{each.first_step:,} to {each.last_step:,}", _text(each.reason)) for each in reasons
    ]
    return _table(("step", "kind", "message"), rows, numbers=(0,)) + _table(
        ("responses", "steps", "why they could not be judged"), unjudged_rows, numbers=(0, 1)
    )


def _evaluations(found: Sequence[EvalCurve]) -> str:
    """The first and the last of each figure, which is what one compares."""

    def value(curve: EvalCurve, place: int) -> str:
        low, high = float(curve.low[place]), float(curve.high[place])
        interval = f" [{low:.3f}, {high:.3f}]" if low == low and high == high else ""
        return f"{curve.values[place]:.3f}{interval}"

    rows = [
        (_text(each.dataset, 60), _text(each.figure, 60), f"{each.steps[0]:,}", value(each, 0), f"{each.steps[-1]:,}",
         value(each, -1))
        for each in found
    ]  # fmt: skip
    return _table(("set", "figure", "step", "value [95 %]", "step", "value [95 %]"), rows, numbers=(2, 3, 4, 5))


def _group(found: GroupDetail) -> str:
    messages = "".join(
        f'<p class="quiet">{_text(str(each.get("role", "")), 100)}</p><pre>{_text(str(each.get("content", "")))}</pre>'
        for each in found.messages
    )
    answer = found.answer if isinstance(found.answer, str) else to_json(found.answer)
    rest = len(found.responses) - _RESPONSES
    more = f'<p class="quiet">and {rest} more responses</p>' if rest > 0 else ""
    return (
        f"<h3>Group {found.serial}: {_text(found.verdict, 100)}, sampled in step {found.generated_step}</h3>"
        f'<div class="box">{messages}<p class="quiet">ground truth</p><pre>{_text(answer)}</pre></div>'
        f'<div class="responses">{"".join(map(_response, found.responses[:_RESPONSES]))}</div>{more}'
    )


def _response(found: Response) -> str:
    word, mark = {True: ("right", "good"), False: ("wrong", "bad"), None: ("", "quiet")}[found.acc]
    if found.error is not None:
        word = f"not judged: {_text(found.error, 300)}"
    figures = f"reward {number(found.reward)} · advantage {number(found.advantage)} · {found.length:,} tokens"
    return (
        f'<div class="box"><p><span class="{mark}">{word}</span> <span class="quiet">{figures}</span></p>'
        f"<pre>{_text(found.text)}</pre></div>"
    )


def _configuration(run: Run) -> str:
    rows = ((_text(key), f"<code>{_text(to_json(value))}</code>") for key, value in configuration(run).items())
    return _table(("option", "value"), rows)
