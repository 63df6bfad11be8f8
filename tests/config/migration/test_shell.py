"""Tests of the shell reader. Where the meaning is bash's, bash itself is asked."""

from __future__ import annotations

import shutil
import subprocess
from random import Random
from tempfile import TemporaryDirectory

import pytest

from dapo.config.migration.shell import UNKNOWN, read_script
from dapo.errors import ConfigError

CALL = "python3 -m verl.trainer.main_ppo"
BASH = shutil.which("bash")
HOME, FOLDER = "/the/home", "/the/folder"
# What would start a training writes down its options instead.
STUBS = """
record() { printf "%s\\0" "$@" >&3; }
python3() { record "$@"; }
ray() { record "$@"; }
export HOME=/the/home
PWD=/the/folder
exec 3>&1
"""


def options(script: str, **environment: str) -> dict[str, str]:
    return read_script(script, "run.sh", environment).options


def by_bash(script: str) -> dict[str, str]:
    command = [str(BASH), "-c", STUBS + script]
    with TemporaryDirectory() as folder:  # some scripts write a log
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={}, cwd=folder)
    words = [word.lstrip("+") for word in done.stdout.split("\0")]
    return {key: value for word in words for key, equals, value in [word.partition("=")] if equals and key[0] != "-"}


SCRIPTS = [
    f"{CALL} a.b=1 c.d=two",
    f"{CALL} \\\n    a.b=1 \\\n    c.d=2 \\\n    e.f=3",
    f"{CALL} \\\n  a.b=1 \\\n\nc.d=2",  # an empty line ends the command
    f"{CALL} \\\n  a.b=1 \\\n  # a comment ends it, too \\\n  c.d=2",
    f"{CALL} a.b=1 # c.d=2",
    f"# {CALL} a.b=0\n{CALL} a.b=1",
    f"x=4\n{CALL} a.b=$x c.d=${{x}} e.f=${{x}}y g.h=$x/y",
    f"x='a b'\n{CALL} a.b=\"$x\" c.d=\"${{x}}\" e.f='$x'",
    f'x="it\'s"\ny=\'say "hi"\'\n{CALL} a.b="$x" c.d="$y"',
    f'x=1 # one\ny="#2"\n{CALL} a.b=$x c.d=$y e.f=a#b',
    f"x=\\$5\n{CALL} a.b=$x c.d=\\'q\\' e.f=a\\ b",
    f'{CALL} a.b="a\\"b" c.d="a\\\\b" e.f="a\\nb" g.h=\'a\\nb\' i.j="\\$x"',
    f'x=${{x:-7}}\ny=${{y:-"${{x}}/z"}}\nz=${{z-q}}\n{CALL} a.b=$x c.d=$y e.f=$z',
    f"x=\n{CALL} a.b=${{x:-full}} c.d=${{x-empty}}",
    f"x=5\n{CALL} a.b=${{x:-7}} c.d=${{x:+set}} e.f=${{nothing:+set}}",
    f"x=MixedCase\n{CALL} a.b=${{x,,}} c.d=${{x^^}}",
    f"a=$((1024 * 2))\nb=$(( a+1 ))\nc=$(((a + b) * 3))\nd=$((c/7))\ne=$((-c / 7))\nf=$((c % 7))\n"
    f"{CALL} a.b=$a c.d=$b e.f=$c g.h=$d i.j=$e k.l=$f m.n=$((${{a}} - $b))",
    f"{CALL} a.b=$((2 * (3 + 4))) c.d=x$((1+1))y",
    f"export X=1 Y=two\nZ=3 {CALL} a.b=$X c.d=$Y",
    f"A=1;B=2; C=3 && {CALL} a.b=$A$B$C",
    f'ARGS=(\n  a.b=1 # first\n  "c.d=2 3"\n\n  \'e.f=4\'\n)\n{CALL} "${{ARGS[@]}}" g.h=5',
    f'ARGS=(a.b=1)\nARGS+=(c.d=2)\nx=a\nx+=b\n{CALL} "${{ARGS[@]}}" e.f=$x',
    f'ARGS="a.b=1 c.d=2"\n{CALL} $ARGS e.f=3',
    f'ARGS="\n  a.b=1 \\\n  c.d=2\n"\n{CALL} $ARGS',
    f"{CALL} a.b=1 $@",
    f'{CALL} a.b=1 "$@" 2>&1 | tee log.txt',
    f"{CALL} a.b=1 > log.txt 2>&1 &\nwait",
    f"x=1\n{CALL} a.b=$x >/dev/null",
    f"{CALL} +a.b=1 ++c.d=2",
    f"{CALL} data.train_files=\"['a.parquet','b.parquet']\" trainer.logger='[\"console\",\"wandb\"]'",
    f"{CALL} --config-path=conf --config-name='x' a.b=1",
    "ray job submit --no-wait --runtime-env=\"${ENV:-e.yaml}\" -- python3 -m recipe.dapo.main_dapo a.b=1 c.d='x y'",
    "set -xeuo pipefail\ncat > f.py <<'EOF'\npython3 -m verl.trainer.main_ppo a.b=0\nEOF\n"
    "python3 -m verl.trainer.main_ppo a.b=1".replace("cat > f.py", "true"),
    f"f() {{\n  {CALL} a.b=1\n}}\nf",
    f"if [ 1 = 1 ]; then x=5; fi\n{CALL} a.b=$x",
    f"case x in\n  x) y=1 ;;\nesac\n{CALL} a.b=$y",
    f'{CALL} a.b=$HOME/x c.d=${{HOME}} e.f="$PWD/y"',
    f'x="$(echo hi)"\n{CALL} a.b=1',
]


@pytest.mark.skipif(BASH is None, reason="needs bash to compare with")
@pytest.mark.parametrize("script", SCRIPTS)
def test_options_are_those_that_bash_would_pass(script):
    expected = by_bash(script)
    read = {key: value.replace("~", HOME) for key, value in options(script).items()}
    read = {key: value.replace("./y", f"{FOLDER}/y") for key, value in read.items()}
    assert read == {key: value.replace("~", HOME) for key, value in expected.items()}
    assert read


def random_word(random: Random, names: list[str], depth: int = 0) -> str:
    """Return a word of plain text, quotes and substitutions."""
    parts = []
    for _ in range(random.randint(1, 3)):
        name = random.choice(names)
        match random.randrange(9 if depth < 2 else 6):
            case 0:
                parts.append(random.choice(["abc", "1", "/x.y", "-", "="]))
            case 1:
                parts.append("'" + random.choice(["a b", "$x", '"', "#", "a\\"]) + "'")
            case 2:
                parts.append('"' + random.choice(["a b", "'", "\\$", '\\"', "#", "a\\b"]) + f'${{{name}}}"')
            case 3:
                parts.append(f"${{{name}}}" if random.random() < 0.5 else f'"${name}"')
            case 4:
                parts.append("\\" + random.choice("$'\" \\"))
            case 5:
                parts.append(f"$(({random.randint(1, 9)} {random.choice('+-*/%')} {random.randint(1, 9)}))")
            case 6:
                parts.append(f"${{unset_{name}:-{random_word(random, names, depth + 1)}}}")
            case 7:
                parts.append(f"${{{name}:+{random.choice(['y', 'z'])}}}")
            case _:
                parts.append(f"${{{name},,}}")
    return "".join(parts)


@pytest.mark.skipif(BASH is None, reason="needs bash to compare with")
def test_random_scripts_are_read_as_bash_reads_them():
    random, names = Random(7), ["one", "two", "three"]
    for attempt in range(120):
        lines = [f"{name}={random_word(random, names[: number + 1])}" for number, name in enumerate(names)]
        separator = random.choice([" ", " \\\n    ", "\t"])
        words = [f'k{i}.x="{"${" + random.choice(names) + "}"}"' for i in range(2)]
        script = "one=; two=; three=\n" + "\n".join(lines) + f"\n{CALL}{separator}{separator.join(words)}"
        assert options(script) == by_bash(script), f"attempt {attempt}:\n{script}"


def test_what_only_a_running_script_knows_is_unknown_and_never_run(tmp_path):
    mark = tmp_path / "made"
    words = 'a.b=$x c.d="$y" e.f=$1 g.h=${z%.*} i.j=$undefined k.l=$((w * 2))'
    assert set(options(f"x=$(touch {mark})\ny=`touch {mark}`\n{CALL} {words}").values()) == {UNKNOWN}
    assert not mark.exists()
    assert options("x=$(pwd)/data\n" + CALL + " a.b=$x") == {"a.b": "./data"}


def test_the_environment_gives_what_the_script_does_not_set_and_is_named():
    script = f"A=${{A:-1}}\nB=2\n{CALL} a.b=$A c.d=$B e.f=$C"
    read = read_script(script, "run.sh", {"A": "10", "B": "20", "C": "30", "D": "40"})
    assert read.options == {"a.b": "10", "c.d": "2", "e.f": "30"}
    assert read.notes == ["A comes from the environment", "C comes from the environment"]


def test_values_set_in_a_branch_are_used_and_named():
    script = f"if [ $N -gt 1 ]; then\n  tp=4\nelse\n  tp=2\nfi\nboth=$tp\nother=1\n{CALL} a.b=$both c.d=$other"
    read = read_script(script, "run.sh", {})
    assert read.options == {"a.b": "2", "c.d": "1"}
    assert read.notes == ["line 4 sets tp inside a branch, which is taken as done: '2'"]


def test_what_is_not_an_option_is_named_and_redirections_are_not():
    read = read_script(f"{CALL} a.b=1 ~c.d $EXTRA $@ 2>&1 >> log.txt", "run.sh", {})
    assert read.options == {"a.b": "1"}
    assert read.notes == [
        "the arguments of the script ($@) are passed on to verl, and are not known here",
        "line 1 gives verl '~c.d', which is not an option that could be read",
        "line 1 gives verl '?', which is not an option that could be read",
    ]
    assert not read_script(f"{CALL} a.b=1 > log.txt 2>&1 &", "run.sh", {}).notes


def test_the_first_of_several_calls_is_read_and_the_others_are_named():
    read = read_script(f"{CALL} a.b=1\n\n{CALL} a.b=2", "run.sh", {})
    assert read.options == {"a.b": "1"}
    assert read.notes == ["the script calls verl 2 times (lines 1, 3); this is the first call"]


@pytest.mark.parametrize(
    "wrapper",
    [
        "python -u -m verl.trainer.main_ppo",
        "PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo",
        "python3 verl/trainer/main_ppo.py",
        "python3 -m recipe.dapo.main_dapo",
        "python3 -m recipe.sppo.main_sppo",
        "python3 -m verl.experimental.fully_async_policy.fully_async_main",
        "nohup python3 -m verl.trainer.main_ppo",
        "srun --nodes=1 python3 -m verl.trainer.main_ppo",
        'ray job submit --runtime-env-json=\'{"a": "b=c"}\' --working-dir . -- python3 -m verl.trainer.main_ppo',
    ],
)
def test_calls_are_found_in_all_their_wrappers(wrapper):
    assert options(f"{wrapper} x.y=1")["x.y"] == "1"


def test_a_call_inside_a_quoted_command_is_found():
    assert options(f"N=3\nsrun bash -c \"cd x && {CALL} a.b=$N c.d='1 2'\"") == {"a.b": "3", "c.d": "1 2"}


@pytest.mark.parametrize("script", ["", "echo hello", "python3 train.py a.b=1", f"echo {CALL} a.b=1", "# " + CALL])
def test_a_script_without_a_call_of_verl_is_refused_in_one_sentence(script):
    with pytest.raises(
        ConfigError, match=r"^run\.sh: found no call of verl; expected a line such as `python3 -m [^\n]*$"
    ):
        options(script)


@pytest.mark.parametrize(("script", "line"), [("x='a\n", 1), ('a=1\nb="x\ny', 2), ("a=1\n\nb=$(c", 3), ("a=(1\n2", 1)])
def test_an_open_quote_or_bracket_is_named_with_its_line(script, line):
    with pytest.raises(ConfigError, match=rf"^run\.sh: line {line}: . is not closed$"):
        options(script)


def test_values_cannot_grow_without_end():
    script = "x=abcdefghij\n" + 'x="$x$x"\n' * 60 + f"{CALL} a.b=$x"
    assert len(options(script)["a.b"]) <= 2**18
    deep = "${a:-" * 3000 + "1" + "}" * 3000
    assert UNKNOWN in options(f"{CALL} a.b={deep}")["a.b"]
