"""The command `dapo plan`: from its command-line options to a printed plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console

from dapo.config import Config
from dapo.errors import ConfigError
from dapo.plan.estimate import Plan, estimate
from dapo.plan.hardware import CONTROLLER_GROUPS, JUDGE_SECONDS, find_gpu
from dapo.plan.memory import DoesNotFit
from dapo.plan.table import print_comparison, print_plan
from dapo.plan.workload import SIGMA, workload


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line. None and 0 mean: use the plan's default."""

    gpus: str = "1"
    gpu: str = "h200"
    rollout_share: float = 0.0
    tensor_parallel: int = 0
    mean_response: float | None = None
    mean_prompt: float | None = None
    keep_rate: float | None = None
    judge_seconds: float | None = None
    network: float | None = None


def plan_command(console: Console, config: Config, options: PlanOptions) -> None:
    """Print the plan for one number of GPUs in detail, or a comparison of several. Refuse if none fits."""
    counts = _counts(options.gpus)
    if not 0 <= options.rollout_share < 1:
        raise ConfigError(f"--rollout-share is {options.rollout_share:g}, but must be at least 0 and below 1")
    for option, value in (("--network", options.network), ("--judge-seconds", options.judge_seconds)):
        if value is not None and value <= 0:
            raise ConfigError(f"{option} is {value:g}, but must be above 0")
    gpu = find_gpu(options.gpu, options.network)
    work = workload(
        config,
        mean_response=options.mean_response,
        mean_prompt=options.mean_prompt,
        keep_rate=options.keep_rate,
        judge_seconds=JUDGE_SECONDS if options.judge_seconds is None else options.judge_seconds,
    )
    found: dict[int, Plan | DoesNotFit] = {}
    for count in counts:
        try:
            found[count] = estimate(
                config, work, gpu, count,
                rollout_gpus=math.ceil(options.rollout_share * count), tensor_parallel=options.tensor_parallel,
            )  # fmt: skip
        except DoesNotFit as error:
            found[count] = error
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if not plans:
        raise next(error for error in found.values() if isinstance(error, DoesNotFit))
    if len(counts) == 1:
        print_plan(console, config.run.name, plans[0], config.run.steps, _assumed(config, plans, options))
    else:
        print_comparison(console, config.run.name, found, _assumed(config, plans, options))


def _counts(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--gpus {text}: expected a number such as 8, or several such as 8,128,1024") from None


def _assumed(config: Config, plans: list[Plan], options: PlanOptions) -> list[str]:
    """List the assumptions: values that were neither given on the command line nor measured."""
    work = plans[0].work
    assumed = [f"log-normal lengths (sigma {SIGMA})"]
    if options.mean_response is None:
        assumed.append(f"responses of {work.lengths.mean:,.0f} tokens (--mean-response)")
    if options.mean_prompt is None:
        assumed.append(f"prompts of {work.prompt:,.0f} (--mean-prompt)")
    if options.keep_rate is None and work.keep_rate < 1:
        assumed.append(f"{100 * work.keep_rate:.0f}% of groups kept (--keep-rate)")
    if any(plan.sampling.driver > 0 for plan in plans):
        assumed.append(f"a driver that dispatches {CONTROLLER_GROUPS:.0f} groups per second to any number of engines")
    if config.model.lora.rank > 0:
        assumed.append("LoRA updates that take as long as full ones")
    return assumed
