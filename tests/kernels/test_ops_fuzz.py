"""Fuzzing of the native extension: a wrong call gives the reference's result or a reason for
refusal.

Shape, strides, dtype or contents of one tensor, or a number, of a valid call are changed. Strides
and shapes that agree are trusted, because the buffer size is unknown. Contents are not trusted,
because they may come from a file. `make asan` runs this too; there a read outside memory ends the
process.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from changed_trees import at, changed, contents, leaves, replaced
from native_calls import ROUNDING_ISAS
from packed_views import FORMATS, magnitude, packed, rope, roped, table_error, tokens
from tersekv.kernels import backends, cpu
from tersekv.kernels.attend_pages import attend_pages
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.cpu import encode
from tersekv.kernels.registry import NotTaken
from tersekv.layouts.base import Concat, View
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.transforms.rope import Rope
from test_ops_cpu_encode import calls, planes
from test_ops_pages import PAGEABLE, pool
from test_ops_parity import ISAS, compare, expectation, pytestmark  # noqa: F401

B, H, T, D, R = 2, 2, 64, 64, 3
SCALING = 0.125
NOT_BELIEVED = {"starts", "places", "channels", "dropped", "bits", "cos", "sin", "dims"}
"""Fields whose contents the reference would use unchecked, or treats as unchanged."""
ENCODED = calls(tokens=64)
fuzz = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@functools.cache
def plain(name: str, side: str) -> View:
    torch.manual_seed(len(name))
    return packed(name, side, tokens(B, H, T, D)).inner


KEYS = {name: functools.partial(plain, name, "keys") for name in FORMATS}
for _name in ("exact", "grid", "sparse", "sparse blocks", "signs", "polar", "trellis", "joined"):
    KEYS[f"roped {_name}"] = lambda name=_name: roped(plain(name, "keys"), "halves", D, T, "per row")
    KEYS[f"with rotated mean {_name}"] = lambda name=_name: with_rotated_mean(plain(name, "keys"))


def with_rotated_mean(view: View) -> View:
    of = rope("pairs", D)
    mean = torch.randn(1, H, D, generator=torch.Generator().manual_seed(0))
    return Concat([(view, D), (RotatedMean(mean, of, of.angles(5, T)), D)])


@functools.cache
def sound(keys: str, values: str) -> dict:
    """Return a valid call as a tree of views, lists, tensors and numbers."""
    view = KEYS[keys]()
    torch.manual_seed(1)
    channels = 2 * D if keys.startswith("with rotated mean") else D
    mask = torch.rand(B, R, T) < 0.8
    return {
        "query": torch.randn(B, H, R, channels), "keys": view, "values": plain(values, "values"), "mask": mask,
    }  # fmt: skip


def on_some_isa(draw, run, *more: type[Exception]):
    """Return the instruction set and the result of `run`, or None if it is refused."""
    cpu.set_isa(isa := draw(st.sampled_from(ISAS)))
    try:
        return isa, run()
    except (ValueError, TypeError, NotTaken, NotImplementedError, *more) as error:
        return isa, None if str(error) else pytest.fail("an error that says nothing")
    finally:
        cpu.set_isa("auto")


def check(draw, call: dict, believed: bool = True) -> None:
    """Run a call and compare. believed: True if the reference accepts it and gives the expected
    result."""
    query, keys, values, mask = call.values()
    args = query, keys.operand, values.operand, mask, SCALING, None
    ropes = (
        [RuntimeError, IndexError] if any(path[-1] == "cos" for path in leaves(keys)) else []
    )  # raised by the model's own function
    run = lambda: cpu_attend.attend_packed(*args)  # noqa: E731
    isa, result = on_some_isa(draw, run, *ropes)
    if result is None or not believed:
        return
    key, value = keys.decode(), values.decode()
    sizes = magnitude(keys).abs(), magnitude(values).abs()
    expected = expectation(query, key, value, sizes, mask, SCALING)
    assert result[0].shape == expected.out.shape
    if isa in ROUNDING_ISAS or not all(x.isfinite().all() for x in (key, value, query, *sizes)):
        return
    if isa == "avx512":
        error = table_error(keys, query) * SCALING
        bound = expected.out_bound + 2 * error * float(value.abs().max())
        expected = expected._replace(out_bound=bound, lse_bound=expected.lse_bound + error)
    compare(result, expected)


@fuzz
@given(data=st.data(), keys=st.sampled_from(sorted(KEYS)), values=st.sampled_from(sorted(FORMATS)))
def test_a_call_with_something_wrong(data, keys, values):
    call = sound(keys, values)
    path = data.draw(st.sampled_from(leaves(call)))
    check(data.draw, changed(data.draw, call, path), not set(path) & NOT_BELIEVED)


@fuzz
@given(data=st.data(), side=st.sampled_from(["keys", "values"]), name=st.sampled_from(sorted(KEYS)))
def test_a_damaged_file(data, side, name):
    plain_name = name.removeprefix("roped ").removeprefix("with rotated mean ")
    call = sound(name, "grid") if side == "keys" else sound("grid", plain_name)
    paths = [path for path in leaves(call) if path[0] == side and isinstance(at(call, path), Tensor)]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        call = replaced(call, path, contents(data.draw, at(call, path)))
    check(data.draw, call, believed=False)


@fuzz
@given(data=st.data(), name=st.sampled_from(PAGEABLE), page_tokens=st.sampled_from([0, -32, 16, 32, 64, 2**62, 2**64]))
def test_pages(data, name, page_tokens):
    torch.manual_seed(0)
    call = {"query": torch.randn(B, H, R, D), "mask": torch.rand(B, 1, 5 * 32) < 0.8}
    call |= {"pages": torch.tensor([[3, 0, 2, 1, -1], [1, 1, -1, -1, -1]], dtype=torch.int32)}
    call["mask"] &= call["pages"].repeat_interleave(32, 1).unsqueeze(1) >= 0
    keys, values = pool(name, B, 4 * 32)
    path = data.draw(st.sampled_from(leaves(call)))
    query, mask, pages = changed(data.draw, call, path).values()
    args = query, keys, values, pages, page_tokens, mask, SCALING, None
    run = lambda: cpu_attend.attend_pages(*args)  # noqa: E731
    _, result = on_some_isa(data.draw, run)
    seen = mask & (pages.repeat_interleave(32, 1).unsqueeze(1) >= 0) if result and page_tokens == 32 else None
    if seen is not None and torch.equal(seen, mask) and query.isfinite().all():
        wanted = attend_pages.reference(*args)
        for x, y in zip(result, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)  # integers multiply in bfloat16


@fuzz
@given(data=st.data())
def test_encoding_and_merging(data):
    torch.manual_seed(0)
    bits = torch.full((2, 16), 2, dtype=torch.uint8)
    call = {"y": torch.randn(2, 3, 16), "weight": torch.rand(2, 16), "bits": bits, "tables": torch.randn(9, 256)}
    args = list(changed(data.draw, call, data.draw(st.sampled_from(leaves(call)))).values())
    on_some_isa(data.draw, lambda: encode.encode_trellis(*args))
    call = {"outs": [torch.randn(1, 2, 3, 8) for _ in range(2)], "lses": [torch.randn(1, 2, 3) for _ in range(2)]}
    args = list(changed(data.draw, call, data.draw(st.sampled_from(leaves(call)))).values())
    on_some_isa(data.draw, lambda: cpu_attend.merge_segments(*args))


@fuzz
@given(data=st.data(), op=st.sampled_from(sorted(ENCODED)))
def test_packing(data, op):
    """An accepted call gives the reference's result."""
    call = dict(enumerate(ENCODED[op]))
    path = data.draw(st.sampled_from(leaves(call)))
    args = list(changed(data.draw, call, path).values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: data.draw(st.sampled_from([1, 3])))
        _, result = on_some_isa(data.draw, lambda: getattr(encode, op)(*args))
    said_twice = op == "rotate_hadamard" and path[0] > 0  # matrix, order and signs contain the same information
    out_of_range = op == "pack_lanes"
    if result is None or said_twice or out_of_range or not args[0].isfinite().all():
        return
    with torch.no_grad():
        wanted = getattr(backends, op).reference(*args)
    for x, y in zip(planes(result), planes(wanted), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if not x.is_floating_point():
            assert op == "encode_polar" or torch.equal(x, y)
        elif op != "encode_polar":
            torch.testing.assert_close(x, y, rtol=2e-7, atol=0, equal_nan=True)


def test_columns_of_cosines_in_any_order():
    """The first and last column of a run are as far apart as in order, but those between are not in
    order."""
    of, first = rope("halves", D), torch.arange(D // 2)
    first[1:15] = first[1:15].flip(0)
    order = torch.cat([first, first + D // 2])
    mixed = Rope(
        lambda positions, length: tuple(x[:, order] for x in of._cos_sin(positions, length)),
        lambda x, cos, sin: of._apply(x, cos[..., order], sin[..., order]),  # the flip is its own inverse
    )
    angles = mixed.angles_at(torch.arange(5, 5 + T).flip(0))  # in order, means would be added in int16
    view = Roped(plain("exact", "keys"), mixed, angles)
    assert torch.equal(mixed.channels(D)[: D // 2, 1], first.int())
    for each in (view, Concat([(plain("exact", "keys"), D), (RotatedMean(torch.ones(1, H, D), mixed, angles), D)])):
        query, key, value = (
            torch.randn(B, H, R, each.decode().shape[-1]),
            each.decode(),
            plain("exact", "values").decode(),
        )
        wanted = expectation(query, key, value, (magnitude(each), value.abs().double()), None, SCALING)
        for isa in ISAS:
            cpu.set_isa(isa)
            compare(cpu_attend.attend_packed(query, each, value, None, SCALING, None), wanted)
    cpu.set_isa("auto")
