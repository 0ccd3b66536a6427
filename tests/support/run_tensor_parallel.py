"""Program for test_tensor_parallel.py, run by `torchrun` on two ranks.

A model whose heads are distributed must give, with every recipe, the answer of the whole model in
one process. Latents are held by every process, with the same codes.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as tf

import tersekv
from conftest import prompt, score_heads
from ranks import process_group
from tersekv.calibration.needs import needs_corpus
from tersekv.codecs import methods
from tersekv.models.fingerprint import fingerprint
from tersekv.recipe import Recipe
from test_saved import DROPPING, KINDS, calibration

LOOKING = [
    kind
    for kind in KINDS
    for codec in Recipe.parse(kind).coder.at(0)
    if codec.fit_spans_heads or codec.encode_spans_heads
]
RECIPES = [
    *dict.fromkeys([*methods(), *LOOKING]),
    *(f"{name}:budget=0.5,recent=16+kivi:bits=4" for name in DROPPING),
    "h2o:budget=0.5,recent=16+polarquant:codebook=online",
    "h2o:budget=0.8,recent=16,rest=2+uniform:bits=4",
    "mixed:recent=16+uniform:bits=4",
    "h2o:budget=0.8,recent=16,rest=2,evict=block+kivi:bits=4",
    "window:recent=16+kvarn:tile=64",
    "snapkv:budget=0.5,recent=16+kvquant:calibration=prompt",
]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
PROMPT = 162  # the first block of a longer recent window is packed two tokens later


def answer(model, recipe, learnt, ids):
    with tersekv.compress(model, recipe, learnt):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, **GREEDY)
    return out.sequences.tolist(), torch.stack(out.logits), out.past_key_values


def digest(cache) -> str:
    """Return a digest of rotations, sketches and tables."""
    codecs = [replace(side.codec, fitted={}) for layer in cache.layers for side in layer.store.sides]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for codec in codecs for t in codec.tables(64))).hexdigest()


def everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def compare(folder: Path) -> None:
    score_heads()
    rank = dist.get_rank()
    whole = tf.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    divided = tf.AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    assert fingerprint(divided) == fingerprint(whole)
    for recipe in RECIPES:
        work = folder / f"{rank}"
        learnt = calibration(whole, recipe, work) if needs_corpus(Recipe.parse(recipe), whole.config) else None
        expected, logits, cache = answer(whole, recipe, learnt, prompt(PROMPT))
        got, ours, own = answer(divided, recipe, learnt, prompt(PROMPT))
        assert got == expected, recipe
        assert float((ours - logits).abs().max()) < 0.02, recipe
        assert own.layers[0].store.kv_heads == 1 < cache.layers[0].store.kv_heads
        assert len(set(everywhere(digest(own)))) == 1, recipe
    out = answer(divided, "subgen:variant=stream,budget=0.5,recent=16+polarquant", None, prompt(PROMPT))
    assert bool(torch.isfinite(out[1]).all())  # otherwise samples are drawn
    files(divided, own, folder)


def latents(folder: Path) -> None:
    whole = tf.AutoModelForCausalLM.from_pretrained(folder / "latent").eval()
    divided = tf.AutoModelForCausalLM.from_pretrained(folder / "latent", tp_plan="auto").eval()
    for recipe in ("exact", "turboquant", "kivi:bits=4,group=16", "default"):
        expected, logits, _ = answer(whole, recipe, None, prompt(420))
        got, ours, cache = answer(divided, recipe, None, prompt(420))
        assert got == expected, recipe
        assert float((ours - logits).abs().max()) < 0.002, recipe
        held = [x.contiguous().numpy().tobytes() for layer in cache.layers for x in layer.store.decoded(torch.float32)]
        assert len(set(everywhere(hashlib.sha256(b"".join(held)).hexdigest()))) == 1, recipe


def files(model, cache, folder: Path) -> None:
    """Check that each rank saves and loads only its own heads."""
    rank = dist.get_rank()
    cache.save(folder / f"cache{rank}")
    dist.barrier()
    loaded = tersekv.CompressedCache.load(folder / f"cache{rank}", model)
    assert loaded.footprint() == cache.footprint()
    with pytest.raises(tersekv.UserError, match="saves and loads a file of its own"):
        tersekv.CompressedCache.load(folder / f"cache{1 - rank}", model)
    with pytest.raises(tersekv.UserError, match="other processes have some"):
        cache.save(folder / f"cache{rank}", storage=4)


if __name__ == "__main__":
    with process_group():
        compare(Path(sys.argv[1]))
        latents(Path(sys.argv[1]))
