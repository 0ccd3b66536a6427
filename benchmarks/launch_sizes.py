"""Find the launch sizes of attention on this GPU: time each format of `tersekv bench attend` in several sizes.

    python benchmarks/launch_sizes.py [--formats grid4,polar] [--tokens 32768] [--jobs 8] [--out FILE]

Prints the fastest size of each format, as `tuning.TABLE` has it. Kernels are compiled first, by several processes that
share Triton's cache. A size that does not fit or is wrong is left out. Each time is the median of a CUDA graph that
reads six copies of the segment, which are larger than the cache, divided by six.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import recorded
from recorded import record, show
from tersekv.errors import UserError
from tersekv.kernels.triton import tuning
from tersekv.kernels.triton.page_set import part
from tersekv.kernels.triton.trees import device_of
from tersekv.kernels.triton.tuning import Key, Shape
from tersekv.lab.bench.clock_gpu import Clock, CudaClock
from tersekv.lab.bench.dense_gpu import own_attention
from tersekv.lab.bench.formats import chosen, make_segment

ROWS, HEADS, DIM = 4, 8, 128
"""Query rows per head, key-value heads, and head dim of Llama-3.1-8B."""
COPIES = 6
SMALL = 4096
"""Tokens of a segment for compiling alone."""
SIZES = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4)]
"""Blocks and warps."""
STAGES, PROGRAMS = (1, 2), (4, 2, 8)
MORE_PROGRAMS = 3
"""Fastest sizes that are also timed with the other numbers of programs."""
SHAPES = [Shape(*size, stages) for size, stages in itertools.product(SIZES, STAGES)]
AT_A_TIME = 3
"""Sizes that one process compiles."""


def query(device: str) -> torch.Tensor:
    """Return queries float32 [1, HEADS, ROWS, DIM], rounded to bfloat16."""
    made = torch.Generator(device).manual_seed(0)
    return torch.randn(1, HEADS, ROWS, DIM, generator=made, device=device).bfloat16().float()


def key_of(operands: Sequence[Any]) -> Key:
    """Return the key of a format's calls."""
    keys, values = operands
    device = device_of(keys)
    made = part(keys, values, device)
    return tuning.key_of(ROWS, made.keys.leaves, made.values.leaves, device, bool(made.keys.roped))


def use(key: Key, shape: Shape) -> None:
    """Let calls of a key use a size."""
    tuning.TABLE[key] = shape
    tuning.chosen.cache_clear()


def fits(name: str, shapes: Iterable[Shape], device: str) -> list[Shape]:
    """Compile and run a format in several sizes. Return those that fit and give the first one's output."""
    operands = make_segment(name, HEADS, SMALL, DIM, 0, device).operands()
    key, good, expected = key_of(operands), [], None
    for shape in shapes:
        use(key, shape)
        out = own_attention(query(device), DIM**-0.5, *operands)
        expected = out if expected is None else expected
        if tuning.TABLE[key] == shape and (out - expected).norm() < 1e-2 * expected.norm():
            good.append(shape)
    return good


def times(clock: Clock, name: str, shapes: Sequence[Shape], tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row per size, each with the key of `tuning.TABLE`."""
    first = make_segment(name, HEADS, tokens, DIM, 0, clock.device)
    inputs = [made.operands() for made in (first, *(first.copy() for _ in range(COPIES - 1)))]
    key = key_of(inputs[0])
    attend = functools.partial(own_attention, query(clock.device), DIM**-0.5)

    def timed(tried: Iterable[Shape]) -> dict[Shape, float]:
        ways = {}
        for shape in tried:
            use(key, shape)
            ways[str(tuple(shape))] = shape, [clock.capture(lambda: [attend(*pair) for pair in inputs])]
        found = clock.turns({way: runs for way, (_, runs) in ways.items()}, seconds)
        return {shape: found[way].ms * 1e3 / COPIES for way, (shape, _) in ways.items()}

    took = timed(shape._replace(programs=PROGRAMS[0]) for shape in shapes)
    best = sorted(took, key=took.__getitem__)[:MORE_PROGRAMS]
    took |= timed(shape._replace(programs=programs) for shape in best for programs in PROGRAMS[1:])
    about = {"format": name, "tokens": tokens, "key": list(key)}
    return [{**about, **shape._asdict(), "median_us": round(us, 2)} for shape, us in took.items()]


def compiled(names: Sequence[str], jobs: int) -> None:
    """Fill Triton's cache: a process per format and `AT_A_TIME` sizes, `jobs` at a time."""
    parts = [range(i, min(i + AT_A_TIME, len(SHAPES))) for i in range(0, len(SHAPES), AT_A_TIME)]
    calls = [[sys.executable, __file__, "--compile", name, *map(str, some)] for some in parts for name in names]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(functools.partial(subprocess.run, capture_output=True), calls))


def main() -> None:
    """Run as described above."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--formats", default="grid4,trellis3-centred,turboquant4,grid2,qjl256,polar,nuq4-1%")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=0.3, help="per format")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--compile", nargs="+", help="a format and numbers of sizes: compile those alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device")
    if options.compile:
        fits(options.compile[0], [SHAPES[int(i)] for i in options.compile[1:]], "cuda")
        return
    names = chosen(options.formats)
    compiled(names, options.jobs)
    clock, rows = CudaClock(), []
    for name in names:
        found = times(clock, name, fits(name, SHAPES, "cuda"), options.tokens, options.seconds)
        record(options.out, {"bench": "launch_sizes", "gpu": clock.name}, found)
        rows += found
    best = [min((row for row in rows if row["format"] == name), key=lambda row: row["median_us"]) for name in names]
    columns = ("format", "blocks", "warps", "stages", "programs", "median_us")
    show("fastest sizes", columns, ([row[column] for column in columns] for row in best))


if __name__ == "__main__":
    main()
