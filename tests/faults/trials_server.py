"""The server process of `trials`: imports everything once, then forks one process per run."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from dapo.cli import sentences
from dapo.config import Config
from dapo.training.trainer import Trainer
from tests import runs
from tests.faults.interpose import Mode, arm
from tests.tiny import save_tiny


def reward(completion: str, answer: int) -> dict[str, Any]:
    """Score by letters, as tests.runs.REWARD does, so that some groups are kept and some dropped."""
    letters = sum(character.isalpha() for character in completion)
    return {"score": letters / 8, "acc": letters % 3 == answer % 2}


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        recipe = Path(job["folder"]) / "recipe.yaml"
        if not recipe.exists():
            recipe = _recipe(Path(job["folder"]))
        child = os.fork()
        if child == 0:
            _train(job, recipe)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)


def _recipe(folder: Path) -> Path:
    """Write the recipe of the smallest run in which groups are kept, dropped and carried over."""
    save_tiny(folder / "model", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    sizes = {"train_batch_size": 2, "gen_batch_size": 4, "max_response_length": 4}
    return runs.recipe(folder, data={"train": str(folder / "data.jsonl"), "max_prompt_length": 64, **sizes})


def _train(job: dict[str, Any], recipe: Path) -> None:
    """Train in this forked process, and exit; does not return."""
    code = 1
    try:
        with Path(job["output"]).open("w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        config = Config.load(recipe, job["overrides"])
        has_begun = _has_begun(config.run_dir / "run.db")
        arm(Path(job["root"]), Mode(job["mode"]), job["at"], Path(job["log"]) if job["log"] else None)
        with sentences():
            trainer = Trainer(config, reward, resume=has_begun, quiet=True)
            try:
                trainer.train()
            finally:
                trainer.close()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _has_begun(database: Path) -> bool:
    """Return whether to resume, as a user would decide: a database that was never begun is empty."""
    import sqlite3

    if not database.exists():
        return False
    connection = sqlite3.connect(database)
    try:
        return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
    finally:
        connection.close()


if __name__ == "__main__":
    main()
