"""Decode attention over packed segments on a GPU, beside the dense ways of the same machine.

The dense ways: SDPA's flash kernel in bfloat16 with the group as query heads (`enable_gqa`) and as query positions,
FlashInfer where it is installed, and our own kernel over bfloat16 and over float8 tokens. Parity with the reference
comes first. Every way is captured in a CUDA graph per input, so that launches do not count; the graphs of all ways run
in turns on inputs that outgrow the second-level cache, and events between them give each run's time. The floor is the
time that a way's bytes take at the bandwidth of a copy, measured in the same run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tersekv.bench.attend import Heads
from tersekv.bench.clock import Spread
from tersekv.bench.clock_gpu import Clock, Run
from tersekv.bench.formats import make_segment
from tersekv.errors import CacheError, UserError
from tersekv.ops import backends
from tersekv.ops.attend_packed import attend_packed

LARGEST_ERROR = 1e-2
MAX_COPIES = 8
COLD_CACHES = 4
"""Inputs together outgrow the second-level cache so many times."""
PROBE_BYTES = 4 << 30
PAGE = 16


class Row(NamedTuple):
    """A way and what it took; bits: None for dense ones. bytes: of keys and values, read once."""

    what: str
    bits: float | None
    bytes: int
    time: Spread
    error: float = 0.0


class Measured(NamedTuple):
    """One context on one machine; bandwidth: gigabytes per second that a copy reads and writes; missing: ways that did
    not run, and why."""

    machine: str
    heads: Heads
    batch: int
    tokens: int
    bandwidth: float
    rows: list[Row]
    missing: dict[str, str]

    def baseline(self) -> float:
        """Milliseconds of the fastest dense bfloat16 way."""
        return min(row.time.ms for row in self.rows if row.bits is None and "bfloat16" in row.what)

    def results(self) -> list[dict[str, Any]]:
        """A record per way."""
        return [self._result(row) for row in self.rows]

    def _result(self, row: Row) -> dict[str, Any]:
        floor = row.bytes / self.bandwidth / 1e6
        return {
            "what": row.what, "shape": str(self.heads), "batch": self.batch, "T": self.tokens, "bits": row.bits,
            "bytes": row.bytes, "median_us": round(row.time.ms * 1e3, 2), "p10": round(row.time.p10 * 1e3, 2),
            "p90": round(row.time.p90 * 1e3, 2), "runs": row.time.runs, "copy_gb_per_s": round(self.bandwidth, 1),
            "floor_us": round(floor * 1e3, 2), "share_of_floor": round(floor / row.time.ms, 3),
            "speedup_bfloat16": round(self.baseline() / row.time.ms, 3), "relative_error": float(f"{row.error:.3g}"),
        }  # fmt: skip


class _Way(NamedTuple):
    row: Row
    runs: list[Run]


def measure(
    clock: Clock, heads: Heads, batch: int, tokens: int, formats: Sequence[str], seconds: float, seed: int = 0
) -> Measured:
    """All ways on one context, in about `seconds` of the device's time."""
    ways, missing = _dense(clock, heads, batch, tokens, seed)
    for name in formats:
        ways.append(_packed(clock, name, heads, batch, tokens, seed + 1))
    times = clock.turns({way.row.what: way.runs for way in ways}, seconds)
    rows = [way.row._replace(time=times[way.row.what]) for way in ways]
    return Measured(clock.name, heads, batch, tokens, copy_bandwidth(clock), rows, missing)


def copy_bandwidth(clock: Clock, size: int = PROBE_BYTES) -> float:
    """Gigabytes per second that a copy within the device reads and writes."""
    size = size if clock.device == "cuda" else 1 << 20
    here, there = (torch.ones(size // 4, device=clock.device) for _ in range(2))
    took = clock.turns({"copy": [clock.capture(lambda: there.copy_(here))]}, 0.2)["copy"]
    return 2 * here.numel() * 4 / took.ms / 1e6


def _copies(clock: Clock, size: int) -> int:
    return max(2, min(MAX_COPIES, math.ceil(COLD_CACHES * clock.cache_bytes / size)))


def _query(clock: Clock, heads: Heads, batch: int, seed: int) -> Tensor:
    """bfloat16 [batch, Hkv, G, D]."""
    g = torch.Generator(clock.device).manual_seed(seed)
    shape = batch, heads.kv, heads.query // heads.kv, heads.dim
    return torch.randn(shape, generator=g, device=clock.device).bfloat16()


def _packed(clock: Clock, name: str, heads: Heads, batch: int, tokens: int, seed: int) -> _Way:
    """The batch's rows as heads of one row: the kernels treat them alike."""
    rows, D = batch * heads.kv, heads.dim
    query = _query(clock, heads, batch, 0).float().flatten(0, 1)[None]
    segment = make_segment(name, rows, tokens, D, seed, clock.device)
    segments = [segment] + [segment.copy() for _ in range(_copies(clock, segment.bytes) - 1)]
    inputs = [made.operands() for made in segments]
    error = _error(name, query, *inputs[0], D**-0.5)
    run = functools.partial(_attend, query, D**-0.5)
    bits = round(segment.bytes * 8 / (2 * rows * tokens * D), 3)
    row = Row(name, bits, segment.bytes, Spread(0, 0, 0, 0), error)
    return _Way(row, [clock.capture(functools.partial(run, *pair)) for pair in inputs])


def _attend(query: Tensor, scaling: float, keys: Any, values: Any) -> Tensor:
    return backends.attend_packed(query, keys, values, None, scaling, None)[0]


def _error(name: str, query: Tensor, keys: Any, values: Any, scaling: float) -> float:
    """Of the kernel's output against the reference, relative to its norm."""
    call = query, keys, values, None, scaling, None
    if backends.kernel("attend_packed", *call) is None:
        raise UserError(f"{name} is not timed: {backends.explain('attend_packed', *call)}")
    out, expected = backends.attend_packed(*call)[0], attend_packed(*call)[0]
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < LARGEST_ERROR:
        raise CacheError(f"{name} is not timed: its output is off by {error:.2g} of its norm")
    return error


def _dense(clock: Clock, heads: Heads, batch: int, tokens: int, seed: int) -> tuple[list[_Way], dict[str, str]]:
    """Dense ways on the same keys and values, and which ways do not run here, and why."""
    g = torch.Generator(clock.device).manual_seed(seed)
    shape = batch, heads.kv, tokens, heads.dim
    size = 2 * math.prod(shape) * 2
    query, scaling = _query(clock, heads, batch, 0), heads.dim**-0.5
    inputs = [
        tuple(torch.randn(shape, generator=g, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(_copies(clock, size))
    ]
    small = [tuple(x.to(torch.float8_e4m3fn) for x in pair) for pair in inputs]
    own = functools.partial(_attend, query.float(), scaling)
    expected = attend_packed(query.float(), inputs[0][0], inputs[0][1], None, scaling, None)[0]
    ways: dict[str, tuple[Callable[..., Tensor], Any]] = {
        "sdpa flash bfloat16": (functools.partial(_sdpa, clock, query.flatten(1, 2).unsqueeze(2), scaling), inputs),
        "sdpa flash bfloat16, group as rows": (functools.partial(_sdpa, clock, query, scaling), inputs),
        "flashinfer bfloat16": (functools.partial(_flashinfer, query), [tuple(map(_in_pages, p)) for p in inputs]),
        "ours bfloat16": (own, inputs),
        "ours float8": (own, small),
    }
    made, missing = [], {}
    for name, (run, pairs) in ways.items():
        try:
            out = run(*pairs[0]).reshape(expected.shape).float()
            error = ((out - expected).norm() / expected.norm()).item()
            if not error < (0.1 if "float8" in name else LARGEST_ERROR):
                raise CacheError(f"its output is off by {error:.2g} of its norm")
            runs = [clock.capture(functools.partial(run, *pair)) for pair in pairs]
        except (ImportError, RuntimeError, ValueError, TypeError) as reason:
            missing[name] = str(reason).splitlines()[0]
            continue
        part = size // 2 if "float8" in name else size
        made.append(_Way(Row(name, None, part, Spread(0, 0, 0, 0), error), runs))
    return made, missing


def _sdpa(clock: Clock, query: Tensor, scaling: float, key: Tensor, value: Tensor) -> Tensor:
    """query [B, Hq, 1, D], or [B, Hkv, G, D] with the group as positions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    flash = SDPBackend.FLASH_ATTENTION if clock.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(flash):
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=gqa)


def _flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [B, Hkv, G, D]; keys and values [1, Hkv, T, D] of one row, or pages [pages, Hkv, PAGE, D] of several."""
    flashinfer = importlib.import_module("flashinfer")
    B, H, G, D = query.shape
    if B == 1:
        return flashinfer.single_decode_with_kv_cache(query[0].flatten(0, 1), key[0], value[0], kv_layout="HND")
    return _paged(flashinfer, B, H, G, D, len(key) // B, key.device).run(query.flatten(1, 2), (key, value))


@functools.lru_cache(maxsize=4)
def _paged(flashinfer: Any, B: int, H: int, G: int, D: int, pages: int, device: torch.device) -> Any:
    """A planned call over `pages` pages per row, which lie one after the other."""
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND")
    ints = functools.partial(torch.arange, dtype=torch.int32, device=device)
    last = torch.full((B,), PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        ints(0, B * pages + 1, pages), ints(B * pages), last, G * H, H, D, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return wrapper


def _in_pages(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B·pages, H, PAGE, D]; one row as it is."""
    if len(x) == 1 or importlib.util.find_spec("flashinfer") is None:
        return x
    return x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1).contiguous()
