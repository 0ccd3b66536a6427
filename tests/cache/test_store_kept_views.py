"""Kernel arguments of packed pages are built once and stay valid after any operation on a store."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import weakref

import pytest
import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.kernels import cpu
from tersekv.kernels.attend_packed import native_view
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

RECIPES = ["kivi:bits=4", "trellis:bits=2,calibration=prompt", "kvquant:bits=3,calibration=prompt", "polarquant", "qjl"]
pytestmark = pytest.mark.skipif(cpu.why_not_built() is not None, reason=cpu.why_not_built() or "")


def tokens(T: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, T, 64, generator=g), torch.randn(2, 2, T, 64, generator=g)


def new_store(recipe: str) -> LayerStore:
    return LayerStore(Recipe.parse(recipe).plan(3, 8), *tokens(0, 0), None, rope=standard_rope(64))


def attend(store: LayerStore, seed: int = 0) -> Tensor:
    query = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(seed))
    return attend_store(store, AttentionCall(query, None, 0.125))


def attend_anew(store: LayerStore, seed: int = 0) -> Tensor:
    """Attend with pages without cached kernel arguments."""
    store._pages = None
    return attend(store, seed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_operation_on_a_store(recipe):
    """Appends with and without packing, crops, selections, copies: attention as with new pages."""
    for seed in range(4):
        chance, store, plain = random.Random(seed), new_store(recipe), new_store(recipe)
        for one in (store, plain):
            one.append(*tokens(300, seed))
        for step in range(25):
            what, n = chance.choice(["append"] * 3 + ["crop", "select", "copy"]), chance.choice([1, 20, 300])
            for one in (store, plain):
                if what == "append":
                    one.append(*tokens(n, 100 + step))
                elif what == "crop":
                    one.crop(min(n, one.num_tokens - 1))
                elif what == "select":
                    one.select(torch.tensor([1, 0]))
            if what == "copy":
                store = copy.deepcopy(store)  # the first one's cached arguments are gone with it
            assert torch.equal(attend(store, step), attend_anew(plain, step)), (what, step)


@pytest.mark.parametrize("recipe", RECIPES)
def test_native_objects_are_made_once(recipe, monkeypatch):
    made = []
    monkeypatch.setattr(cpu_attend, "native_view", lambda *call: made.append(call[1]) or native_view(*call))
    store = new_store(recipe)
    store.append(*tokens(400, 1))
    store.append(*tokens(700, 2))
    assert len(store.pages().tokens) > 1
    first = attend(store)
    assert len(made) == 2 * len(store.pages().tokens)
    made.clear()
    assert torch.equal(attend(store), first)
    store.append(*tokens(1, 3))
    attend(store)
    assert not made


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_start_without_kernel_arguments(copied):
    store = new_store("kivi:bits=4")
    store.append(*tokens(400, 1))
    attend(store)
    pages = store.pages()
    assert pages.made
    assert copied(pages).made == {}
    assert pages.made  # the copied store is unchanged


def test_rope_tables_live_as_long_as_their_address():
    """Threads that use a RoPE for the first time at once each build its tables; the last ones are
    kept."""
    store = new_store("trellis:bits=2,calibration=prompt")
    store.append(*tokens(700, 1))
    first = attend(store)
    rope = store.rotary.rope
    made = [weakref.ref(x) for x in (*rope.offset_table(), *rope._channels.values())]
    rope._steps = None
    rope._channels.clear()
    gc.collect()
    assert all(x() is not None for x in made)
    assert torch.equal(attend(store), first)


def test_no_basis_stays_unpacked():
    store = new_store("trellis:bits=2,pre_rope=true,centre=false,calibration=prompt")
    store.append(*tokens(700, 1))
    first = attend(store)
    assert store._pages is None
    assert torch.equal(attend(store), first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_restored_and_shared_states(recipe):
    """Their tensors may be moved, and kernel arguments may be cached before that."""
    store, restored = new_store(recipe), new_store(recipe)
    store.append(*tokens(700, 1))
    first = attend(store)
    assert list(restored.packed_pages()) == []
    restored.restore(store.state())
    assert torch.equal(attend(restored), first)
    for page in store.state()["tiers"][0]["sides"][0]["packed"][0]["pages"]:
        for plane in page["planes"].values():
            plane.share_memory_()
    gc.collect()
    assert torch.equal(attend(store), first)


@pytest.mark.parametrize("recipe", ["trellis:bits=2,calibration=prompt", "kvquant:bits=3,calibration=prompt"])
def test_tables_that_are_moved(recipe):
    """Their old memory may be used again."""
    store = new_store(recipe)
    store.append(*tokens(700, 1))
    first = attend(store)
    for table in store.tables():
        table.share_memory_()
    used = [torch.full((1 << 16,), float("nan")) for _ in range(20)]
    assert torch.equal(attend(store), first)
    del used


def test_fitted_tables_are_not_copied():
    """Kernels read 16-bit scales and means in the codec's own memory, and native objects keep them
    alive."""
    store = new_store("trellis:bits=2,calibration=prompt")
    store.append(*tokens(700, 0))
    attend(store)
    counts = [sys.getrefcount(store.keys.codec.fitted[name]) for name in ("scale", "mean")]
    pages, store._pages = store._pages, None
    del pages
    gc.collect()
    assert all(sys.getrefcount(store.keys.codec.fitted[n]) < c for n, c in zip(("scale", "mean"), counts, strict=True))
