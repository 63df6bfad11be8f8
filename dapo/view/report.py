"""Write a run as one self-contained HTML file: it needs no server, no network and no other file."""

from __future__ import annotations

import importlib.util
import re
import secrets
import time
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dapo.errors import CheckpointError, ConfigError
from dapo.store.encoding import to_json
from dapo.system.files import write_text
from dapo.system.install import install_hint
from dapo.view.curves import EvalCurve, evaluations
from dapo.view.groups import extremes, group
from dapo.view.health import events, unjudged
from dapo.view.page.charts import Look
from dapo.view.page.panels import all_charts, load
from dapo.view.page.text import display_text, format_number, format_time
from dapo.view.runs import find_run, summary
from dapo.view.source import Run, configuration

GROUPS = 3  # best and worst groups shown, each
_RESPONSES = 16  # per group
_CHARACTERS = 2_000  # per text
_EVENTS = 200
_TIME = "%Y-%m-%d %H:%M UTC"
_LIBRARY = "nicegui-echart"
_UNESCAPED = "!$&'()*+,-./:;=?@[]_`{|}~^"  # safe in a data URL inside JSON inside HTML


def write_report(folder: Path, out: Path) -> None:
    """Write the report of the run in `folder` to the file `out`."""
    folder = Path(folder).resolve()
    if not (folder / "run.db").exists():
        raise CheckpointError(f"{folder}: there is no run database here; pass the folder of one run, such as runs/my")
    run = find_run(folder, folder.name)
    best, worst = ([group(run, serial) for serial in serials] for serials in extremes(run, GROUPS))
    # Everything that the template inserts is escaped. `text` also shortens it, and names control characters.
    shell = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    shell.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False}
    shell.filters |= {"text": _text, "number": format_number, "json": to_json}
    page = shell.get_template("report.html").render(
        nonce=secrets.token_urlsafe(16),
        name=folder.name,
        made=format_time(time.time(), _TIME),
        facts=_facts(folder),
        events=_events(run),
        unjudged=[(f"{each.responses:,}", f"{each.first_step:,} to {each.last_step:,}", each.reason)
                  for each in unjudged(run)],
        evaluations=[(_text(each.dataset, 60), _text(each.metric, 60), *_value(each, 0), *_value(each, -1))
                     for each in evaluations(run)],
        best=best,
        worst=worst,
        max_responses=_RESPONSES,
        configuration=configuration(run),
        library=library_urls(),
        script=(Path(__file__).parent / "page" / "page.js").read_text(encoding="utf-8"),
        charts=list(all_charts([load(run)], Look()).values()),
    )  # fmt: skip
    write_text(out, page)


def library_urls() -> dict[str, str]:
    """Return the files of ECharts, as shipped with NiceGUI, as data URLs by module name."""
    spec = importlib.util.find_spec("nicegui")
    if spec is None or spec.origin is None:
        raise ConfigError(f"the report's charts need NiceGUI: {install_hint('view')}")
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


def _text(value: object, most: int = _CHARACTERS) -> str:
    return display_text(str(value), most)


def _facts(folder: Path) -> dict[str, str]:
    found = summary(folder, folder.name)
    if found.problem is not None:
        raise CheckpointError(found.problem)
    return {
        "status": found.status or "–",
        "model": found.model,
        "recipe": found.recipe,
        "step": f"{found.step:,}" + (f" of {found.planned:,}" if found.planned else ""),
        "last reward": format_number(found.reward),
        "started": format_time(found.started, _TIME),
        "last change": format_time(found.changed, _TIME),
    }


def _events(run: Run) -> list[tuple[str, str, str, str]]:
    found = reversed(events(run, limit=_EVENTS, newest_first=True))
    return [(f"{each.step:,}", each.severity, _text(each.kind, 60), each.message) for each in found]


def _value(curve: EvalCurve, index: int) -> tuple[str, str]:
    """Return a step of an evaluation, and the metric's value then with its interval."""
    low, high = float(curve.low[index]), float(curve.high[index])
    interval = f" [{low:.3f}, {high:.3f}]" if low == low and high == high else ""
    return f"{curve.steps[index]:,}", f"{curve.values[index]:.3f}{interval}"
