"""Datasets to prompts: what the trainer draws from, and what it is evaluated on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from dapo.config import Config, Source
from dapo.data.distinct import Distinct, answer_key, counted, question_key
from dapo.data.encode import encode, progress
from dapo.data.gym import MAX_ATTEMPTS, Gym, GymDeck
from dapo.data.readers import GYM, read_rows
from dapo.data.rows import Question, read_question
from dapo.data.stream import Deck, PromptStream, Shuffled
from dapo.data.wording import Wording
from dapo.errors import DataError
from dapo.types import Phase, Prompt

MAX_CHARACTERS_PER_TOKEN = 256  # on average over a prompt; text has about four


def load_train_stream(config: Config, tokenizer: Any, held_out: Collection[Prompt] = ()) -> PromptStream:
    """The training questions as one endless stream, without those that are held out for evaluation."""
    loader = _Loader(config, tokenizer, ("train",), held_out)
    sources = config.data.train
    finite = {i: loader.read(i, source) for i, source in enumerate(sources) if not _is_endless(source)}
    decks: list[Deck] = [
        Shuffled(loader.finish(i, source, finite[i]), config.run.seed, i) if i in finite else loader.endless(i, source)
        for i, source in enumerate(sources)
    ]
    return PromptStream(decks, [source.weight for source in sources], loader.notes)


def load_eval_sets(config: Config, tokenizer: Any, notes: list[str] | None = None) -> dict[str, list[Prompt]]:
    """The questions of eval.data by the name of their set; sentences about rows left out are added to `notes`."""
    sets = {}
    for name, sources in (config.eval.data or {}).items():
        loader = _Loader(config, tokenizer, ("eval", name))
        found = [loader.read(i, source) for i, source in enumerate(sources)]
        sets[name] = [p for i, source in enumerate(sources) for p in loader.finish(i, source, found[i])]
        if notes is not None:
            notes += [f"evaluation set {name}: {note}" for note in loader.notes]
    return sets


def _is_endless(source: Source) -> bool:
    return source.path.startswith(GYM) and source.size is None


class _Loader:
    """Reads the sources of one set: all rows first, because a later source may contradict an earlier one."""

    def __init__(
        self, config: Config, tokenizer: Any, place: tuple[Phase] | tuple[Phase, str], held_out: Collection[Prompt] = ()
    ) -> None:
        self.data = config.data
        self.tokenizer = tokenizer
        self.seed = (config.run.seed, *place)
        self.is_training = place[0] == "train"
        self.wording = Wording.of(config.data.prompt_template, config.data.system_prompt)
        self.held_out = frozenset(question_key(prompt.messages) for prompt in held_out)
        self.rows = Distinct()
        self.items = Distinct()  # gym questions can have several right answers: for them only the question counts
        self.unmade: Counter[int] = Counter()  # gym items without a question or an answer, by source
        self.notes: list[str] = []

    def read(self, index: int, source: Source) -> list[Question]:
        """The first row of every question that no earlier source holds."""
        if source.path.startswith(GYM):
            return self._read_gym(index, source)
        questions = []
        for where, row in progress(read_rows(source), f"Reading {source.path}"):
            if isinstance(row, DataError):
                raise row
            question = read_question(where, row, self.wording)
            if self.rows.add(question_key(question.messages), answer_key(question.answer), index):
                questions.append(question)
        if not self.rows.repeats(index).rows:
            raise DataError(f"{source.path}: no rows; expected one question with its answer per row")
        return questions

    def finish(self, index: int, source: Source, found: Sequence[Question]) -> list[Prompt]:
        """Tokenised, without conflicts, held-out questions and prompts that are too long; a note says how many."""
        is_gym = source.path.startswith(GYM)
        repeats = (self.items if is_gym else self.rows).repeats(index)
        story = [f"{source.path}: {repeats.sentence('item' if is_gym else 'row')}"]
        if self.unmade[index]:
            story.append(f"{counted(self.unmade[index], 'item')} that the task failed to make left out")
        keyed = [(question_key(question.messages), question) for question in found]
        agreed = [(key, question) for key, question in keyed if is_gym or not self.rows.is_conflict(key)]
        questions = [question for key, question in agreed if key not in self.held_out]
        if len(questions) < len(agreed):
            story.append(f"{counted(len(agreed) - len(questions), 'question')} held out for evaluation left out")
        short = [question for question in questions if self._may_fit(question)]
        prompts = [self._fits(p, q.where) for p, q in zip(self._encode(short, source), short, strict=True)]
        kept = [prompt for prompt in prompts if prompt is not None]
        if len(kept) < len(questions):
            too_long = counted(len(questions) - len(kept), "prompt")
            story.append(f"{too_long} over {self.data.max_prompt_length:,} tokens left out")
        unanswered = sum(1 for prompt in kept if prompt.answer is None)
        if unanswered and not is_gym:
            story.append(f"{unanswered:,} without an answer")
        self.notes.append(", ".join(story))
        if not kept:
            remedy = "; without eval.data the training questions are evaluated" if agreed and not questions else ""
            raise DataError(f"{', '.join(story)}; no question is left{remedy}")
        return kept

    def endless(self, index: int, source: Source) -> GymDeck:
        gym = Gym(source, (*self.seed, index))
        self.notes.append(f"{gym.name}: made as they are drawn, without end")
        return GymDeck(gym, self.wording, self._usable, self.held_out)

    def _read_gym(self, index: int, source: Source) -> list[Question]:
        gym = Gym(source, (*self.seed, index))
        size = source.size
        if size is None:
            raise DataError(f"{gym.name}: give a `size` to evaluate on it; the task has no end of questions")
        questions: list[Question] = []
        position, last_new, reason = 0, -1, "a repeat"
        while position < size if self.is_training else len(questions) < size:
            try:
                question = gym.question(position, self.wording)
            except DataError as error:
                self.unmade[index] += 1
                reason = str(error)
            else:
                if self.items.add(question_key(question.messages), b"", index):
                    questions.append(question)
                    last_new = position
            if position - last_new >= MAX_ATTEMPTS and not self.is_training:
                raise DataError(
                    f"{gym.name}: asked for {counted(size, 'distinct question')}, but after {len(questions):,} the "
                    f"next {MAX_ATTEMPTS:,} items gave no new one (such as {reason}); lower `size`, or change `params`"
                )
            position += 1
        return questions

    def _encode(self, questions: Sequence[Question], source: Source) -> list[Prompt]:
        return encode(questions, self.tokenizer, f"Tokenising {source.path}")

    def _usable(self, question: Question) -> Prompt | None:
        if not self._may_fit(question):
            return None
        (prompt,) = encode([question], self.tokenizer)
        return self._fits(prompt, question.where)

    def _may_fit(self, question: Question) -> bool:
        """Whether it is worth tokenizing, which takes more than a second per million characters."""
        characters = sum(len(message["content"]) for message in question.messages)
        if characters <= MAX_CHARACTERS_PER_TOKEN * self.data.max_prompt_length:
            return True
        if self.data.overlong_prompts == "drop":
            return False
        raise DataError(
            f"{question.where}: the prompt has {characters:,} characters, more than fit into data.max_prompt_length = "
            f"{self.data.max_prompt_length:,} tokens"
        )

    def _fits(self, prompt: Prompt, where: str) -> Prompt | None:
        if len(prompt.tokens) <= self.data.max_prompt_length:
            return prompt
        if self.data.overlong_prompts == "drop":
            return None
        raise DataError(
            f"{where}: the prompt has {len(prompt.tokens):,} tokens, more than data.max_prompt_length = "
            f"{self.data.max_prompt_length:,}"
        )
