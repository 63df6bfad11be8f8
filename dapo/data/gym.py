"""Questions from reasoning-gym tasks. Each item can be generated again from a seed and an index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from dapo.config import Source
from dapo.data.distinct import question_key
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import GYM
from dapo.data.rows import Question
from dapo.errors import DataError, did_you_mean, first_line
from dapo.system.digest import text_digest
from dapo.system.install import install_hint
from dapo.types import Prompt

# Some tasks generate all their items when they are created. So a task is created for this many items at a time.
BLOCK = 500
MAX_ATTEMPTS = 1000  # unusable items in a row before giving up

_NOT_REPRODUCIBLE = (
    "generates different items in every process, so that a resumed run or the judge would see other ones"
)

# Tasks that cannot be used, with the reason for the error message. Found by generating up to 500 items of every task in
# two processes, and by scoring junk and answers to other questions. Three more tasks (intermediate_integration,
# knight_swap, word_ladder) give other sample answers in every process, but their scorers do not use the sample answer.
REFUSED = {
    "codeio": "runs downloaded programs whose output changes and which write files",
    "coin_flip": "gives the full score to 0 whenever the right answer begins with 0",
    "composite": "is a mix of tasks; list several sources with weights instead",
    "game_of_life_halting": "gives the full score to any answer",
    "isomorphic_strings": _NOT_REPRODUCIBLE,
    "list_functions": _NOT_REPRODUCIBLE,
    "polynomial_multiplication": _NOT_REPRODUCIBLE,
    "puzzle24": "gives the full score to any expression that makes 24, whatever numbers the question allows",
    "ransom_note": _NOT_REPRODUCIBLE,
}


class Gym:
    """One task with its parameters and seed."""

    def __init__(self, source: Source, seed: tuple[object, ...]) -> None:
        self.name = source.path
        self.task = source.path.removeprefix(GYM)
        self._factory = _import_factory(self.name)
        self._check_task()
        self.params = self._check_params(source.params)
        self.seed = _seed(json.dumps(seed))
        # Creating a task can take a third of a second. Reading items in order needs one or two tasks at a time.
        self._create: Callable[[int], Any] = lru_cache(maxsize=4)(self._create_task)
        self._create(self.seed)  # now, so that wrong parameters are reported before the run starts

    def question(self, index: int, prompt_format: PromptFormat) -> Question:
        """Return the item at `index`. Block b of BLOCK items has the seed `self.seed` + b x BLOCK."""
        return self._read(
            self.seed + index // BLOCK * BLOCK, index % BLOCK, f"{self.name}, item {index}", prompt_format
        )

    def substitute(self, index: int, attempt: int, prompt_format: PromptFormat) -> Question:
        """Return a replacement for an unusable item, from a sequence of items used only for this index."""
        seed = _seed(f"{self.seed} {index} {attempt // BLOCK}")
        where = f"{self.name}, item {index}, attempt {attempt + 2}"  # the item itself was attempt 1
        return self._read(seed, attempt % BLOCK, where, prompt_format)

    def identity(self) -> str:
        return json.dumps([self.name, self.params, self.seed], sort_keys=True)

    def _read(self, seed: int, index: int, where: str, prompt_format: PromptFormat) -> Question:
        try:
            entry = self._create(seed)[index]
        except Exception as error:  # the task's own code can raise anything
            raise DataError(
                f"{where}: the task failed to generate the item ({type(error).__name__}: {first_line(error)})"
            ) from None
        text, answer = entry["question"], entry["answer"]
        gold = None if answer is None else str(answer)  # some tasks have no gold answer, only a scorer
        if gold is not None and not gold.strip():  # base_conversion writes 0 as an empty string
            raise DataError(f"{where}: the task generated a question with an empty answer")
        # By `check` the judge sees that it generated the same question again.
        origin = {"task": self.task, "params": self.params, "seed": seed, "index": index, "check": text_digest(text)}
        return Question(
            where, prompt_format.messages(text), gold, self.name, {"gym": origin}, True, has_one_answer=False
        )

    def _create_task(self, seed: int) -> Any:
        try:
            return self._factory.create_dataset(self.task, seed=seed, **self.params)
        except Exception as error:  # tasks check their parameters with assert and with many kinds of exceptions
            shown = {name: value for name, value in self.params.items() if name != "size"}
            raise DataError(
                f"{self.name}: the task rejects params {shown} ({type(error).__name__}: {first_line(error)})"
            ) from None

    def _check_task(self) -> None:
        if self.task in REFUSED:
            raise DataError(f"{self.name}: this task cannot be used, because it {REFUSED[self.task]}")
        if self.task not in self._factory.DATASETS:
            raise DataError(
                f"{self.name}: no such task in reasoning-gym{did_you_mean(self.task, self._factory.DATASETS)}"
            )

    def _check_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Check the parameters, add the block size, and return them as the judge will get them: through JSON."""
        names = [field.name for field in dataclasses.fields(self._factory.DATASETS[self.task][1])]
        names = [name for name in names if name not in ("seed", "size")]
        for name in params:
            if name in ("seed", "size"):
                raise DataError(
                    f"{self.name}: params must not contain '{name}'; the seed is derived from run.seed, and the number "
                    "of items is `size` beside `path`"
                )
            if name not in names:
                raise DataError(
                    f"{self.name}: unknown parameter '{name}'; the task takes {', '.join(names)}"
                    f"{did_you_mean(name, names)}"
                )
        try:
            return json.loads(json.dumps({**params, "size": BLOCK}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.name}: params must be JSON values ({first_line(error)})") from None


class GymSource:
    """An endless source: the task's items by position, with replacements for items that cannot be used."""

    def __init__(
        self,
        gym: Gym,
        prompt_format: PromptFormat,
        usable: Callable[[Question], Prompt | None],
        held_out: Collection[bytes],
    ) -> None:
        self.gym = gym
        self.prompt_format = prompt_format
        self.usable = usable  # returns the prompt, or None if it is too long
        self.held_out = held_out

    def draw(self, position: int) -> Prompt:
        """Return the first usable prompt among the item at `position` and its replacements."""
        reason = ""
        for attempt in range(MAX_ATTEMPTS):
            try:
                question = (
                    self.gym.question(position, self.prompt_format)
                    if attempt == 0
                    else self.gym.substitute(position, attempt - 1, self.prompt_format)
                )
            except DataError as error:  # the task failed to generate it
                reason = str(error)
                continue
            if question_key(question.messages) in self.held_out:
                reason = "held out for evaluation"
                continue
            prompt = self.usable(question)
            if prompt is not None:
                return prompt
            reason = "longer than data.max_prompt_length"
        raise DataError(
            f"{self.gym.name}: {MAX_ATTEMPTS:,} items in a row cannot be used for position {position}; the last one: "
            f"{reason}"
        )

    def identity(self) -> str:
        return self.gym.identity()

    def questions(self) -> list[Prompt]:
        raise DataError(f"{self.gym.name} is endless, so it cannot be evaluated as a whole; set eval.data")

    def columns(self) -> set[str]:
        return {"gym"}

    def has_answers(self) -> bool:
        return True


def _seed(text: str) -> int:
    """Return a seed of 31 bits: some tasks seed numpy, which takes at most 32."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31


def _import_factory(name: str) -> Any:
    try:
        import reasoning_gym.factory
    except ImportError:
        raise DataError(f"{name}: needs the package reasoning-gym: {install_hint('gym')}") from None
    return reasoning_gym.factory
