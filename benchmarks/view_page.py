"""python -m benchmarks.view_page: how long each view of `dapo view` takes to appear in a real browser.

It uses the database that benchmarks.view generates (--folder keeps it for both). A view has appeared when its rows or
curves are visible. The first round, in which the browser loads the site's scripts, is not counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.table import Table

from benchmarks.view import LIMIT_S, database_in
from dapo.view.groups import GroupFilter, groups
from dapo.view.runs import find_run


@contextmanager
def server(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "dapo", "view", str(root), "--no-open", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found.group().rstrip("/")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def tab(width: int = 1400, height: int = 900) -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("this benchmark needs Chromium or Chrome; install it and make sure that it is on the PATH")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()


def waits(page: Any, url: str, serial: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield named user actions. Each returns when its result is visible."""
    run = f"{url}/run/made_up"

    def opened(address: str, sign: str) -> Callable[[], Any]:
        def wait() -> None:
            page.goto(address, wait_until="commit")
            page.locator(sign).first.wait_for()

        return wait

    def changed(act: Callable[[], Any], selector: str) -> Callable[[], Any]:
        def wait() -> None:
            before = page.inner_text(selector)
            act()
            page.wait_for_function(
                "([selector, before]) => document.querySelector(selector).innerText !== before", arg=[selector, before]
            )

        return wait

    def painted(act: Callable[[], Any]) -> Callable[[], Any]:
        def wait() -> None:
            before = page.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
            act()
            page.wait_for_function("before => document.querySelector('canvas').toDataURL() !== before", arg=before)

        return wait

    rows = ".ag-center-cols-container"
    yield "runs", opened(url, ".opens .ag-row")
    yield "curves", opened(f"{run}/curves", ".curves :not(.waiting) > div > canvas")
    yield "curves: logarithmic", painted(lambda: page.get_by_text("logarithmic").click())
    yield "groups", opened(f"{run}/groups", ".groups .ag-row")
    yield "groups: next page", changed(lambda: page.get_by_role("button", name="Next").click(), rows)
    yield "groups: up to step 500", changed(lambda: page.get_by_label("to step").fill("500"), rows)
    text = page.get_by_label("text in prompt or response")
    yield "groups: a common text", changed(lambda: text.fill("THE SUM OF BOTH"), ".where")
    yield "groups: a text that no group has", changed(lambda: text.fill("a needle in the haystack"), ".where")
    yield "one group", opened(f"{run}/groups/{serial}", ".responses .q-card")
    yield "tokens", opened(f"{run}/tokens/{serial}/0", ".tokens span")
    color = page.get_by_role("button", name="entropy")
    yield "tokens: by entropy", changed(lambda: color.click(), "[id=token-legend]")
    yield "prompts", opened(f"{run}/prompts", ".prompts .ag-row")
    yield "prompts: flickering", changed(lambda: page.get_by_role("button", name="flickering").click(), rows)
    first = page.locator(".prompts .ag-row .ag-cell").first

    def history() -> None:
        first.click()
        page.locator(".history canvas").wait_for()

    yield "prompts: the history of one", history
    yield "health", opened(f"{run}/health", ".events .ag-row")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where benchmarks.view keeps its database")
    options = parser.parse_args()
    console = Console(width=120)
    slowest: dict[str, float] = {}
    with database_in(options.folder, options.steps, console) as path:
        run = find_run(path.parent.parent, "made_up")
        serial = groups(run, GroupFilter(verdicts=("kept",)), limit=1, newest_first=True).rows[0].serial
        with server(path.parent.parent) as url, tab() as page:
            for round_number in range(options.repeats + 1):
                for name, wait in waits(page, url, serial):
                    start = time.perf_counter()
                    wait()
                    if round_number:
                        slowest[name] = max(slowest.get(name, 0.0), time.perf_counter() - start)
                    page.wait_for_timeout(1_500)  # let the view finish, so that the next one is not charged for it
        table = Table(title=f"{path.stat().st_size / 1e9:.2f} GB, {options.steps * 512:,} responses")
    for heading in ("view", f"slowest of {options.repeats}, s", ""):
        table.add_column(heading, justify="left" if heading == "view" else "right")
    for name, taken in slowest.items():
        table.add_row(name, f"{taken:.2f}", "" if taken < LIMIT_S else f"over {LIMIT_S} s")
    console.print(table)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NiceGUI {importlib.metadata.version('nicegui')}"
    )


if __name__ == "__main__":
    main()
