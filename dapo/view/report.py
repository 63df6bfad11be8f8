"""Write a run as one self-contained HTML file: it needs no server, no network and no other file."""

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
from dapo.system.files import write_text
from dapo.view.curves import EvalCurve, evaluations
from dapo.view.groups import GroupDetail, Response, extremes, group
from dapo.view.health import EventRow, UnjudgedReason, events, unjudged
from dapo.view.page.charts import Look
from dapo.view.page.panels import all_charts, load
from dapo.view.page.text import display_text, format_number, format_time
from dapo.view.runs import RunSummary, find_run, summary
from dapo.view.source import Run, configuration

GROUPS = 3  # best and worst groups shown, each
_RESPONSES = 16  # per group
_CHARACTERS = 2_000  # per text
_EVENTS = 200
_TIME = "%Y-%m-%d %H:%M UTC"
_ROUTINE = ("plan", "data", "configuration", "finished")  # event kinds that are not warnings
_LIBRARY = "nicegui-echart"
_UNESCAPED = "!$&'()*+,-./:;=?@[]_`{|}~^"  # safe in a data URL inside JSON inside HTML


def write_report(folder: Path, out: Path) -> None:
    """Write the report of the run in `folder` to the file `out`."""
    folder = Path(folder).resolve()
    name = folder.name
    if not (folder / "run.db").exists():
        raise CheckpointError(f"{folder}: there is no run database here; pass the folder of one run, such as runs/my")
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
        made=format_time(time.time(), _TIME),
        body="\n".join(body),
        imports=_script_json({"imports": library_urls()}),
        charts=_script_json(charts),
    )
    write_text(out, page)


def library_urls() -> dict[str, str]:
    """Return the files of ECharts, as shipped with NiceGUI, as data URLs by module name."""
    spec = importlib.util.find_spec("nicegui")
    if spec is None or spec.origin is None:
        raise ConfigError("the report's charts need NiceGUI: pip install nicegui")
    folder = Path(spec.origin).parent / "elements" / "echart" / "dist"
    urls, waiting = {}, {_LIBRARY: "index.js"}
    while waiting:
        name, file = waiting.popitem()
        # A module in a data URL cannot resolve relative imports. They become bare names, which the import map resolves.
        source = re.sub(r'(from|import) ?"\./([^"]+)"', r'\1"\2"', (folder / file).read_text(encoding="utf-8"))
        urls[name] = "data:text/javascript;charset=utf-8," + quote(source, safe=_UNESCAPED)
        # Only static imports: modules that are loaded on demand (3D charts) are left out.
        waiting |= {each: each for each in re.findall(r'from"([^"]+\.js)"', source) if each not in urls}
    return urls


def _script_json(value: object) -> str:
    """Return JSON that is safe inside a script element: nothing in it can close the element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _text(value: str, most: int = _CHARACTERS) -> str:
    return escape(display_text(value, most))


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content or '<p class=quiet>none</p>'}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return an HTML table. Cells are HTML already; the columns in `numbers` are right-aligned."""

    def cells(tag: str, row: Sequence[str]) -> str:
        classes = (" class=number" if index in numbers else "" for index in range(len(row)))
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(classes, row, strict=True)) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f"<table>{cells('th', headings)}{body}</table>" if body else ""


def _facts(found: RunSummary) -> str:
    facts = [
        ("status", found.status or "–"),
        ("model", _text(found.model)),
        ("recipe", _text(found.recipe)),
        ("step", f"{found.step:,} of {found.planned:,}"),
        ("last reward", format_number(found.reward)),
        ("started", format_time(found.started, _TIME)),
        ("last change", format_time(found.changed, _TIME)),
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
    """Return a table with the first and the last value of each metric."""

    def value(curve: EvalCurve, index: int) -> str:
        low, high = float(curve.low[index]), float(curve.high[index])
        interval = f" [{low:.3f}, {high:.3f}]" if low == low and high == high else ""
        return f"{curve.values[index]:.3f}{interval}"

    rows = [
        (_text(each.dataset, 60), _text(each.metric, 60), f"{each.steps[0]:,}", value(each, 0), f"{each.steps[-1]:,}",
         value(each, -1))
        for each in found
    ]  # fmt: skip
    return _table(("set", "metric", "step", "value [95 %]", "step", "value [95 %]"), rows, numbers=(2, 3, 4, 5))


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
    word, mark = {True: ("correct", "good"), False: ("wrong", "bad"), None: ("", "quiet")}[found.acc]
    if found.error is not None:
        word = f"not judged: {_text(found.error, 300)}"
    thought, reply = found.parts
    title = "thought" if reply is not None else "thought, without an end"
    folded = f'<details class="quiet"><summary>{title}</summary><pre>{_text(thought)}</pre></details>'
    shown_thought = folded if thought else ""
    numbers = (
        f"reward {format_number(found.reward)} · advantage {format_number(found.advantage)} · {found.length:,} tokens"
    )
    return (
        f'<div class="box"><p><span class="{mark}">{word}</span> <span class="quiet">{numbers}</span></p>'
        f"{shown_thought}{'' if reply is None else f'<pre>{_text(reply)}</pre>'}</div>"
    )


def _configuration(run: Run) -> str:
    rows = ((_text(key), f"<code>{_text(to_json(value))}</code>") for key, value in configuration(run).items())
    return _table(("option", "value"), rows)
