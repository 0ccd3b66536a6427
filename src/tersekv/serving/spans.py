"""Tokens of one engine step by request, page and query: all that block tables with pages of one size share.

Models with layers of several kinds have a block table per kind, and each plans a step
(`tersekv.serving.steps`). What does not depend on the numbers of pages is found once here.

Shapes: T tokens of the step, n requests, B requests with one query, P pages of the longest of them, p tokens per page.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SINKS = 4
"""First tokens of a request that are read exactly. They get much attention, and their keys are unlike others."""

Ints = NDArray[np.int64]


class Seen(NamedTuple):
    """Tokens that requests with one query each read.

    pages: full pages that are read, bool [B, P]. packed: their tokens but the sinks, bool [B, 1, P·p].
    exact: tokens of the page being filled, bool [B, 1, p]. first: sinks, bool [B, 1, SINKS].
    """

    pages: Tensor
    packed: Tensor
    exact: Tensor
    first: Tensor


class Spans:
    """Requests with queries of a step, in the order of their queries.

    starts, seen: bytes of int64. Request i has queries starts[i] to starts[i + 1], which are the last of its
    seen[i] tokens.
    """

    def __init__(self, starts: bytes, seen: bytes, p: int) -> None:
        begin, held = np.frombuffer(starts, np.int64), np.frombuffer(seen, np.int64)
        queries = np.diff(begin)
        self.p = p
        self.requests = np.flatnonzero(queries)
        """Numbers of the requests that have queries."""
        self.first, self.queries, self.seen = (x[self.requests] for x in (begin[:-1], queries, held))
        self.start = self.seen - self.queries
        """Position of the first query."""
        begun, ends = self.start // p, (self.seen - 1) // p  # pages of the first and of the last query

        self.old = np.flatnonzero(self.start % p)
        """Requests whose first query is in a page that an earlier step began."""
        self.old_page, self.old_held = begun[self.old], self.start[self.old] % p
        stop = np.minimum(self.seen[self.old], (self.old_page + 1) * p)
        self.old_holds = stop - self.old_page * p
        """Tokens of these pages after the step; `old_held` before it."""
        self.new = np.flatnonzero(((ends > begun) | (self.start % p == 0)) & (self.seen % p != 0))
        """Requests that begin a page in this step and leave it partly filled."""
        self.new_page = ends[self.new]
        self.new_holds = self.seen[self.new] - self.new_page * p
        whole = begun + (self.start % p != 0)  # pages from here to seen // p are of this step alone
        alone = np.maximum(self.seen // p - whole, 0)
        self.owner = np.repeat(np.arange(len(alone)), alone)
        """Request of each page that this step begins and fills; `own_page` is its number in the request."""
        self.own_page = whole[self.owner] + counted(alone)
        self.completed = np.flatnonzero(self.old_holds == p)
        """Index, in `old`, of the pages that get full."""

        new_start = np.maximum(self.start[self.new], self.new_page * p)
        count = np.concatenate([stop - self.start[self.old], self.seen[self.new] - new_start])
        position = np.repeat(np.concatenate([self.start[self.old], new_start]), count) + counted(count)
        who = np.repeat(np.concatenate([self.old, self.new]), count)
        token = self.first[who] + position - self.start[who]
        order = np.argsort(token)
        self.copied = tensor(token[order])
        """Tokens that are copied to rows, in their order."""
        self.copied_row = np.repeat(np.arange(len(count)), count)[order]
        """Index of their row in the rows of `old`, then of `new`; `copied_place` is their place in it."""
        self.copied_place = (position % p)[order]

        tokens = (self.first[self.owner] + self.own_page * p - self.start[self.owner])[:, None] + np.arange(p)
        self.full_page = np.concatenate([self.own_page, self.old_page[self.completed]])
        """Numbers of the pages that get full: those of `owner`, then of `completed`."""
        self.full_tokens = tensor(tokens)
        self.full_positions = tensor(self.full_page[:, None] * p + np.arange(p))
        self.starting = np.flatnonzero(self.full_page == 0)
        """Index, in `full_page`, of first pages."""

        self.single = np.flatnonzero(self.queries == 1)
        """Requests with one query."""
        self.several = np.flatnonzero(self.queries > 1).tolist()
        """Requests with more queries."""
        first = self.first[self.single]
        alike = not self.several and bool((first == np.arange(len(first))).all())
        self.single_tokens = None if alike else torch.from_numpy(first)
        """Token of each request with one query; None if the step has no other tokens."""
        self.pages_read = (self.seen[self.single] - 1) // p
        """Full pages that each of them reads, without a sliding window."""
        self.reads = np.arange(max(1, int(self.pages_read.max(initial=0)))) < self.pages_read[:, None]
        """Mask of these pages, bool [B, P]."""
        self._seen: dict[tuple[int | None, torch.device], Seen] = {}

    @staticmethod
    def of(starts: Any, seen: Any, p: int) -> Spans:
        """Return the spans of a step, from n + 1 and n numbers. Block tables of one step get the same object."""
        return _spans(np.asarray(starts, np.int64).tobytes(), np.asarray(seen, np.int64).tobytes(), p)

    def seen_by_singles(self, window: int | None, device: torch.device) -> Seen:
        """Return what the requests with one query read in layers with this sliding window, or none.

        Pages before the window are left out, because the engine may have given them away.
        """
        key = window, device
        if key not in self._seen:
            found = self._all() if window is None else self._within(window)
            self._seen[key] = Seen(*(torch.from_numpy(x).to(device) for x in found))
        return self._seen[key]

    def _all(self) -> tuple[NDArray[np.bool_], ...]:
        packed = np.repeat(self.reads, self.p, axis=1)
        packed[:, :SINKS] = False
        exact = np.arange(self.p) < (self.seen[self.single] - self.pages_read * self.p)[:, None]
        first = np.repeat((self.pages_read > 0)[:, None], SINKS, axis=1)
        return self.reads, packed[:, None], exact[:, None], first[:, None]

    def _within(self, window: int) -> tuple[NDArray[np.bool_], ...]:
        pages, packed, exact, first = self._all()
        p, after = self.p, (self.seen[self.single] - window)[:, None]  # the window's first token, or below 0
        place = np.arange(packed.shape[-1])
        begun = (self.pages_read * p)[:, None] + np.arange(p)
        return (
            pages & ((np.arange(pages.shape[1]) + 1) * p > after),
            packed & (place >= after)[:, None],
            exact & (begun >= after)[:, None],
            first & (np.arange(SINKS) >= after)[:, None],
        )


_spans = functools.lru_cache(maxsize=2)(Spans)


def counted(counts: Ints) -> Ints:
    """Return 0 to counts[0] − 1, then 0 to counts[1] − 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def tensor(x: NDArray[Any]) -> Tensor:
    """Return the elements as int64."""
    return torch.from_numpy(np.ascontiguousarray(x.reshape(-1), dtype=np.int64))
