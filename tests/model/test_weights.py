"""A model's folder is data: nothing in it is unpickled or run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.config import ModelConfig, RewardModelConfig
from dapo.errors import ModelError, RewardError
from dapo.model.forward import check_model
from dapo.model.loading import load_model, load_tokenizer
from dapo.rewards.reward_model import RewardModelJudge
from tests.rewards.test_reward_model import save as save_reward_model
from tests.tiny import save_tiny

CONVERT = r"only \.safetensors files are loaded, because others can run code: .* save_pretrained$"


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickle_in_the_index(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled_index(folder: Path) -> None:
    pickle_in_the_index(folder)
    (folder / "other.safetensors").unlink()
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")


def pickle_outside(folder: Path) -> None:
    pickle_in_the_index(folder)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_in_the_config(folder: Path) -> None:
    edit(folder / "config.json", transformers_weights="adapter_model.bin")


@pytest.mark.parametrize(
    "arrange", [only_pickles, pickle_in_the_index, pickled_index, pickle_outside, pickle_in_the_config]
)
def test_pickled_weights_are_refused_and_never_opened(arrange: Callable[[Path], None], tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for name, save in (("model", save_tiny), ("judge", save_reward_model)):
        folder = tmp_path / name
        save(folder)
        for file in ("pytorch_model.bin", "adapter_model.bin"):
            (folder / file).write_bytes(pickle.dumps(Trap(mark)))
        arrange(folder)
    with pytest.raises(ModelError, match=CONVERT):
        load_model(ModelConfig(path=str(tmp_path / "model"), device="cpu"))
    with pytest.raises(RewardError, match=CONVERT):
        RewardModelJudge(str(tmp_path / "judge"), RewardModelConfig(device="cpu"))
    assert not mark.exists()
    pickle.loads((tmp_path / "model" / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "the trap works"


def test_a_reward_model_that_is_adapters_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    folder = tmp_path / "judge"
    save_reward_model(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(RewardError, match="holds LoRA adapters"):
        RewardModelJudge(str(folder), RewardModelConfig(device="cpu"))
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["llama", "unheard_of"])
def test_code_that_comes_with_a_model_is_never_run(model_type: str, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for name, save in (("model", save_tiny), ("judge", save_reward_model)):
        folder = tmp_path / name
        save(folder)
        (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass A: pass\n")
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
        autos = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
        edit(folder / "config.json", auto_map=dict.fromkeys(autos, "evil.A"), model_type=model_type)
        edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.A", "evil.A"]})
    load: list[Callable[[], object]] = [
        lambda: load_tokenizer(str(tmp_path / "model")),
        lambda: load_model(ModelConfig(path=str(tmp_path / "model"), device="cpu")),
        lambda: RewardModelJudge(str(tmp_path / "judge"), RewardModelConfig(device="cpu")).close(),
    ]
    for attempt in load:
        if model_type == "llama":  # transformers has this architecture built in
            attempt()
        else:
            with pytest.raises((ModelError, RewardError), match="custom code") as refusal:
                attempt()
            assert "\n" not in str(refusal.value)
    assert not mark.exists()


def test_a_kernel_from_the_hub_is_refused_as_code(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit(tmp_path / "config.json", attn_implementation="someone/kernel")
    with pytest.raises(ModelError, match=r"asks for code from the hub \(attn_implementation\)"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers in its config.json is -1, expected an integer from 1 to"),
        ({"num_hidden_layers": 10**30}, "expected an integer from 1 to"),
        ({"num_attention_heads": 0}, "num_attention_heads in its config.json is 0"),
        ({"vocab_size": "many"}, "vocab_size in its config.json is 'many'"),
        ({"sliding_window": [1]}, r"sliding_window in its config.json is \[1\]"),
    ],
)
def test_impossible_sizes_are_refused_by_name(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit(tmp_path / "config.json", **values)
    with pytest.raises(ModelError, match=words):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


def test_a_broken_config_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"its config\.json cannot be read \(Expecting value"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, vocab_size=100)
    with pytest.raises(ModelError, match=r"has the token 131 \('.*'\), but its embedding has only 100 rows"):
        load_model(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_named(value: float, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu")).model
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 of 2048 values that are NaN"):
        check_model(model, 72)
    assert torch.isfinite(weights["lm_head.weight"]).all()
