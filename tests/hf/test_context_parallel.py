"""Context parallelism among threads that meet at a barrier, and once among two ranks under
torchrun."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf

import tersekv
from conftest import HEAD, SHAPE, prompt
from ranks import torchrun
from tersekv.cache.parallel import ContextParallel
from tersekv.calibration.needs import attention_plans
from tersekv.errors import CacheError, UserError
from tersekv.hf.parallel import spread_over
from tersekv.recipe import Recipe
from test_saved import DROPPING, KINDS, calibration, read, singles
from test_saved import wide as wide

ROPED = ["kivi:bits=2,pre_rope=true", "polarquant:codebook=online"]


def together(ranks: int, work: Callable[[ContextParallel], Any]) -> list[Any]:
    """Return the results of `work` on all ranks, which are threads."""
    barrier, slots = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks

    def gather(rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        slots[rank] = x
        barrier.wait()
        parts = list(slots)
        barrier.wait()
        return parts

    def run(rank: int) -> Any:
        try:
            return work(ContextParallel(rank, ranks, lambda x: gather(rank, x)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def divided(model, recipe: str, spread: ContextParallel, learnt=None) -> tersekv.CompressedCache:
    plans = {layer.index: layer.plan for layer in tersekv.CompressedCache(model.config, recipe, learnt).layers}
    return tersekv.CompressedCache.of(model.config, Recipe.parse(recipe), plans, spread)


def same_as_one(model, recipe, steps, ranks=2, mask=None, learnt=None) -> list[tersekv.CompressedCache]:
    """Return the caches of all ranks after checking that their logits equal those of one process
    bit for bit."""
    with tersekv.compress(model, recipe, learnt):
        one = tersekv.CompressedCache(model.config, recipe, learnt)
        expected = read(model, one, steps, mask)

        def work(spread: ContextParallel) -> Any:
            cache = divided(model, recipe, spread, learnt)
            return read(model, cache, steps, mask), cache

        found = together(ranks, work)
    for logits, _ in found:
        for a, b, c in zip(logits, expected, found[0][0], strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
            assert torch.equal(a, c)
    return [one, *(cache for _, cache in found)]


@pytest.mark.parametrize("recipe", [*KINDS, *ROPED])
def test_every_method_gives_the_result_of_one_process(wide, recipe, tmp_path):
    learnt = calibration(wide, recipe, tmp_path)
    steps = [prompt(300), *singles(25), prompt(70, seed=2), *singles(1)]  # 24 more fill a block
    one, *ranks = same_as_one(wide, recipe, steps, learnt=learnt)
    for layer in range(2):
        store, *parts = (cache.layers[layer].store for cache in (one, *ranks))
        places = torch.cat([part.own.places for part in parts])
        assert places.sort().values.tolist() == list(range(store.packed_first, store.packed_first + len(places)))
        assert len(places) == store.packed_tokens
        assert max(part.packed_tokens for part in parts) <= store.packed_tokens / 2 + store.flush_tokens
        for side in ("keys", "values"):  # the same bits, at the same places as in one process
            whole = getattr(store, side)
            expected = whole.codec.decode(whole.packed.planes(), 64)
            for part in parts:
                own = getattr(part, side)
                got = own.codec.decode(own.packed.planes(), 64)
                assert torch.equal(got, expected[:, :, part.own.places.long() - store.packed_first])


@pytest.mark.parametrize(("ranks", "recipe"), [(1, ROPED[0]), (3, "uniform:bits=7"), (5, ROPED[0])])
def test_more_processes_than_blocks(llama, ranks, recipe):
    """Ranks without packed tokens take part, also if kernels read the others' tokens. Remaining
    blocks are distributed."""
    _, *parts = same_as_one(llama, recipe, [prompt(200), *singles(40), prompt(20, seed=3)], ranks)
    packed = [part.layers[0].store.packed_tokens for part in parts]
    assert max(packed) - min(packed) <= 32


def test_padded_batches_and_sliding_windows(models):
    mask = torch.ones(2, 250, dtype=torch.long)
    mask[0, :37] = 0
    steps = [prompt(200, 2), prompt(50, 2, 1), *singles(15, 2, 2)]
    for name in ("llama", "gemma3", "gpt_oss"):
        _, part, _ = same_as_one(models[name], ROPED[0], steps, mask=mask)
        kinds = [layer.store.own is None for layer in part.layers]
        assert kinds == [layer.sliding_window is not None for layer in part.layers]


def test_frequencies_that_change_with_the_length():
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = tf.LlamaConfig(**(SHAPE | {"max_position_embeddings": 128}), **HEAD, rope_parameters=rope)
    steps = [prompt(200, 2), *singles(40, 2), prompt(90, 2, seed=3)]
    mask = torch.ones(2, 330, dtype=torch.long)
    mask[0, :37] = 0
    fresh = tf.LlamaForCausalLM(config).eval()  # a model keeps the frequencies of its longest text

    def work(spread: ContextParallel | None) -> Any:
        model, recipe = copy.deepcopy(fresh), ROPED[0]
        with tersekv.compress(model, recipe):
            cache = tersekv.CompressedCache(model.config, recipe) if spread is None else divided(model, recipe, spread)
            return read(model, cache, steps, mask)

    expected = work(None)
    for logits in together(2, work):
        for a, b in zip(logits, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_memory_is_divided(llama):
    one, *parts = same_as_one(llama, "kivi:bits=2", [prompt(2000)], 4)
    for part in parts:
        assert part.footprint().parts["codes"] < 0.27 * one.footprint().parts["codes"]


def test_rollback_rows_and_reset(llama):
    def work(spread: ContextParallel) -> Any:
        cache = divided(llama, "kivi:bits=4", spread)
        read(llama, cache, [prompt(300, 2)])
        cache.crop(-20)
        with pytest.raises(CacheError, match="layer 0: cannot roll back 200 tokens: other processes"):
            cache.crop(-200)
        cache.batch_select_indices(torch.tensor([1]))
        logits = read(llama, cache, singles(5))
        cache.crop(-285)
        assert cache.get_seq_length() == 0
        return logits + read(llama, cache, [prompt(250), *singles(3)])

    with tersekv.compress(llama, "kivi:bits=4"):
        one = tersekv.CompressedCache(llama.config, "kivi:bits=4")
        read(llama, one, [prompt(300, 2)])
        one.crop(-20)
        one.batch_select_indices(torch.tensor([1]))
        expected = read(llama, one, singles(5))
        one.crop(-285)
        expected += read(llama, one, [prompt(250), *singles(3)])
        for logits in together(2, work):
            for a, b in zip(logits, expected, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_unsupported_caches_and_operations(llama, models, tmp_path):
    spread = ContextParallel(0, 2, lambda x: [x, x])

    def make(model, recipe):
        return tersekv.CompressedCache.of(
            model.config, Recipe.parse(recipe), attention_plans(Recipe.parse(recipe), model.config), spread
        )

    for policy in DROPPING:
        with pytest.raises(UserError, match="the policy drops tokens"):
            make(llama, f"{policy}+kivi")
    with pytest.raises(UserError, match="the model has latent attention"):
        make(models["deepseek_v3"], "kivi")
    cache = make(llama, "kivi")
    with tersekv.compress(llama, "kivi"), torch.no_grad():
        llama(prompt(300), past_key_values=cache)
        with pytest.raises(UserError, match="with context_parallel cannot be saved"):
            cache.save(tmp_path / "cache")
        with pytest.raises(UserError, match="without output_attentions"):
            llama(prompt(1), past_key_values=cache, output_attentions=True)
    with (
        pytest.raises(UserError, match="only tersekv's attention can read it"),
        pytest.warns(UserWarning, match="is not installed"),
    ):
        llama(prompt(1), past_key_values=cache)
    assert spread_over(None) is None


def test_two_ranks_under_torchrun():
    torchrun("run_context_parallel.py", "330")
