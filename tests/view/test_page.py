"""The page in a real browser, with the database of a real training and with hostile ones."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("nicegui", reason="the page needs dapo[view]")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dapo.store.database import RunDatabase
from dapo.store.encoding import visible
from dapo.types import Event
from dapo.view.curves import curves, spread
from dapo.view.groups import GroupFilter, group, groups
from dapo.view.page.charts import Line, Look, Zone, line_chart, points, smoothed, stacked_chart
from dapo.view.page.panels import overlong_zone
from dapo.view.page.runs import sparkline
from dapo.view.page.text import display_text
from dapo.view.runs import find_run
from dapo.view.source import Run
from dapo.view.tokens import tokens
from tests.view.made import HOSTILE, create, make_group, make_report
from tests.view.test_server import running

# The views, each with an element that shows that it is loaded.
SIGNS = {
    "curves": ".curves :not(.waiting) > div > canvas",
    "groups": ".groups .ag-row",
    "groups/0": ".responses .q-card",
    "tokens": ".tokens span",
    "prompts": ".prompts .ag-row",
    "health": ".events .ag-row",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, trained: Run) -> Path:
    """A folder with a real run and two copies (one without checkpoints), a hostile, a growing and two broken runs."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("real", "copy"):
        shutil.copytree(trained.path.parent, folder / name)
    shutil.copytree(trained.path.parent, folder / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    with create(folder, name="hostile") as database:
        made = [
            make_group(
                serial,
                accs=(True, False, None),
                texts=[text] * 3,
                messages=({"role": text[:50], "content": text},),
                answer=text,
                data_source=text[:100],
            )
            for serial, text in enumerate(HOSTILE)
        ]
        database.record_step(make_report(1, made, events=[Event(HOSTILE[0], HOSTILE[0], 1)]))
    vocabulary = {f"{HOSTILE[0]}{number}": number for number in range(100)}
    (folder / "hostile" / "checkpoints" / "step_1").mkdir(parents=True)
    Tokenizer(WordLevel(vocabulary, unk_token=f"{HOSTILE[0]}0")).save(
        str(folder / "hostile" / "checkpoints" / "step_1" / "tokenizer.json")
    )
    with create(folder, name="growing") as database:
        database.record_step(make_report(1, [make_group(1)]))
    for name, content in (("empty", b""), ("broken", b"this is no database" * 1_000)):
        (folder / name).mkdir()
        (folder / name / "run.db").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with running(root) as address:
        yield address.rstrip("/")


def rows(page: Any, table: str) -> list[str]:
    return page.locator(f"{table} .ag-center-cols-container .ag-row").all_inner_texts()


def test_the_runs_are_listed_and_a_click_opens_one(page: Any, url: str):
    page.goto(url)
    page.get_by_text("unreadable").first.wait_for()
    text = " ".join(rows(page, ".opens"))
    assert "is empty" in text
    assert "cannot be read" in text
    assert "finished" in text
    assert page.locator(".opens svg polyline").count() >= 2
    page.locator("[col-id=name]", has_text="real").click()
    page.wait_for_url("**/run/real/curves")
    page.locator(".curves :not(.waiting) > div > canvas").first.wait_for()


def test_a_table_says_that_it_is_loading_until_it_knows_that_there_is_nothing(page: Any, url: str):
    page.add_init_script("""
        window.seen = [];
        new MutationObserver(() => document.querySelectorAll('.reasons .ag-overlay').forEach(
            each => each.innerText.trim() && seen.push(each.innerText.trim())
        )).observe(document, {childList: true, subtree: true});
    """)
    page.goto(f"{url}/run/growing/health")
    page.locator(".reasons").get_by_text("nothing here").wait_for()
    assert page.evaluate("[...new Set(seen)]") == ["loading", "nothing here"]


def test_selected_runs_are_compared(page: Any, url: str):
    page.goto(url)
    for name in ("copy", "real"):
        row = page.locator(".ag-row", has=page.locator("[col-id=name]", has_text=name))
        row.locator("input[type=checkbox]").check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/run/copy/curves?other=real")
    page.get_by_text("0 options in which these runs differ").wait_for()
    page.locator(".curves :not(.waiting) > div > canvas").first.wait_for()


@pytest.mark.parametrize("view", SIGNS)
@pytest.mark.parametrize("name", ["real", "hostile"])
def test_every_view_opens_without_an_error(page: Any, url: str, name: str, view: str):
    page.goto(f"{url}/run/{name}/{view}")
    page.locator(SIGNS[view]).first.wait_for()
    page.wait_for_timeout(300)
    assert page.locator(".problem:visible").count() == 0
    assert page.locator("img[src=x]").count() == 0
    if name == "hostile" and view != "curves":
        assert "<script>alert(1)</script><img src=x onerror=alert(1)>" in page.inner_text("body")


@pytest.mark.parametrize("view", SIGNS)
def test_no_view_is_wider_than_a_phone(page: Any, url: str, view: str):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url}/run/real/{view}")
    page.locator(SIGNS[view]).first.wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_text_is_shown_as_text_and_shortened(page: Any, url: str):
    page.goto(f"{url}/run/hostile/groups/1")
    page.locator(".responses .q-card").first.wait_for()
    assert "⟨esc⟩[31mred" in page.inner_text(".responses")
    assert "⟨RIGHT-TO-LEFT OVERRIDE⟩" in page.inner_text(".responses")
    page.goto(f"{url}/run/hostile/groups/3")
    page.locator(".responses .q-card").first.wait_for()
    assert "more characters" in page.inner_text(".responses")
    assert len(page.inner_text("body")) < 200_000


def test_filters_change_the_rows(page: Any, url: str, root: Path):
    run = find_run(root, "real")
    kept = groups(run, GroupFilter(verdicts=("kept",)), limit=1_000).rows
    everything = groups(run, limit=1_000).rows
    assert 0 < len(kept) < len(everything)
    page.goto(f"{url}/run/real/groups")
    where = page.locator(".where")
    where.get_by_text(f"of {len(everything)} groups").wait_for()
    page.goto(f"{url}/run/real/groups?verdict=kept")
    where.get_by_text(f"of {len(kept)} groups").wait_for()
    assert all("kept" in row for row in rows(page, ".groups"))
    page.get_by_label("to step").fill("1")
    first = [row for row in kept if row.generated_step <= 1]
    where.get_by_text(f"1 to {len(first)} of {len(first)} groups").wait_for()
    page.get_by_label("text in prompt or response").fill("no text has these words")
    where.get_by_text("0 groups with this text").wait_for()
    page.wait_for_function("document.querySelectorAll('.groups .ag-center-cols-container .ag-row').length === 0")


def test_verdicts_are_shown_in_words(page: Any, url: str, root: Path):
    wrong = groups(find_run(root, "real"), GroupFilter(verdicts=("all_wrong",)), limit=1_000).rows
    page.goto(f"{url}/run/real/groups")
    page.get_by_label("verdict").click()
    page.get_by_role("option", name="all wrong").click()
    page.locator(".where").get_by_text(f"of {len(wrong)} groups").wait_for()
    page.locator(".groups .ag-row", has_text="kept").first.wait_for(state="detached")
    assert all("all wrong" in row for row in rows(page, ".groups"))
    page.goto(f"{url}/run/real/groups/{wrong[0].serial}")
    page.locator(".q-badge", has_text="all wrong").wait_for()


def test_pages_of_groups_follow_each_other(page: Any, url: str, generated: Run):
    with running(generated.path.parent.parent) as other:
        page.goto(f"{other}run/{generated.name}/groups")
        page.get_by_text("1 to 25 of 192 groups").wait_for()
        page.get_by_role("button", name="Next").click()
        page.get_by_text("26 to 50 of 192 groups").wait_for()
        page.locator(".groups .ag-row", has_text="166").first.wait_for()
        page.get_by_role("button", name="Previous").click()
        page.get_by_text("1 to 25 of 192 groups").wait_for()


def test_a_group_opens_with_its_responses_and_is_exported(page: Any, url: str, root: Path):
    page.goto(f"{url}/run/real/groups")
    page.locator(".groups .ag-row").first.locator(".ag-cell").first.click()
    page.wait_for_url(re.compile(r"/run/real/groups/\d+$"))
    page.locator(".responses .q-card").nth(3).wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    assert '"responses"' in Path(download.value.path()).read_text(encoding="utf-8")


def test_a_clipped_token_shows_its_numbers(page: Any, url: str, root: Path):
    run = find_run(root, "real")
    serial, sample, index = next(
        (row.serial, sample, index)
        for row in groups(run, GroupFilter(verdicts=("kept",)), limit=1_000).rows
        for sample in range(row.responses)
        for index, clip in enumerate(tokens(run, row.serial, sample, str).clips or ())
        if clip == "high"
    )
    found = tokens(run, serial, sample, str)
    page.goto(f"{url}/run/real/tokens/{serial}/{sample}")
    token = page.locator(".tokens span").nth(index)
    token.wait_for()
    assert token.get_attribute("class") == "clip-high"
    token.hover()
    tip = page.inner_text("#token-tip")
    assert re.search(r"clipped\s+high", tip)
    assert f"{found.ratio[index]:.4f}" in tip
    assert f"{found.sampler_logprobs[index]:.4f}" in tip
    before = page.locator(".tokens").inner_html()
    page.get_by_role("button", name="entropy").click()
    page.wait_for_function("before => document.querySelector('.tokens').innerHTML !== before", arg=before)


def test_a_response_whose_tokens_were_not_stored_shows_its_text(page: Any, url: str, root: Path):
    run = find_run(root, "real")  # with run.store_tokens: kept
    found = group(run, groups(run, GroupFilter(verdicts=("all_wrong",)), limit=1).rows[0].serial)
    page.goto(f"{url}/run/real/tokens/{found.serial}/1")
    page.locator(".only-text").wait_for()
    assert page.locator(".only-text").inner_text().strip() == display_text(found.responses[1].text).strip()
    assert "run.store_tokens=all stores the tokens of every group" in page.inner_text("body")
    assert not page.locator(".tokens").is_visible() and not page.get_by_text("color by").is_visible()


def test_a_prompt_opens_its_history(page: Any, url: str):
    page.goto(f"{url}/run/real/prompts")
    page.locator(".prompts .ag-row").first.locator(".ag-cell").first.click()
    page.locator(".history canvas").wait_for()
    page.get_by_role("link", name=re.compile("its .* groups")).click()
    page.wait_for_url("**/groups?prompt=*")
    page.locator(".groups .ag-row").first.wait_for()


def test_a_click_on_a_reason_opens_its_groups(page: Any, url: str):
    page.goto(f"{url}/run/hostile/health")
    page.locator(".reasons .ag-cell", has_text="timed out").click()
    page.wait_for_url("**/groups?error=*")
    page.get_by_text("of 5 groups").wait_for()


def test_an_open_page_shows_new_groups(page: Any, url: str, root: Path):
    page.goto(f"{url}/run/growing/groups")
    page.get_by_text("1 to 1 of 1 groups").wait_for()
    with RunDatabase.open(root / "growing" / "run.db") as database:
        database.record_step(make_report(2, [make_group(2), make_group(3)]))
        page.get_by_text("1 to 3 of 3 groups").wait_for()
        assert len(rows(page, ".groups")) == 3


def test_curves_can_be_drawn_on_a_logarithmic_axis_and_downloaded(page: Any, url: str):
    page.goto(f"{url}/run/real/curves")
    canvas = curves_drawn(page)
    before = canvas.evaluate("element => element.toDataURL()")
    page.get_by_text("logarithmic").click()
    changed = "before => document.querySelector('.curves :not(.waiting) > div > canvas').toDataURL() !== before"
    page.wait_for_function(changed, arg=before)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of all metrics").click()
    assert Path(download.value.path()).read_text(encoding="utf-8").startswith("step,acc/mean,")


def curves_drawn(page: Any) -> Any:
    """Wait until the first panel is drawn, and return its canvas."""
    page.wait_for_function("document.querySelector('.curves :not(.waiting) > div > canvas')?.toDataURL().length > 8000")
    page.wait_for_timeout(300)
    return page.locator(".curves :not(.waiting) > div > canvas").first


def save(page: Any, chart: int, kind: str) -> tuple[str, bytes]:
    """Click a button in the n-th panel's toolbox, and return the saved file's name and content.

    The buttons are drawn on a canvas, so they are found by position.
    """
    box = page.locator(".curves .nicegui-echart").nth(chart)
    box.scroll_into_view_if_needed()
    size = box.bounding_box()
    # From the right: CSV, SVG, PNG.
    x = size["width"] - 23 - 27.3 * ("CSV", "SVG", "PNG").index(kind)
    with page.expect_download() as download:
        box.click(position={"x": x, "y": 17})
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_any_curve_is_saved_as_png_svg_and_csv(page: Any, url: str, root: Path):
    page.goto(f"{url}/run/real/curves")
    curves_drawn(page)
    name, content = save(page, 0, "PNG")
    assert (name, content[:8]) == ("Reward.png", b"\x89PNG\r\n\x1a\n")
    name, content = save(page, 0, "SVG")
    assert name == "Reward.svg"
    assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
    assert content.count(b"<path") > 5 and b">Reward</text>" in content
    name, content = save(page, 0, "CSV")
    assert name == "Reward.csv"
    run = find_run(root, "real")
    (curve,) = curves(run, ["reward/mean"])
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    assert [int(row["step"]) for row in rows] == curve.steps.tolist()
    assert [float(row["reward"]) for row in rows] == curve.values.tolist()
    band = spread(run, "reward")
    np.testing.assert_allclose([float(row["reward low"]) for row in rows], band.quantiles[0])
    np.testing.assert_allclose([float(row["reward high"]) for row in rows], band.quantiles[-1])


def test_a_saved_curve_is_not_smoothed(page: Any, url: str, root: Path):
    page.goto(f"{url}/run/real/curves")
    canvas = curves_drawn(page)
    before = canvas.evaluate("element => element.toDataURL()")
    page.get_by_label("smoothing").click()  # sets the slider to its middle
    page.wait_for_function(
        "before => document.querySelector('.curves :not(.waiting) > div > canvas').toDataURL() !== before", arg=before
    )
    _, content = save(page, 0, "CSV")
    (curve,) = curves(find_run(root, "real"), ["reward/mean"])
    assert [float(row["reward"]) for row in csv.DictReader(io.StringIO(content.decode()))] == curve.values.tolist()


def test_any_recorded_metric_can_be_drawn(page: Any, url: str):
    page.goto(f"{url}/run/real/curves")
    page.locator(".curves :not(.waiting) > div > canvas").first.wait_for()
    count = 12  # eight panels of metrics, time, groups, tokens, and an evaluation
    page.wait_for_function(f"document.querySelectorAll('.curves .nicegui-echart').length === {count}")
    page.get_by_label("more metrics").fill("updates/non")
    page.get_by_role("option", name="updates/non_finite").click()
    page.wait_for_function(f"document.querySelectorAll('.curves .nicegui-echart').length === {count + 1}")
    page.keyboard.press("Escape")
    curves_drawn(page)
    name, content = save(page, 0, "CSV")
    assert name == "updates_non_finite.csv"
    assert content.decode().splitlines() == ["step,updates/non_finite", "1,0", "2,0", "3,0", "4,0"]
    page.get_by_label("Remove").click()
    page.wait_for_function(f"document.querySelectorAll('.curves .nicegui-echart').length === {count}")


def test_tokens_are_decoded_before_the_first_checkpoint(page: Any, url: str, root: Path):
    serial = groups(find_run(root, "unsaved"), GroupFilter(verdicts=("kept",)), limit=1).rows[0].serial
    page.goto(f"{url}/run/unsaved/tokens/{serial}/0")
    page.locator(".tokens span").first.wait_for()
    early = page.inner_text(".tokens")
    page.goto(f"{url}/run/real/tokens/{serial}/0")
    page.locator(".tokens span").first.wait_for()
    assert page.inner_text(".tokens") == early
    assert not re.match(r"⟨\d+⟩", early)


def test_the_choice_of_dark_mode_is_kept(page: Any, url: str):
    page.goto(url)
    assert page.locator("body.body--dark").count() == 0
    page.get_by_role("button", name="light or dark").click()
    page.locator("body.body--dark").wait_for()
    page.goto(f"{url}/run/real/health")
    page.locator("body.body--dark").wait_for()


@pytest.mark.parametrize(("name", "words"), [
    ("empty", "is empty"), ("broken", "cannot be read"), ("nothing", "there is no run database here"),
    ("..%5cx", "is not the name of a run"),
])  # fmt: skip
def test_a_run_that_cannot_be_read_is_one_sentence(page: Any, url: str, name: str, words: str):
    page.goto(f"{url}/run/{name}/groups")
    page.locator(".problem", has_text=words).wait_for()
    assert "Traceback" not in page.inner_text("body")


def test_a_smoothed_curve_starts_at_its_first_value_and_skips_gaps():
    found = smoothed(np.array([4.0, 0.0, np.nan, 2.0]), 0.5)
    np.testing.assert_allclose(found, [4, 4 / 3, 4 / 3, (0.5 * 1 + 0.5 * 2) / 0.875], rtol=1e-12)
    values = np.array([1.0, np.nan])
    assert smoothed(values, 0.0) is values


def test_a_value_that_cannot_be_drawn_is_a_gap():
    steps, values = np.array([1, 2, 3, 4]), np.array([1.0, np.nan, 0.0, np.inf])
    assert points(steps, values) == [[1, 1.0], [2, None], [3, 0.0], [4, None]]
    assert points(steps, values, is_log=True) == [[1, 1.0], [2, None], [3, None], [4, None]]


def test_a_band_is_as_high_as_the_distance_of_its_bounds():
    steps, values = np.array([1, 2]), np.array([0.0, 1.0])
    line = Line("a", steps, values, "red", low=values - 2, high=values + 3)
    chart = line_chart("t", "u", [line], Look(), Zone("overlong", 3, 4))
    assert [[point[1] for point in series["data"]] for series in chart["series"]] == [[-2, -1], [5, 5], [0, 1]]
    assert chart["series"][-1]["markArea"]["data"][0][0]["yAxis"] == 3
    assert not any("stack" in series for series in line_chart("t", "u", [line], Look(is_log=True))["series"])


def test_a_single_step_is_centered():
    axis = stacked_chart("t", "u", np.array([7]), {"some": np.array([2.0])})["xAxis"]
    assert (axis["min"], axis["max"]) == (6, 8)
    axis = stacked_chart("t", "u", np.array([7, 9]), {"some": np.array([2.0, 3.0])})["xAxis"]
    assert (axis["min"], axis["max"]) == ("dataMin", "dataMax")


def test_parts_that_are_always_zero_are_not_drawn():
    chart = stacked_chart("t", "u", np.array([1]), {"some": np.array([2.0]), "none": np.array([0.0])})
    assert [series["name"] for series in chart["series"]] == ["some"]


def test_the_overlong_zone_is_where_reward_is_lost():
    options = {"data.max_response_length": 24, "reward.overlong_buffer.len": 16, "reward.target_length": 5}
    assert overlong_zone({**options, "reward.length_shaping": "buffer"}) == Zone("overlong", 8, 24)
    assert overlong_zone({**options, "reward.length_shaping": "target"}) == Zone("overlong", 5, 24)
    assert overlong_zone({**options, "reward.length_shaping": "none"}) is None


def test_a_sparkline_is_made_of_numbers_only():
    assert sparkline(np.array([1.0])) == sparkline(np.array([np.nan, 1.0])) == ""
    assert re.search(r'points="2.0,22.0 60.0,2.0 118.0,12.0"', sparkline(np.array([0.0, 2.0, 1.0])))
    assert "nan" not in sparkline(np.array([0.0, np.nan, np.inf, 1.0]))


def test_control_characters_are_named_and_long_text_is_shortened():
    assert visible("a\0b\x1b[0m\u202e\n\tc") == "a⟨nul⟩b⟨esc⟩[0m⟨RIGHT-TO-LEFT OVERRIDE⟩\n\tc"
    assert display_text("a" * 28 + "bc", 6) == "aaaa\n… 24 more characters …\nbc"
    assert display_text("abc", 2) == "ab\n… 1 more characters …\n"
