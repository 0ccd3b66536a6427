"""Caches as files: `cache.save(path)` and `CompressedCache.load(path, model)`.

A file (`cache/tensor_file.py`) holds the `state()` of every layer, the tables that codecs share,
and the token ids if they are known. It also names its recipe and model. Loading checks all of that.
Pages of packed blocks stay in the memory-mapped file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tersekv import __version__
from tersekv.cache import tensor_file
from tersekv.cache.schema import anything, each, optional, record, require, tensor
from tersekv.cache.state import joined, split
from tersekv.cache.store import Store
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.needs import attention_plans
from tersekv.errors import UserError
from tersekv.hf import stored
from tersekv.hf.base import ModelCache
from tersekv.hf.layer import compressed_layers
from tersekv.hf.token_ids import PADDING
from tersekv.models.config import attention_layers, text_config
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.recipe import Recipe
from tersekv.tensors import plain

log = logging.getLogger(__name__)
C = TypeVar("C", bound=ModelCache)
SAME = 1e-6
"""Tolerance for tables made on another machine, because libraries of linear algebra round
differently."""


@plain
def save(
    cache: ModelCache,
    path: Path,
    ids: Tensor | None = None,
    model: PreTrainedModel | None = None,
    storage: float | None = None,
) -> None:
    """Write a cache to a file; see `CompressedCache.save`."""
    about, ids = about_cache(cache, ids, model)
    if storage is None:
        layers = [layer.live_state() for layer in compressed_layers(cache)]
        tree, tensors = split({"layers": layers, "tables": _shared_tables(cache), "ids": ids})
        said = {**about, **({} if cache.stored_kl is None else {"kl": cache.stored_kl}), "state": tree}
    else:
        said, tensors = stored.save(cache, about, ids, storage)
    tensor_file.write(Path(path).expanduser(), tensors, said)


def about_cache(
    cache: ModelCache, ids: Tensor | None, model: PreTrainedModel | None
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the metadata of a file with this cache, and the token ids as int32 [B, T].

    Raises:
        UserError: see `CompressedCache.save`.
    """
    model = model if model is not None else cache.model
    if model is None:
        raise UserError(
            "the model of this cache is unknown: fill it under tersekv.compress, or give cache.save(path, model=model)"
        )
    if any(kind.type == "linear" for kind in attention_layers(cache.config)):
        raise UserError(f"{cache.config.model_type} has state other than keys and values; such a cache cannot be saved")
    if cache.context_parallel is not None:
        raise UserError("a cache with context_parallel cannot be saved: read the prompt in one process instead")
    cache.progress.check()
    layers = compressed_layers(cache)
    seen = {layer.get_seq_length() for layer in layers}
    if len(seen) != 1 or seen == {0}:
        raise UserError("the cache is empty or its layers differ in their tokens: fill it before it is saved")
    tokens, batch = seen.pop(), layers[0].batch_size
    ids = None if ids is None else _checked_ids(ids, batch, tokens)
    said = {
        "tersekv": __version__,
        "recipe": str(cache.recipe),
        "model_type": cache.config.model_type,
        "architecture": architecture(cache.config),
        "model": fingerprint(model),
        "batch": batch,
        "ids_sha256": None if ids is None else ids_digest(ids),
        "cache": cache.footprint().to_dict(),
    }
    if ids is not None and cache.token_ids.known == tokens:
        said["padding"] = cache.token_ids.padding()
    return said, ids


@plain
def load(
    kind: type[C],
    path: str | Path,
    model: PreTrainedModel,
    ids: Tensor | None = None,
    decode: Callable[[list[int]], str] = str,
    recipe: str | Recipe | None = None,
    calibration: Calibration | str | Path | None = None,
) -> C:
    """Read a cache from a file; see `CompressedCache.load`. kind: the class of the cache."""
    path = Path(path).expanduser()
    said, tensors, size = tensor_file.read(path)
    tensor_file.check_said(path, said, size)
    check_model(path, said, model)
    device = torch.device("cpu") if model.device.type == "meta" else model.device  # meta: weights are elsewhere
    if "storage" in said:
        if ids is not None:
            check_prompt(path, tensors.get("ids"), ids, decode)
        cache = kind(model, recipe or "default", calibration)  # type: ignore[arg-type]  # that of CompressedCache
        cache.bind_model(model)
        if any(layer.plan.policy.observes for layer in compressed_layers(cache)):
            raise UserError(
                f"{path} cannot be loaded into {cache.recipe}: its token policy chooses by the prompt's queries, which "
                "a storage file does not hold; take a recipe without this policy"
            )
        with _named(path):
            _check_ids(said, tensors.get("ids"))
            stored.fill(cache, said, tensors, device)
        return _noted(cache, said, tensors.get("ids"), path)
    if recipe is not None and str(Recipe.parse(recipe)) != said["recipe"]:
        raise UserError(
            f"{path} holds a cache packed with {said['recipe']}, not with {recipe}: leave the recipe out, or build a "
            "storage file, which loads into any"
        )
    with _named(path):
        state = joined(said["state"], {name: tensor.to(device) for name, tensor in tensors.items()})
        parsed = Recipe.parse(said["recipe"])
        cache = kind.of(model.config, parsed, attention_plans(parsed, model.config))
        layers = compressed_layers(cache)
        record({"layers": each(anything, len(layers)), "tables": each(anything), "ids": anything})(state, "")
        _check_ids(said, state["ids"])
    if ids is not None:
        check_prompt(path, state["ids"], ids, decode)
    with _named(path):
        for i, (layer, its_state) in enumerate(zip(layers, state["layers"], strict=True)):
            layer.adopt_rates(its_state, f"layers.{i}")
    _check_tables(path, state["tables"], _shared_tables(cache))
    cache.bind_model(model)
    with _named(path):
        for i, (layer, its_state) in enumerate(zip(layers, state["layers"], strict=True)):
            layer.restore(its_state, said["batch"], device, f"layers.{i}")
        _check_layers([layer.store for layer in layers if layer.store is not None], said["cache"]["tokens"])
    return _noted(cache, said, state["ids"], path)


def _noted(cache: C, said: dict[str, Any], ids: Tensor | None, path: Path) -> C:
    """Return the cache with the ids of its tokens and the loss of their storage file, if they are known."""
    cache.stored_kl = said.get("kl")
    padding = said.get("padding", [0] if said["batch"] == 1 else None)  # unknown if `compress` has not seen the ids
    if ids is not None and padding is not None:
        hidden = torch.arange(ids.shape[1]) < torch.tensor(padding)[:, None]
        cache.token_ids.note(0, ids.masked_fill(hidden.to(ids.device), PADDING))
    log.info("loaded %d tokens in %s from %s", cache.get_seq_length(), cache.recipe, path)
    return cache


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the path to errors about the contents of a file."""
    try:
        yield
    except UserError as error:
        text = f"{path} is not a cache of its recipe and this model: {error}; {tensor_file.AGAIN}"
        raise UserError(text) from error


def _check_layers(stores: list[Store], tokens: int) -> None:
    """Raise UserError unless all layers have seen `tokens` tokens and have the same padding."""
    paddings = {tuple(store.padding.tolist()) for store in stores if store.padding is not None}
    for i, store in enumerate(stores):
        require(
            store.num_tokens == tokens, f"layers.{i}", f"has seen {store.num_tokens} tokens, and the cache {tokens}"
        )
    require(len(paddings) < 2, "layers", "differ in their padding")


def _check_ids(said: dict[str, Any], ids: Any) -> None:
    """Raise UserError unless the token ids of a file match the shape and hash in its metadata."""
    shape = said["batch"], said["cache"]["tokens"]
    require(len(said.get("padding", range(shape[0]))) == shape[0], "padding", "is not of as many rows as the batch")
    optional(tensor(torch.int32, *shape))(ids, "ids")
    digest = None if ids is None else ids_digest(ids)
    require(digest == said["ids_sha256"], "ids", "are not those of ids_sha256")


def check_model(path: Path, said: dict[str, Any], model: PreTrainedModel) -> None:
    """Raise UserError unless the metadata of a file names this model. said: the metadata."""
    if said["architecture"] != architecture(model.config):
        ours = text_config(model.config).model_type
        raise UserError(
            f"{path} was made by a model of another architecture ({said['model_type']}) than this {ours}; load the "
            "model that made it, or build it again"
        )
    if said["model"] != fingerprint(model):
        raise UserError(f"{path} was made by a model with other weights; load that model, or build it again")


def check_prompt(path: Path, held: Tensor | None, ids: Tensor, decode: Callable[[list[int]], str] = str) -> None:
    """Raise UserError unless a prompt [B, T] begins with the tokens [B, n] of a file."""
    if held is None:
        raise UserError(f"{path} was saved without token ids: save it with cache.save(path, ids)")
    new = ids.reshape(-1, ids.shape[-1]).to(held)
    if len(new) != len(held):
        raise UserError(f"{path} holds {len(held)} sequences, and the prompt has {len(new)}")
    n = min(held.shape[1], new.shape[1])
    differ = (held[:, :n] != new[:, :n]).nonzero()
    if len(differ):
        row, place = differ[differ[:, 1].argmin()].tolist()
        there, here = (decode(x[row, place : place + 8].tolist()) for x in (held, new))
        of = "" if len(held) == 1 else f" of sequence {row}"
        raise UserError(
            f"the prompt must begin with the {held.shape[1]:,} tokens of {path}, and differs from token {place:,}{of} "
            f"on: {here!r} instead of {there!r}"
        )
    if new.shape[1] < held.shape[1]:
        raise UserError(
            f"the prompt has {new.shape[1]:,} tokens and must begin with all {held.shape[1]:,} of {path}; "
            "give the rest of it, too"
        )


def ids_digest(ids: Tensor) -> str:
    """Return the SHA-256 in hex of token ids [B, T] as int32."""
    return hashlib.sha256(ids.to("cpu", torch.int32).contiguous().numpy().tobytes()).hexdigest()


def _checked_ids(ids: Tensor, batch: int, tokens: int) -> Tensor:
    ids = ids.detach().reshape(-1, ids.shape[-1]).to("cpu", torch.int32)
    if ids.shape != (batch, tokens):
        raise UserError(
            f"the cache holds {batch} × {tokens} tokens, and ids have shape {tuple(ids.shape)}: give those of all "
            "tokens that the model has read (of what it generated, all but the last)"
        )
    return ids


def _shared_tables(cache: ModelCache) -> list[Tensor]:
    """Return the tables that codecs derive from their options alone, each table once."""
    dims = cache.shape.key_dim, cache.shape.value_dim
    plans = [layer.plan for layer in compressed_layers(cache)]
    codecs = [pair for plan in plans for pair in zip((plan.keys, plan.values), dims, strict=True)]
    tables = [table for codec, dim in codecs for table in replace(codec, fitted={}).tables(dim)]
    return list({table.data_ptr(): table.cpu() for table in tables}.values())


def _check_tables(path: Path, written: list[Tensor], made: list[Tensor]) -> None:
    """Raise UserError unless the tables are alike, because codes decode correctly only with the
    rotation or sketch that made them."""
    alike = len(written) == len(made) and all(
        isinstance(a, Tensor)
        and (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.allclose(a.cpu().float(), b.float(), rtol=SAME, atol=SAME)
        for a, b in zip(written, made, strict=False)
    )
    if not alike:
        raise UserError(
            f"{path} was made with other tables, rotations or sketches than this version of tersekv or torch makes; "
            "build it again"
        )
