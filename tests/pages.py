"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block of code."""

    language: str  # empty for output and diagrams
    text: str
    not_run: str  # why it does not run in a test, from a comment in front of it


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in these languages. `<!-- not run: REASON -->` in front of one excuses it."""
    fence = r"(?:^ *<!-- not run: ([^\n]*) -->\n)?^( *)```(\w*)\n(.*?)^ *```$"
    found = []
    for reason, indent, language, text in re.findall(fence, page.read_text(encoding="utf-8"), re.M | re.S):
        lines = (line.removeprefix(indent) for line in text.splitlines(keepends=True))
        found.append(Block(language, "".join(lines), reason))
    return [block for block in found if block.language in languages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", without_code, re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
