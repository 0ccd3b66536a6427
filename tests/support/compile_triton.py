"""Compile, without a GPU, the kernels that calls of the Triton backend launch.

test_ops_triton_compile.py runs this in its own process, because Triton decides on import if kernels
are interpreted.

    python compile_triton.py sm_90 [calls]

Prints a line of JSON per call: {"call", "kernels", "error"}. "error" is the compiler's or null.
"kernels" is a list of {"name", "shared_bytes", "binary_bytes", "narrow_loads", "undefined", "layouts"}:

- narrow_loads: number of instructions that load 1 or 2 bytes (NVIDIA only);
- undefined: number of inline loads from an address that is not defined;
- layouts: those of each side.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from packed_views import packed, rope, roped, tokens
from tersekv.codecs import methods
from tersekv.kernels.attend_grid import Axis, Side
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.triton import encode, launch, layer, leaves, pack
from tersekv.kernels.triton.page_set import prepare
from tersekv.lab.bench.without_gpu import compile_for
from tersekv.layouts.base import Concat, View
from tersekv.layouts.linear_map import LinearMap
from tersekv.layouts.mean_removed import RotatedMean
from tersekv.recipe import Recipe
from tersekv.transforms.rotation import hadamard_parts, random_rotation

NAMES = {kind.value: name for name, kind in (leaves.LAYOUTS | {"rotated mean": leaves.ROTATED_MEAN}).items()}
compiled: list[dict[str, Any]] = []


def note(kernel: JITFunction, made: Any, options: dict[str, Any]) -> None:
    """Describe a kernel that was compiled for a launch."""
    of_keys = "keys before RoPE" if options.get("ROPED") else "keys"
    sides = {of_keys: options.get("KEYS", ()), "values": options.get("VALUES", ())}
    layouts = {side: [NAMES[leaf[0]] for leaf in leaves] for side, leaves in sides.items()}
    binary = made.asm["hsaco" if "hsaco" in made.asm else "cubin"]
    narrow_loads = len(re.findall(r"ld\.global[.\w]*\.b(8|16)\b", made.asm.get("ptx", "")))
    loads = [line for line in made.asm["llir"].splitlines() if " asm " in line and "ld.global" in line]
    counts = {"narrow_loads": narrow_loads, "undefined": sum("undef" in x or "poison" in x for x in loads)}
    sizes = {"shared_bytes": made.metadata.shared, "binary_bytes": len(binary)}
    compiled.append({"name": kernel.__name__, **sizes, **counts, "layouts": layouts})


def side(name: str, which: str, D: int) -> View:
    """Pack 64 tokens of two heads in a format of `packed_views.FORMATS`."""
    return packed(name, which, tokens(1, 2, 64, D)).inner


def attend(keys: str, values: str, D: int = 64, R: int = 4, pre_rope: bool = False, masked: bool = False) -> None:
    """Call attention over packed keys and values."""
    key = side(keys, "keys", D)
    if pre_rope:
        key = roped(key, "halves", D, 64)
    mask = torch.ones(1, 1, 64, dtype=torch.bool) if masked else None
    softcap = 20.0 if masked else None
    launch.attend_packed(torch.randn(1, 2, R, D), key.operand, side(values, "values", D).operand, mask, 0.1, softcap)


def pages(name: str, p: int) -> None:
    """Call attention over two pages of p tokens, one of which is missing."""
    key, value = (side(name, which, 64).operand for which in ("keys", "values"))
    table, mask = torch.tensor([[0, -1]], dtype=torch.int32), torch.ones(1, 1, 2 * p, dtype=torch.bool)
    launch.attend_pages(torch.randn(1, 2, 4, 64), key, value, table, p, mask, 0.1, None)


def page_set(keys: str, values: str, pre_rope: bool = False, masked: bool = False) -> None:
    """Call attention over two pages given by their addresses, and two exact segments."""
    segments = []
    for first in (0, 64):
        key = side(keys, "keys", 64)
        if pre_rope:
            key = roped(key, "halves", 64, 64)
            key = type(key)(key.before, key.rope, key.rope.angles(first, 64))
        segments.append(Segment(key.operand, side(values, "values", 64).operand, is_page=True))
    exact = torch.randn(1, 2, 5, 64).bfloat16()
    made = prepare(segments).with_segments([Segment(exact, exact), Segment(exact[:, :, :4], exact[:, :, :4])])
    masks = [torch.ones(1, 1, n, dtype=torch.bool) if masked else None for n in (64, 64, 5, 4)]
    launch.attend(torch.randn(1, 2, 4, 64), made, masks, 0.1, None)


def mean_in_pages(D: int = 64) -> None:
    """Call attention over pages of trellis codes with a rotated mean."""
    of, mean, codes = rope("halves", D), torch.randn(1, 2, D), side("trellis", "keys", D)
    keys = [Concat([(codes, D), (RotatedMean(mean, of, of.angles(first, 64)), D)]) for first in (0, 64)]
    value = side("trellis", "values", D)
    launch.attend(torch.randn(1, 2, 4, 2 * D), prepare([Segment(key, value, is_page=True) for key in keys]),
                  [None] * 2, 0.1, None)  # fmt: skip


def step(maps: tuple[LinearMap, LinearMap], exact: bool = True) -> None:
    """Call attention of one bfloat16 token over two mapped pages and exact tokens, to which it is appended."""
    pages = prepare([Segment(side("grid", "keys", 64).operand, side("grid", "values", 64).operand, is_page=True)] * 2)
    window = torch.randn(1, 2, 5, 64).bfloat16()
    own = prepare([Segment(window, window)]) if exact else None
    query = torch.randn(1, 8, 1, 64).bfloat16()
    packed = [(pages, [None] * 2, torch.ones(1, 2, 64) if exact else None)]
    written = [window[:, :, :1], window[:, :, 4:]] * 2 if exact else []
    call = 0.1, None, torch.ones(8), not exact, written
    layer.attend_layer(query, query.view(1, 2, 4, 64), own, [None], packed, maps, *call)


def maps(quantised: bool) -> tuple[LinearMap, LinearMap]:
    """Return maps of keys and values of 64 channels."""
    if not quantised:
        return LinearMap(rotation=torch.eye(64)), LinearMap(rotation=torch.eye(64).expand(1, 2, 64, 64))
    basis, channels = torch.zeros(1, 2, 3 * 64 * 64 // 4, dtype=torch.uint8), torch.ones(1, 2, 64).half()
    return LinearMap(basis=basis, channels=channels), LinearMap(None, basis, channels, torch.ones(1, 2, 64))


def latents(recipe: str, L: int = 512, D: int = 64, R: int = 16) -> None:
    """Call attention over two pages of latents with rotated keys, and over exact ones."""
    plan, x, rotated = Recipe.parse(recipe).plan(0, 1).of_latents(0), tokens(1, 1, 64, L), tokens(1, 1, 64, D)
    codecs = plan.keys.fit(x), plan.values.fit(rotated)
    parts = [
        codec.view(codec.encode(held), held.shape[-1]).inner for codec, held in zip(codecs, (x, rotated), strict=True)
    ]
    page = Segment(Concat([(parts[0], L), (parts[1], D)]), parts[0].operand, is_page=True)
    exact = torch.cat([x, rotated], dim=-1).bfloat16()
    made = prepare([page, page], latent=True).with_segments([Segment(exact, exact[..., :L])])
    launch.attend(torch.randn(1, 1, R, L + D), made, [None] * 3, 0.1, None)


def centred(D: int = 64) -> None:
    """Call attention over trellis codes of keys whose mean is stored separately."""
    of = rope("halves", D)
    keys = Concat([(side("trellis", "keys", D), D), (RotatedMean(torch.randn(1, 2, D), of, of.angles(0, 64)), D)])
    launch.attend_packed(torch.randn(1, 2, 4, 2 * D), keys, side("trellis", "values", D), None, 0.1, None)


def rotated(D: int) -> None:
    """Call attention over keys with a rotation before RoPE."""
    x = tokens(1, 2, 64, D)
    codec = methods()["turboquant"].build().keys.fit(x)
    keys = roped(codec.view(codec.encode(x), D), "halves", D, 64)
    launch.attend_packed(torch.randn(1, 2, 4, D), keys.operand, side("grid", "values", D).operand, None, 0.1, None)


def merge() -> None:
    """Merge a few segments in one launch, and the splits of one segment."""
    out, lse = torch.randn(1, 2, 4, 64), torch.randn(1, 2, 4)
    launch.merge_segments([out] * 3, [lse] * 3)
    launch.merge_segments([out] * 10, [lse] * 10)


def grids(side: Side, bits: int, axis: Axis, group: int, table: Tensor | None = None) -> None:
    """Compute ranges and codes of 64 tokens."""
    x, place = torch.randn(1, 2, 64, 128), GridPlace(side, bits, axis, group, 32)
    low, high = encode.group_ranges(x, place)
    encode.encode_grid(x, place, high.half(), low.half() if table is None else None, table)


def outliers() -> None:
    """Compute thresholds of tokens and their outliers. No launch fills the counts: half of all
    elements are entries."""
    encode.quantiles(torch.randn(32, 1024), 0.01)
    empty = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda *call, **options: empty(*call, **options).fill_(512)
    try:
        encode.pack_outliers(torch.randn(1, 2, 32, 128), torch.ones(1, 2, 32, 128, dtype=torch.bool))
    finally:
        torch.Tensor.new_empty = empty


def trellis_vectors() -> None:
    """Pack trellis codes of vectors with three gains each, and of some with one."""
    bits, tables = torch.full((2, 128), 2, dtype=torch.uint8), torch.randn(9, 256)
    call = torch.ones(2, 128), bits, tables, 16
    pack.pack_trellis(torch.randn(2, 32, 128), *call, [2, 5], torch.ones(2))
    pack.pack_trellis(torch.randn(2, 32, 128), *call, [], torch.ones(2))


def basis(D: int) -> None:
    """Multiply with a basis in both ways, and invert it."""
    codes, channels = torch.zeros(1, 2, 3 * D * D // 4, dtype=torch.uint8), torch.ones(1, 2, D).half()
    for combine in (False, True):
        pack.basis_product(torch.randn(3, 2, 4, D), codes, channels, combine)
    pack.basis_components(torch.randn(3, 2, 4, D), codes, channels)


CALLS: dict[str, Callable[[], None]] = {
    "grids, head dim 128": lambda: attend("grid", "grid", D=128, R=8),
    "exact, mask and softcap": lambda: attend("exact", "exact", masked=True),
    "signs and a grid of 3 bits": lambda: attend("signs", "grid 3"),
    "signs per block": lambda: attend("signs per group", "signs per group"),
    "signs per block before RoPE": lambda: attend("signs per group", "exact", pre_rope=True),
    "signs per block, head dim 128": lambda: attend("signs per group", "grid", D=128),
    "polar": lambda: attend("polar", "polar"),
    "outliers before RoPE": lambda: attend("sparse", "sparse", pre_rope=True),
    "outliers after RoPE": lambda: attend("sparse", "signs alone"),
    "signs before RoPE": lambda: attend("signs alone", "exact", pre_rope=True),
    "polar before RoPE": lambda: attend("polar", "exact", pre_rope=True),
    "trellis before RoPE": lambda: attend("trellis", "exact", pre_rope=True),
    "trellis beside a mean": centred,
    "exact before RoPE": lambda: attend("exact", "exact", pre_rope=True),
    "grids before RoPE, head dim 128": lambda: attend("grid", "grid", D=128, pre_rope=True),
    "a rotation before RoPE, head dim 128": lambda: rotated(128),
    "exact before RoPE, head dim 256": lambda: attend("exact", "exact", D=256, pre_rope=True),
    "polar, head dim 256": lambda: attend("polar", "polar", D=256),
    "trellis before RoPE, head dim 256": lambda: attend("trellis", "trellis", D=256, pre_rope=True),
    "grids, 32 rows, head dim 256": lambda: attend("grid", "grid", D=256, R=32),
    "grids in pages": lambda: pages("grid 7", 64),
    "polar in pages": lambda: pages("polar", 32),
    "pages of grids by address": lambda: page_set("grid", "grid 3", masked=True),
    "pages of exact tokens by address": lambda: page_set("exact", "exact"),
    "pages of outliers before RoPE by address": lambda: page_set("sparse", "sparse", pre_rope=True),
    "pages of blocks of outliers before RoPE by address": lambda: page_set(
        "sparse blocks", "sparse blocks", pre_rope=True
    ),
    "blocks of outliers in pages": lambda: pages("sparse blocks", 32),
    "pages of polar by address": lambda: page_set("polar", "polar"),
    "pages of signs by address": lambda: page_set("signs", "grid"),
    "pages of signs per block by address": lambda: page_set("signs per group", "grid"),
    "pages of trellis beside a mean by address": mean_in_pages,
    "latents of a grid": lambda: latents("kivi:bits=4"),
    "latents of trellis, 128 heads": lambda: latents("trellis:bits=3,calibration=prompt", R=128),
    "a step with rotations": lambda: step(maps(False)),
    "a step with bases": lambda: step(maps(True)),
    "a step without exact tokens": lambda: step(maps(False), exact=False),
    "scores alone": lambda: launch.score_keys(torch.randn(1, 2, 4, 64), side("grid", "keys", 64).operand, 0.1),
    "merge": merge,
    "codes of keys per channel": lambda: grids("keys", 4, "channel", 32),
    "codes of values per token": lambda: grids("values", 3, "token", 32),
    "codes into a table": lambda: grids("keys", 6, "token", 128, torch.linspace(-1, 1, 64)),
    "signs of a sketch": lambda: encode.encode_signs(torch.randn(2, 32, 128), torch.randn(256, 128)),
    "polar angles": lambda: encode.encode_polar(
        torch.randn(1, 2, 32, 128), [4, 2, 2, 2], [torch.linspace(0, 1, 2**b) for b in (4, 2, 2, 2)]
    ),
    "Hadamard": lambda: encode.rotate_hadamard(
        torch.randn(2, 32, 128), random_rotation(128, 0, "hadamard"), *hadamard_parts(128, 0, "cpu")
    ),
    "search for trellis codes": lambda: encode.encode_trellis(
        torch.randn(2, 32, 128), torch.ones(2, 128), torch.full((2, 128), 2, dtype=torch.uint8), torch.randn(9, 256)
    ),
    "packed trellis codes": trellis_vectors,
    "basis": lambda: basis(128),
    "outliers": outliers,
    "packing alone": lambda: encode.pack_lanes(torch.zeros(2, 64, 80, dtype=torch.uint8), 5),
}


def reasons(error: BaseException | None) -> str:
    """Return the error and its causes. The compiler reports the place first and the reason last."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(lines)


def main() -> None:
    """Run every call, or those named on the command line."""
    name, *calls = sys.argv[1:]
    compile_for(name, note)
    for call in calls or CALLS:
        torch.manual_seed(0)
        compiled.clear()
        error = None
        try:
            CALLS[call]()
        except Exception as raised:
            error = reasons(raised)
        print(json.dumps({"call": call, "kernels": compiled, "error": error}), flush=True)


if __name__ == "__main__":
    main()
