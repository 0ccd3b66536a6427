"""Caches filled from one shared prefill."""

from __future__ import annotations

import pytest
import torch

import tersekv
from conftest import MODELS, prompt
from tersekv.evals.reader import Reader
from tersekv.evals.tasks import Prompt
from tersekv.hf.models import load
from tersekv.hf.prefill import Prefill, held_by, new_cache, shares_prefill
from tersekv.tokens.window import Window


@pytest.mark.parametrize(
    "recipe",
    [
        *("kivi:bits=2,group=16", "qjl:outliers=4,value_group=0", "turboquant", "polarquant"),
        *("window:sinks=0,recent=16+int4:group=16", "kivi:bits=4,group=16,pre_rope=true"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_shared_prefill_has_the_bytes_of_a_real_one(models, name: str, recipe: str) -> None:
    model, ids = models[name], prompt(200)
    filled, real = new_cache(model, recipe), new_cache(model, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(input_ids=ids, past_key_values=real)
        # inside, since softcaps and attention sinks are rounded otherwise than by the model's own attention
        Prefill(model).fill(filled, ids)
    for ours, theirs in zip(filled.layers, real.layers, strict=True):
        if theirs.store is None:
            assert ours.store is None
            continue
        assert (ours.store.seen, ours.store.dropped) == (theirs.store.seen, theirs.store.dropped)
        for a, b in zip(ours.store.sides, theirs.store.sides, strict=True):
            assert torch.equal(a.sinks, b.sinks)
            assert torch.equal(a.tail.data, b.tail.data)
            planes, wanted = a.packed.planes(), b.packed.planes()
            assert all(torch.equal(planes[key].view(torch.uint8), wanted[key].view(torch.uint8)) for key in wanted)
    assert held_by(filled) == held_by(real)


def test_shared_prefill_fills_the_full_cache_with_sliding_windows(models) -> None:
    model, ids = models["gemma2"], prompt(200)
    filled, real = new_cache(model, None), new_cache(model, None)
    Prefill(model).fill(filled, ids)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=real)
        nexts = [model(input_ids=ids[:, :1], past_key_values=cache).logits for cache in (filled, real)]
    assert torch.equal(*nexts)


def test_prefill_is_computed_once_per_prompt(llama) -> None:
    calls = []
    hook = llama.base_model.register_forward_hook(lambda *_: calls.append(1))
    try:
        prefill = Prefill(llama)
        for ids in (prompt(40), prompt(40).clone(), prompt(41), prompt(40)):
            prefill.fill(new_cache(llama, "kivi"), ids)
    finally:
        hook.remove()
    assert len(calls) == 3


def test_policies_that_observe_queries_prefill_themselves(tiny: str, monkeypatch) -> None:
    model, tokenizer = load(tiny)
    ask = Prompt("A cache keeps keys and values. " * 8, "Why?")
    shared = Reader(model, tokenizer, "kivi:bits=2").answer(ask, 8)
    monkeypatch.setattr(Window, "observes", True)
    assert not shares_prefill(model, "kivi:bits=2")
    assert shares_prefill(model, None)
    assert Reader(model, tokenizer, "kivi:bits=2").answer(ask, 8) == shared
