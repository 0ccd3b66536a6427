"""Forged cache files with correct digests: each is refused in one sentence, or loaded as what it
says.

For more of them run `python tests/hf/test_saved_forged.py 5000 [seed]`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path += map(str, Path(__file__).resolve().parents[1].glob("**/"))  # as under pytest

import forged
import tersekv
from conftest import build, prompt
from tersekv.cache import tensor_file
from tersekv.errors import CacheError, UserError

RECIPES = {
    "window:recent=16+kivi:bits=2": "llama",
    "window:recent=16+trellis:bits=2,calibration=prompt": "llama",
    "window:recent=16+kvquant:calibration=prompt": "llama",
    "window:recent=16+qjl:outliers_per=group/uniform:axis=channel,group=0": "llama",
    "window:recent=16+polarquant:codebook=online/turboquant:bits=2.5": "llama",
    "h2o:budget=64,recent=16+kivi:bits=4,pre_rope=true": "llama",
    "h2o:budget=64,recent=16,evict=block+kivi:bits=4": "llama",
    "streaming:budget=128,recent=16,rest=2+trellis:bits=4,calibration=prompt": "llama",
    "snapkv:budget=0.5+kvquant:calibration=prompt,outliers=0.05": "llama",
    "subgen:variant=stream,budget=0.5,recent=16+qjl/kivi:bits=4": "llama",
    "window:recent=16+kvquant:calibration=prompt,axis=token;1=trellis:calibration=prompt": "gemma3",
}
MUTANTS = 45
ROOM = ("allocated", "blocks", "entries")
"""Fields for spare capacity. A loaded cache has at most the capacity that appending would give."""


def saved(model: Any, recipe: str, path: Path) -> None:
    """Save a cache of a prompt of two rows, one of them padded, and some decode steps."""
    mask = torch.ones(2, 173, dtype=torch.long)
    mask[0, :5] = 0
    ids = prompt(173, 2)
    cache = tersekv.CompressedCache(model.config, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(ids[:, :170], past_key_values=cache, attention_mask=mask[:, :170])
        for i in range(170, 173):
            model(ids[:, i : i + 1], past_key_values=cache, attention_mask=mask[:, : i + 1])
        cache.save(path, ids)


def without_room(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_room(value) for key, value in tree.items() if key not in ROOM}
    return [without_room(value) for value in tree] if isinstance(tree, list) else tree


def same_numbers(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and tensor_file._bytes(a) == tensor_file._bytes(b)


def refusal(path: Path, model: Any) -> Any:
    """Return the error, or the loaded cache."""
    try:
        return tersekv.CompressedCache.load(path, model)
    except UserError as error:
        return error


def outcome(model: Any, recipe: str, mutant: forged.Mutant, path: Path) -> str:
    """Return the outcome of a mutant. Raises AssertionError if it is neither refused nor loaded as
    what it says."""
    what, said, tensors = mutant
    tensor_file.write(path, tensors, said)
    cache = refusal(path, model)
    if isinstance(cache, UserError):
        text = str(cache)
        assert str(path) in text, (what, text)
        assert "\n" not in text, (what, text)
        assert len(text) < len(str(path)) + 500, (what, text)
        return "refused"
    again = path.with_name("again")
    cache.save(again, None if tensors.get("ids") is None else tensors["ids"])
    new_said, new_tensors = forged.read(again)
    assert without_room(new_said["state"]) == without_room(said["state"]), what
    assert new_tensors.keys() == tensors.keys(), what
    for name, tensor in tensors.items():
        assert same_numbers(tensor, new_tensors[name]) or name.startswith("tables."), (what, name)
    mask = torch.ones(2, 240, dtype=torch.long)
    mask[0, :5] = 0
    with contextlib.suppress(UserError, CacheError), tersekv.compress(model, cache), torch.no_grad():
        for ids in (prompt(1, 2), prompt(60, 2)):
            seen = cache.get_seq_length() + ids.shape[1]
            model(ids, past_key_values=cache, attention_mask=mask[:, :seen])
    return "loaded"


def run(model: Any, recipe: str, folder: Path, seed: int, count: int) -> Counter[str]:
    path = folder / "cache"
    saved(model, recipe, path)
    said, tensors = forged.read(path)
    found: Counter[str] = Counter()
    for mutant in forged.mutants(said, tensors, seed, count):
        found[outcome(model, recipe, mutant, folder / "forged")] += 1
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forged_file_is_refused_or_is_what_it_says(models, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    found = run(models[RECIPES[recipe]], recipe, tmp_path, 0, MUTANTS)
    assert found["refused"] > found["loaded"]
    assert found["loaded"]  # other codes, or another program's version, are not forgeries


@pytest.mark.parametrize(
    "recipe",
    [
        "mixed:budget=0.4,rest=1,recent=16+kivi:bits=4",
        "window:found=4,recent=16+trellis:calibration=prompt",
        "h2o:budget=64,recent=16,rest=2+kivi:bits=4,pre_rope=true",
        "subgen:variant=stream,budget=0.5,recent=16+qjl",
    ],
)
def test_a_number_in_place_of_a_dictionary_or_list_is_refused(llama, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    path = tmp_path / "cache"
    saved(llama, recipe, path)
    said, tensors = forged.read(path)
    places = [("state", *place) for place in forged.leaves(said["state"]) if place[:2] in [("layers",), ("layers", 0)]]
    for place in [("state",), *places]:
        if isinstance(forged.at(said, place), (dict, list)):
            changed = copy.deepcopy(said)
            forged.at(changed, place[:-1])[place[-1]] = 3
            tensor_file.write(path, tensors, changed)
            assert isinstance(refusal(path, llama), UserError), place


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("turboquant:bits=4,seed=0", "seed=0", "seed=1"),
        ("mixed:budget=0.4,rest=1,recent=16+uniform:bits=4", "budget=0.4", "budget=0.5"),
        ("mixed:budget=0.4,rest=1,recent=16+uniform:bits=4", "rest=1", "rest=2"),
        ("mixed:budget=0.4,rest=1,recent=16+trellis:bits=4,calibration=prompt", "rest=1", "rest=1.5"),
        ("window:bias_correction=half+kivi:bits=4", "half", "full"),
        ("h2o:budget=64,recent=16+kivi:bits=4", "budget=64", "budget=96"),
        ("kivi:bits=4;0=turboquant:bits=2,seed=5", "seed=5", "seed=6"),
    ],
)
def test_another_recipe_in_the_header_is_refused(llama, tmp_path, recipe, old, new):
    path = tmp_path / "cache"
    saved(llama, recipe, path)
    said, tensors = forged.read(path)
    assert old in said["recipe"]
    tensor_file.write(path, tensors, said | {"recipe": said["recipe"].replace(old, new)})
    with pytest.raises(UserError, match=r"options\.policy\.\w+ is '.*', and must be|made with other tables"):
        tersekv.CompressedCache.load(path, llama)


@pytest.mark.parametrize("recipe", ["mixed:rest=1,recent=16+kivi:bits=4", "mixed:allot=prompt,recent=16+kivi:bits=3"])
def test_caches_without_the_counts_of_heads_are_refused(llama, tmp_path, recipe):
    """Without the number of blocks of each head, and with one row of rates for all heads of a layer."""
    path = tmp_path / "cache"
    saved(llama, recipe, path)
    said, tensors = forged.read(path)
    for i, layer in enumerate(said["state"]["layers"]):
        for tier in layer["store"]["tiers"]:
            tier["slots"] = []
        if "rates" in layer["plan"]:
            tensors[f"layers.{i}.plan.rates"] = tensors[f"layers.{i}.plan.rates"][0].clone()
    left = {name: tensor for name, tensor in tensors.items() if ".slots." not in name}
    tensor_file.write(path, left, said)
    with pytest.raises(UserError, match=r"(slots has 0 entries|rates is float32 \[3\]), and must .*; create it again"):
        tersekv.CompressedCache.load(path, llama)


if __name__ == "__main__":
    import tempfile
    import traceback

    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    total: Counter[str] = Counter()
    for recipe, name in RECIPES.items():
        model = build(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            saved(model, recipe, path)
            said, tensors = forged.read(path)
            found: Counter[str] = Counter()
            for mutant in forged.mutants(said, tensors, seed, math.ceil(count / len(RECIPES))):
                try:
                    result = outcome(model, recipe, copy.copy(mutant), Path(folder) / "forged")
                    found[result] += 1
                    if result == "loaded" and "-v" in sys.argv:
                        print("  loaded:", mutant[0])
                except Exception:
                    found["FAULT"] += 1
                    if found["FAULT"] <= 6:
                        print(recipe, mutant[0], "\n", "".join(traceback.format_exc().splitlines(True)[-7:]))
        print(recipe, dict(found), flush=True)
        total += found
    print(dict(total))
