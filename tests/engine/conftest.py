"""One engine of each kind, shared by all tests of a session because vLLM is slow to start."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo.config import ModelConfig
from dapo.engine.embedded.engine import EmbeddedEngine
from dapo.engine.embedded.paged import PagedDecoder
from dapo.engine.protocol import Engine
from dapo.model.attention import ATTENTION_NAME
from dapo.model.loading import load_model
from tests.tiny import EOS_ID, save_tiny, tiny_tokenizer

STOP = frozenset({EOS_ID, *range(4, 24)})  # many, so that responses end at different times
SEED = 3
MAX_LENGTH = 256
MAX_CONCURRENT = 32
CACHE_BYTES = 64 << 20


@dataclass(eq=False)
class Subject:
    """An engine under test, and the model being trained."""

    engine: Engine
    model: Any
    version: int = 0

    def change(self, scale: float = 0.1) -> None:
        """Change all weights at random and tell the engine, as an update would."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        self.version += 1
        self.engine.sync_weights(self.version)


def open_embedded(directory: Path, model: Any) -> Engine:
    return EmbeddedEngine(model, tiny_tokenizer(), STOP, SEED, MAX_CONCURRENT, max_length=MAX_LENGTH)


def open_paged(directory: Path, model: Any) -> Engine:
    """The embedded engine with the decoder for GPUs, on a CPU, with few pages."""
    engine = EmbeddedEngine(model, tiny_tokenizer(), STOP, SEED, MAX_CONCURRENT)
    engine.decoder = PagedDecoder(model, STOP, MAX_CONCURRENT, MAX_LENGTH, pages=60)
    return engine


def open_vllm(directory: Path, model: Any, **timing: Any) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-cluster` installs its CPU build")
    from dapo.engine.vllm.engine import VllmEngine, VllmOptions

    options = VllmOptions(
        directory,
        SEED,
        MAX_LENGTH,
        MAX_CONCURRENT,
        dtype="float32",
        # Starts sooner, and computes no more tokens at once than one sequence may have.
        extra={"enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES, "max_num_batched_tokens": MAX_LENGTH},
    )
    return VllmEngine(options, STOP, tiny_tokenizer(), lambda: model.state_dict().items(), **timing)


# Every engine belongs here, and is then tested by tests/engine/test_contract.py.
ENGINES: dict[str, Callable[[Path, Any], Engine]] = {"embedded": open_embedded, "paged": open_paged, "vllm": open_vllm}


def tiny_pair(folder: Path, kind: str = "llama", **shape: Any) -> tuple[Path, Any]:
    """Save a tiny model and return its directory and the trainer's copy. Its head size is one that vLLM supports."""
    directory = save_tiny(folder / "model", kind, **{"hidden_size": 128} | shape)
    model = load_model(ModelConfig(path=str(directory), device="cpu")).model.requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    return directory, model


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    subjects: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in subjects:
            directory, model = tiny_pair(tmp_path_factory.mktemp(name))
            subjects[name] = Subject(ENGINES[name](directory, model), model)
        return subjects[name]

    yield get
    for subject in subjects.values():
        subject.engine.close()


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest, opened: Callable[[str], Subject]) -> Subject:
    return opened(request.param)


@pytest.fixture
def vllm_subject(opened: Callable[[str], Subject]) -> Subject:
    return opened("vllm")
