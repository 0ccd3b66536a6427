"""Count what attention's Triton kernels do on GPUs that need not be there.

    python benchmarks/instructions_gpu.py [--formats all] [--target sm_80] [--out FILE]

Each format of `tersekv bench attend` is compiled with head dim 128 and 4 query rows per head, in the launch sizes that
the library takes; latents with 512 channels, 64 rotated ones and 16 heads. `-prompt` after a format: 512 query rows
per head, of which a program has 32. Lane-instructions per code are those of the
loop, all lanes of all warps, per code of keys and values; a latent has one code for both. The bound is how many times
as fast as reading bfloat16 at 3.0 TB/s an H100 would be if every scheduler issued an instruction in every cycle. It
says what cannot win. It does not say what wins: conflicts, waits and few warps cost the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import recorded
from recorded import record, show
from tersekv.cache.layer import LayerStore
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.triton import launch
from tersekv.kernels.triton.page_set import prepare
from tersekv.lab.bench import without_gpu
from tersekv.lab.bench.formats import chosen, make_segment
from tersekv.recipe import Recipe
from tersekv.versions import package_version

ROWS, DIM, TOKENS = 4, 128, 256
FORMATS = (
    "grid4,grid3,grid2,turboquant4,qjl256,polar,trellis2,trellis3-centred,nuq4-1%,latents-grid4,latents-trellis3,"
    "grid4-prompt,turboquant4-prompt,polar-prompt,trellis2-prompt"
)
PROMPT, PROMPT_ROWS = "-prompt", 512
LATENTS = {"latents-grid4": "kivi:bits=4", "latents-trellis3": "trellis:bits=3,calibration=prompt"}
LATENT, ROTATED, HEADS = 512, 64, 16
"""Channels and heads of DeepSeek-V2-Lite."""
ISSUE = 128 * 132 * 1.755e9
"""Lane-instructions per second of an H100: lanes that issue per cycle, multiprocessors, clock."""
BYTES_PER_SECOND = 3.0e12


def measure(names: Sequence[str], target: str) -> list[dict[str, Any]]:
    """Return a row per format."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def noted(kernel: Any, made: Any, options: dict[str, Any]) -> None:
        if kernel.__name__ == "attend":
            seen.append((made, options))

    stores = {name: latents(LATENTS[name]) for name in names if name in LATENTS}
    segments = {
        name: make_segment(name.removesuffix(PROMPT), 2, TOKENS, DIM, 0) for name in names if name not in LATENTS
    }
    without_gpu.compile_for(target, noted)
    for name in names:
        if name in LATENTS:
            query = torch.randn(1, 1, HEADS, LATENT + ROTATED)
            pages = [Segment(page.keys.inner.operand, page.values.inner.operand, is_page=True) for page in stores[name]]
            launch.attend(query, prepare(pages, latent=True), [None] * len(pages), DIM**-0.5, None)
        else:
            query = torch.randn(1, 2, PROMPT_ROWS if name.endswith(PROMPT) else ROWS, DIM)
            launch.attend_packed(query, *segments[name].operands(), None, DIM**-0.5, None)
    return [row(name, target, *one) for name, one in zip(names, seen, strict=True)]


def latents(recipe: str) -> list[Any]:
    """Pack latents with rotated keys and return their pages."""
    empty = [torch.zeros(1, 1, 0, width) for width in (LATENT, ROTATED)]
    store = LayerStore(Recipe.parse(recipe).plan(0, 1).of_latents(0), *empty, None, None)
    store.append(*(torch.randn(1, 1, 2 * TOKENS, width) for width in (LATENT, ROTATED)))
    return list(store.packed_pages())


def row(name: str, target: str, made: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a record holds of a compiled kernel."""
    codes = LATENT + ROTATED if name in LATENTS else 2 * DIM
    blocks, warps, stages = (options[key] for key in ("NB", "num_warps", "num_stages"))
    found = without_gpu.counts(made, target, warps)
    each = found.instructions * 32 * warps / (32 * blocks * codes)
    about = {"format": name, "target": target, "blocks": blocks, "warps": warps, "stages": stages}
    return {**about, "lane_instructions_per_code": round(each, 2), **found._asdict()}


def listed(text: str) -> list[str]:
    """Return the names of formats and latents in a list with commas, or all."""
    if text == "all":
        return [*chosen("all"), *LATENTS]
    names = text.split(",")
    if formats := [name.removesuffix(PROMPT) for name in names if name not in LATENTS]:
        chosen(",".join(formats))  # refuses other names
    return names


def bound(row: dict[str, Any]) -> float:
    """Return the bound on the speed of an H100 relative to bfloat16."""
    return 2 / BYTES_PER_SECOND / (row["lane_instructions_per_code"] / ISSUE)


def main() -> None:
    """Run as described above."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--formats", default=FORMATS)
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
                row["stack_bytes"], row["shared_bytes"] // 1024, row["programs"], f"{bound(row):.1f}",
            )
            for row in rows
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
