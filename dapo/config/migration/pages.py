"""Writes the tables of docs/how-to/from-verl.md and from-trl.md: `python -m dapo.config.migration.pages`."""

from __future__ import annotations

import json
from pathlib import Path

from dapo.config.migration.table import NOT_SET, SYSTEMS, rows

MARKER = "<!-- The rest of this page is generated: python -m dapo.config.migration.pages -->\n"


def table_markdown(system: str) -> str:
    """Return the table of a system: its options, ours, and what differs."""
    head = f"| {system} | default | dapo | what differs |\n| --- | --- | --- | --- |\n"
    lines = [f"\n## Options of {SYSTEMS[system]}\n\n{head}"]
    for row in rows(system):
        names = "<br>".join(f"`{name}`" for name in row.names)
        default = "" if row.default is NOT_SET else f"`{json.dumps(row.default)}`"
        ours = f"`{row.ours}`" if row.ours else "–"
        lines.append(f"| {names} | {default} | {ours} | {row.note} |\n")
    return "".join(lines)


def write_pages(docs: Path) -> None:
    """Write the tables into the pages, below the marker."""
    for system in SYSTEMS:
        page = docs / f"from-{system}.md"
        introduction = page.read_text(encoding="utf-8").partition(MARKER)[0]
        page.write_text(introduction + MARKER + table_markdown(system), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path("docs") / "how-to")
