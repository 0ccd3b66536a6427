"""Convert a GGUF file to a folder in Hugging Face's layout, and check the result against known
facts.

Values of quantised blocks are stored as float32, because bfloat16 would round them. A file that has
only 16-bit floats keeps their type. `--dtype` rounds when the model is loaded.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv.errors import UserError
from tersekv.models import gguf_file
from tersekv.models.gguf_file import GgufFile

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Tokens with which chat templates end a turn, where the file names another end-of-text token."""

TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>")
"""Tokens that end a text without a chat template, where the file names the end of a turn."""

FIELDS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata that transformers does not read for every architecture -> field of the config."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's RoPE scaling, which a GGUF file stores as one factor per frequency."""

ALIASES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
"""llama.cpp's name of an architecture -> name in transformers, where they differ."""


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel, pinned by the hash of the wheel and of the GGUF file in it."""

    name: str
    title: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    download_bytes: int
    eos_token: str
    config: dict[str, Any]


def readable() -> list[str]:
    """Return llama.cpp's names of the architectures that can be converted."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {name: alias for alias, name in ALIASES.items()}
    return sorted(
        names.get(name, name) for name in GGUF_SUPPORTED_ARCHITECTURES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def stored_dtype(file: GgufFile) -> Any:
    """Return the type in which the weights of a file are stored once converted."""
    import torch

    types = {tensor.type for tensor in file.tensors.values()}
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        if name in types and types <= {name, "F32"}:
            return dtype
    return torch.float32


def stored_bytes(file: GgufFile) -> int:
    """Return the bytes of the converted weights."""
    return sum(math.prod(tensor.shape) for tensor in file.tensors.values()) * stored_dtype(file).itemsize


def config_of(file: GgufFile) -> Any:
    """Return the config of the model in a GGUF file, without reading weights.

    Raises:
        UserError: transformers does not read the architecture, or the file uses a RoPE that has no
            place in the config.
    """
    if file.architecture not in readable():
        raise UserError(
            f"{file.path} has architecture {file.architecture}, which is not readable from GGUF; readable are "
            f"{', '.join(readable())}; give the model's folder in Hugging Face's layout instead"
        )
    with tempfile.TemporaryDirectory() as folder, quiet():
        from transformers import AutoConfig

        try:
            _write_header(file, Path(folder) / "model.gguf")
            config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise UserError(
                f"{file.path} lacks metadata of its model ({type(error).__name__}: {said[:200]}): get another file"
            ) from error
    config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    config.dtype = stored_dtype(file)
    config.name_or_path = ""
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(config, f"{kind}_token_id", file.token_id(key))
    _set_shape(file, config)
    _set_rope(file, config)
    return config


def _write_header(file: GgufFile, path: Path) -> None:
    """Write a GGUF file with the metadata and tensor names of another, one token, and tensors of
    one element. transformers reads it in milliseconds."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), file.architecture)
    for key, (kind, value) in file.fields.items():
        # transformers 5.23 misreads gpt-oss' scaling; `_set_rope` sets it.
        if key != "general.architecture" and not key.startswith("tokenizer.") and ".rope.scaling." not in key:
            if kind == gguf_file.ARRAY:
                if value:
                    writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType(kind))
    if file.of_model("vocab_size") is None:
        writer.add_vocab_size(file.tensors["token_embd.weight"].shape[0])
    writer.add_token_list(["x"])
    for name in file.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _set_shape(file: GgufFile, config: Any) -> None:
    """Set fields of the shape that transformers leaves at the default of the config's class."""
    for key, name in FIELDS.items():
        value = file.of_model(key)
        # Gemma 4 has two head dims, which transformers reads.
        if isinstance(value, int) and hasattr(config, name) and file.architecture != "gemma4":
            setattr(config, name, value)
    pattern = file.of_model("attention.sliding_window_pattern")
    if pattern and getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        layers = config.num_hidden_layers
        windowed = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
        config.layer_types = ["sliding_attention" if one else "full_attention" for one in windowed]
    if (file.architecture, config.num_hidden_layers) in {("gemma2", 46), ("gemma3", 62)}:
        # The models of 27B scale scores by another number than the head dim, and no key says so.
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _set_rope(file: GgufFile, config: Any) -> None:
    """Set the scaling of the RoPE, which transformers does not read from GGUF.

    Raises:
        UserError: the scaling has no counterpart in the config.
    """
    by_layer = getattr(config, "rope_parameters", None)
    if not by_layer:
        return
    parameters = by_layer.get("full_attention", by_layer)
    if "sliding_attention" in by_layer and (base := file.of_model("rope.freq_base_swa")):
        by_layer["sliding_attention"]["rope_theta"] = base
    _set_rotated_part(file, config, parameters)
    kind, factor = file.of_model("rope.scaling.type", "none"), file.of_model("rope.scaling.factor")
    original = file.of_model("rope.scaling.original_context_length")
    if any(name.startswith("rope_factors_") for name in file.tensors):
        kind = "longrope"
    if "rope_freqs.weight" in file.tensors and file.architecture != "gemma4":
        parameters |= {"rope_type": "llama3", "factor": _llama3_factor(file, config), **LLAMA3}
    elif kind == "linear" and factor:
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor and original:
        parameters |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind != "none":
        raise UserError(
            f"{file.path} scales its RoPE by {kind!r}, which cannot be read from GGUF (readable: none, linear, yarn, "
            "Llama 3's): give the model's folder in Hugging Face's layout instead"
        )


def _set_rotated_part(file: GgufFile, config: Any, parameters: dict[str, Any]) -> None:
    """Set the part of each head that the RoPE rotates.

    Raises:
        UserError: it is not the whole head, and the architecture has no field for it.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = file.of_model("rope.dimension_count", head_dim)
    if "partial_rotary_factor" in parameters:
        parameters["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim and file.architecture != "gemma4":
        raise UserError(
            f"{file.path} rotates {rotated} of {head_dim} channels by RoPE, which {config.model_type} cannot do: "
            "give the model's folder in Hugging Face's layout instead"
        )


def _llama3_factor(file: GgufFile, config: Any) -> float:
    """Return the factor of Llama 3's RoPE scaling from the factors of all frequencies.

    Raises:
        UserError: the factors are not those of Llama 3's formula.
    """
    import numpy as np

    tensor = file.tensors["rope_freqs.weight"]
    stored = np.fromfile(file.path, np.float32, math.prod(tensor.shape), offset=tensor.start)
    factor = float(stored.max())
    theta, head_dim = config.rope_parameters["rope_theta"], config.head_dim
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, original = LLAMA3.values()
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UserError(
            f"{file.path} scales its RoPE by factors that are not Llama 3's: give the model's folder in "
            "Hugging Face's layout instead"
        )
    return factor


def convert(path: Path, target: Path) -> tuple[Any, Any]:
    """Write a GGUF file to `target` as a Hugging Face model folder: safetensors, tokenizer, chat
    template, configs. Return (config, tokenizer).

    Raises:
        UserError: the file is damaged or not readable, or transformers' model has other tensors.
    """
    from transformers import AutoTokenizer

    file = gguf_file.read(path)
    config = config_of(file)
    # The GGUF reader draws a progress bar that transformers' settings do not turn off.
    with quiet(), contextlib.redirect_stderr(io.StringIO()), _alone(path, target.parent) as folder:
        network = _network(file, config)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        _set_special_tokens(file, tokenizer)
        tokenizer.model_max_length = getattr(config, "max_position_embeddings", None)
        network.generation_config.eos_token_id = end_ids(file, tokenizer)
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)
        return network.config, AutoTokenizer.from_pretrained(target)


@contextlib.contextmanager
def _alone(path: Path, scratch: Path) -> Iterator[str]:
    """Give a folder that contains only the file, as model.gguf. transformers would read other
    configs next to it."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        link = Path(folder) / "model.gguf"
        try:
            link.symlink_to(path.resolve())
        except OSError:  # Windows allows links only to some users
            shutil.copyfile(path, link)
        yield folder


def _network(file: GgufFile, config: Any) -> Any:
    """Return the model with the file's weights.

    Tensors are assigned to a model without memory of its own, so that weights exist once.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
    )

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(network, processor)
    unused = {name for name in file.tensors if not {name, name.removesuffix(".weight")} & names.keys()}
    # from_pretrained(gguf_file=...) does the same, but requires `accelerate`, which is not needed.
    tensors = load_gguf_checkpoint(
        str(file.path), return_tensors=True, model_to_load=network, torch_dtype=config.dtype
    )["tensors"]
    missing = set(network.load_state_dict(tensors, strict=False, assign=True).missing_keys)
    network.tie_weights()
    missing -= set(network.all_tied_weights_keys) if config.tie_word_embeddings else set()
    unused -= {"rope_freqs.weight"}
    if missing or unused:
        parts = (("lacks", missing), ("also has", unused))
        said = " and ".join(f"{verb} {len(some)} ({', '.join(sorted(some)[:3])}…)" for verb, some in parts if some)
        raise UserError(
            f"{file.path} has other tensors than transformers' {config.model_type} model: it {said}; give the "
            "model's folder in Hugging Face's layout instead"
        )
    return network


def _set_special_tokens(file: GgufFile, tokenizer: Any) -> None:
    """Set the special tokens by the file's ids, because some releases of transformers confuse bos
    and eos."""
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := file.token_id(key)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token_id))


def end_ids(file: GgufFile, tokenizer: Any) -> int | list[int] | None:
    """Return the ids at which generation ends, the file's own first.

    A file may name the end of a text, and its chat template end a turn with another token, or the
    other way round.
    """
    ids = [file.token_id(kind) for kind in ("eos", "eot", "eom")]
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    turns = [] if tokenizer.eos_token and tokenizer.eos_token in template else [t for t in TURN_ENDS if t in template]
    ids += [vocabulary.get(token) for token in (*turns, *TEXT_ENDS)]
    ends = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return ends if len(ends) > 1 else ends[0] if ends else None


def check(model: PackagedModel, config: Any, tokenizer: Any) -> None:
    """Raise UserError if a converted model differs from the known facts in `model`."""
    faults = [
        f"{key} is {getattr(config, key, None)!r}, expected {value!r}"
        for key, value in model.config.items()
        if getattr(config, key, None) != value
    ]
    if tokenizer.eos_token != model.eos_token:
        faults.append(f"end-of-text token is {tokenizer.eos_token!r}, expected {model.eos_token!r}")
    if not tokenizer.chat_template:
        faults.append("no chat template")
    sample = "Hello  world,\n\tx = 3.14; naïve – “日本”"
    if tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) != sample:
        faults.append("the tokenizer does not give a text back")
    if faults:
        raise UserError(
            f"{model.name} did not convert faithfully ({'; '.join(faults)}): the installed transformers reads "
            "this GGUF file differently; use a version within the range that tersekv states"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers; restore its settings afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
