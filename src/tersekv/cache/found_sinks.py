"""The cache of one layer that finds attention sinks beyond the first tokens and keeps them exact.

Some tokens in the middle of a text are attention sinks, too. Their keys or values have unusual norms
(KVSink, arXiv 2508.04257), and their coding errors cost most. Each layer keeps the `found` tokens of
the most unusual norms exact. Their packed copies stay in place, so that blocks and positions do not
change, and are hidden from queries. A token that a more unusual one replaces is read packed again.

How unusual: |log |x|| − median|, in mean deviations of the tokens packed first; the larger one of
key and value, and the largest of all KV heads. So all heads of a layer keep the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import require, tensor
from tersekv.cache.segments import ExactSegment
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.kernels.attend import Masks, PackedPages, Where
from tersekv.kernels.marks import BITS, Marks
from tersekv.tensors import gathered

SMALLEST = 1e-30
"""Added to norms and deviations, so that logarithms and quotients are finite."""


def found_tokens(found: FoundTokens, place: str) -> None:
    """Check that there are as many keys as values, and no token twice."""
    held = found.places
    counts = {held.shape[1], found.unusual.shape[1], found.exact.tokens}
    require(
        len(counts) == 1 and held.shape[1] <= found.most,
        f"{place}.places",
        f"must name {found.most} tokens or fewer",
    )
    ordered = held.sort(dim=1).values
    same = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not bool(same.any()), f"{place}.places", "names a token twice")


def found_are_packed(store: Any, place: str) -> None:
    """Check that the found tokens of a layer are packed."""
    for found in store.found:
        inside = (found.places >= store.packed_first) & (found.places < store.packed_first + store.placement.packed)
        fits = bool((inside | (found.places == -1)).all())
        require(fits, f"{place}.found.0.places", "names tokens that are not packed")


def _of_heads(shown: Tensor, held: Tensor) -> Tensor:
    """Return the masks [B, N] of positions as masks [B, H, T] of the positions [B, H, T] that heads hold, or −1."""
    return shown.unsqueeze(1).expand(-1, held.shape[1], -1).gather(2, held.clamp(min=0).long())


def _usual(norms: Tensor) -> Tensor:
    """Return median and mean deviation [B, 4, H] of log norms [B, 2, H, n]. NaN marks tokens that do not count.

    They are 0 in a row in which no token counts.
    """
    middle = norms.nanmedian(-1).values
    return torch.cat([middle, (norms - middle.unsqueeze(-1)).abs().nanmean(-1)], dim=1).nan_to_num(0.0)


class FoundTokens(Stateful):
    """The found tokens of a layer under the policy `window` with the option `found`.

    most: number of tokens that are kept exact.
    places: int32 [B, n], their positions, n = min(`most`, packed tokens); −1 for none.
    unusual: float32 [B, n], how unusual they are; −1 for none.
    exact: their keys and values.
    usual: float32 [B, 4, H], median and mean deviation of the log norms of keys and of values, without
        padding and sinks.
    """

    STATE: ClassVar[Spec] = {
        "places": lambda found: tensor(torch.int32, len(found.usual), None, low=-1),
        "unusual": lambda found: tensor(torch.float32, len(found.usual), None, low=-1),
        "usual": lambda found: tensor(torch.float32, *found.usual.shape),
    }
    RULES: ClassVar[Rules] = (found_tokens,)
    PARTS: ClassVar[tuple[str, ...]] = ("exact",)
    MADE: ClassVar[tuple[str, ...]] = ("_located",)

    def __init__(self, most: int, like: Sequence[Tensor], heads: HeadShard | None, latent: bool) -> None:
        keys, self.most, self.heads = like[0], most, heads
        self.usual = keys.new_zeros((keys.shape[0], 4, keys.shape[1]), dtype=torch.float32)
        self._located: tuple[PackedPages, PackedPages] | None = None  # pages, and the same with masks for a step
        self.exact = ExactTokens(like, part="exact sinks", latent=latent)
        self.places = torch.empty((len(keys), 0), dtype=torch.int32, device=keys.device)
        self.unusual = torch.empty((len(keys), 0), dtype=torch.float32, device=keys.device)

    def look(self, packed: Sequence[Tensor], place: int, end: Tensor | None) -> None:
        """Choose among the tokens found before and [B, H, n, D], packed from position `place` on.

        end: int64 [B], tokens at smaller positions do not count, or None.
        """
        n, self._located = packed[0].shape[2], None
        if self.places.is_meta:  # shapes only
            kept = min(self.most, self.places.shape[1] + n)
            self.places, self.unusual = (x.new_empty((len(x), kept)) for x in (self.places, self.unusual))
            self.exact.hold([x.new_empty((*x.shape[:2], kept, x.shape[3])) for x in self.exact.buffers])
            return
        positions = torch.arange(place, place + n, dtype=torch.int32, device=self.places.device)
        positions = positions.expand(len(self.usual), -1)
        hidden = None if end is None else positions < end[:, None]
        norms = torch.stack([(x.float().norm(dim=-1) + SMALLEST).log() for x in packed], dim=1)  # [B, 2, H, n]
        if end is not None and hidden is not None:  # rows whose tokens were all hidden before get their usual norms now
            new = _usual(norms.masked_fill(hidden[:, None, None], torch.nan))
            self.usual = torch.where((end >= place)[:, None, None], new, self.usual)
        elif not self.places.shape[1]:
            self.usual = _usual(norms)
        middle, spread = self.usual.unsqueeze(-1).split(2, dim=1)
        away = (norms - middle).abs() / (spread + SMALLEST)
        by_head = away.amax(1)
        if self.heads is not None:  # all processes choose the same tokens
            by_head = self.heads.gather(by_head.unsqueeze(-1)).squeeze(-1)
        unusual = by_head.amax(1)
        unusual = unusual if hidden is None else unusual.masked_fill(hidden, -1.0)
        everything = torch.cat([self.unusual, unusual], dim=1)
        chosen = everything.topk(min(self.most, everything.shape[1]), dim=1).indices
        self.unusual = everything.gather(1, chosen)
        self.places = torch.cat([self.places, positions], dim=1).gather(1, chosen)
        self.places = self.places.masked_fill(self.unusual < 0, -1)
        by_token = chosen.unsqueeze(1).expand(-1, packed[0].shape[1], -1)
        both = zip(self.exact.buffers, packed, strict=True)
        self.exact.hold([gathered(torch.cat([held, x.to(held.dtype)], dim=2), by_token) for held, x in both])

    # ------------------------------------------------------------------ reading

    def segment(self) -> list[ExactSegment]:
        """Return the found tokens, if there are any."""
        return self.exact.segment(self.places.unsqueeze(1).expand(-1, self.exact.buffers[0].shape[1], -1))

    def without_copies(self, pages: PackedPages, masks: Masks, queries: int) -> PackedPages:
        """Return the pages with masks that hide the packed copies of found tokens."""
        if not self.places.shape[1]:
            return pages
        plain_step = masks.mask is None and masks.hidden is None and queries == 1
        if plain_step and self._located is not None and self._located[0] is pages:
            return self._located[1]
        each = [self.shown(masks.at(at, n), at, n) for at, n in zip(pages.where, pages.tokens, strict=True)]
        masks_of_pages = [mask.expand(*mask.shape[:-2], queries, -1) for mask in each if mask is not None]
        padded = None
        if (whole := pages.padded) is not None:
            padded = lambda: self.without_copies(made, masks, queries) if (made := whole()) else None  # noqa: E731
        located = pages.located(masks_of_pages, padded)
        if plain_step and pages.kept:
            self._located = pages, located
        return located

    def shown(self, mask: Tensor | None, where: Where, tokens: int) -> Tensor | None:
        """Return a segment's mask with the copies of found tokens hidden.

        bool [B, 1 or q, T], or [B, H, 1 or q, T] if heads hold different tokens; [1 or q, T] of marks with `ends`.
        """
        if not self.places.shape[1]:
            return mask
        held, first = (where.positions() if isinstance(where, Marks) else where), 0
        row = where.head // where.bits.shape[1] if isinstance(where, Marks) and where.ends is not None else None
        if isinstance(held, int):
            first, end = held, held + tokens
        elif isinstance(where, Marks):
            end = where.first + where.bits.shape[2] * BITS
        else:
            end = int(held.max()) + 1
        at = torch.where((self.places < first) | (self.places >= end), end, self.places).long() - first
        shown = torch.ones((len(at), end - first + 1), dtype=torch.bool, device=at.device)
        shown = shown.scatter_(1, at, False)[:, :-1]  # the last column takes those of other pages
        if row is not None:
            shown = shown[row, torch.as_tensor(held).flatten().long()]
        elif not isinstance(held, int):
            shown = shown[:, held.long()] if held.dim() == 1 else _of_heads(shown, held)
        shown = shown.unsqueeze(-2)
        return shown if mask is None else mask & shown

    def put(self, both: Sequence[Tensor], first: int) -> None:
        """Write found tokens into keys and values [B, H, n, D], whose first token has position `first`."""
        for x, held in zip(both, self.exact.buffers, strict=True):
            for row, places in enumerate(self.places.tolist()):
                for i, place in enumerate(places):
                    if first <= place < first + x.shape[2]:
                        x[row, :, place - first] = held[row, :, i].to(x.dtype)

    # ------------------------------------------------------------------ changing

    def crop(self, first: int, everything: bool) -> None:
        """Forget tokens from position `first` on, or everything."""
        gone, self._located = self.places >= first, None
        self.places, self.unusual = self.places.masked_fill(gone, -1), self.unusual.masked_fill(gone, -1.0)
        if everything:
            self.exact.shrink()
            self.places, self.unusual = self.places[:, :0], self.unusual[:, :0]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        super().count(footprint)
        footprint.parts["selection"] += self.places.nbytes + self.unusual.nbytes + self.usual.nbytes
