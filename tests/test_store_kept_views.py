"""What kernels are handed of packed pages is made once, and stays right whatever is done to a store."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref

import pytest
import torch
from torch import Tensor

from tersekv.attention.read import Call, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.codecs.transforms.rope import standard_rope
from tersekv.kernels import cpu
from tersekv.kernels.attend_segments import Kept
from tersekv.recipe import Recipe

RECIPES = ["kivi:bits=4", "trellis:bits=2,calibration=prompt", "kvquant:bits=3,calibration=prompt", "polarquant", "qjl"]
pytestmark = pytest.mark.skipif(cpu.why_not_built() is not None, reason=cpu.why_not_built() or "")


def tokens(T: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, T, 64, generator=g), torch.randn(2, 2, T, 64, generator=g)


def new_store(recipe: str) -> LayerStore:
    return LayerStore(Recipe.parse(recipe).plan(3, 8), *tokens(0, 0), None, rope=standard_rope(64))


def attend(store: LayerStore, seed: int = 0) -> Tensor:
    query = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(seed))
    return attend_store(store, Call(query, None, 0.125))


def attend_anew(store: LayerStore, seed: int = 0) -> Tensor:
    """With pages that nothing was kept of."""
    store._pages = None
    return attend(store, seed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_whatever_is_done_to_a_store(recipe):
    """Appends that pack and appends that do not, crops, selections, copies: attention as with pages made anew."""
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
                    one.crop(min(n, one.seen - 1))
                elif what == "select":
                    one.select(torch.tensor([1, 0]))
            if what == "copy":
                store = copy.deepcopy(store)  # what the first one kept is gone with it
            assert torch.equal(attend(store, step), attend_anew(plain, step)), (what, step)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pages_are_handed_over_once(recipe, monkeypatch):
    packed, pack = [], cpu.pack
    monkeypatch.setattr(cpu, "pack", lambda name, operand: packed.append(operand) or pack(name, operand))
    store = new_store(recipe)
    store.append(*tokens(400, 1))
    store.append(*tokens(700, 2))
    assert len(list(store.packed_pages())) > 1
    first = attend(store)
    assert any(not isinstance(operand, Tensor) for operand in packed)
    packed.clear()
    assert torch.equal(attend(store), first)
    assert packed  # sinks and tail, which move
    assert all(isinstance(operand, Tensor) for operand in packed)


def test_copies_begin_with_nothing():
    kept = Kept()
    kept.of["cpu"] = ((1,), (2,))
    for copied in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert copied.of == {}
        assert kept.of == {"cpu": ((1,), (2,))}


def test_what_a_rope_has_lives_as_long_as_its_address():
    """Threads that look at a RoPE for the first time make its steps and channels each; the last one's stay there."""
    store = new_store("trellis:bits=2,calibration=prompt")
    store.append(*tokens(700, 1))
    first = attend(store)
    rope = store.rotary.rope
    made = [weakref.ref(x) for x in (*rope.steps(), *rope._channels.values())]
    rope._steps = None
    rope._channels.clear()
    gc.collect()
    assert all(x() is not None for x in made)
    assert torch.equal(attend(store), first)


def test_no_basis_stays_unpacked():
    store = new_store("trellis:bits=2,pre_rope=true,centre=false,calibration=prompt")
    store.append(*tokens(700, 1))
    first = attend(store)
    assert all(page.kept.of == {} for page in store.packed_pages())
    assert torch.equal(attend(store), first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_states(recipe):
    """Their tensors may be moved, and what holds one may have been looked at before."""
    store, restored = new_store(recipe), new_store(recipe)
    store.append(*tokens(700, 1))
    first = attend(store)
    assert list(restored.packed_pages()) == []
    restored.restore(store.state())
    assert torch.equal(attend(restored), first)
    for page in store.state()["sides"][0]["packed"][0]["pages"]:
        for plane in page["planes"].values():
            plane.share_memory_()
    gc.collect()
    assert torch.equal(attend(store), first)


def test_pages_share_what_was_fitted():
    """In float32 for kernels: once for all pages, and gone with the store."""
    store = new_store("trellis:bits=2,calibration=prompt")
    for seed in range(4):
        store.append(*tokens(700, seed))
    attend(store)
    handed = [page.kept.of["cpu"] for page in store.packed_pages()]
    made = {id(x): weakref.ref(x) for x in floats(handed) if x.shape == (2, 2, 64)}
    assert len(handed) > 2
    assert len(made) == 3  # scales of both sides and the mean
    del handed, store
    gc.collect()
    assert all(x() is None for x in made.values())


def floats(kept: object) -> list[Tensor]:
    """float32 tensors in nested tuples and lists."""
    if isinstance(kept, Tensor):
        return [kept] if kept.dtype is torch.float32 else []
    return [x for part in kept for x in floats(part)] if isinstance(kept, (tuple, list)) else []
