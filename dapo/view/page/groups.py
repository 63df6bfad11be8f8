"""The groups view: a filtered table of groups, and one group with its responses side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from nicegui import ui

from dapo.store.encoding import to_json
from dapo.types import Verdict
from dapo.view import groups as read
from dapo.view.groups import GroupDetail, GroupFilter, GroupPage, Response
from dapo.view.page.frame import Live, ask, button, column, fill, grid, link, number_column, offer, pager, share_column
from dapo.view.page.text import as_words, display_text, format_number
from dapo.view.page.turns import show_turns
from dapo.view.source import Run

PAGE = 25  # groups
_QUESTION = 160  # characters
_NAME = 200  # characters
_SCROLLS = "model-text overflow-auto w-full"


def build(run: Run, wanted: GroupFilter) -> Live:
    return Live(_Groups(run, wanted).refresh)


class _Groups:
    def __init__(self, run: Run, wanted: GroupFilter) -> None:
        self.run = run
        self.fixed = wanted  # conditions from the URL that have no input field: a prompt, or why a judge failed
        self.starts: list[int | None] = [None]  # serial after which each page starts, up to the current one
        self.next: int | None = None  # serial after which the next page starts
        self.queries = 0  # number of the latest query
        self._filters(wanted)
        self.back, self.forth, self.where = pager(self._back, self._forth)
        self.table = grid(
            [
                number_column("serial", "group", width=80),
                number_column("generated_step", "step", width=80),
                column("verdict", "verdict", width=120),
                share_column("accuracy", "accuracy", width=100),
                number_column("reward", "reward", 3, width=100),
                number_column("length", "mean tokens", 1, width=115),
                number_column("responses", "responses", width=100),
                number_column("judged", "judged", width=90),
                column("data_source", "source", width=150),
                column("question", "question", flex=1, minWidth=200),
            ],
            "serial",
            lambda row: ui.navigate.to(link(run.name, "groups", int(row["serial"]))),
        ).classes("groups")

    def _filters(self, wanted: GroupFilter) -> None:
        with ui.row().classes("items-center gap-4 w-full"):
            self.first, self.last = (
                ui.number(label, value=step, min=0, precision=0).classes("w-24").props("dense")
                for label, step in (("from step", wanted.first_step), ("to step", wanted.last_step))
            )
            chosen = list(wanted.verdicts)
            self.verdicts = ui.select(_labels(chosen), label="verdict", value=chosen, multiple=True)
            self.verdicts.classes("w-48").props("use-chips dense")
            with ui.column().classes("gap-0 w-48 px-2"):
                ui.label("accuracy, %").classes("quiet text-xs")
                self.accuracy = ui.range(min=0, max=100, step=5, value={"min": 0, "max": 100}).props("label")
            self.source = ui.select([], label="source", clearable=True).classes("w-40").props("dense")
            self.text = ui.input("text in prompt or response").classes("w-56").props("clearable dense debounce=300")
            self.newest = ui.switch("newest first", value=True)
        for each in (self.first, self.last, self.verdicts, self.accuracy, self.source, self.text, self.newest):
            each.on_value_change(self._filter)
        for name, value in (("prompt", wanted.prompt_uid), ("not judged because", wanted.error)):
            if value is not None:
                with ui.row().classes("items-center gap-2"):
                    ui.label(f"only {name}: {display_text(value, 200)}")
                    ui.link("all groups", link(self.run.name, "groups"))

    def wanted(self) -> GroupFilter:
        ends = self.accuracy.value or {"min": 0, "max": 100}
        low, high = ends["min"], ends["max"]
        return replace(
            self.fixed,
            first_step=_whole(self.first.value),
            last_step=_whole(self.last.value),
            verdicts=tuple(self.verdicts.value),
            # A slider at its end means no condition: unjudged groups have no accuracy and should be listed, too.
            min_accuracy=None if low == 0 else low / 100,
            max_accuracy=None if high == 100 else high / 100,
            data_source=self.source.value,
            text=self.text.value or "",
        )

    async def refresh(self) -> None:
        found = await ask(read.verdicts, self.run)
        # Keep verdicts from the URL selectable, even if no group has them.
        offer(self.verdicts, _labels([*found, *self.verdicts.value]))
        offer(self.source, await ask(read.data_sources, self.run))
        await self._show()

    async def _show(self) -> None:
        self.queries += 1
        mine, wanted = self.queries, self.wanted()
        is_newest_first = bool(self.newest.value)
        page = await ask(read.groups, self.run, wanted, self.starts[-1], PAGE, newest_first=is_newest_first)
        total = await ask(read.count_groups, self.run, wanted)
        if mine != self.queries:  # another filter was set meanwhile
            return
        self.next = page.after
        rows = [asdict(row) for row in page.rows]
        for row in rows:
            row["question"] = display_text(row["question"][:_QUESTION])
            row["verdict"] = as_words(row["verdict"])
            row |= {name: display_text(row[name], _NAME) for name in ("verdict", "data_source", "prompt_uid")}
        fill(self.table, rows)
        start = (len(self.starts) - 1) * PAGE
        self.where.set_text(_where(start, page, total))
        self.back.set_enabled(start > 0)
        self.forth.set_enabled(page.after is not None and (total is None or start + PAGE < total))

    async def _filter(self) -> None:
        self.starts = [None]
        await self._show()

    async def _forth(self) -> None:
        if self.next is not None:
            self.starts.append(self.next)
            await self._show()

    async def _back(self) -> None:
        if len(self.starts) > 1:
            self.starts.pop()
            await self._show()


def _where(start: int, page: GroupPage, total: int | None) -> str:
    if total is not None:
        return f"{start + 1:,} to {start + len(page.rows):,} of {total:,} groups" if page.rows else "no such groups"
    # A search reads texts for half a second at a time.
    rest = "" if page.after is None else "; Next continues the search"
    return f"{len(page.rows)} groups with this text{rest}"


def _labels(verdicts: Sequence[str]) -> dict[str, str]:
    """Return what the filter shows for each verdict, by verdict."""
    return {verdict: display_text(as_words(verdict), _NAME) for verdict in verdicts}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def build_one(run: Run, serial: int) -> Live:
    place = ui.column().classes("w-full gap-3")
    seen: GroupDetail | None = None

    async def refresh() -> None:
        nonlocal seen
        found = await ask(read.group, run, serial)
        # Redraw only if the group changed (its verdict came), so that the page does not jump while it is read.
        if found != seen:
            seen = found
            place.clear()
            with place:
                _group(run, found)

    return Live(refresh)


def _group(run: Run, found: GroupDetail) -> None:
    decided = "" if found.decided_step in (None, found.generated_step) else f", decided in step {found.decided_step}"
    with ui.row().classes("items-center gap-4 w-full"):
        ui.label(f"Group {found.serial}").classes("text-xl")
        color = "green-8" if found.verdict == Verdict.KEPT else "grey-8"
        ui.badge(display_text(as_words(found.verdict), _NAME), color=color).classes("text-sm px-2")
        ui.label(f"sampled in step {found.generated_step}{decided} · source {display_text(found.data_source, 100)}")
        ui.link("all of this step", link(run.name, "groups") + f"?step={found.generated_step}")
        ui.space()
        button("JSON", lambda: _download(run, found.serial))
    with ui.element("div").classes("w-full").style("display: grid; grid-template-columns: 3fr 1fr; gap: 12px"):
        with ui.card().classes("gap-1 p-3"):
            for message in found.messages:
                ui.label(display_text(str(message.get("role", "")), 100)).classes("quiet text-xs")
                ui.label(display_text(str(message.get("content", "")))).classes(f"{_SCROLLS} max-h-64")
        with ui.card().classes("gap-1 p-3"):
            ui.label("ground truth").classes("quiet text-xs")
            answer = found.answer if isinstance(found.answer, str) else to_json(found.answer)
            ui.label(display_text(answer)).classes(f"{_SCROLLS} max-h-64")
    columns = "display: grid; grid-template-columns: repeat(auto-fill, minmax(min(290px, 100%), 1fr)); gap: 12px"
    with ui.element("div").classes("w-full responses").style(columns):
        for response in found.responses:
            _response(run, found, response)


def _response(run: Run, found: GroupDetail, response: Response) -> None:
    judgments = {True: ("correct", "green-8"), False: ("wrong", "red-8"), None: ("not judged", "grey-8")}
    judgment, color = judgments[response.acc]
    rows = [
        ("reward", format_number(response.reward)),
        ("score", format_number(response.score)),
        ("advantage", format_number(response.advantage)),
        ("extracted answer", "–" if response.extracted is None else display_text(response.extracted, 200)),
        ("length", f"{response.length:,} tokens"),
        _ending(response),
        ("weights", f"version {response.weight_version}"),
    ]
    if response.turns:
        rows.append(("turns", str(len(response.turns))))
    if response.error is not None:
        rows.append(("not judged because", display_text(response.error, 500)))
    if not response.trains:
        rows.append(("in the loss", "no"))
    with ui.card().classes("gap-2 p-3 w-full"):
        with ui.row().classes("items-center w-full gap-2"):
            ui.label(f"Response {response.sample}").classes("font-semibold")
            ui.badge(judgment, color=color)
            ui.space()
            if response.has_tokens:
                ui.link("tokens", link(run.name, "tokens", found.serial, response.sample))
        with ui.element("div").classes("name-values w-full"):
            for name, value in rows:
                ui.label(name).classes("quiet")
                ui.label(value)
        ui.separator()
        show_text(response)


def show_text(response: Response) -> None:
    """Show the text of a response with its thought folded, or the turns of an episode."""
    if response.turns:
        show_turns(response.turns)
        return
    thought, reply = response.parts
    if thought:
        with ui.expansion("thought" if reply is not None else "thought, without an end").classes("w-full quiet"):
            ui.label(display_text(thought)).classes(f"{_SCROLLS} max-h-96")
    if reply is not None:
        ui.label(display_text(reply)).classes(f"{_SCROLLS} max-h-96")


def _ending(response: Response) -> tuple[str, str]:
    """Return a row that says why the response ended. An episode's last turn has its own reason."""
    ended = response.turns[-1].get("ended") if response.turns else None
    if isinstance(ended, str):
        return "ended", display_text(ended, _NAME)
    return "ended by", display_text(response.finish_reason, _NAME)


async def _download(run: Run, serial: int) -> None:
    text = await ask(lambda: read.group_json(read.group(run, serial)))
    ui.download.content(text, f"{run.name}-group-{serial}.json", "application/json")
