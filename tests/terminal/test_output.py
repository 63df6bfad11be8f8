import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from dapo.terminal.evaltable import EvalRow, models_table
from dapo.terminal.output import StampedLines, log_console, print_table


def test_every_line_of_a_pipe_begins_with_its_time_and_has_no_control_characters():
    out = io.StringIO()
    console = Console(file=StampedLines(out), width=40)  # pyright: ignore[reportArgumentType]
    console.print("[red]first[/]\n\nse", end="")
    console.print("cond \x1b[31m \x07")
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(f"{stamp} first\n{stamp}\n{stamp} second .*31m.*\n", out.getvalue())
    assert all(line.isprintable() for line in out.getvalue().splitlines())


def test_output_that_is_captured_is_stamped(capsys):
    log_console().print("hello")
    assert re.fullmatch(r"\S+ \S+ hello\n", capsys.readouterr().out)


def printed(table: Table, is_terminal: bool, width: int = 80) -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width, force_terminal=is_terminal, color_system=None), table)
    return out.getvalue().splitlines()


def named(*names: str) -> Table:
    table = Table("arm", *["after 4 steps"] * 4)
    for name in names:
        table.add_row(name, *["-30.0 [-30.0, -30.0]\nno difference shown"] * 4)
    return table


def test_names_of_up_to_20_characters_stay_whole_in_a_narrow_terminal():
    names = ["grpo", "no-dynamic-sampling", "x" * 20]
    lines = printed(named(*names), is_terminal=True)
    assert max(map(len, lines)) <= 80
    for name in names:
        assert any(f" {name} " in line for line in lines)
    assert "30.0" in lines[4] and "…" not in "".join(lines)
    wide = printed(named("y" * 60), is_terminal=True, width=200)
    assert any("y" * 60 in line for line in wide)


def test_a_table_in_a_pipe_has_its_full_width():
    lines = printed(named("z" * 60), is_terminal=False)
    assert any(line.count("-30.0 [-30.0, -30.0]") == 4 and "z" * 60 in line for line in lines)


@pytest.mark.parametrize("name", ["m", "x" * 20])
def test_values_that_cannot_wrap_are_not_cut_in_a_terminal_of_80_columns(name: str):
    rates = {f"{rate}/{end}": 1.0 for rate in ("avg@16", "pass@16", "maj@16") for end in ("low", "high")}
    metrics = {"avg@16": 1.0, "pass@16": 1.0, "maj@16": 1.0, "parse_rate": 1.0, "response_length/clip_ratio": 1.0,
               "response_length/mean": 812.3, "unjudged": 0.0, **rates}  # fmt: skip
    lines = printed(models_table("aime", [EvalRow(name, metrics, 1234.0)], 80), is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-7:] == ["100.0", "100.0", "100.0", "100.0", "100.0", "812.3", "1234"] for line in lines)
    assert "…" not in "".join(lines)
