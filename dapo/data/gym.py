"""Questions from reasoning-gym: any number of them per task, each rebuilt at will from a seed and an index."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from dapo.config import Source
from dapo.data.distinct import question_key
from dapo.data.readers import GYM, one_line
from dapo.data.rows import Question
from dapo.data.wording import Wording
from dapo.errors import DataError
from dapo.types import Prompt

# Some tasks lay out all their items when they are made: a task is made for this many items, and then made again.
BLOCK = 500
MAX_ATTEMPTS = 1000

_NOT_REBUILT = "makes other items in every process, so that neither a resumed run nor a judge would see the same ones"

# Tasks that cannot be trained on, and what the user is told. Found by making up to 500 items of every task in two
# processes, and by scoring junk and the answers to other questions. Three more tasks (intermediate_integration,
# knight_swap, word_ladder) make the same questions with other sample answers, which their scorers do not look at.
REFUSED = {
    "codeio": "runs downloaded programs whose output changes and which write files",
    "coin_flip": "gives its full score to 0 wherever the answer begins with 0",
    "composite": "is a mix of tasks; name several datasets with weights instead",
    "game_of_life_halting": "gives its full score to any answer",
    "isomorphic_strings": _NOT_REBUILT,
    "list_functions": _NOT_REBUILT,
    "polynomial_multiplication": _NOT_REBUILT,
    "puzzle24": "gives its full score to any sum that makes 24, whatever the numbers of the question",
    "ransom_note": _NOT_REBUILT,
}


class Gym:
    """One task with its parameters and its seed."""

    def __init__(self, source: Source, seed: tuple[object, ...]) -> None:
        self.name = source.path
        self.task = source.path.removeprefix(GYM)
        self._factory = _factory(self.name)
        self._check_task()
        self.params = self._checked(source.params)
        digest = hashlib.blake2b(json.dumps(seed).encode(), digest_size=8).digest()
        self.seed = int.from_bytes(digest, "big") % 2**31  # some tasks seed numpy, which takes 32 bits
        # Making a task can take a third of a second, and stepping through the items needs one or two at a time.
        self._make: Callable[[int], Any] = lru_cache(maxsize=4)(self._make_task)
        self._make(self.seed)  # now, because wrong parameters are refused here

    def question(self, index: int, wording: Wording) -> Question:
        return self._read(self.seed + index // BLOCK * BLOCK, index % BLOCK, f"{self.name}, item {index}", wording)

    def substitute(self, index: int, attempt: int, wording: Wording) -> Question:
        """In place of an item that cannot be used: from a sequence that this item has to itself."""
        digest = hashlib.blake2b(f"{self.seed} {index} {attempt // BLOCK}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") % 2**31
        where = f"{self.name}, item {index}, attempt {attempt + 2}"
        return self._read(seed, attempt % BLOCK, where, wording)

    def identity(self) -> str:
        return json.dumps([self.name, self.params, self.seed], sort_keys=True)

    def _read(self, seed: int, index: int, where: str, wording: Wording) -> Question:
        try:
            entry = self._make(seed)[index]
        except Exception as error:  # the task's own code, with parameters that it did not refuse
            raise DataError(f"{where}: the task made no item ({type(error).__name__}: {one_line(error)})") from None
        text, answer = entry["question"], entry["answer"]
        gold = None if answer is None else str(answer)  # some tasks accept any answer that fits, and know none
        if gold is not None and not gold.strip():  # base_conversion writes 0 so
            raise DataError(f"{where}: the task made a question whose answer is empty")
        origin = {"task": self.task, "params": self.params, "seed": seed, "index": index, "check": fingerprint(text)}
        return Question(where, wording.put(text), gold, self.name, {"gym": origin}, True, has_one_answer=False)

    def _make_task(self, seed: int) -> Any:
        try:
            return self._factory.create_dataset(self.task, seed=seed, **self.params)
        except Exception as error:  # asserts and errors of all kinds
            shown = {name: value for name, value in self.params.items() if name != "size"}
            raise DataError(
                f"{self.name}: the task refuses params {shown} ({type(error).__name__}: {one_line(error)})"
            ) from None

    def _check_task(self) -> None:
        if self.task in REFUSED:
            raise DataError(f"{self.name}: this task cannot be used, because it {REFUSED[self.task]}")
        if self.task not in self._factory.DATASETS:
            raise DataError(f"{self.name}: no such task in reasoning-gym{_suggest(self.task, self._factory.DATASETS)}")

    def _checked(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with the size of a block, as the judge will get them: through JSON."""
        names = [field.name for field in dataclasses.fields(self._factory.DATASETS[self.task][1])]
        names = [name for name in names if name not in ("seed", "size")]
        for name in params:
            if name in ("seed", "size"):
                raise DataError(
                    f"{self.name}: params may not hold '{name}'; the seed follows from run.seed, and the number of "
                    "items is `size` beside `path`"
                )
            if name not in names:
                raise DataError(
                    f"{self.name}: unknown parameter '{name}'{_suggest(name, names)}; there are {', '.join(names)}"
                )
        try:
            return json.loads(json.dumps({**params, "size": BLOCK}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.name}: params must be JSON values ({one_line(error)})") from None


class GymDeck:
    """A task without end. The item at a position, or what stands in for one that may not be drawn."""

    def __init__(
        self, gym: Gym, wording: Wording, usable: Callable[[Question], Prompt | None], held_out: Collection[bytes]
    ) -> None:
        self.gym = gym
        self.wording = wording
        self.usable = usable  # the prompt, or None where it is too long
        self.held_out = held_out

    def draw(self, position: int) -> Prompt:
        reason = ""
        for attempt in range(MAX_ATTEMPTS):
            try:
                question = (
                    self.gym.question(position, self.wording)
                    if attempt == 0
                    else self.gym.substitute(position, attempt - 1, self.wording)
                )
            except DataError as error:  # an item that the task fails to make is passed over like one that is too long
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
        raise DataError(f"{self.gym.name} is endless; name eval.data")


def fingerprint(question: str) -> str:
    """The judge makes the item again from its seed: by this it knows that it is the same one."""
    return hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _factory(name: str) -> Any:
    try:
        import reasoning_gym.factory
    except ImportError:
        raise DataError(f"{name}: needs the package reasoning-gym: pip install 'dapo[gym]'") from None
    return reasoning_gym.factory


def _suggest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
