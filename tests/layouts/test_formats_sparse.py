"""Layout `sparse`: position of entries, append, slice, selection and eviction; thresholds; and its
buffers."""

from __future__ import annotations

import pytest
import torch

from tersekv.cache.blocks import BlockBuffer
from tersekv.codecs.kvquant import KVQuant
from tersekv.layouts.sparse import SparseBlocksView, SparseView, largest, pack_outlier_blocks, pack_outliers, quantiles


def overlay(B: int = 2, H: int = 3, T: int = 96, D: int = 40, seed: int = 0, share: float = 0.03):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, T, D, generator=generator).half().float()
    chosen = torch.rand(B, H, T, D, generator=generator) < share
    return x, chosen


def test_entries_are_as_drawn():
    x = torch.zeros(1, 1, 64, 300)
    chosen = torch.zeros_like(x, dtype=torch.bool)
    for token, channel, value in ((0, 5, 1.0), (31, 299, -2.0), (31, 0, 0.5), (33, 7, 4.0)):
        x[0, 0, token, channel] = value
        chosen[0, 0, token, channel] = True
    planes = pack_outliers(x, chosen)
    # [token : 5][channel : 11], ordered by token and then by channel; block 1 begins at entry 3.
    assert [int(p) & 0xFFFF for p in planes["outlier_places"]] == [5, 31 << 11, 31 << 11 | 299, 1 << 11 | 7]
    assert planes["outlier_values"].tolist() == [1.0, 0.5, -2.0, 4.0]
    assert planes["outlier_starts"].tolist() == [[[0, 3]]]
    assert planes["outlier_places"].dtype == torch.int16
    assert torch.equal(SparseView(planes, 300).decode(), x)


def test_blocks_of_one_size_are_as_drawn():
    x = torch.zeros(1, 1, 64, 300)
    chosen = torch.zeros_like(x, dtype=torch.bool)
    for token, channel, value in ((0, 5, 1.0), (31, 299, -2.0), (31, 0, 0.5), (33, 7, 4.0)):
        x[0, 0, token, channel] = value
        chosen[0, 0, token, channel] = True
    planes = pack_outlier_blocks(x, chosen, 4)
    last = 31 << 11 | 299  # of unused entries
    places = planes["outlier_places"].long() & 0xFFFF
    assert places.tolist() == [[[[5, 31 << 11, last, last], [1 << 11 | 7, last, last, last]]]]
    assert planes["outlier_values"].tolist() == [[[[1.0, 0.5, -2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]]]
    assert (planes["outlier_places"].dtype, planes["outlier_values"].dtype) == (torch.int16, torch.float16)
    assert torch.equal(SparseBlocksView(planes, 300).decode(), x)


@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
def test_blocks_of_one_size_hold_the_same_outliers(share):
    x, chosen = overlay(share=share)
    planes = pack_outlier_blocks(x, chosen, max(1, int(chosen.unflatten(2, (-1, 32)).sum((3, 4)).max())))
    assert torch.equal(SparseBlocksView(planes, 40).decode(), SparseView(pack_outliers(x, chosen), 40).decode())


@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
def test_round_trip(share):
    x, chosen = overlay(share=share)
    decoded = SparseView(pack_outliers(x, chosen), 40).decode()
    assert torch.equal(decoded, torch.where(chosen, x, 0.0))


@pytest.fixture
def codec() -> KVQuant:
    x = overlay(T=256, D=64)[0]
    return KVQuant(4, "int", 0.05, calibration="prompt").fit(x)


def test_appends_slices_selections_and_evictions(codec):
    """After any operation on a buffer with ragged tensors, its blocks decode to the original
    tokens."""
    x = overlay(T=256, D=64)[0]
    whole = codec.decode(codec.encode(x), 64)
    buffer = BlockBuffer(codec.layout(64), 2, 3, x.device)
    for first, last in ((0, 1), (1, 4), (4, 5), (5, 8)):
        buffer.append(codec.encode(x[:, :, 32 * first : 32 * last]))
    for first, last in ((0, 8), (2, 5), (7, 8)):
        assert torch.equal(codec.decode(buffer.planes(first, last), 64), whole[:, :, 32 * first : 32 * last])
    buffer.drop_back(1)
    buffer.drop_front(6)
    assert len(buffer.pages) == 1  # of two: the memory of the first four blocks is freed
    assert torch.equal(codec.decode(buffer.planes(), 64), whole[:, :, 192:224])
    buffer.append(codec.encode(x[:, :, 224:256]))
    assert torch.equal(codec.decode(buffer.planes(), 64), whole[:, :, 192:256])
    rows = torch.tensor([1, 0, 1])
    buffer.select(rows)
    chosen = codec.select(rows)
    assert torch.equal(chosen.decode(buffer.planes(), 64), whole[rows][:, :, 192:256])
    buffer.append(chosen.encode(x[rows][:, :, :32]))
    assert torch.equal(chosen.decode(buffer.planes(2), 64), whole[rows][:, :, :32])


def test_quantiles():
    x = torch.arange(201.0)[torch.randperm(201, generator=torch.Generator().manual_seed(0))]
    low, high = quantiles(x[None], 0.01)
    assert (low.item(), high.item()) == (1.0, 199.0)
    assert ((x < low) | (x > high)).sum() == 2
    assert quantiles(x[None], 0.0) == (torch.tensor([0.0]), torch.tensor([200.0]))
    expected = torch.quantile(x, torch.tensor([0.015, 0.985]))
    torch.testing.assert_close(torch.stack(quantiles(x, 0.03)), expected)


def test_largest_keeps_at_most():
    excess = torch.tensor([[1.0, 5.0, 3.0, 4.0]])
    chosen = torch.tensor([[True, True, False, True]])
    assert largest(excess, chosen, 2).tolist() == [[False, True, False, True]]
    assert largest(excess, chosen, 9).tolist() == chosen.tolist()
