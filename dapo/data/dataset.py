"""Load the configured datasets: the training stream and the evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dapo.config import PYTHON, Config, Source
from dapo.data.distinct import Distinct, answer_key, columns_key, question_key
from dapo.data.encode import encode, progress
from dapo.data.gym import MAX_ATTEMPTS, Gym, GymSource
from dapo.data.memory import Rows
from dapo.data.opening import begin_episodes
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import GYM, read_rows
from dapo.data.rows import Question, read_question
from dapo.data.stream import PromptSource, PromptStream, ShuffledSource
from dapo.environments.protocol import ROW_PROMPT, EnvironmentPool
from dapo.errors import DataError, counted
from dapo.model.template import check_template_tools, check_template_variables
from dapo.types import Phase, Prompt

MAX_CHARACTERS_PER_TOKEN = 256  # an upper bound on the average over a prompt; ordinary text has about 4


@dataclass(frozen=True, slots=True, eq=False)
class RunData:
    """The prompts of one run."""

    stream: PromptStream  # to train on
    eval_sets: Mapping[str, Sequence[Prompt]]  # by name; empty if the run does not evaluate
    notes: tuple[str, ...]  # messages for the user: how many rows were left out, and why

    def columns(self) -> set[str]:
        """Return the columns that a reward function can take by name, besides the prompt and the gold answer."""
        prompts = (prompt for members in self.eval_sets.values() for prompt in members)
        return self.stream.columns().union({"data_source"}, *(prompt.extra for prompt in prompts))


def load_run_data(
    config: Config,
    tokenizer: Any,
    seen: Collection[str] | None = (),
    given: Mapping[str, Rows] | None = None,
    environment: EnvironmentPool | None = None,
) -> RunData:
    """Load what the run trains and evaluates on. Without `eval.data` it evaluates on the training questions.

    Two rows are duplicates if question, answer and the columns that the judge sees are equal (`seen` None: all).
    `given` are the rows of `python:` sources, by path. An `environment` sees whole rows, and begins their episodes.
    """
    notes: list[str] = []
    sets = load_eval_sets(config, tokenizer, notes, seen, given, environment)
    # Evaluation questions are never trained on, even if this run does not evaluate.
    held_out = [prompt for prompts in sets.values() for prompt in prompts]
    stream = load_train_stream(config, tokenizer, held_out, seen, given, environment)
    if config.eval.k == 0:
        sets = {}
    elif not sets:
        sets = {Path(config.data.train[0].path.removeprefix(GYM).removeprefix(PYTHON)).stem: stream.questions()}
    return RunData(stream, sets, (*stream.notes, *notes))


def load_train_stream(
    config: Config,
    tokenizer: Any,
    held_out: Collection[Prompt] = (),
    seen: Collection[str] | None = (),
    given: Mapping[str, Rows] | None = None,
    environment: EnvironmentPool | None = None,
) -> PromptStream:
    """Return the training questions as one endless stream, without those held out for evaluation."""
    loader = _Loader(config, tokenizer, ("train",), held_out, seen, given, environment)
    sources = config.data.train
    finite = {i: loader.read(i, source) for i, source in enumerate(sources) if not _is_endless(source)}
    prompt_sources: list[PromptSource] = [
        ShuffledSource(loader.finish(i, source, finite[i]), config.run.seed, i)
        if i in finite
        else loader.endless_source(i, source)
        for i, source in enumerate(sources)
    ]
    return PromptStream(prompt_sources, [source.weight for source in sources], loader.notes)


def load_eval_sets(
    config: Config,
    tokenizer: Any,
    notes: list[str] | None = None,
    seen: Collection[str] | None = (),
    given: Mapping[str, Rows] | None = None,
    environment: EnvironmentPool | None = None,
) -> dict[str, list[Prompt]]:
    """Return the prompts of eval.data by set name. Messages about rows that were left out are appended to `notes`."""
    sets = {}
    for name, sources in (config.eval.data or {}).items():
        loader = _Loader(config, tokenizer, ("eval", name), (), seen, given, environment)
        found = [loader.read(i, source) for i, source in enumerate(sources)]
        sets[name] = [p for i, source in enumerate(sources) for p in loader.finish(i, source, found[i])]
        if notes is not None:
            notes += [f"evaluation set {name}: {note.removeprefix(f'{name}: ')}" for note in loader.notes]
    return sets


def _is_endless(source: Source) -> bool:
    return source.path.startswith(GYM) and source.size is None


class _Loader:
    """Loads the sources of one dataset, with duplicates and conflicts found across all of them.

    Call `read` for every source before the first `finish`: a later source may contradict an earlier one.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        scope: tuple[Phase] | tuple[Phase, str],
        held_out: Collection[Prompt],
        seen: Collection[str] | None,
        given: Mapping[str, Rows] | None,
        environment: EnvironmentPool | None,
    ) -> None:
        self.data = config.data
        self.tokenizer = tokenizer
        self.environment = environment
        check_template_variables(tokenizer, config.data.chat_template_kwargs)
        self.template_kwargs = dict(config.data.chat_template_kwargs)
        if environment is not None and environment.tools:
            check_template_tools(tokenizer)
            self.template_kwargs["tools"] = [dict(tool) for tool in environment.tools]
        self.opening = config.reward.think_tags[0] if config.reward.think_tags else None
        # `scope` is the phase and the name of the evaluation set, so that no two sets get the same gym items.
        self.seed = (config.run.seed, *scope)
        self.is_training = scope[0] == "train"
        self.prompt_format = PromptFormat.of(config.data.prompt_template, config.data.system_prompt)
        own = [(prompt.extra.get(ROW_PROMPT, prompt.messages), prompt.answer) for prompt in held_out]
        # Gym questions are told apart by question only, with and without an environment.
        self.held_out = frozenset({self._key(*row) for row in own} | {question_key(messages) for messages, _ in own})
        self.seen, self.given = seen if environment is None else None, given
        self.rows = Distinct()
        self.items = Distinct()  # gym questions, by question only: they can have several right answers
        self.failed_items: Counter[int] = Counter()  # by source: gym items without a question or an answer
        self.notes: list[str] = []

    def read(self, index: int, source: Source) -> list[Question]:
        """Read the questions of a source that no earlier row or source has."""
        if source.path.startswith(GYM):
            return self._read_gym(index, source)
        questions = []
        rows = read_rows(source, self.given, columns=self.data.columns)
        for where, row in progress(rows, f"Reading {source.path}"):
            if isinstance(row, DataError):
                raise row
            question = read_question(where, row, self.prompt_format)
            key = self._key(question.messages, question.answer)
            columns = columns_key(question.data_source, question.extra, self.seen)
            is_new = self.rows.add(key, answer_key(question.answer), index, columns)
            if is_new or not self.data.deduplicate:
                is_variant = self.rows.is_variant(key, columns)
                questions.append(replace(question, variant=columns.hex()) if is_variant else question)
        if not self.rows.counts(index).rows:
            raise DataError(
                f"{source.path.removeprefix(PYTHON)}: no rows; expected one question with its answer per row"
            )
        return questions

    def finish(self, index: int, source: Source, found: Sequence[Question]) -> list[Prompt]:
        """Tokenize the questions, leaving out conflicts, held-out questions and prompts that are too long.

        How many were left out is added to `notes`.
        """
        is_gym = source.path.startswith(GYM)
        row_counts = (self.items if is_gym else self.rows).counts(index)
        counts = row_counts.summary("item" if is_gym else "row", are_left_out=self.data.deduplicate)
        summary = [f"{source.path.removeprefix(PYTHON)}: {counts}"]
        if self.failed_items[index]:
            summary.append(f"{counted(self.failed_items[index], 'item')} that the task failed to generate left out")
        keyed = [
            (question_key(question.messages) if is_gym else self._key(question.messages, question.answer), question)
            for question in found
        ]
        keeps_all = is_gym or not self.data.deduplicate
        agreed = [(key, question) for key, question in keyed if keeps_all or not self.rows.is_conflict(key)]
        questions = [question for key, question in agreed if key not in self.held_out]
        if len(questions) < len(agreed):
            summary.append(f"{counted(len(agreed) - len(questions), 'question')} held out for evaluation left out")
        short = [question for question in questions if self._may_fit(question)]
        label = f"Tokenizing {source.path}"
        prompts = [self._check_length(p, q.where) for p, q in zip(self._encode(short, label), short, strict=True)]
        kept = [prompt for prompt in prompts if prompt is not None]
        if len(kept) < len(questions):
            too_long = counted(len(questions) - len(kept), "prompt")
            summary.append(f"{too_long} over {self.data.max_prompt_length:,} tokens left out")
        unanswered = sum(1 for prompt in kept if prompt.answer is None)
        if unanswered and not is_gym:
            summary.append(f"{unanswered:,} without an answer")
        self.notes.append(", ".join(summary))
        if not kept:
            all_held_out = agreed and not questions
            hint = "; to evaluate on the training questions, leave eval.data unset" if all_held_out else ""
            raise DataError(f"{', '.join(summary)}; no question is left{hint}")
        return kept

    def endless_source(self, index: int, source: Source) -> GymSource:
        """Return a reasoning-gym task as an endless source."""
        gym = Gym(source, (*self.seed, index))
        self.notes.append(f"{gym.name}: endless, questions are generated as they are drawn")
        return GymSource(gym, self.prompt_format, self._usable, self.held_out)

    def _read_gym(self, index: int, source: Source) -> list[Question]:
        """Generate `size` items for training, or for evaluation as many as give `size` distinct questions."""
        gym = Gym(source, (*self.seed, index))
        size = source.size
        if size is None:
            raise DataError(f"{gym.name}: give a `size` to evaluate on it, because the task is endless")
        questions: list[Question] = []
        position, last_new, reason = 0, -1, "a repeat"
        while position < size if self.is_training else len(questions) < size:
            try:
                question = gym.question(position, self.prompt_format)
            except DataError as error:
                self.failed_items[index] += 1
                reason = str(error)
            else:
                if self.items.add(question_key(question.messages), b"", index) or not self.data.deduplicate:
                    questions.append(question)
                    last_new = position
            if position - last_new >= MAX_ATTEMPTS and not self.is_training:
                raise DataError(
                    f"{gym.name}: asked for {counted(size, 'distinct question')}, but after {len(questions):,} the "
                    f"next {MAX_ATTEMPTS:,} items gave no new one (for example: {reason}); lower `size`, or change "
                    "`params`"
                )
            position += 1
        return questions

    def _key(self, messages: Iterable[Mapping[str, str]], answer: Any) -> bytes:
        """Return the key of a question. With an environment the answer is part of it: it is a hidden state, of which
        the same question may have several.
        """
        key = question_key(messages)
        return key if self.environment is None else key + answer_key(answer)

    def _encode(self, questions: Sequence[Question], label: str) -> list[Prompt]:
        if self.environment is not None:
            questions = begin_episodes(questions, self.environment)
        return encode(questions, self.tokenizer, label, template_kwargs=self.template_kwargs, opening=self.opening)

    def _usable(self, question: Question) -> Prompt | None:
        """Tokenize one question; return None if it is too long."""
        if not self._may_fit(question):
            return None
        (prompt,) = self._encode([question], question.where)
        return self._check_length(prompt, question.where)

    def _may_fit(self, question: Question) -> bool:
        """Return whether the text is short enough to try: tokenizing a million characters takes over a second."""
        characters = sum(len(message["content"]) for message in question.messages)
        if characters <= MAX_CHARACTERS_PER_TOKEN * self.data.max_prompt_length:
            return True
        if self.data.overlong_prompts == "drop":
            return False
        raise DataError(
            f"{question.where}: the prompt has {characters:,} characters, more than fit into data.max_prompt_length = "
            f"{self.data.max_prompt_length:,} tokens; raise the limit, or set data.overlong_prompts to drop"
        )

    def _check_length(self, prompt: Prompt, where: str) -> Prompt | None:
        """Return the prompt, or None if it is too long and such prompts are dropped."""
        if len(prompt.tokens) <= self.data.max_prompt_length:
            return prompt
        if self.data.overlong_prompts == "drop":
            return None
        raise DataError(
            f"{where}: the prompt has {len(prompt.tokens):,} tokens, more than data.max_prompt_length = "
            f"{self.data.max_prompt_length:,}; raise the limit, or set data.overlong_prompts to drop"
        )
