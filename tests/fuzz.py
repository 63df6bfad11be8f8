"""Generators of broken options, recipes, datasets and models, from a seed.

They start from a good input and damage it, because a random string fails at the first check.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import yaml

from dapo.config import leaves
from dapo.errors import DapoError

KEYS = [name for name, _ in leaves()]

SCALARS: list[str] = [
    "", "null", "true", "no", "0", "1", "-1", "2", "7", "0.5", "-0.0", "1e-6", "1e400", ".nan", ".inf", "-.inf",
    "0x10", "0o17", "0b1", "1_000", "1:30", "12:30:45", "2024-01-01", "2024-13-45", "2024-01-01T00:00:00Z", "9" * 30,
    "9" * 5000, "0x" + "f" * 400, "1" + "0" * 12, "1e18", "=", "<<", "~", "~nobody/x", "~/x", "/", ".", "..", "a/b",
    "a/b/c", "a b", "'", '"', '"\\0"', '"\\ud800"', '"\\ud83d\\ude00"', '"a\\nb"', '"\\x1b[31m"', "\x7f", "é", "名",
    "🙂", "a" * 300, "x" * 5000, "!!binary aGk=", "!!python/name:os.system", "!!timestamp 1", "!!set {a}", "!!int x",
    "!!bool maybe", "!!float z", "!!str [1]", "!!omap [a]", "&a [*a]", "*a", "&a", "? a", "- a", "- - a", "[", "[]",
    "[[]]", "{}", "{", "{a: 1}", "{1: 2}", "{null: 1}", "{? [a] : b}", "[1, 2", "[1, 2]", "[a, b]", "{path: x}",
    "{path: 1}", "{path: x, size: 0}", "{a: {b: {c: d}}}", "{path: x, weight: .inf}", "[{path: x}, y]",
    "{path: x, params: {a: [1, {b: 2}]}}", "[" * 40 + "]" * 40, "[" * 2000, "{a: " * 40 + "1" + "}" * 40, "%", "@",
    "`", "|", ">", "---", "...", "# a", "a: b", "a:", ":", "auto", "math", "exact", "regex", "gym", "model:x",
    "model:", "x.py:f", ".py", "http://", "http://[", "http://[::1]:x/", "http://a:99999", "https://é/", "python:f",
    "pypi:", "pypi:-r", "gym:", "gym:chain_sum", "gym:nothing", "x.jsonl", "*.jsonl", "[a-", "x.gguf", "cpu",
    "cuda:99", "cuda:" + "9" * 30, "vllm", "inflight", "strict", "target", "buffer", "all-linear", "lm_head",
    "[lm_head]", "{math: .nan}", "{math: 1, exact: -1e30}", "set/avg@2", "avg@2", "dapo", "{question}",
    "{question} {question}",
]  # fmt: skip


def survives(action: Callable[[], object]) -> str | None:
    """Run the action, and return the sentence that the command line would show; let any other exception through."""
    try:
        action()
    except OSError as error:  # such as a name that is too long
        if error.filename is None:
            raise
        return f"{error.filename}: {error.strerror}"
    except DapoError as error:
        sentence = str(error)
        assert sentence.strip() and "\n" not in sentence, f"no sentence: {sentence!r}"
        assert len(sentence) < 3000, f"a sentence of {len(sentence)} characters: {sentence[:300]!r}"
        return sentence
    return None


def key(random: Random) -> str:
    """Return the name of an option, sometimes damaged."""
    name = random.choice(KEYS)
    match random.randrange(12):
        case 0:
            return name.rpartition(".")[0] or name
        case 1:
            return f"{name}.{random.choice(['a', '', '1', 'path', 'x' * 300])}"
        case 2:
            return random.choice(
                ["", ".", "..", "a", "run", "x.y", "é", "run..name", "1.2", "eval.data.a", "rollout.vllm.a.b"]
            )
        case 3:
            place = random.randrange(len(name) + 1)
            return name[:place] + random.choice(["x", "_", ".", " ", "é"]) + name[place + 1 :]
    return name


def value(random: Random) -> str:
    text = random.choice(SCALARS)
    match random.randrange(8):
        case 0:
            return f"[{text}, {random.choice(SCALARS)}]"
        case 1:
            return f"{{{random.choice(SCALARS)}: {text}}}"
        case 2:
            return text + random.choice(SCALARS)
    return text


def overrides(random: Random) -> list[str]:
    return [
        f"{key(random)}{random.choice(['=', '=', '=', '=', '=', '==', ''])}{value(random)}"
        for _ in range(random.choice([1, 1, 1, 2, 3]))
    ]


def recipe(random: Random, good: dict[str, Any]) -> bytes:
    """Return a good recipe with some values replaced or its text damaged."""
    values = copy.deepcopy(good)
    for _ in range(random.randrange(3)):
        replace_somewhere(random, values)
    try:
        text = yaml.safe_dump(values, allow_unicode=random.random() < 0.5)
    except RecursionError:
        text = json.dumps(values)  # JSON is YAML, too
    for _ in range(random.randrange(3)):
        text += f"\n{key(random).split('.')[0]}: {value(random)}\n"
    data = text.encode("utf-8", "surrogatepass")
    return damage_bytes(random, data) if random.random() < 0.4 else data


def odd(random: Random) -> Any:
    """Return a JSON value that probably has the wrong type."""
    return random.choice(
        [None, True, False, 0, 1, -1, 2, 3.5, -0.0, 10**6, 2**31, 2**63, -(2**70), 10**400, 1e308, float("nan"),
         float("inf"), "", " ", "a", "\0", "\ud800", "é" * 50, "x" * 10_000, "1" * 5000, [], [None],
         [[]], [1, 2], {}, {"": None}, {"a": {"b": [1]}}, {"role": "user", "content": "x"}, [{"role": 1}],
         [{"role": "user", "content": "x"}], nested(20), nested(300)]
    )  # fmt: skip


def nested(depth: int) -> Any:
    inner: Any = 1
    for _ in range(depth):
        inner = [inner]
    return inner


def replace_somewhere(random: Random, document: Any) -> None:
    """Replace, remove or add one value somewhere in nested dicts and lists."""
    holder, place = random.choice(_places(document) or [({}, "")])
    match random.randrange(6):
        case 0 if isinstance(holder, dict):
            holder.pop(place, None)
        case 1 if isinstance(holder, dict):
            holder[random.choice(["x", "", "type", "path", "é"])] = odd(random)
        case 2 if isinstance(holder, list):
            holder.insert(0, odd(random))
        case _:
            holder[place] = odd(random)


def _places(document: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > 6:
        return []
    keys = (
        list(document)
        if isinstance(document, dict)
        else range(min(len(document), 40))
        if isinstance(document, list)
        else []
    )
    return [(document, key) for key in keys] + [found for key in keys for found in _places(document[key], depth + 1)]


def damage_bytes(random: Random, data: bytes) -> bytes:
    place, length = random.randrange(len(data) + 1), random.choice([0, 1, 4, 50])
    put = random.choice(
        [b"", b"\0", b"\xff\xfe", b"\n", b"\t", b"{", b"]", b'"', b"\xed\xa0\x80", b"-1", b"9" * 30, bytes(8)]
    )
    match random.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data + data[:place]
        case _:
            return data[:place] + put + data[place + length :]


ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "answer": "2"},
    {"question": "How many?", "answer": 3, "data_source": "x", "level": 1.5},
    {"problem": "Solve.", "solution": "\\boxed{4}"},
    {"prompt": [{"role": "user", "content": "Hi"}], "reward_model": {"ground_truth": "5", "style": "rule"}},
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]}],
        "answer": [1],
    },
]  # fmt: skip


def rows(random: Random) -> list[Any]:
    found: list[Any] = [copy.deepcopy(random.choice(ROWS)) for _ in range(random.randint(1, 4))]
    for _ in range(random.randrange(1, 4)):
        replace_somewhere(random, found)
    return found


def write_dataset(random: Random, folder: Path) -> Path:
    """Write a file of one of the formats with damaged rows or bytes."""
    kind = random.random()
    if kind < 0.15:
        return _write_csv_or_json(random, folder)
    if kind < 0.6:
        path = folder / "rows.jsonl"
        lines = [json.dumps(row, ensure_ascii=random.random() < 0.5) for row in rows(random)]
        data = random.choice(["\n", "\n", "\r\n", "\n\n", ""]).join(lines).encode("utf-8", "surrogatepass")
        path.write_bytes(damage_bytes(random, data) if random.random() < 0.4 else data)
        return path
    path, write = random.choice(
        [(folder / "rows.parquet", pq.write_table), (folder / "rows.feather", feather.write_feather)]
    )
    try:
        table = pa.Table.from_pylist([row if isinstance(row, dict) else {"prompt": row} for row in rows(random)])
        write(table, str(path))
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):  # values that no column can hold
        write(pa.table({"prompt": pa.array([1, 2]), "answer": pa.array([b"\xff", None])}), str(path))
    if random.random() < 0.4:
        path.write_bytes(damage_bytes(random, path.read_bytes()))
    return path


def _write_csv_or_json(random: Random, folder: Path) -> Path:
    found = rows(random)
    if random.random() < 0.5:
        path, text = folder / "rows.json", json.dumps(found)
    else:
        path, out = folder / "rows.csv", io.StringIO()
        cells = [[str(row), "5"][: random.choice([1, 2, 2, 2])] for row in found]
        csv.writer(out).writerows([["prompt", "answer"], *cells])
        text = out.getvalue()
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damage_bytes(random, data) if random.random() < 0.6 else data)
    return path


MODEL_KEYS = [
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "model_type", "architectures", "tie_word_embeddings", "rms_norm_eps",
    "hidden_act", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "attention_dropout",
    "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config", "auto_map",
    "text_config", "transformers_weights", "attn_implementation", "initializer_range", "layer_types", "use_cache",
    "sliding_window", "transformers_version", "id2label", "num_labels", "problem_type", "is_encoder_decoder",
]  # fmt: skip
MODEL_VALUES: list[Any] = [
    "llama", "qwen2", "t5", "bert", "gpt2", "mamba", "", "silu", "gelu", "relu", "float16", "bfloat16", "int8",
    "a.b", "x/y", ["LlamaForCausalLM"], ["Nope"], [1], {"rope_type": "linear", "factor": 0}, {"rope_type": "yarn"},
    {"type": "dynamic"},
    {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, {"quant_method": "gptq"}, 3, 5,
    31, 33, 64, 1000, 0, -1,
    -2, 0.0, 1e-30, "pytorch_model.bin", [0], [1, "a"], ["full_attention"], "2",
]  # fmt: skip


def damage_model(random: Random, good: Path, folder: Path) -> Path:
    """Copy a good model's folder, and damage one or two files."""
    shutil.copytree(good, folder)
    for _ in range(random.choice([1, 1, 2])):
        name = random.choice(
            ["config.json"] * 6 + ["tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "model.safetensors", "model.safetensors.index.json", "chat_template.jinja", "adapter_config.json",
             "special_tokens_map.json"]
        )  # fmt: skip
        _damage_file(random, folder / name)
    return folder


def _damage_file(random: Random, file: Path) -> None:
    data = file.read_bytes() if file.exists() else b"{}"
    choice = random.random()
    if choice < 0.05 and file.exists():
        file.unlink()
    elif file.suffix == ".jinja":
        text = data.decode()
        place = random.randrange(len(text))
        file.write_text(
            text[:place]
            + random.choice(["{{", "{% x %}", "{{ 1/0 }}", "{{ messages[9] }}", "{{ x.y }}"])
            + text[place:]
        )
    elif file.suffix != ".json" or choice < 0.2:
        file.write_bytes(damage_bytes(random, data))
    else:
        try:
            document = json.loads(data)
        except ValueError:
            return
        if file.name == "config.json" and isinstance(document, dict) and random.random() < 0.8:
            document[random.choice(MODEL_KEYS)] = odd(random) if random.random() < 0.5 else random.choice(MODEL_VALUES)
        else:
            replace_somewhere(random, document)
        file.write_text(json.dumps(document))
