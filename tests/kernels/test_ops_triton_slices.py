"""Grids of integers that are multiplied slice by slice, and which ones are."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from packed_views import make_mask, tokens
from tersekv.codecs import methods
from tersekv.kernels import backends
from tersekv.kernels.attend_packed import attend_packed
from test_ops_triton import compare, device, moved, pytestmark, right  # noqa: F401

GRIDS = {
    "keys per channel, values in groups": ("kivi", {"bits": 4}),
    "two bits": ("kivi", {"bits": 2}),
    "scales beyond float16": ("uniform", {"bits": 4, "axis": "channel", "group": 32, "scales": "bf16"}),
    "scales per token": ("uniform", {"bits": 4, "axis": "token", "group": 0}),
    "two bits per token": ("uniform", {"bits": 2, "axis": "token", "group": 0}),
    "a table, scales per token": ("turboquant", {"bits": 4.0}),
    "a table, groups": ("normalfloat", {"axis": "channel", "group": 32}),
    "a table that differs between rows": ("kvquant", {"bits": 4, "calibration": "prompt", "outliers": 0}),
}


@pytest.mark.parametrize(("D", "T"), [(32, 64), (64, 96), (128, 320), (96, 160), (256, 64)])
@pytest.mark.parametrize("name", GRIDS)
def test_slices(device, name, D, T):  # noqa: F811
    method, options = GRIDS[name]
    torch.manual_seed(D)
    pair = methods()[method].build(**options)
    large = 1e6 if "beyond" in name else 1.0
    x, y = large * tokens(2, 2, T, D), tokens(2, 2, T, D) + 0.5
    with backends.forced("auto"):
        codecs = pair.keys.fit(x), pair.values.fit(y)
        keys, values = (codec.view(codec.encode(z), D) for codec, z in zip(codecs, (x, y), strict=True))
    query = torch.randn(2, 2, 6 if D < 128 else 18, D).bfloat16().float() / large  # one program, or two
    query[:, :, 1] /= 1024  # rows of a program share a power of two
    call = query, keys.inner.operand, values.inner.operand, make_mask(2, 3, T), D**-0.5, None
    result = backends.attend_packed(*(moved(x, device) for x in call))
    compare(result, right(attend_packed, *call), float((query @ keys.inner.decode().mT).abs().max()) * D**-0.5)


@pytest.mark.parametrize("name", ["a table, scales per token", "a table that differs between rows"])
def test_entries_that_are_loaded(device, name, monkeypatch):  # noqa: F811
    if device == "cuda":
        pytest.skip("NVIDIA's GPUs put them together of bytes")
    from tersekv.kernels.triton import grid_slices

    monkeypatch.setattr(grid_slices, "BY_BYTES", type(grid_slices.BY_BYTES)(False))
    test_slices(device, name, 64, 96)


def test_which_grids_are_sliced(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("it does not depend on the device")
    from tersekv.kernels.triton import trees
    from tersekv.kernels.triton.grid_slices import sliced

    def of(side, bits, D, method="uniform", **options):
        codec = getattr(methods()[method].build(bits=bits, **options), side)
        operand = codec.view(codec.encode(torch.randn(1, 1, 128, D)), D).inner.operand
        made = getattr(trees, side)(operand, torch.device("cpu"))
        return tuple(leaf.spec for leaf in made.leaves)

    groups = {"axis": "channel", "group": 32}
    assert [bits for bits in range(1, 9) if sliced(of("keys", bits, 128, **groups), 0)] == [2, 4, 8]
    assert not sliced(of("keys", 4, 128, axis="channel", group=8), 0)
    table = {"method": "normalfloat", **groups}
    assert [bits for bits in (2, 3, 4) if sliced(of("keys", bits, 128, **table), 0)] == [4]


def run_ptx(text, memory=None, **registers):
    """Run straight-line PTX of the few instructions that kernels use, on numbers of at most 64 bits. memory:
    numbers by address."""
    known = dict(registers)

    def value(name):
        if name.startswith("{"):
            low, high = (known[part.strip()] for part in name.strip("{}").split(","))
            return low | high << size // 2
        return known[name] if name in known else int(name, 0)

    def byte(a, b, nibble):
        found = (a | b << 32) >> 8 * (nibble & 7) & 255
        return (255 if found > 127 else 0) if nibble & 8 else found

    def fma(*halves):
        a, b, c = (torch.tensor([x & 0xFFFF, x >> 16]).to(torch.uint16).view(torch.float16).double() for x in halves)
        low, high = (a * b + c).half().view(torch.uint16).tolist()
        return low | high << 16

    does = {
        "mov": lambda a: a, "shr": lambda a, n: a >> n, "shl": lambda a, n: a << n,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "fma.rn.f16x2": fma,
        "mul.rn.f16x2": lambda a, b: fma(a, b, 0x80008000), "ld.global.nc": lambda at: memory[at],
        "prmt": lambda a, b, s: sum(byte(a, b, s >> 4 * i & 15) << 8 * i for i in range(4)),
        "lop3": lambda a, b, c, table: sum(
            (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32)
        ),
    }  # fmt: skip
    for line in text.strip()[1:-1].split(";"):
        name, _, rest = line.strip().partition(" ")
        what, _, bits = name.partition(".b")
        if not name or name.startswith(".reg"):
            continue
        size = int(bits or 32)
        to, *of = (part.strip("[]") for part in re.findall(r"\{[^}]*\}|[^,\s]+", rest))
        found = does[what](*map(value, of)) & (1 << size) - 1
        if to.startswith("{"):
            low, high = (part.strip() for part in to.strip("{}").split(","))
            known |= {low: found & (1 << size // 2) - 1, high: found >> size // 2}
        else:
            known[to] = found
    return known


def halves_of(number):
    return torch.tensor([number & 0xFFFF, number >> 16]).to(torch.uint16).view(torch.float16).tolist()


HIGH_HALF = 0x7F12
"""High half of a table's address."""


def test_ptx_of_a_trellis():
    """Windows at any place of two words, for two tokens."""
    from tersekv.kernels.triton.trellis import GATHER

    random = torch.Generator().manual_seed(0)
    entries = torch.randint(2**16, (9, 256), generator=random).tolist()
    start = 0x2A000
    memory = {HIGH_HALF << 32 | start + 512 * b + 2 * i: x for b, row in enumerate(entries) for i, x in enumerate(row)}
    for case in torch.randint(2**31, (40, 6), generator=random).tolist():
        first, second, shifts, bits = case[0], case[1], [x % 16 for x in case[2:4]], [x % 9 for x in case[4:]]
        registers = {"$1": first, "$2": second, "$3": shifts[0], "$4": shifts[1], "$7": HIGH_HALF, "$8": HIGH_HALF}
        registers |= {"$5": start | 512 * bits[0], "$6": start | 512 * bits[1]}
        out = run_ptx(GATHER.value, memory, **registers)["$0"]
        for token, at in enumerate((0, 16)):
            words = (first >> at & 0xFFFF) | (second >> at & 0xFFFF) << 16
            window = words >> shifts[token] + 1 & 255
            assert out >> at & 0xFFFF == entries[bits[token]][window]


@pytest.mark.parametrize("high", [0, 1])
def test_ptx_of_polar_directions(high):
    """Half of a pair times cosine and sine."""
    from tersekv.kernels.triton.polar import _turning

    directions = torch.randn(16, 2, generator=torch.Generator().manual_seed(high)).half()
    start, radii = 0x2A040, torch.tensor([0.7, -1.3]).half()
    memory = {HIGH_HALF << 32 | start + 4 * i: word_of(pair) for i, pair in enumerate(directions)}
    for i in range(16):
        registers = {"$1": word_of(radii), "$2": 4 * i, "$3": start, "$4": HIGH_HALF}
        out = run_ptx(_turning(high), memory, **registers)["$0"]
        assert halves_of(out) == (radii[high] * directions[i]).tolist()


def test_ptx_of_two_polar_directions():
    """Two values times the cosines, or sines, of two codes."""
    from tersekv.kernels.triton.polar import BOTH

    table, radii = torch.randn(4, generator=torch.Generator().manual_seed(0)).half(), torch.tensor([0.7, -1.3]).half()
    for first, second in itertools.product(range(4), repeat=2):
        places = ((2 * first | 2 * second << 8) * 0x11 + 0x1010) | 0x7777 << 16
        registers = {"$1": word_of(radii), "$2": word_of(table[:2]), "$3": word_of(table[2:]), "$4": places}
        out = run_ptx(BOTH.value, {}, **registers)["$0"]
        assert halves_of(out) == (radii * table[[first, second]]).tolist()


def word_of(pair):
    low, high = pair.view(torch.uint16).tolist()
    return low | high << 16
