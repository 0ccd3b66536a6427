"""Grids of integers that are multiplied slice by slice, and which ones are."""

from __future__ import annotations

import pytest
import torch

from packed_views import tokens
from tersekv.codecs import methods
from tersekv.kernels import backends
from tersekv.kernels.attend_packed import attend_packed
from test_ops_triton import compare, device, make_mask, moved, pytestmark, right  # noqa: F401

GRIDS = {
    "keys per channel, values in groups": ("kivi", {"bits": 4}),
    "two bits": ("kivi", {"bits": 2}),
    "scales beyond float16": ("uniform", {"bits": 4, "axis": "channel", "group": 32, "scales": "bf16"}),
    "scales per token": ("uniform", {"bits": 4, "axis": "token", "group": 0}),
    "two bits per token": ("uniform", {"bits": 2, "axis": "token", "group": 0}),
}


@pytest.mark.parametrize(("D", "T"), [(64, 96), (128, 320), (96, 160), (256, 64)])
@pytest.mark.parametrize("name", GRIDS)
def test_slices(device, name, D, T):  # noqa: F811
    method, options = GRIDS[name]
    torch.manual_seed(D)
    pair = methods()[method].build(**options)
    large = 1e6 if "beyond" in name else 1.0
    with backends.forced("auto"):
        keys, values = (
            codec.view(codec.encode(x), D)
            for codec, x in ((pair.keys, large * tokens(2, 2, T, D)), (pair.values, tokens(2, 2, T, D)))
        )
    query = torch.randn(2, 2, 6, D).bfloat16().float() / large
    call = query, keys.inner.operand, values.inner.operand, make_mask(2, 3, T), D**-0.5, None
    result = backends.attend_packed(*(moved(x, device) for x in call))
    compare(result, right(attend_packed, *call), float((query @ keys.inner.decode().mT).abs().max()) * D**-0.5)


def test_which_grids_are_sliced(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("it does not depend on the device")
    from tersekv.kernels.triton import trees
    from tersekv.kernels.triton.grid_slices import sliced

    def of(side, bits, D, **options):
        codec = getattr(methods()["uniform"].build(bits=bits, **options), side)
        operand = codec.view(codec.encode(torch.randn(1, 1, 128, D)), D).inner.operand
        made = getattr(trees, side)(operand, torch.device("cpu"))
        return tuple(leaf.spec for leaf in made.leaves)

    groups = {"axis": "channel", "group": 32}
    assert [bits for bits in range(1, 9) if sliced(of("keys", bits, 128, **groups), 0, 4)] == [2, 4]
    assert [D for D in (32, 64, 128) if sliced(of("keys", 2, D, **groups), 0, D // 32)] == [128]
    assert [n for n in (1, 2, 4) if sliced(of("values", 4, 64, axis="token", group=32), 0, n)] == [2, 4]
    assert [n for n in (1, 2, 4) if sliced(of("values", 4, 64, axis="token", group=0), 0, n)] == [4]
