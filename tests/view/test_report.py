"""The report is one file that shows a run in a browser without a server, and never runs text that a model wrote."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.types import EvalReport, Event
from dapo.view.groups import extremes, group, groups
from dapo.view.page.text import as_words
from dapo.view.runs import find_run
from dapo.view.source import Run
from tests.view.made import HOSTILE, create, make_group, make_report

ROOT = Path(__file__).parent.parent.parent


def dapo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dapo", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def drawn(page: Any) -> list[int]:
    """Count the colored pixels of each chart, those that are neither transparent nor the gray of the axes."""
    return page.evaluate("""() => [...document.querySelectorAll('.chart canvas')].map(canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < data.length; i += 4)
            count += data[i + 3] > 100 && Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(
                data[i], data[i + 1], data[i + 2]) > 60;
        return count;
    })""")


def test_a_real_run_is_shown_without_a_server(page: Any, trained: Run, tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    out = tmp_path / "it.html"
    done = dapo("report", trained.path.parent, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.stat().st_size < 2_500_000
    page.context.set_offline(True)
    page.goto(out.as_uri())
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_timeout(500)
    counts = drawn(page)
    assert len(counts) == page.locator(".chart").count() > 8
    # A curve that is zero throughout is hidden by the axis; all others must be visible.
    assert sum(count > 100 for count in counts) >= len(counts) - 1
    text = page.inner_text("body")
    assert re.search(r"finished", text) and "4 of 4" in text
    assert "algorithm.clip_ratio_high\t0.003" in text
    assert re.search(r"avg@2\s+0\s+\d\.\d{3} \[", text)
    best, worst = extremes(trained, 3)
    for serial in (*best, *worst):
        found = group(trained, serial)
        assert f"Group {serial}: {as_words(found.verdict)}, sampled in step {found.generated_step}" in text


def test_the_report_follows_the_system_s_dark_mode_and_has_a_button_to_change_it(
    browser: Any, trained: Run, tmp_path: Path
):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    dapo("report", trained.path.parent, "--out", tmp_path / "it.html")
    backgrounds = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        opened = context.new_page()
        opened.goto((tmp_path / "it.html").as_uri())
        shade = "() => getComputedStyle(document.body).backgroundColor"
        backgrounds.append(opened.evaluate(shade))
        opened.get_by_role("button", name="light or dark").click()
        backgrounds.append(opened.evaluate(shade))
        context.close()
    light, toggled, dark, back = backgrounds
    assert (light, dark) == (back, toggled) and light != dark


def test_text_that_a_model_wrote_is_shown_as_text(page: Any, tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    endings = ("</script><script>alert(1)</script>", "<!--<script>", "</style>", "${nonce} $nonce", *HOSTILE[:3])
    with create(tmp_path, name="hostile") as database:
        made = [
            make_group(
                serial, (True, False, None), texts=[text] * 3, answer=text, verdict=text[:50],
                messages=({"role": text[:50], "content": text},),
            )
            for serial, text in enumerate(endings[-6:])
        ]  # fmt: skip
        events = [Event(text, text, 1) for text in endings]
        database.record_step(make_report(1, made, {"reward/mean": 0.5, "grad_norm": float("nan")}, events))
        database.record_eval(EvalReport(1, endings[0], {"avg@2": 0.5, "avg@2/low": 0.4, "avg@2/high": 0.6}, ()))
    done = dapo("report", tmp_path / "hostile", "--out", tmp_path / "it.html")
    assert (done.returncode, done.stderr) == (0, "")
    page.goto((tmp_path / "it.html").as_uri())
    page.locator(".chart canvas").first.wait_for()
    text = page.inner_text("body")
    assert all(each in text for each in endings[:4])
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>" in text
    assert "⟨esc⟩[31mred" in text
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 4


def test_a_long_run_of_long_texts_stays_a_small_file(generated: Run, tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1, (True,) * 40, texts=["x" * 2**20] * 40)]))
    assert dapo("report", tmp_path / "made", "--out", tmp_path / "it.html").returncode == 0
    assert (tmp_path / "it.html").stat().st_size < 2_500_000
    assert "and 24 more responses" in (tmp_path / "it.html").read_text(encoding="utf-8")


def test_a_run_without_steps_has_a_report(tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    create(tmp_path).close()
    assert dapo("report", tmp_path / "made", "--out", tmp_path / "it.html").returncode == 0
    assert "none" in (tmp_path / "it.html").read_text(encoding="utf-8")


def test_a_run_that_cannot_be_read_or_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    pytest.importorskip("nicegui", reason="the charts need dapo[view]")
    create(tmp_path).close()
    for run, out, words in (
        (tmp_path / "none", tmp_path / "it.html", "there is no run database here"),
        (tmp_path / "made", tmp_path / "none" / "it.html", str(tmp_path / "none" / "it.html")),
    ):
        done = dapo("report", run, "--out", out)
        assert done.returncode == 2
        assert words in done.stderr and "Traceback" not in done.stderr


def test_the_extremes_are_those_of_the_mean_reward(generated: Run):
    rows = [row for row in groups(generated, limit=1_000).rows if row.reward is not None]
    ranked = sorted(rows, key=lambda row: (row.reward, row.serial))
    best, worst = extremes(generated, 4)
    rewards = {row.serial: row.reward for row in rows}
    np.testing.assert_allclose([rewards[s] for s in best], [row.reward for row in ranked[:-5:-1]], rtol=1e-12)
    np.testing.assert_allclose([rewards[s] for s in worst], [row.reward for row in ranked[:4]], rtol=1e-12)


def test_in_a_small_run_no_group_is_both_the_best_and_the_worst(tmp_path: Path):
    with create(tmp_path) as database:
        database.record_step(make_report(1, [make_group(1), make_group(2, (True, True))]))
    assert extremes(find_run(tmp_path, "made"), 3) == ([2, 1], [])
