"""Whole runs on models with real weights, which TERSEKV_MODELS names, separated by colons:

    TERSEKV_MODELS=smollm2:FOLDER:FILE.gguf python -m pytest tests/hf/test_real_models.py

Whatever transformers does with a cache is done with the preset `default` beside the full cache, on a
text of some 1,200 tokens. The bound of the divergence is .05 nats, thirty times what the preset has.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, TextIteratorStreamer

import tersekv
from tersekv.calibration.text import pydoc_text

MODELS = [name for name in os.environ.get("TERSEKV_MODELS", "").split(os.pathsep) if name]
pytestmark = pytest.mark.skipif(not MODELS, reason="TERSEKV_MODELS names no model")
NEAR = 0.05
TOKENS = 1200


@pytest.fixture(scope="module", params=MODELS or [None])
def loaded(request):
    return tersekv.load_model(request.param, dtype="float32")


@pytest.fixture
def ids(loaded) -> Tensor:
    return loaded[1](pydoc_text()[:20_000], return_tensors="pt")["input_ids"][:, :TOKENS]


def divergence(full: Tensor, packed: Tensor) -> float:
    """Return the mean KL divergence, nats, between logits [..., V]."""
    p, q = full.float().log_softmax(-1), packed.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def generated(model, recipe: str | None, ids: Tensor, **options):
    """Return `generate`'s output with a recipe; with the full cache if that is None."""
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0} | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if recipe is None:
        return model.generate(ids, **options)
    with tersekv.compress(model, recipe):
        return model.generate(ids, **options)


@torch.no_grad()
def test_each_step_is_near_the_full_cache(loaded, ids):
    """The full cache's answer is fed to both, so a token that differs does not hide the rest."""
    model, _ = loaded
    answer = generated(model, None, ids).sequences[:, TOKENS:]
    full, packed = DynamicCache(config=model.config), tersekv.CompressedCache(model, "default")
    for cache in (full, packed):
        with tersekv.compress(model, "default"):
            steps = [model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]]
            steps += [model(answer[:, n : n + 1], past_key_values=cache).logits[:, -1] for n in range(31)]
        cache.steps = torch.stack(steps)
    assert 0 < divergence(full.steps, packed.steps) < NEAR
    assert packed.footprint().ratio() > 1.5


def test_streamed_text_is_the_generated_one(loaded, ids):
    model, tokenizer = loaded
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    found = generated(model, "default", ids, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(found.sequences[0, TOKENS:])


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 256}])
def test_other_ways_to_the_same_answer(loaded, ids, options):
    """Proposals that are rolled back, and a prompt in parts: the logits stay near those of the plain run."""
    model, _ = loaded
    plain, other = generated(model, "default", ids), generated(model, "default", ids, **options)
    assert divergence(plain.logits[0], other.logits[0]) < NEAR
    same = (plain.sequences == other.sequences[:, : plain.sequences.shape[1]])[0, TOKENS:]
    assert int(same.int().cumprod(0).sum()) >= 8


def test_an_assistant_proposes(loaded, ids):
    """The model itself, with its layers' outputs as they are, proposes; some proposals are rolled back."""
    model, _ = loaded
    assistant = copy.deepcopy(model)
    for parameter in assistant.get_output_embeddings().parameters():
        parameter.data += 0.02 * parameter.data.std() * torch.randn_like(parameter)
    plain, other = (generated(model, "default", ids, assistant_model=one) for one in (None, assistant))
    assert divergence(plain.logits[0], other.logits[0]) < NEAR
    same = (plain.sequences == other.sequences[:, : plain.sequences.shape[1]])[0, TOKENS:]
    assert int(same.int().cumprod(0).sum()) >= 8


def test_beams(loaded, ids):
    model, _ = loaded
    options = {"num_beams": 3, "max_new_tokens": 12, "output_scores": True}
    full, packed = (generated(model, recipe, ids, **options) for recipe in (None, "default"))
    assert abs(float(full.sequences_scores[0] - packed.sequences_scores[0])) < NEAR


def test_rows_with_padding(loaded, ids):
    """A short and a long row: the logits of each are near those of the full cache."""
    model, _ = loaded
    short = 400
    batch, mask = ids.repeat(2, 1), torch.ones(2, TOKENS, dtype=torch.long)
    batch[1, : TOKENS - short], mask[1, : TOKENS - short] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 2}
    full, packed = (generated(model, recipe, batch, **options) for recipe in (None, "default"))
    for row in (0, 1):
        assert divergence(full.logits[0][row], packed.logits[0][row]) < NEAR


@torch.no_grad()
def test_second_turn_and_prompt_cache(loaded, ids, tmp_path: Path):
    """A second question after 32 single tokens, with the cache at hand, copied, and saved and loaded."""
    model, _ = loaded
    first, *steps, second = ids.split([1000, *[1] * 32, TOKENS - 1032], dim=1)
    full, packed = DynamicCache(config=model.config), tersekv.CompressedCache(model, "default")
    with tersekv.compress(model, "default"):
        for cache in (full, packed):
            for part in (first, *steps):
                model(part, past_key_values=cache, logits_to_keep=1)
        packed.save(tmp_path / "kept.cache")
        others = [copy.deepcopy(packed), tersekv.CompressedCache.load(tmp_path / "kept.cache", model)]
        wanted, *held = (model(second, past_key_values=cache).logits for cache in (full, packed, *others))
    assert divergence(wanted, held[0]) < NEAR
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[0], held[2])


@pytest.mark.skipif(not os.environ.get("TERSEKV_LONG"), reason="TERSEKV_LONG is not set: takes minutes")
@torch.no_grad()
def test_two_thousand_new_tokens(loaded, ids):
    """The full cache reads what was written, 64 tokens at a time, and finds the same probabilities."""
    model, _ = loaded
    new = 2000
    found = generated(model, "default", ids, max_new_tokens=new, min_new_tokens=new)
    full = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=full, logits_to_keep=1)
    read = found.sequences[:, TOKENS - 1 : -1].split(64, dim=1)
    wanted = torch.cat([model(part, past_key_values=full).logits for part in read], dim=1)[0]
    assert found.sequences.shape[1] == TOKENS + new
    assert divergence(wanted, torch.cat(found.logits)) < NEAR
    assert found.past_key_values.footprint().ratio() > 1.5
