"""The store of a layer: exact and packed tokens, independent of how tokens were fed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tersekv.cache.footprint import PARTS, Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.pages import ROLLBACK_TOKENS
from tersekv.codecs import methods
from tersekv.errors import CacheError, UserError
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

UNFITTED = ["kivi:bits=2", "kivi:bits=4", "int4", "normalfloat", "qjl:outliers=0", "qjl:outliers_per=group", "exact"]


def tokens(T: int, B: int = 1, H: int = 2, D: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, H, T, D, generator=generator), torch.randn(B, H, T, D, generator=generator)


def store(recipe: str, keys: Tensor, values: Tensor, window: int | None = None) -> LayerStore:
    plan = Recipe.parse(recipe).plan(0, 1)
    rope = standard_rope(keys.shape[-1]) if plan.keys.needs_rope else None
    return LayerStore(plan, keys, values, window, rope)


def fed(recipe: str, keys: Tensor, values: Tensor, cuts: list[int], window: int | None = None) -> LayerStore:
    s = store(recipe, keys, values, window)
    for a, b in itertools.pairwise(cuts):
        s.append(keys[:, :, a:b], values[:, :, a:b])
    return s


def contents(s: LayerStore) -> list[Tensor]:
    """Return every byte in use."""
    planes = [plane for side in s.sides for plane in side.packed.planes().values()]
    return [*planes, *s.sinks.data, *s.recent.data]


@pytest.mark.parametrize("recipe", UNFITTED)
@pytest.mark.parametrize("cuts", [[0, 400], [0, 1, 400], [0, 5, 200, 201, 399, 400], list(range(401))])
def test_bytes_do_not_depend_on_how_tokens_were_fed(recipe, cuts):
    keys, values = tokens(400)
    once = fed(recipe, keys, values, [0, 400])
    parts = fed(recipe, keys, values, cuts)
    for a, b in zip(contents(once), contents(parts), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=8), st.integers(0, 40), st.integers(0, 9))
def test_any_chunking(chunks, recent, sinks):
    total = sum(chunks)
    keys, values = tokens(total, D=32)
    recipe = f"window:recent={recent},sinks={sinks}+kivi:bits=2"
    cuts = [0]
    for chunk in chunks:
        cuts.append(cuts[-1] + chunk)
    s = fed(recipe, keys, values, cuts)
    for a, b in zip(contents(s), contents(fed(recipe, keys, values, [0, total])), strict=True):
        assert torch.equal(a, b)
    assert s.sinks.keys.shape[2] + s.packed_tokens + s.recent.tokens == s.num_tokens == total
    assert s.sinks.keys.shape[2] == min(total, sinks)
    assert s.recent.tokens >= min(recent, total - s.sinks.keys.shape[2])
    # nothing is packed before twice `recent` tokens, see `window:start`
    assert s.recent.tokens < recent + s.flush_tokens or total < 2 * recent


def test_codecs_fitted_on_the_prompt_say_so():
    keys, _ = tokens(400)
    for name in methods():
        pair = methods()[name].build()
        for codec in (pair.keys, pair.values):
            assert (codec.fit(keys) is codec) == (codec.fits_on is None)
    assert methods()["qjl"].build().keys.fits_on == "prompt"


def test_order_and_exactness():
    """Sinks and window are returned unchanged (in the exact dtype); the middle is close."""
    keys, values = tokens(500)
    s = fed("kivi:bits=4", keys, values, [0, 500])
    decoded = s.decoded(torch.float32)
    for x, back in zip((keys, values), decoded, strict=True):
        exact = x.half().float()
        assert torch.equal(back[:, :, :4], exact[:, :, :4])
        assert torch.equal(back[:, :, -s.recent.tokens :], exact[:, :, -s.recent.tokens :])
        assert (back - x).square().mean() < 0.02
    assert s.recent.tokens >= 128


def test_empty_and_one_token():
    keys, values = tokens(1)
    s = fed("kivi", keys, values, [0, 1])
    assert (s.num_tokens, s.packed_tokens, s.sinks.keys.shape[2], s.recent.tokens) == (1, 0, 1, 0)
    assert s.packed_segment() is None
    assert torch.equal(s.decoded(torch.float32)[0], keys.half().float())


def test_different_blocks_for_keys_and_values():
    """Key groups of 128 tokens and value blocks of 32: tokens are packed in multiples of 128."""
    keys, values = tokens(700)
    s = fed("uniform:axis=channel,group=128/int4", keys, values, [0, 300, 700])
    assert s.flush_tokens == 128
    assert s.packed_tokens == (700 - 4 - 128) // 128 * 128
    assert s.decoded(torch.float32)[1].shape == values.shape


def test_a_footprint_prints_as_one_line():
    small = Footprint(7012, 16 * 10**6, {"codes": 8 * 10**6})
    assert str(small) == "7,012 tokens, 8.00 MB, 4.00 bits per element, 4.00 times smaller than bfloat16"
    assert str(Footprint(9, 1000, {"slack": 4000})).endswith("32.00 bits per element, 2.00 times the size of bfloat16")
    assert str(Footprint()) == "empty"


def test_footprint_counts_the_tensors_held():
    keys, values = tokens(1000, B=2, H=3)
    s = fed("kivi:bits=4", keys, values, [0, 900, 1000])
    footprint = s.footprint()
    packed = [plane for side in s.sides for page in side.packed.pages for plane in page.planes.values()]
    held = [*packed, *s.sinks.buffers, *s.recent.buffers]
    assert footprint.total_bytes == sum(x.numel() * x.element_size() for x in held)
    assert footprint.tokens == 1000
    assert footprint.elements == 2 * keys.numel()
    coded = s.packed_tokens * 2 * 3 * 64 * 2
    assert footprint.parts["codes"] == coded * 4 // 8
    assert footprint.parts["scales and norms"] == coded * 1 // 8
    assert footprint.parts["exact sinks"] == 2 * 3 * 4 * 64 * 2 * 2
    assert footprint.parts["exact window"] == 2 * 3 * s.recent.tokens * 64 * 2 * 2
    assert set(footprint.parts) == set(PARTS)


def test_ratios():
    footprint = Footprint(10, 1000)
    footprint.parts["codes"] = 500
    assert footprint.bits_per_element == 4.0
    assert (footprint.ratio(16), footprint.ratio(8)) == (4.0, 2.0)
    assert Footprint().ratio() == 0.0


@pytest.mark.parametrize("removed", [0, 1, 50, 128, 160, 161, 200, 396, 397, 399, 400])
def test_crop_then_continue(removed):
    """After a rollback, feeding the tokens again gives the same tokens, exact where they are exact."""
    keys, values = tokens(400)
    s = fed("exact:dtype=fp16", keys, values, [0, 400])
    s.crop(removed)
    assert s.num_tokens == 400 - removed
    torch.testing.assert_close(s.decoded(torch.float32)[0], keys[:, :, : 400 - removed].half().float())
    s.append(keys[:, :, 400 - removed :], values[:, :, 400 - removed :])
    torch.testing.assert_close(s.decoded(torch.float32)[1], values.half().float())


def test_crop_inside_the_window_changes_no_packed_byte():
    keys, values = tokens(400)
    s = fed("kivi:bits=2", keys, values, [0, 400])
    before = [plane.clone() for side in s.sides for plane in side.packed.planes().values()]
    s.crop(100)
    after = [plane for side in s.sides for plane in side.packed.planes().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_select_rows():
    keys, values = tokens(300, B=3)
    s = fed("qjl", keys, values, [0, 300])
    whole = s.decoded(torch.float32)
    rows = torch.tensor([2, 2, 0])
    s.select(rows)
    for a, b in zip(s.decoded(torch.float32), whole, strict=True):
        assert torch.equal(a, b[rows])


def test_left_padded_rows_have_their_own_sinks():
    keys, values = tokens(300, B=2)
    keys[0, :, :50] = 1e4  # the contents of padding must have no effect
    s = store("kivi:bits=2", keys, values)
    s.append(keys, values, torch.tensor([50, 0]))
    assert torch.equal(s.sinks.keys[0], keys[0, :, 50:54].half())
    assert torch.equal(s.sinks.keys[1], keys[1, :, :4].half())
    decoded = s.decoded(torch.float32)[0]
    assert torch.equal(decoded[0, :, 50:54], keys[0, :, 50:54].half().float())
    assert (decoded[0, :, 54:150] - keys[0, :, 54:150]).square().mean() < 0.3
    with pytest.raises(CacheError, match="left-padded"):
        s.crop(250)
    s.crop(300)
    assert s.num_tokens == 0


def test_a_padded_batch_starts_when_every_row_has_its_sinks():
    """Chunks that are padding for some row stay exact; then all is as if it had been fed at once."""
    keys, values = tokens(400, B=2)
    padding = torch.tensor([150, 0])
    once = store("uniform:bits=4,axis=channel,group=0/kivi", keys, values)
    once.append(keys, values, padding)
    parts = store("uniform:bits=4,axis=channel,group=0/kivi", keys, values)
    for a, b in [(0, 64), (64, 128), (128, 151), (151, 152), (152, 400)]:
        parts.append(keys[:, :, a:b], values[:, :, a:b], padding.clamp(max=b) if parts.deferred else None)
        assert parts.deferred == (b < 154)
        assert parts.decoded(torch.float32)[0].shape[2] == parts.num_tokens == b
    for x, y in zip(contents(parts), contents(once), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(parts.keys.codec.fitted["scale"], once.keys.codec.fitted["scale"])


def test_sliding_window_frees_memory():
    keys, values = tokens(3000)
    window = 100
    grown = fed("kivi:bits=2", keys, values, [0, *range(1000, 3001)], window)
    once = fed("kivi:bits=2", keys, values, [0, 3000], window)
    for s in (grown, once):
        kept = s.num_tokens - s.num_evicted
        assert window + ROLLBACK_TOKENS <= kept < window + ROLLBACK_TOKENS + 3 * s.flush_tokens
        assert s.footprint().parts["exact sinks"] == 0
        assert s.footprint().total_bytes < 3000 * 64 * 2 * 2
    common = 3000 - max(grown.num_evicted, once.num_evicted)
    a, b = (s.decoded(torch.float32)[0][:, :, -common:] for s in (grown, once))
    assert torch.equal(a, b)
    once.crop(ROLLBACK_TOKENS)
    with pytest.raises(CacheError, match="sliding window 100"):
        once.crop(500)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(value):
    keys, values = tokens(40)
    values[0, 1, 7, 3] = value
    with pytest.raises(CacheError, match="NaN or Inf"):
        fed("kivi", keys, values, [0, 40])


def test_values_that_float16_cannot_hold():
    keys, values = tokens(40)
    keys[0, 0, 0, 0] = 1e5
    with pytest.raises(CacheError, match="use the policy option exact=bf16"):
        fed("kivi", keys, values, [0, 40])
    assert fed("window:exact=bf16+kivi", keys, values, [0, 40]).num_tokens == 40


def test_crop_more_than_all_tokens():
    keys, values = tokens(40)
    with pytest.raises(CacheError, match="only 40 were seen"):
        fed("kivi", keys, values, [0, 40]).crop(41)


def test_a_refused_append_changes_nothing():
    """Values whose scale exceeds float16 are refused after the keys were encoded. The layer stays
    unchanged."""
    keys, values = tokens(600)
    s = fed("window:exact=fp32+kivi:bits=1", keys, values, [0, 300])
    before, seen = [x.clone() for x in contents(s)], s.num_tokens
    values[:, :, 400] = 1e5
    with pytest.raises(UserError, match="scales=bf16"):
        s.append(keys[:, :, 300:], values[:, :, 300:])
    assert s.num_tokens == seen
    for a, b in zip(contents(s), before, strict=True):
        assert torch.equal(a, b)


def test_an_emptied_layer_is_fitted_on_its_next_prompt():
    keys, values = tokens(400)
    keys[..., 5] *= 50
    s = fed("qjl:outliers=1", keys, values, [0, 400])
    assert s.keys.codec.fitted["channels"].unique().tolist() == [5]
    s.crop(400)
    other = keys.roll(7, dims=-1)
    s.append(other, values)
    assert s.keys.codec.fitted["channels"].unique().tolist() == [12]
    assert torch.equal(
        s.decoded(torch.float32)[0], fed("qjl:outliers=1", other, values, [0, 400]).decoded(torch.float32)[0]
    )
