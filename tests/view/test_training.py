"""The page follows a real training in another process, without delaying it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from dapo.store.database import RunDatabase
from tests import runs
from tests.view.test_server import ROOT, running

STEPS = 40


def step_shown(page: Any, at_least: int) -> int:
    number = "+(document.querySelector('.step')?.innerText ?? '').replace('step ', '')"
    page.wait_for_function(f"{number} >= {at_least}", timeout=120_000)
    return page.evaluate(number)


@pytest.mark.timeout(400)
def test_the_page_follows_a_training_in_another_process(page: Any, tmp_path: Path):
    looked = tmp_path / "looked"  # the training waits for this file in an early step, however slow the page is
    reward = runs.REWARD.replace(
        "def reward(completion, answer, **row):",
        "import time\nfrom pathlib import Path\ncalls = 0\n"
        "def reward(completion, answer, **row):\n"
        "    global calls\n    calls += 1\n"
        f"    while calls > 200 and not Path({str(looked)!r}).exists():\n        time.sleep(0.05)",
    )
    recipe = runs.recipe(tmp_path, reward, run={"steps": STEPS, "save_every": 0, "name": "live"})
    (tmp_path / "runs").mkdir()
    with running(tmp_path / "runs") as url:
        page.goto(url)
        training = subprocess.Popen(
            [sys.executable, "-m", "dapo", "train", str(recipe), "reward.workers=1", "reward.timeout=300"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            # The run did not exist when the list of runs was opened.
            page.locator(".opens .ag-row", has_text="live").wait_for(timeout=120_000)
            page.goto(f"{url}run/live/curves")
            first = step_shown(page, 1)
            page.locator(".curves :not(.waiting) > div > canvas").first.wait_for()
            page.evaluate("window.sameDocument = true")
            canvas = "document.querySelector('.curves :not(.waiting) > div > canvas').toDataURL()"
            before = page.evaluate(canvas)
            looked.touch()
            assert step_shown(page, first + 2) > first
            page.wait_for_function(f"before => {canvas} !== before", arg=before)
            output, _ = training.communicate(timeout=200)
        finally:
            training.kill()
        assert training.returncode == 0
        assert f"{STEPS} steps," in output
        assert step_shown(page, STEPS) == STEPS
        assert page.evaluate("window.sameDocument") is True
        page.close()  # before the server stops: a page without a server logs errors
    with RunDatabase.open_readonly(tmp_path / "runs" / "live" / "run.db") as database:
        assert [step["step"] for step in database.steps()] == list(range(1, STEPS + 1))
        assert [event["kind"] for event in database.events()][-1] == "finished"
