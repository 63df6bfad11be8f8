"""The options of algorithm, optim, eval, run and cluster: type, default, bounds and help text of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from dapo.config.base import (
    FIXED,
    MOST_PROCESSES,
    MOST_PROMPTS,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_STEPS,
    FromList,
    NamedSources,
    Section,
    built_in_or_file,
)
from dapo.config.sampling_options import EngineName


class FilterGroupsConfig(Section):
    enable: bool = Field(
        default=True, description="Dynamic sampling: train only on groups whose responses differ in the metric."
    )
    metric: str | None = Field(
        default=None,
        description="acc, score, seq_reward, seq_final_reward, or a named extra of the score; "
        "default: acc if there is one, else score.",
    )
    function: Annotated[str, built_in_or_file()] | None = Field(
        default=None,
        description="path/to/file.py:function that decides about each group instead: it returns `kept`, or the reason "
        "why the group is dropped.",
    )
    max_num_gen_batches: int = Field(
        default=10,
        description="Most prompts per step, as a multiple of gen_batch_size (train_batch_size where that is 0); 0 or "
        "less: no limit.",
    )
    on_exhausted: Literal["train_partial", "skip", "pad", "raise"] = Field(
        default="train_partial",
        description="What to do when a step may sample no more prompts and its batch is not full: train on the groups "
        "there are, skip the update, pad the batch with dropped groups, or stop the run.",
    )
    min_batch_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Fraction of train_batch_size below which `skip` skips, and up to which `pad` pads.",
    )


class LedgerConfig(Section):
    enable: bool = Field(
        default=False,
        description="Draw prompts less often if their latest groups were all right, all wrong or scored alike.",
    )
    explore: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="Fraction of draws that ignore the history. With lookahead, the prompts that it does not choose "
        "are drawn with probability explore / lookahead.",
    )
    revisit: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Largest fraction of draws that revisit prompts whose latest group was kept, instead of taking the "
        "next ones in the data; the oldest first, and more likely those with a pass rate near one half.",
    )
    lookahead: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Prompts to look at for each one drawn. With more than 1, the run predicts their pass rates from "
        "the model's hidden states and its own groups, and draws those nearest to one half. The judge must give "
        "`acc`.",
    )
    correct: bool = Field(
        default=False,
        description="Weight each group by the inverse of its prompt's chance to be drawn, so that the expected "
        "gradient is the same as without the ledger. Not with revisit or lookahead.",
    )


# What each name of algorithm.loss sets besides the function. The clip bounds are defaults, the others are fixed.
LOSS_SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"clip_ratio_high": 0.2, "clip_ratio_c": None, "loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {
        "clip_ratio_high": 0.2,
        "clip_ratio_c": None,
        "loss_agg_mode": "seq-mean-token-sum",
        "adv_norm": "none",
    },
    "gspo": {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "clip_ratio_c": None,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "clip_ratio_c": None, "loss_agg_mode": "token-mean"},
    "sapo": {"clip_ratio_c": None, "loss_agg_mode": "seq-mean-token-mean"},
    "gmpo": {
        "clip_ratio_low": 0.4,
        "clip_ratio_high": 0.4,
        "clip_ratio_c": None,
        "loss_agg_mode": "seq-mean-token-mean",
    },
}
CLIP_BOUNDS = ("clip_ratio_low", "clip_ratio_high")


class AlgorithmConfig(Section):
    @model_validator(mode="before")
    @classmethod
    def _apply_loss_settings(cls, values: Any) -> Any:
        """Set the options that belong to the loss, unless they are given."""
        loss = values.get("loss") if isinstance(values, dict) else None
        if not isinstance(loss, str) or loss not in LOSS_SETTINGS:
            return values
        settings = LOSS_SETTINGS[loss]
        given = [values[name] for name in CLIP_BOUNDS if name in values]
        if loss in ("grpo", "dr_grpo") and given:  # their clip is symmetric: one bound sets both
            settings = settings | dict.fromkeys(CLIP_BOUNDS, given[0])
        return settings | values

    loss: Annotated[str, built_in_or_file(*LOSS_SETTINGS)] = Field(
        default="dapo",
        description="The policy loss: `dapo`, `grpo`, `dr_grpo`, `gspo`, `cispo`, `sapo`, `gmpo`, or "
        "path/to/file.py:function. Names other than `dapo` also set clip_ratio_low, clip_ratio_high, clip_ratio_c, "
        "loss_agg_mode and adv_norm, as docs/explanation/algorithm.md says.",
    )
    advantage: Annotated[str, built_in_or_file()] | None = Field(
        default=None,
        description="path/to/file.py:function from a group's rewards to advantages; default: (R - mean) / std.",
    )
    adv_norm: Literal["std", "none"] = Field(
        default="std", description="std: divide advantages by the group's standard deviation; none: do not (Dr. GRPO)."
    )
    clip_ratio_low: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Lower clip: the ratio stays above 1 - this (`gmpo`: above exp(-this)); 1: no lower clip.",
    )
    clip_ratio_high: float = Field(
        default=0.28,
        ge=0,
        description="Upper clip (clip-higher): the ratio stays below 1 + this (`gmpo`: below exp(this)).",
    )
    clip_ratio_c: float | None = Field(
        default=10.0, gt=1, description="Dual clip bound for negative advantages; null: off."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean", description="How token losses are averaged, always over the whole mini-batch."
    )
    overlong_filter: bool = Field(default=False, description="Leave responses cut off at the limit out of the loss.")
    kl_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL term in the loss. No reference model is loaded if this and kl_reward_coef are 0.",
    )
    kl_reward_coef: float = Field(default=0.0, ge=0, description="Weight of the KL term subtracted from the reward.")
    max_staleness: int = Field(
        default=1,
        ge=0,
        le=10**6,
        description="Most steps that a kept group beyond the batch may wait to be trained on; 0 drops it, as "
        "published. In flight: the greatest age of a token that is trained on, in steps.",
    )
    importance_correction: Literal[
        "auto", "none", "token-truncated", "token-masked", "sequence-truncated", "sequence-masked"
    ] = Field(
        default="auto",
        description="Weight the loss by the trainer's probability divided by the sampler's, per token or per response: "
        "truncated to at most 2, or masked outside of 1/2 to 2. auto: token-truncated with vLLM, else none.",
    )
    max_logprob_gap: float = Field(
        default=0.05,
        gt=0,
        description="Mean |sampler - trainer| log-probability above which a run without importance_correction stops.",
    )
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    ledger: LedgerConfig = LedgerConfig()


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0, description="AdamW learning rate.")
    warmup_steps: int = Field(
        default=10, ge=0, le=MOST_STEPS, description="Steps over which the learning rate rises from 0."
    )
    lr_schedule: Annotated[str, built_in_or_file("constant", "linear", "cosine")] = Field(
        default="constant",
        description="The learning rate after the warm-up, up to run.steps: `constant`, `linear` or `cosine` down to 0, "
        "or path/to/file.py:function from (step, total steps) to a factor.",
    )
    weight_decay: float = Field(default=0.1, ge=0, description="AdamW weight decay, decoupled.")
    betas: Annotated[tuple[float, float], FromList] = Field(
        default=(0.9, 0.999), description="AdamW moment decay rates."
    )
    grad_clip: float = Field(default=1.0, gt=0, description="Largest gradient norm.")
    ppo_mini_batch_size: int = Field(
        default=0, ge=0, le=MOST_PROMPTS, description="Prompts per optimizer step; 0: the whole batch."
    )
    ppo_epochs: int = Field(default=1, ge=1, le=1000, description="Passes over the batch.")
    max_tokens_per_micro_batch: int = Field(
        default=0,
        ge=0,
        le=2**30,
        description="Tokens per forward and backward pass; changes memory and speed, never the gradient. 0: as many "
        "as fit on a GPU, 4096 on a CPU.",
    )
    recompute_activations: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Keep few activations and recompute the others in the backward pass (GPU only); auto: only if too "
        "few tokens would fit without it.",
    )


class EvalConfig(Section):
    k: int = Field(
        default=0,
        ge=0,
        le=MOST_SAMPLES,
        description="Samples per question, before the first step and after the last; 0: no evaluation.",
    )
    every: int = Field(
        default=0, ge=0, le=MOST_STEPS, description="Steps between evaluations; 0: only before and after training."
    )
    data: NamedSources = Field(
        default=None,
        description="Questions to evaluate on, as in data.train, or a mapping of names to such sets; default: the "
        "training questions. Questions that are listed here are never trained on.",
    )
    best_metric: str | None = Field(
        default=None,
        description="Keep the checkpoint that is best by this evaluation metric, for example aime-2024/avg@32.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(default=0, ge=0, le=2**31 - 1, description="Sample from the k likeliest tokens; 0: off.")


class RunConfig(Section):
    name: str = Field(default="run", description="Folder name of the run; default: the file name of the recipe.")
    dir: str = Field(default="runs", description="The folder of all runs.")
    steps: int | None = Field(
        default=100, ge=1, le=MOST_STEPS, description="Training steps; null if run.epochs is set."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=MOST_STEPS,
        description="Passes over the training questions, in place of run.steps. The run ends after the step that "
        "completes them. Each prompt counts when it is drawn, even if its group is dropped or the ledger skips it.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="The seed of all randomness.", json_schema_extra=FIXED)
    save_every: int = Field(
        default=50,
        ge=0,
        le=MOST_STEPS,
        description="Steps between checkpoints, besides the one at the end; 0: only that one.",
    )
    store_tokens: Literal["all", "kept", "none"] = Field(
        default="kept", description="Groups whose tokens, log-probabilities and entropies are stored in the database."
    )
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], FromList] = Field(
        default=(),
        description="Trackers that also get the metrics; nothing leaves the machine unless their own settings say so.",
    )
    show_samples: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Responses to print per step, with question, score and verdict; the first is one of the best, the "
        "second one of the worst.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        """Let epochs replace the default number of steps, but not one that is given."""
        if not isinstance(values, dict):
            return values
        steps, epochs = values.get("steps"), values.get("epochs")
        if steps is not None and epochs is not None:
            raise ValueError(f"run.steps is {steps} and run.epochs is {epochs}; set one of them, and the other to null")
        if steps is None and epochs is None and "steps" in values:
            raise ValueError("run.steps and run.epochs are both null; set one of them")
        return values if epochs is None else {**values, "steps": None}


def _worker_counts(value: Any) -> Any:
    """Check the value with one message; pydantic would report every way in which it fits neither type of the union."""
    counts, least = (list(value.values()), 1) if isinstance(value, dict) else ([value], 0)
    has_known_names = not isinstance(value, dict) or value.keys() <= set(get_args(EngineName))
    if (
        not counts
        or not has_known_names
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
    offload: bool = Field(default=False, description="Keep parameters and optimizer state in CPU memory.")
    rollout_workers: Annotated[int | dict[EngineName, int], BeforeValidator(_worker_counts)] = Field(
        default=0,
        description="Workers that sample, placed by Ray, each with a copy of the weights; 0: the learners sample. A "
        "number of workers that run rollout.engine, or a mapping such as {vllm: 1, embedded: 2}.",
    )
    reward_workers: int = Field(
        default=0,
        ge=0,
        le=MOST_PROCESSES,
        description="Workers that judge, placed by Ray, each with reward.workers processes (0: one process); 0: judge "
        "on the trainer's machine.",
    )
    max_restarts: int = Field(
        default=3, ge=0, le=10**6, description="Lost processes that Ray replaces before the run saves and stops."
    )
    timeout: float = Field(
        default=1800.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds without an answer after which a process counts as lost; must exceed the longest response.",
    )
