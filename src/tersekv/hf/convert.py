"""Convert a GGUF file to a folder in Hugging Face's layout, and check the result against known
facts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv.errors import UserError


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


def convert(model: PackagedModel, gguf: Path, target: Path) -> None:
    """Write `target` as a Hugging Face model folder: float32 safetensors, tokenizer, chat template,
    configs.

    Raises:
        UserError: the converted model differs from the known facts in `model`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with quiet():
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # from_pretrained(gguf_file=...) does the same, but requires `accelerate`, which is not
        # needed here.
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=network)["tensors"]
        left = network.load_state_dict(tensors, strict=False)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer.model_max_length = config.max_position_embeddings
        for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
            # Some releases of transformers confuse bos and eos here; the ids in the config come
            # from the file.
            if (token_id := getattr(config, f"{kind}_id", None)) is not None:
                setattr(tokenizer, kind, tokenizer.convert_ids_to_tokens(token_id))
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)
        tied = set(network.all_tied_weights_keys) if config.tie_word_embeddings else set()
        faults = _faults(model, config, set(left.missing_keys) - tied, AutoTokenizer.from_pretrained(target))
    if faults:
        raise UserError(
            f"{model.name} did not convert faithfully ({'; '.join(faults)}): the installed transformers reads "
            "this GGUF file differently; use a version within the range that tersekv states"
        )


def _faults(model: PackagedModel, config: Any, missing: set[str], tokenizer: Any) -> list[str]:
    """Return the differences between the converted model and the known facts in `model`."""
    faults = [
        f"{key} is {getattr(config, key, None)!r}, expected {value!r}"
        for key, value in model.config.items()
        if getattr(config, key, None) != value
    ]
    if missing:
        faults.append(f"no weights for {', '.join(sorted(missing))}")
    if tokenizer.eos_token != model.eos_token:
        faults.append(f"end-of-text token is {tokenizer.eos_token!r}, expected {model.eos_token!r}")
    if not tokenizer.chat_template:
        faults.append("no chat template")
    sample = "Hello  world,\n\tx = 3.14; naïve – “日本”"
    if tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) != sample:
        faults.append("the tokenizer does not give a text back")
    return faults


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
