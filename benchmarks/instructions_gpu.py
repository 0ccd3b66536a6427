"""Count what attention's Triton kernels do on GPUs that need not be there.

    python benchmarks/instructions_gpu.py [--formats all] [--target sm_80] [--out FILE]

Each format of `tersekv bench attend` is compiled with head dim 128 and 4 query rows per head, in the launch sizes that
the library takes; latents with 512 channels, 64 rotated ones and 16 heads. `-prompt` after a format: 512 query rows
per head, and counts are for 32 of them, also where a program has 16. Lane-instructions per code are those of the
loop, all lanes of all warps, per code of keys and values; a latent has one code for both. The bound is how many times
as fast as reading bfloat16 at 3.0 TB/s an H100 would be if every scheduler issued an instruction in every cycle. It
says what cannot win. It does not say what wins: conflicts, waits and few warps cost the rest.

Kernels that pack are counted in tokens of head dim 128, per element; those of `PACKING` with turns in their longest
loop, the others as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import recorded
from recorded import record, show
from tersekv.cache.layer import LayerStore
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.triton import encode, launch, pack
from tersekv.kernels.triton.page_set import prepare
from tersekv.lab.bench import without_gpu
from tersekv.lab.bench.formats import chosen, make_segment
from tersekv.recipe import Recipe
from tersekv.transforms.rotation import hadamard_parts, random_rotation
from tersekv.versions import package_version

ROWS, DIM, TOKENS = 4, 128, 256
FORMATS = (
    "grid4,grid3,grid2,turboquant4,qjl256,polar,trellis2,trellis3-centred,nuq4-1%,latents-grid4,latents-trellis3,"
    "grid4-prompt,turboquant4-prompt,polar-prompt,trellis2-prompt"
)
PROMPT, PROMPT_ROWS, PROMPT_PART = "-prompt", 512, 32
LATENTS = {"latents-grid4": "kivi:bits=4", "latents-trellis3": "trellis:bits=3,calibration=prompt"}
LATENT, ROTATED, HEADS = 512, 64, 16
"""Channels and heads of DeepSeek-V2-Lite."""
BLOCK = (1, 2, 32, DIM)
"""Shape of the tokens that are packed."""


class Packing(NamedTuple):
    """A kernel that packs: a call that launches it last, its name, the number of elements of a program, and of turns of
    its longest loop, 0 if it has none."""

    call: Callable[[], Any]
    kernel: str
    elements: int
    turns: int = 0


def grid(side: Any, axis: Any, table: bool = False) -> Any:
    """Encode a block to a grid of 4 bits."""
    x, place = torch.randn(BLOCK), GridPlace(side, 4, axis, DIM if table else 32, 32)
    scale = torch.ones(1, 2, *place.plane(32, DIM)).half()
    return encode.encode_grid(x, place, scale, None if table else scale, torch.linspace(-1, 1, 16) if table else None)


def trellis() -> Any:
    """Pack a block of trellis codes of 2 bits."""
    bits, tables = torch.full((2, DIM), 2, dtype=torch.uint8), torch.randn(9, 256)
    return pack.pack_trellis(torch.randn(2, 32, DIM), torch.ones(2, DIM), bits, tables, 16, [], torch.ones(2))


def polar() -> Any:
    """Pack a block of polar codes."""
    return encode.encode_polar(torch.randn(BLOCK), [4, 2, 2, 2], [torch.linspace(0, 1, 2**b) for b in (4, 2, 2, 2)])


PACKING = {
    "pack-ranges": Packing(
        lambda: encode.group_ranges(torch.randn(BLOCK), GridPlace("keys", 4, "channel", 32, 32)), "ranges", 4096
    ),
    "pack-grid4-keys": Packing(lambda: grid("keys", "channel"), "pack", 4096),
    "pack-grid4-values": Packing(lambda: grid("values", "token"), "pack", 4096),
    "pack-table4": Packing(lambda: grid("keys", "token", True), "pack", 4096),
    "pack-hadamard": Packing(
        lambda: encode.rotate_hadamard(
            torch.randn(64, DIM), random_rotation(DIM, 0, "hadamard"), *hadamard_parts(DIM, 0, "cpu")
        ),
        "hadamard", 1024,
    ),
    "pack-signs": Packing(
        lambda: encode.encode_signs(torch.randn(2, 32, DIM), torch.randn(256, DIM)), "signs", 32 * 64, DIM
    ),
    "pack-polar": Packing(polar, "polar_codes", 4096, 15),
    "pack-polar-stream": Packing(polar, "polar_pack", 32 * 64 * 8 // 23),
    "pack-trellis-search": Packing(trellis, "search", 1, 1),
    "pack-trellis-trace": Packing(trellis, "trace", 1, 1),
    "pack-trellis-gain": Packing(trellis, "keep_better", 4 * DIM),
    "pack-trellis-stream": Packing(trellis, "write_stream", DIM),
    "pack-quantiles": Packing(lambda: encode.quantiles(torch.randn(32, 1024), 0.01), "quantiles", 1024),
}  # fmt: skip
ISSUE = 128 * 132 * 1.755e9
"""Lane-instructions per second of an H100: lanes that issue per cycle, multiprocessors, clock."""
BYTES_PER_SECOND = 3.0e12


def measure(names: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Return a row per format."""
    seen: list[tuple[str, Any, dict[str, Any]]] = []
    stores = {name: latents(LATENTS[name]) for name in names if name in LATENTS}
    segments = {
        name: make_segment(name.removesuffix(PROMPT), 2, TOKENS, DIM, 0)
        for name in names
        if name not in LATENTS and name not in PACKING
    }
    without_gpu.compile_for(target, lambda kernel, *made: seen.append((kernel.__name__, *made)))
    rows = []
    for name in names:
        if name in PACKING:
            PACKING[name].call()
        elif name in LATENTS:
            query = torch.randn(1, 1, HEADS, LATENT + ROTATED)
            pages = [Segment(page.keys.inner.operand, page.values.inner.operand, is_page=True) for page in stores[name]]
            launch.attend(query, prepare(pages, latent=True), [None] * len(pages), DIM**-0.5, None)
        else:
            query = torch.randn(1, 2, PROMPT_ROWS if name.endswith(PROMPT) else ROWS, DIM)
            launch.attend_packed(query, *segments[name].operands(), None, DIM**-0.5, None)
        wanted = PACKING[name].kernel if name in PACKING else "attend"
        rows.append(row(name, target, *next(made for kernel, *made in reversed(seen) if kernel == wanted)))
    return rows


def latents(recipe: str) -> list[Any]:
    """Pack latents with rotated keys and return their pages."""
    empty = [torch.zeros(1, 1, 0, width) for width in (LATENT, ROTATED)]
    store = LayerStore(Recipe.parse(recipe).plan(0, 1).of_latents(0), *empty, None, None)
    store.append(*(torch.randn(1, 1, 2 * TOKENS, width) for width in (LATENT, ROTATED)))
    return list(store.packed_pages())


def row(name: str, target: str, made: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a record holds of a compiled kernel."""
    warps = options["num_warps"]
    about = {"format": name, "target": target, "warps": warps}
    if name in PACKING:
        elements, turns = PACKING[name].elements, PACKING[name].turns
    else:
        blocks = options["NB"]
        about |= {"blocks": blocks, "stages": options["num_stages"]}
        elements, turns = 32 * blocks * (LATENT + ROTATED if name in LATENTS else 2 * DIM), 1
        if name.endswith(PROMPT):
            turns = PROMPT_PART // options["ROWS"]
    found = without_gpu.counts(made, target, warps, whole=not turns)
    each = found.instructions * max(turns, 1) * 32 * warps / elements
    return {**about, "lane_instructions_per_code": round(each, 2), **found._asdict()}


def listed(text: str) -> list[str]:
    """Return the names of formats and latents in a list with commas, or all."""
    if text == "all":
        return [*chosen("all"), *LATENTS, *PACKING]
    names = text.split(",")
    if formats := [name.removesuffix(PROMPT) for name in names if name not in LATENTS and name not in PACKING]:
        chosen(",".join(formats))  # refuses other names
    return names


def bound(row: dict[str, Any]) -> float:
    """Return the bound on the speed of an H100 relative to bfloat16."""
    return 2 / BYTES_PER_SECOND / (row["lane_instructions_per_code"] / ISSUE)


def main() -> None:
    """Run as described above."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--formats", default=",".join([FORMATS, *PACKING]))
    parser.add_argument("--target", default="sm_90", choices=tuple(without_gpu.SHARED_BYTES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measure(listed(options.formats), options.target)
    record(options.out, {"bench": "instructions_gpu", "triton": package_version("triton")}, rows)
    columns = ("format", "per code", "shared", "barriers", "registers", "spilled", "KiB", "programs", "bound")
    show(
        f"loops for {options.target}", columns,
        (
            (
                row["format"], row["lane_instructions_per_code"], row["shared"], row["barriers"], row["registers"],
                row["stack_bytes"], row["shared_bytes"] // 1024, row["programs"],
                "" if row["format"] in PACKING else f"{bound(row):.1f}",
            )
            for row in rows
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
