"""`dapo train --dry-run`: checks everything that a run needs, short of loading weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dapo.cluster.ray_connection import check_room, check_run_dir, needs_ray
from dapo.config import Config, Source
from dapo.data.dataset import RunData, load_eval_sets, load_train_stream
from dapo.data.opening import begin_episodes
from dapo.data.prompt_format import PromptFormat
from dapo.data.readers import GYM, find_files, read_rows
from dapo.data.rows import read_question
from dapo.data.stream import ShuffledSource, any_answers
from dapo.engine.vllm.arguments import require_vllm
from dapo.environments.pool import build_environment
from dapo.environments.protocol import EnvironmentPool
from dapo.errors import DapoError, DataError, RunExists
from dapo.model.forward import free_memory
from dapo.model.loading import check_architecture, find_path, load_vocabulary, resolve_device
from dapo.model.lora import check_targets
from dapo.model.tokens import token_bytes
from dapo.model.weights import check_folder
from dapo.plan.dry_run import on_gpu, planned_checkpoint, training_memory
from dapo.plan.shapes import find_shape
from dapo.policy.rules import UpdateRules
from dapo.rewards.judge import check_columns, check_judges, columns_seen, isolation_note, judge_kinds, judge_specs
from dapo.rewards.signature import Kind
from dapo.sampling.episodes import Environment
from dapo.sampling.rules import group_rules
from dapo.store.trackers import require_trackers
from dapo.system.machine import free_disk, memory, size_text
from dapo.training.disk import disk_plan, disk_warning
from dapo.training.run_directory import RunDirectory, is_locked

_MODEL = "model:"


@dataclass(frozen=True, slots=True)
class Findings:
    """Sentences about a run that has not started: what is there, what is doubtful, and what is missing."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the error of the block, so that the checks after it still run."""
        try:
            yield
        except DapoError as error:
            if str(error) not in self.missing:
                self.missing.append(str(error))

    def lines(self) -> list[str]:
        """Return a line for each sentence but those about what is missing, which are raised, and so printed last."""
        marked = [("ok", self.notes), ("warning", self.warnings)]
        return [f"  {mark:<9} {sentence}" for mark, sentences in marked for sentence in sentences]


def check_run(
    config: Config, *, resume: bool = False, has_given_name: bool = False, reads_data: bool = True
) -> Findings:
    """Check folder, reward, environment, model, data, trackers, cluster, memory and disk. It leaves no files."""
    found = Findings()
    _check_folder(found, config, resume, has_given_name)
    kinds = _check_judges(found, config)
    for check in (UpdateRules.of, group_rules):  # loss, schedule, advantage, filter and shaping, also from files
        with found.collecting():
            check(config)
    tokenizer = _check_model(found, config)
    with _environment(found, config) as environment:
        if reads_data and tokenizer is None:
            _read_data(found, config, kinds, environment)
        elif reads_data:
            _load_data(found, config, tokenizer, kinds, environment)
        if tokenizer is not None:
            with found.collecting():
                Environment.of(config, environment, tokenizer)  # raises if the chat template cannot be continued
    if config.eval.data and config.eval.k == 0:
        found.warnings.append("eval: eval.data is set, but nothing is evaluated, because eval.k is 0")
    for name in config.run.trackers:
        with found.collecting():
            require_trackers([name])
    with found.collecting():
        if config.uses_vllm:
            require_vllm()
    with found.collecting():
        check_run_dir(config)
        if needs_ray(config):
            check_room(config)
    _check_resources(found, config)
    return found


def _check_folder(found: Findings, config: Config, resume: bool, has_given_name: bool) -> None:
    """Take the run's lock and give it back, which shows whether the folder can be written and what it holds."""
    with found.collecting():
        try:
            RunDirectory(config, resume=resume).abandon()
            found.notes.append(f"run: {config.run_dir} " + ("can resume" if resume else "can be written"))
        except RunExists:
            if resume or has_given_name:
                raise
            held = "holds a run that is training now" if is_locked(config.run_dir) else "holds another run"
            found.notes.append(f"run: {config.run_dir} {held}, so this one gets the next free name")


def _check_judges(found: Findings, config: Config) -> list[tuple[str, Kind]]:
    """Import each reward function in a process of its own, and return the properties of the judges."""
    kinds: list[tuple[str, Kind]] = []
    for spec in judge_specs(config.reward):
        with found.collecting():
            options = config.reward.model_copy(update={"use": spec})
            check_judges(options)
            if spec.startswith(_MODEL):
                path = spec.removeprefix(_MODEL)
                if (folder := find_path(path)) is not None:
                    check_folder(folder, path)
            else:
                kinds += judge_kinds(options, None)
                isolation_note(options)  # raises if programs cannot be run safely here
            if config.environment.use != "guess":  # it scores every episode itself
                found.notes.append(f"reward: {spec}")
    return kinds


def _check_model(found: Findings, config: Config) -> Any:
    """Check configuration, tokenizer and context length; return the tokenizer if the model is on this machine."""
    tokenizer = None
    with found.collecting():
        if config.cluster.learners == 1:
            resolve_device(config.model.device)
    with found.collecting():
        folder = find_path(config.model.path)
        if folder is None:
            found.warnings.append(
                f"model: {config.model.path} is not on this machine, so its template and context length are not "
                "checked; the run fetches it"
            )
            return None
        tokenizer = _load_tokenizer(str(folder))
        if config.rollout.stop:
            token_bytes(tokenizer)
        model = check_architecture(folder, config.longest)
        if config.model.lora.rank > 0:
            check_targets(model, config.model.lora.target_modules)
        found.notes.append(
            f"model: {config.model.path}, with room for prompts and responses of {config.longest:,} tokens"
        )
    return tokenizer


@functools.lru_cache(maxsize=1)
def _load_tokenizer(folder: str) -> Any:
    """Load a tokenizer, which takes seconds; most arms of an ablation have the same one."""
    return load_vocabulary(folder)[0]


@contextmanager
def _environment(found: Findings, config: Config) -> Iterator[EnvironmentPool | None]:
    """Load the environment in one process, in which the episodes of the data begin."""
    options = config.environment.model_copy(update={"workers": 1})
    environment = _collected(found, lambda: build_environment(config.model_copy(update={"environment": options})))
    if environment is not None:
        tools = ", ".join(tool["function"]["name"] for tool in environment.tools)
        found.notes.append(f"environment: {options.use}" + (f", with the tools {tools}" if tools else ""))
    try:
        yield environment
    finally:
        if environment is not None:
            environment.close()


def _sources(config: Config) -> list[Source]:
    return [*config.data.train, *(source for members in (config.eval.data or {}).values() for source in members)]


def _find_files(found: Findings, config: Config) -> bool:
    """Look for the files of every source; return whether all are there."""
    before = len(found.missing)
    for source in _sources(config):
        with found.collecting():
            if not source.path.startswith(GYM):
                find_files(source.path)
    return len(found.missing) == before


def _load_data(
    found: Findings,
    config: Config,
    tokenizer: Any,
    kinds: Sequence[tuple[str, Kind]],
    environment: EnvironmentPool | None,
) -> None:
    """Load the data as the run does: read, deduplicate, apply the chat template, and compare with the reward."""
    if not _find_files(found, config):
        return
    seen, notes = columns_seen(kinds), list[str]()
    sets = _collected(found, lambda: load_eval_sets(config, tokenizer, notes, seen, None, environment))
    held_out = [prompt for prompts in (sets or {}).values() for prompt in prompts]
    stream = _collected(found, lambda: load_train_stream(config, tokenizer, held_out, seen, None, environment))
    if sets is None or stream is None:
        return
    data = RunData(stream, sets, (*stream.notes, *notes))
    found.notes.extend(f"data: {note}" for note in data.notes)
    _compare_columns(found, kinds, data.columns(), environment is not None or stream.has_answers())
    if environment is None:
        trained = [
            prompt for source in stream.sources if isinstance(source, ShuffledSource) for prompt in source.prompts
        ]
        for name, prompts in (("training", trained), ("evaluation", held_out)):
            _warn_of_unanswered(found, kinds, name, [any_answers([prompt]) for prompt in prompts])


def _read_data(
    found: Findings, config: Config, kinds: Sequence[tuple[str, Kind]], environment: EnvironmentPool | None
) -> None:
    """Read every row without the model's tokenizer."""
    if not _find_files(found, config):
        return
    prompt_format = _collected(found, lambda: PromptFormat.of(config.data.prompt_template, config.data.system_prompt))
    columns, before = {"data_source"}, len(found.missing)
    answers: dict[str, list[bool]] = {"training": [], "evaluation": []}  # whether each row has one
    has_gym = False
    for place, source in enumerate(_sources(config)):
        name = "training" if place < len(config.data.train) else "evaluation"
        with found.collecting():
            if source.path.startswith(GYM):
                columns.add("gym")
                has_gym |= name == "training"
                continue
            rows = 0
            for where, row in read_rows(source, columns=config.data.columns):
                if isinstance(row, DataError):
                    raise row
                question = read_question(where, row, prompt_format or PromptFormat())
                if environment is not None and rows == 0:
                    begin_episodes([question], environment)
                columns |= question.extra.keys()
                answers[name].append(question.answer is not None)
                rows += 1
            if not rows:
                raise DataError(f"{source.path}: no rows; expected one question with its answer per row")
            found.notes.append(f"data: {source.path}: {rows:,} rows")
    was_cut_short = len(found.missing) > before  # at a bad row, so that other rows may have answers
    has_answers = environment is not None or has_gym or any(answers["training"])
    _compare_columns(found, kinds, columns, has_answers or was_cut_short)
    if environment is None:
        for name, has_answer in answers.items():
            _warn_of_unanswered(found, kinds, name, has_answer)


def _compare_columns(found: Findings, kinds: Sequence[tuple[str, Kind]], columns: set[str], has_answers: bool) -> None:
    for kind in kinds:
        with found.collecting():
            check_columns([kind], columns, has_answers=has_answers)


def _warn_of_unanswered(
    found: Findings, kinds: Sequence[tuple[str, Kind]], name: str, has_answer: Sequence[bool]
) -> None:
    """Warn of the questions of which no response can be judged. (If no question has an answer, that is an error.)"""
    needing, missing = [judge for judge, kind in kinds if kind.gold is not None], has_answer.count(False)
    if needing and 0 < missing < len(has_answer):
        found.warnings.append(
            f"data: {missing:,} of {len(has_answer):,} {name} questions have no gold answer, which {needing[0]} needs, "
            "so their responses will stay unjudged; add the answers, or remove these rows"
        )


def _collected(found: Findings, load: Callable[[], Any]) -> Any:
    with found.collecting():
        return load()
    return None


def _check_resources(found: Findings, config: Config) -> None:
    """Compare memory and disk with what the model needs, if its shape is known."""
    shape = _collected(found, lambda: find_shape(config.model.path))
    if shape is None:
        return
    is_here = config.cluster.learners == 1 and not config.rollout_engines
    parts, free = training_memory(config, shape), _free_memory(config)
    if on_gpu(config):
        del parts["moments"]  # where they do not fit, they are in the host's memory
    needed = sum(parts.values())
    if is_here and free is not None and free < needed:
        found.missing.append(
            f"training {config.model.path} takes {size_text(needed)} of memory and more for responses and activations, "
            f"but only {size_text(free)} are free; use a smaller model, LoRA (model.lora.rank), or more GPUs"
        )
    checkpoint, free = planned_checkpoint(config, shape), free_disk(config.run_dir)
    warning = disk_warning(config, checkpoint)
    if warning is None:
        found.notes.append(f"disk: {disk_plan(config, checkpoint)}")
    else:
        (found.missing if free < checkpoint else found.warnings).append(f"disk: {warning}")


def _free_memory(config: Config) -> int | None:
    if not on_gpu(config):
        return memory()[1]
    if not torch.cuda.is_available():
        return None
    return free_memory(resolve_device(config.model.device))
