"""The configuration of a run: one frozen tree of options, values derived from them, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from dapo.config.base import Section
from dapo.config.loading import Dumper, apply_override, explain, parse_yaml, read_yaml
from dapo.config.sampling_options import (
    REWARD_TOKEN,
    DataConfig,
    EngineName,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from dapo.config.training_options import (
    CLIP_BOUNDS,
    LOSS_SETTINGS,
    AlgorithmConfig,
    ClusterConfig,
    EvalConfig,
    OptimConfig,
    RunConfig,
)
from dapo.errors import ConfigError, mask_secrets


class Config(Section):
    """All options of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file and apply dotted overrides such as `optim.lr=1e-5`."""
        path = Path(path)
        values = read_yaml(path, option_names())
        for override in overrides:
            apply_override(values, override, option_names())
        run = values.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", path.stem)
        return cls.parse(values, source=str(path))

    @classmethod
    def from_text(cls, text: str, source: str, overrides: Sequence[str] = ()) -> Self:
        """Read YAML text, for example the copy in a run's database."""
        values = parse_yaml(text, source)
        for override in overrides:
            apply_override(values, override, option_names())
        return cls.parse(values, source=source)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Build from the nested values of a Python program, with the checks that YAML text gets."""
        try:
            text = yaml.dump(values, Dumper=Dumper, allow_unicode=True)
        except (yaml.YAMLError, RecursionError) as error:
            found = " ".join(map(str, error.args)) or "nested too deeply"
            raise ConfigError(f"{source}: holds a value that YAML cannot represent ({found})") from None
        return cls.from_text(text, source)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "configuration") -> Self:
        """Build from a nested mapping; raise ConfigError with one sentence per mistake."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, source, option_names())) from None

    @property
    def gen_batch_size(self) -> int:
        return self.data.gen_batch_size or self.data.train_batch_size

    @property
    def largest_round(self) -> int:
        """The most prompts of a round whose size follows the keep rate."""
        return self.data.gen_batch_size or 4 * self.data.train_batch_size

    @property
    def concurrent(self) -> int:
        """Responses to decode at once on a GPU: a whole round, but at most 1024."""
        return self.rollout.max_concurrent or min(1024, self.gen_batch_size * self.rollout.n)

    @property
    def rollout_engines(self) -> tuple[EngineName, ...]:
        """The engine of each rollout worker; empty if the learners sample themselves."""
        workers = self.cluster.rollout_workers
        counts: Mapping[EngineName, int] = {self.rollout.engine: workers} if isinstance(workers, int) else workers
        return tuple(engine for engine, count in counts.items() for _ in range(count))

    @property
    def rollout_gpus(self) -> tuple[int, ...]:
        """The number of GPUs of each rollout worker, if there are GPUs."""
        return tuple(self.rollout.tensor_parallel if engine == "vllm" else 1 for engine in self.rollout_engines)

    @property
    def uses_vllm(self) -> bool:
        return "vllm" in (self.rollout_engines or (self.rollout.engine,))

    @property
    def samples_in_process(self) -> bool:
        """Whether one process learns and samples, except under torchrun. Then no clock orders the responses."""
        is_alone = self.cluster.learners == 1 and not self.rollout_engines and not self.cluster.reward_workers
        return is_alone and not self.uses_vllm

    @property
    def mini_batch_size(self) -> int:
        return self.optim.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def longest(self) -> int:
        """The most tokens of a prompt with its response."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def update_tokens(self) -> int:
        """The most tokens of prompts and responses that an update trains on."""
        return self.mini_batch_size * self.rollout.n * self.longest

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) / self.run.name

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_loss_coef > 0 or self.algorithm.kl_reward_coef > 0

    def renamed(self, name: str, folder: str | None = None) -> Self:
        """Return the same configuration for a run of another name, and in another `run.dir` if `folder` is given."""
        run = self.run.model_copy(update={"name": name, "dir": self.run.dir if folder is None else folder})
        return self.model_copy(update={"run": run})

    def option(self, name: str) -> Any:
        """Return the value of the option with this dotted name."""
        return reduce(getattr, name.split("."), self)

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return the options in which `other` differs, with both values."""
        pairs = {key: (self.option(key), other.option(key)) for key in option_names()}
        return {key: (own, theirs) for key, (own, theirs) in pairs.items() if own != theirs}

    def to_yaml(self) -> str:
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)

    @model_validator(mode="after")
    def _validate_rules(self) -> Self:
        self.check_rules()
        return self

    def check_rules(self) -> None:
        """Check the rules between options; each ValueError names the options and says what to do."""
        self._check_reward()
        self._check_eval()
        self._check_engine()
        self._check_training()
        self._check_algorithm()

    def _check_reward(self) -> None:
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
        tags = self.reward.think_tags
        if tags and (len(tags) != 2 or not all(tags) or tags[0] in tags[1] or tags[1] in tags[0]):
            raise ValueError(
                f"reward.think_tags is {list(tags)}, but must be two strings, neither of which contains the other, "
                "such as [<think>, </think>]; null turns thoughts off"
            )
        if self.reward.use == {}:
            raise ValueError("reward.use is an empty mapping; name at least one judge")
        if any(map(_holds_secret, [self.reward.use] if isinstance(self.reward.use, str) else self.reward.use)):
            raise ValueError(
                "reward.use: the URL of an endpoint holds a user name, a password or a key, which would be written to "
                f"the run directory; leave it out, and set the environment variable {REWARD_TOKEN}, which is sent as "
                "`Authorization: Bearer ...` (write an @ in the path as %40)"
            )

    def _check_eval(self) -> None:
        if self.eval.best_metric is not None and self.eval.k == 0:
            raise ValueError("eval.best_metric needs an evaluation: set eval.k to the number of samples per question")
        best, sets = self.eval.best_metric, self.eval.data
        if best is not None and sets is not None and not any(best.startswith(f"{name}/") for name in sets):
            raise ValueError(
                f"eval.best_metric is '{best}', but must start with the name of a set and a slash; the sets are "
                f"{', '.join(sets)}"
            )

    def _check_engine(self) -> None:
        if self.rollout.mode == "inflight" and self.algorithm.max_staleness == 0:
            raise ValueError(
                "rollout.mode inflight needs an algorithm.max_staleness of at least 1, because every update makes the "
                "responses in flight one version older"
            )
        if self.rollout.engine == "vllm" and not self.uses_vllm:
            raise ValueError(
                "rollout.engine is vllm, but cluster.rollout_workers names no worker that runs it; name one, or set "
                "rollout.engine to embedded"
            )
        if not self.uses_vllm and (self.rollout.tensor_parallel > 1 or self.rollout.vllm):
            name = "vllm" if self.rollout.vllm else "tensor_parallel"
            raise ValueError(f"rollout.{name} is for vLLM only: set rollout.engine to vllm, or leave it out")
        if "" in self.rollout.stop:
            raise ValueError("rollout.stop holds an empty string, which would end every response; leave it out")
        if self.cluster.offload and self.cluster.learners == 1:
            raise ValueError(
                "cluster.offload needs weights that several processes share: set cluster.learners to at least 2"
            )

    def _check_training(self) -> None:
        for source in self.data.train:
            if self.run.epochs is not None and source.path.startswith("gym:") and source.size is None:
                raise ValueError(
                    f"run.epochs counts passes over the training questions, but {source.path} generates them without "
                    "end; give it a `size`, or set run.steps instead"
                )
        if self.optim.ppo_mini_batch_size > self.data.train_batch_size:
            raise ValueError(
                f"optim.ppo_mini_batch_size is {self.optim.ppo_mini_batch_size} prompts, more than the "
                f"data.train_batch_size of {self.data.train_batch_size}; lower it, or set 0 for the whole batch"
            )
        if any(not 0 <= beta < 1 for beta in self.optim.betas):
            raise ValueError(f"optim.betas must both lie in [0, 1), found {list(self.optim.betas)}")
        name = self.run.name
        if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
            raise ValueError(f"run.name must be a plain folder name, found {name!r}; run.dir is the folder of all runs")
        if not self.model.lora.target_modules:
            raise ValueError("model.lora.target_modules is empty; name the layers that get adapters, or all-linear")
        if "lm_head" in self.model.lora.target_modules:
            raise ValueError("model.lora.target_modules cannot contain lm_head: its loss is computed in fused chunks")

    def _check_algorithm(self) -> None:
        algorithm, rule = self.algorithm, self.algorithm.filter_groups
        if algorithm.advantage is not None and algorithm.adv_norm != "std":
            raise ValueError(
                "algorithm.advantage replaces the built-in advantage, which contradicts algorithm.adv_norm "
                f"{algorithm.adv_norm}; leave one out"
            )
        if rule.function is not None and (rule.metric is not None or not rule.enable):
            other = "enable false" if not rule.enable else f"metric {rule.metric}"
            raise ValueError(
                "algorithm.filter_groups.function decides about each group, which contradicts "
                f"algorithm.filter_groups.{other}; leave one out"
            )
        ledger = algorithm.ledger
        extras = {"revisit": ledger.revisit > 0, "correct": ledger.correct, "lookahead": ledger.lookahead > 1}
        for name in (name for name, is_on in extras.items() if is_on and not ledger.enable):
            raise ValueError(f"algorithm.ledger.{name} needs algorithm.ledger.enable")
        is_remote = self.rollout_engines or self.cluster.learners > 1 or self.cluster.reward_workers
        if ledger.lookahead > 1 and is_remote:
            raise ValueError(
                "algorithm.ledger.lookahead reads the hidden states of a model in the trainer's own process, so it "
                "needs cluster.learners 1, cluster.rollout_workers 0 and cluster.reward_workers 0; set it to 1"
            )
        if ledger.lookahead > 1 and ledger.correct:
            raise ValueError(
                "algorithm.ledger.correct cannot be combined with algorithm.ledger.lookahead: a prompt drawn with "
                "probability explore / lookahead would get most of the batch's weight; leave one out"
            )
        if ledger.revisit and ledger.correct:
            raise ValueError(
                "algorithm.ledger.correct knows no weights for prompts that algorithm.ledger.revisit draws again; "
                "leave one of the two out"
            )
        if self.run.epochs is not None and self.optim.lr_schedule != "constant":
            raise ValueError(
                f"optim.lr_schedule {self.optim.lr_schedule} needs to know the number of steps, but run.epochs is set; "
                "set run.steps instead"
            )
        if rule.metric == "seq_final_reward" and algorithm.kl_reward_coef == 0:
            raise ValueError(
                "algorithm.filter_groups.metric seq_final_reward needs algorithm.kl_reward_coef > 0; without a KL term "
                "it equals seq_reward"
            )
        self._check_loss()

    def _check_loss(self) -> None:
        """Refuse options that contradict what the name of the loss stands for."""
        algorithm, loss = self.algorithm, self.algorithm.loss
        for name, value in LOSS_SETTINGS.get(loss, {}).items():
            found = getattr(algorithm, name)
            if name not in CLIP_BOUNDS and found != value:
                raise ValueError(
                    f"algorithm.loss {loss} needs algorithm.{name} {_yaml(value)}, but it is {_yaml(found)}; leave it "
                    "out, or choose another algorithm.loss"
                )
        low, high = (getattr(algorithm, name) for name in CLIP_BOUNDS)
        if loss in ("grpo", "dr_grpo") and low != high:
            raise ValueError(
                f"algorithm.loss {loss} clips symmetrically, but algorithm.clip_ratio_low is {low} and "
                f"algorithm.clip_ratio_high {high}; give one of them, or choose algorithm.loss dapo"
            )
        defaults = [AlgorithmConfig.model_fields[name].default for name in CLIP_BOUNDS]
        if loss == "sapo" and [low, high] != defaults:
            raise ValueError(
                "algorithm.loss sapo has no clip, so algorithm.clip_ratio_low and algorithm.clip_ratio_high do "
                "nothing; leave them out"
            )


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _holds_secret(judge: str) -> bool:
    """Return whether a URL, even without its scheme, has a user name or a parameter that looks like a secret."""
    is_url = "://" in judge or not (judge.startswith("model:") or ".py" in judge)
    return is_url and ("@" in judge or mask_secrets(judge) != judge)


def leaves(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option as (dotted name, pydantic field), in the order of declaration."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def option_names() -> list[str]:
    return [name for name, _ in leaves()]
