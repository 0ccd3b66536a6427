"""Peak memory of reading a prompt, against what was measured, and where one recipe becomes smaller than another."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from conftest import build
from tersekv.hf.facts import load_known, of_config
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import Widths, last_change, predict, prefill_bytes


class Model(NamedTuple):
    """Numbers of a config, and bytes of the weights in float32."""

    hidden: int
    inner: int
    vocabulary: int
    heads: tuple[int, int, int]
    windows: tuple[int | None, ...] = (None,)


MODELS = {
    "SmolLM2-135M-Instruct": Model(576, 1536, 49152, (9, 3, 64)),
    "Qwen2.5-Coder-0.5B-Instruct": Model(896, 4864, 151936, (14, 2, 64)),
    "gemma-3-270m": Model(640, 2048, 262144, (4, 1, 256), (512, None)),
}

MEASURED = [
    ("SmolLM2-135M-Instruct", 1_024, 0, 9_076_816, 62_595_072),
    ("SmolLM2-135M-Instruct", 1_024, 512, 9_076_816, 43_048_960),
    ("SmolLM2-135M-Instruct", 4_096, 0, 25_112_656, 168_103_936),
    ("SmolLM2-135M-Instruct", 4_096, 512, 25_112_656, 74_698_752),
    ("Qwen2.5-Coder-0.5B-Instruct", 1_024, 0, 4_899_072, 120_111_104),
    ("Qwen2.5-Coder-0.5B-Instruct", 1_024, 512, 4_899_072, 84_336_640),
    ("Qwen2.5-Coder-0.5B-Instruct", 4_096, 0, 13_451_520, 362_651_648),
    ("Qwen2.5-Coder-0.5B-Instruct", 4_096, 512, 13_451_520, 105_177_088),
    ("gemma-3-270m", 1_024, 0, 6_248_512, 80_257_024),
    ("gemma-3-270m", 1_024, 512, 6_248_512, 52_117_504),
    ("gemma-3-270m", 4_096, 0, 9_197_632, 363_167_744),
    ("gemma-3-270m", 4_096, 512, 9_197_632, 75_161_600),
]
"""Model, tokens, tokens per forward pass (0: all), bytes of the cache, and peak resident memory above that of the
loaded model: `generate` with `default` in float32, one thread, on an AMD EPYC (Zen 3)."""


@pytest.mark.parametrize(("name", "tokens", "chunk", "held", "peak"), MEASURED)
def test_peaks_are_within_15_percent_of_what_was_measured(
    name: str, tokens: int, chunk: int, held: int, peak: int
) -> None:
    model = MODELS[name]
    query_heads, kv_heads, dim = model.heads
    widths = Widths(model.hidden, model.inner, model.vocabulary)
    shape = CacheShape(model.windows, kv_heads, dim, dim, torch.float32, (), query_heads=query_heads)
    predicted = held + prefill_bytes(widths, shape, tokens, chunk=chunk, width=4)
    assert predicted == pytest.approx(peak, rel=0.15)


DEFAULT = Recipe.parse("default")


def test_a_peak_is_known_by_a_published_name_and_from_a_config() -> None:
    whole, chunks = (load_known("llama-3.1-8b").peak(DEFAULT, 0, 32768, chunk=chunk) for chunk in (0, 512))
    assert 16.1e9 < chunks < 16.8e9 < 19e9 < whole < 21e9
    assert of_config(build("llama").config).peak(DEFAULT, 0, 64) is not None
    assert of_config(build("gpt_oss").config).peak(DEFAULT, 0, 64) is None  # experts
    waits = Recipe.parse("mixed:allot=prompt+trellis:bits=2,calibration=prompt")  # a prompt is exact at first
    assert load_known("llama-3.1-8b").peak(waits, 0, 32768) == whole + 32768 * 131072


def test_the_length_from_which_a_recipe_is_smaller() -> None:
    assert last_change(lambda n: 1000 + 2 * n, lambda n: 4 * n) == (pytest.approx(500, rel=0.03), -1)
    assert last_change(lambda n: 4 * n, lambda n: 1000 + 2 * n) == (pytest.approx(500, rel=0.03), 1)
    assert last_change(lambda n: n, lambda n: 2 * n) == (None, -1)
    assert last_change(lambda n: n, lambda n: n) == (None, 0)


def test_kivi_and_default_change_places_where_it_is_said() -> None:
    shape = load_known("llama-3.1-8b").shape
    sizes = [lambda n, recipe=recipe: predict(shape, recipe, n).total_bytes for recipe in ("kivi:bits=4", "default")]
    tokens, order = last_change(*sizes)
    assert order == 1
    assert tokens is not None
    assert sizes[0](tokens - 64) < sizes[1](tokens - 64)
    assert sizes[0](tokens + 64) > sizes[1](tokens + 64)
