"""Self-contained HTML files with charts: they need no server, no network and no other file."""

from __future__ import annotations

import importlib.util
import re
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dapo.errors import ConfigError
from dapo.store.encoding import to_json
from dapo.system.files import write_text
from dapo.system.install import install_hint
from dapo.view.page.text import display_text, format_number, format_time

TIME = "%Y-%m-%d %H:%M UTC"
_CHARACTERS = 2_000  # per text
_LIBRARY = "nicegui-echart"
_UNESCAPED = "!$&'()*+,-./:;=?@[]_`{|}~^"  # safe in a data URL inside JSON inside HTML
_HERE = Path(__file__).parent


def write_document(out: Path, template: Path, **values: Any) -> None:
    """Write `template`, which extends document.html, to the file `out`.

    `values` need at least `name`, `kind` (what the document shows) and `charts`, a list of ECharts options. Everything
    that a template inserts is escaped. Its filter `text` also shortens it, and names control characters.
    """
    shell = Environment(loader=FileSystemLoader([template.parent, _HERE]), autoescape=True, undefined=StrictUndefined)
    shell.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False}
    shell.filters |= {"text": short_text, "number": format_number, "json": to_json}
    page = shell.get_template(template.name).render(
        nonce=secrets.token_urlsafe(16),
        made=format_time(time.time(), TIME),
        library=library_urls(),
        script=(_HERE / "page" / "page.js").read_text(encoding="utf-8"),
        **values,
    )
    write_text(out, page)


def short_text(value: object, most: int = _CHARACTERS) -> str:
    return display_text(str(value), most)


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
