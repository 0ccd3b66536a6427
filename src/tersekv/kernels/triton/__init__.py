"""The Triton kernels as a backend: checks of a call (`why_not_*`, which do no tensor work), the
operators' kernels, and attention over segments that are prepared once (`prepare`, `attend`).

They run on CUDA devices. With TRITON_INTERPRET=1 before their first use, Triton interprets them on
the CPU, for tests only: interpreted kernels run only if the backend is forced. Triton is loaded at
the first call, never at import.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tersekv.kernels import attend as layer_operators
from tersekv.kernels import attend_packed as packed_operators
from tersekv.kernels import attend_pages as pages_operators
from tersekv.kernels import attend_segments as segments_operators
from tersekv.kernels import softmax as softmax_operators
from tersekv.kernels.attend import PackedPages, Room, Table, Where, composed, copy_tokens, query_rows, segments_of
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.registry import NotTaken, Operator, chosen

if TYPE_CHECKING:
    from tersekv.kernels.triton.page_set import PageSet

Call = ParamSpec("Call")
Result = TypeVar("Result")

NAME = "triton"

MAX_ROWS, MAX_ROWS_OF_ONE = 256, 1024
"""Most query rows per key-value head, and of a layer's only one, as latents have, because most of its rows are heads.
More rows are a chunk of a prompt, which is work for a dense matrix product."""


@functools.cache
def why_not_installed() -> str | None:
    """Load Triton; return None if that works, else the reason."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not installed: {error} (pip install triton)"
    return None


def interpreted() -> bool:
    """True if Triton interprets kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not_usable(device: torch.device | None = None) -> str | None:
    """Return the reason why no kernel runs on this device, or on any device; None if kernels run."""
    if reason := why_not_installed():
        return reason
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None if device is None or device.type == "cuda" else f"query is on {device}, not on a CUDA device"


def detail() -> str:
    """Return Triton's version and the devices, or the reason why there is none."""
    if reason := why_not_usable():
        return reason
    version = importlib.import_module("triton").__version__
    if interpreted():
        return f"Triton {version}, interpreted on the CPU, only if it is forced"
    return f"Triton {version}, {', '.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}"


def on_own_device(run: Callable[Call, Result]) -> Callable[Call, Result]:
    """Run a function on the device of its first tensor, because kernels are launched on the current
    device."""

    @functools.wraps(run)
    def guarded(*args: Call.args, **options: Call.kwargs) -> Result:
        first: Any = args[0]
        x = first[0] if isinstance(first, list) else first
        if not x.is_cuda:
            return run(*args, **options)
        with torch.cuda.device(x.device):
            return run(*args, **options)

    return guarded


def joins(
    operator: Operator, unless: Callable[Call, str | None]
) -> Callable[[Callable[Call, Result]], Callable[Call, Result]]:
    """Register a function as the Triton kernel of an operator. `unless` takes the same arguments;
    it returns the reason why the kernel does not support a call, or None."""

    def join(run: Callable[Call, Result]) -> Callable[Call, Result]:
        def checked(*args: Call.args, **options: Call.kwargs) -> Result:
            _check_interpreter(args[0])
            if reason := unless(*args, **options):
                raise NotTaken(reason)
            return run(*args, **options)

        operator.by(NAME)(checked)
        return run

    return join


def _check_interpreter(first: Any) -> None:
    """Raise `NotTaken` for tensors on the CPU unless Triton's interpreter is forced."""
    x = first[0] if isinstance(first, list) else first
    if x.is_cpu and interpreted() and chosen() != NAME:
        raise NotTaken("Triton's interpreter runs only if it is forced")


def _launch() -> ModuleType:
    return importlib.import_module("tersekv.kernels.triton.launch")


def _page_set() -> ModuleType:
    return importlib.import_module("tersekv.kernels.triton.page_set")


def why_not_attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> str | None:
    """Return the reason why `attend_packed` does not support this call, or None."""
    return why_not_attend_segments(query, [Segment(keys, values, mask)], scaling, softcap)


why_not_attend_exact = why_not_attend_packed


def why_not_attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> str | None:
    """Return the reason why `attend_segments` does not support this call, or None."""
    if reason := why_not_usable(query.device) or _why_not_query(query):
        return reason
    for segment in segments:
        if reason := _why_not_mask(query, segment.mask):
            return reason
    for segment in segments:
        reason = _page_set().why_not(segment, query.device)
        if reason is not None:
            return str(reason)
    return None


def why_not_attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> str | None:  # fmt: skip
    """Return the reason why `attend_pages` does not support this call, or None."""
    if pages.device != query.device or pages.dtype is not torch.int32:
        return f"pages are {pages.dtype} on {pages.device}, not int32 on {query.device}"
    reason = why_not_usable(query.device) or _why_not_query(query) or _why_not_mask(query, mask)
    if reason is None:
        reason = _page_set().why_not(Segment(keys, values), query.device, in_pages=True)
    return None if reason is None else str(reason)


def why_not_merge_segments(outs: list[Tensor], lses: list[Tensor]) -> str | None:
    """Return the reason why `merge_segments` does not support this call, or None."""
    if reason := why_not_usable(outs[0].device):
        return reason
    for x in (*outs, *lses):
        if x.device != outs[0].device:
            return f"segments are on {outs[0].device} and {x.device}"
        if x.dtype is not torch.float32:
            return f"a segment is {x.dtype}, not float32"
        if x.requires_grad and torch.is_grad_enabled():
            return "a segment needs a gradient"
    return None


def _why_not_query(query: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> str | None:
    if query.dtype not in dtypes:
        return f"query is {query.dtype}, not float32"
    if query.requires_grad and torch.is_grad_enabled():
        return "query needs a gradient"
    most = MAX_ROWS if query.shape[1] > 1 else MAX_ROWS_OF_ONE
    if query.shape[2] > most:
        return f"query has {query.shape[2]} rows per key-value head, more than {most}"
    return None


def _why_not_mask(query: Tensor, mask: Tensor | None) -> str | None:
    if mask is not None:
        if mask.device != query.device:
            return f"mask is on {mask.device}, the query on {query.device}"
        if mask.dtype is not torch.bool:
            return f"mask is {mask.dtype}, not bool"
    return None


@joins(packed_operators.attend_packed, unless=why_not_attend_packed)
@on_own_device
def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over a segment, see `kernels/attend_packed.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R]."""
    result: tuple[Tensor, Tensor] = _launch().attend_packed(query, keys, values, mask, scaling, softcap)
    return result


attend_exact = joins(softmax_operators.attend_exact, unless=why_not_attend_exact)(attend_packed)
"""`attend_packed` registered for unpacked tokens, see `kernels/softmax.py`."""


@on_own_device
def score_keys(query: Tensor, keys: Operand, scaling: float) -> Tensor:
    """log Σ exp(scaling·q·k̂) over all keys, which is attention without values: float32 [B, H, R].
    Not an operator; benchmarks use it."""
    result: Tensor = _launch().score_keys(query, keys, scaling)
    return result


@joins(pages_operators.attend_pages, unless=why_not_attend_pages)
@on_own_device
def attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over a pool, see `kernels/attend_pages.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R]."""
    call = query, keys, values, pages, page_tokens, mask, scaling, softcap
    result: tuple[Tensor, Tensor] = _launch().attend_pages(*call)
    return result


def prepare(segments: Sequence[Segment], latent: bool = False) -> PageSet | str:
    """Check the segments of one layer and build everything that does not depend on the query.

    Args:
        segments: at least one; keys [B, H, T, D] and values [B, H, T, Dv] of equal T, which may
            differ between segments. Masks are ignored.
        latent: True if the values are the latents that keys begin with.

    Returns:
        The page set, or the reason why Triton does not support one of the segments. Segments that
        change at every step, such as the residual window, are better added by
        `PageSet.with_segments`.
    """
    page_set = _page_set()
    try:
        made: PageSet = page_set.prepare(segments, latent)
    except page_set.UnreadableError as unreadable:
        return str(unreadable)
    return why_not_usable(made.device) or made


@on_own_device
def attend(
    query: Tensor,
    page_set: PageSet,
    masks: Sequence[Tensor | None] | None,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ over all tokens of a page set, with its log-sum-exp.

    It only launches kernels: one per group of packed pages with the same layouts, one per group of
    exact segments of the same type, and one that merges.

    Args:
        query: float32 [B, H, R, D], on the page set's device.
        masks: one per segment, in the order in which they were prepared, or None for a segment
            whose tokens are all visible. bool [B, q, T] or [B, H, q, T], True where a token is
            visible, R % q == 0 (row r uses mask row r % q). None: all tokens are visible.
            Neighbouring columns of one tensor are read in place, other masks are copied.
        scaling: factor on the scores. softcap: s -> softcap·tanh(s/softcap), or None.

    Returns:
        out float32 [B, H, R, Dv] and lse float32 [B, H, R]; a row that sees no token has out 0 and
        lse -inf.
    """
    if reason := why_not_usable(query.device) or _why_not_query(query):
        raise NotTaken(reason)
    given = [None] * page_set.segments if masks is None else masks
    result: tuple[Tensor, Tensor] = _launch().attend(query, page_set, given, scaling, softcap)
    return result


@joins(segments_operators.attend_segments, unless=why_not_attend_segments)
@on_own_device
def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over segments, see `kernels/attend_segments.py`."""
    result: tuple[Tensor, Tensor] = _launch().attend_segments(query, segments, scaling, softcap)
    return result


@joins(softmax_operators.merge_segments, unless=why_not_merge_segments)
@on_own_device
def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge segments, see `kernels/softmax.py`: outs [B, H, R, D], lses [B, H, R], float32, to one
    out and lse."""
    result: tuple[Tensor, Tensor] = _launch().merge_segments(outs, lses)
    return result


@layer_operators.attend.by(NAME)
def attend_layer(
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where | None], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: bool = False,
    table: Table | None = None,
    room: Room | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a layer, see `kernels/attend.py`: one launch for exact tokens, one for the pages of
    each layout and correction, which are prepared once, and one that merges."""
    if table is not None:
        raise NotTaken("attend does not read page tables; use attend_pages")
    _check_interpreter(query)
    sets = {} if pages is None else _page_sets(pages)
    call = query, exact, pages, mask, hidden
    if (few := _attend_few(*call, sets, scaling, softcap, sinks, parts, room)) is not None:
        return few
    if room is not None:
        copy_tokens(exact, room)

    def run(rows: Tensor, segments: list[Segment], scaling: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        own = [segment for segment in segments if segment.is_page]
        others = [segment for segment in segments if not segment.is_page]
        if not own:
            return segments_operators.attend_segments.kernels[NAME](rows, others, scaling, softcap)
        made = sets[id(own[0].keys)]
        assert not isinstance(made, str)
        masks = [segment.mask for segment in (*own, *others)]
        return attend(rows, made.with_segments(others), masks, scaling, softcap)

    return composed(run, *call, scaling, softcap, sinks, parts)


def _page_sets(pages: PackedPages) -> dict[int, PageSet]:
    """Return the page set of all pages with the same correction, by the first one's keys."""
    sets: dict[int, PageSet | str] = pages.made.get(NAME, {})
    if not sets:
        sets = pages.made[NAME] = {
            id(pages.keys[numbers[0]]): prepare(
                [Segment(pages.keys[i], pages.values[i], None, True, pages.ends[i]) for i in numbers], pages.shared > 0
            )
            for numbers in pages.alike
        }
    for made in sets.values():
        if isinstance(made, str):
            raise NotTaken(made)
    return sets  # type: ignore[return-value]


@on_own_device
def _attend_few(
    query: Tensor, exact: tuple[tuple[Tensor, Tensor, Where | None], ...], pages: PackedPages | None,
    mask: Tensor | None, hidden: Tensor | None, sets: dict[int, PageSet], scaling: float, softcap: float | None,
    sinks: Tensor | None, parts: bool, room: Room | None,
) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
    """Attend with a few query rows, see `layer.py`. None if that is not possible."""
    rows = query_rows(query, exact[0][0].shape[1] if pages is None else pages.heads)
    if why_not_usable(query.device) or _why_not_query(rows, (torch.float32, torch.float16, torch.bfloat16)):
        return None
    plain, packed = segments_of(query, exact, pages, mask, hidden)
    own = prepare(plain) if plain else None
    if isinstance(own, str):
        return None
    of_pages = []
    if pages is not None:
        for numbers in pages.alike:
            masks = [packed[i].mask for i in numbers]
            of_pages.append((sets[id(pages.keys[numbers[0]])], masks, pages.corrections[numbers[0]]))
    maps = pages.maps if pages is not None and pages.is_mapped else None
    written = [x for pair in zip(exact[-1], room, strict=False) for x in pair] if room else []
    exact_masks, layer = [segment.mask for segment in plain], importlib.import_module("tersekv.kernels.triton.layer")
    found: Tensor | tuple[Tensor, Tensor] | None = layer.attend_layer(
        query, rows, own, exact_masks, of_pages, maps, scaling, softcap, sinks, parts, written
    )
    return found
