import io
import re

from rich.console import Console

from dapo.terminal.output import StampedLines, log_console


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
