"""The highest-ranked tokens of each KV head of a layer.

Tokens that leave the recent window compete with those that were chosen before.

With the option `rest`, tokens are demoted to a lower rate before they are evicted:

    tier at the codec's rate | tier at the lower rate | exact window

The policy ranks tokens of both tiers together. The codec's rate is for those that it would keep with
a smaller budget. A token whose rank falls below them is decoded and coded again with fewer bits from
the same fit, so its errors add up. No token returns to the higher rate. Of all tokens, those of the
lowest rank are evicted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersekv.cache.candidates import VOTES, Leaving, Ranks, Share, best
from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.filled import Stream, fill_chosen, fill_most
from tersekv.cache.footprint import Footprint
from tersekv.cache.head_tokens import SELECTIVE, HeadTokens
from tersekv.cache.schema import require, tensor, whole
from tersekv.cache.slots import in_front
from tersekv.cache.tier import WEIGHT
from tersekv.errors import UserError
from tersekv.policies.base import Candidates
from tersekv.tensors import gathered

NO_SCORES = (
    "the token policy needs the importance of the model's heads: measure it with `tersekv calibrate`, and use the "
    "recipe under tersekv.compress or with tersekv.CompressedCache"
)


CHOSEN = {
    **SELECTIVE,
    "tail_votes": lambda kept: tensor(torch.float32, kept.batch_size, kept.kv_heads, None, low=0),
    "queries": lambda kept: tensor(kept.dtype, kept.batch_size, None, None, kept.recent.buffers[0].shape[3]),
    "queries_end": lambda kept: whole(),
}


def kept_votes(kept: ChosenTokens, place: str) -> None:
    """Check that the tail has votes for each of its tokens if votes are remembered.

    Tokens whose queries are kept may have none yet.
    """
    tail = kept.recent.tokens
    held, wanted = kept.tail_votes.shape[2], tail if kept.policy.remembers else 0
    later = kept.policy.evicts == "block"
    require(held == wanted or (later and held < wanted), f"{place}.tail_votes", f"has {held} tokens of {wanted}")
    queries, most = kept.queries.shape[2], tail if kept.keeps_queries else 0
    require(queries <= most, f"{place}.queries", f"has {queries} queries, and at most {most} are kept")


class ChosenTokens(HeadTokens):
    """Tokens of a policy that ranks them.

    tail_votes: float32 [B, H, n], votes of tokens in the window.
    queries: [B, Hq, n, D] after RoPE, of tokens whose votes are added up later. `queries_end` is the
        number of tokens with the last one.

    Tokens held are ordered: packed slots and loose slots of each rate, window. Votes have this order,
    followed by those of new tokens.
    """

    STATE, RULES = CHOSEN, (*HeadTokens.RULES, kept_votes)

    def restart(self) -> None:
        """Start over, without tokens."""
        super().restart()
        keys = self.recent.keys
        self.tail_votes = keys.new_empty((*keys.shape[:2], 0), dtype=torch.float32)
        self.queries, self.queries_end = keys, 0

    def fields(self) -> dict[str, torch.dtype]:
        """Return the numbers that are kept of each token."""
        return {VOTES: torch.float32} if self.policy.remembers else {}

    @property
    def keeps_queries(self) -> bool:
        """True if votes of several generated tokens are added up at once."""
        return self.policy.remembers and self.policy.evicts == "block"

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens, or None. A rollback has removed some of them."""
        left = self.queries.shape[2] - (self.queries_end - self.num_tokens)
        return self.queries[:, :, :left] if self.queries_end >= self.num_tokens and left > 0 else None

    def keep(self, query: Tensor, seen: int, masked: bool) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended to `seen` others. None is in the
        padding."""
        waiting, new = self.waiting_queries(), query.detach().to(self.dtype)
        self.queries = new if waiting is None else torch.cat([waiting, new], dim=2)
        self.queries_end = seen + query.shape[2]

    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Choose or evict the oldest tokens, see `HeadTokens`.

        New votes are added to remembered ones.
        """
        held, n = self._sizes(), new[0].shape[2]
        slots = sum(held)
        if votes is None:
            total = slots + self.recent.tokens + n
            votes = self.tail_votes.new_zeros((self.batch_size, self.kv_heads, total))
        if self.policy.remembers:
            past = torch.cat([*(held.slots.fields[VOTES] for held in self.slots), self.tail_votes], dim=2)
            votes = votes + torch.nn.functional.pad(past, (0, votes.shape[2] - past.shape[2]))
            self.queries = self.queries[:, :, :0]
            for each, own in zip(self.slots, votes[:, :, :slots].split(held, dim=2), strict=True):
                each.slots.note(**{VOTES: own})
            self.tail_votes = votes[:, :, slots + leave :].clone()
        if leave:
            self._choose(new, votes[:, :, : slots + leave], leave, prompt)

    def _sizes(self) -> list[int]:
        """Return the numbers of slots."""
        return [len(held.slots) for held in self.slots]

    def _positions(self, leaving: Tensor) -> Tensor:
        """Return the positions of all slots, then those of tokens that leave the window."""
        return torch.cat([*(held.slots.positions for held in self.slots), leaving], dim=2)

    def _choose(self, new: list[Tensor], votes: Tensor, leave: int, prompt: bool) -> None:
        """Choose the oldest tokens of the window, or evict them.

        votes: of all slots and of these tokens.
        """
        after = self.recent.tokens + new[0].shape[2] - leave  # tokens that stay in the window
        tokens, positions = self._leaving(new, leave)
        leaving = Leaving(tokens, positions, votes)
        positions = self._positions(positions)
        room = (self._head_budget() - self._of_row(after)[:, None]).clamp(min=0)
        always = self._sinks(positions) | (positions >= (self.num_tokens - self.latest)[:, None, None])
        alive, evicts = positions >= 0, prompt or self.policy.evicts != "never"
        too_many = (alive.sum(-1) > room).any(-1, keepdim=True)
        evicts = evicts and bool(too_many.any())
        kept = room
        if evicts and not prompt and self.policy.evicts_ahead:
            kept = torch.where(too_many, room - room // 8, room)
        candidates = Candidates(votes, positions, self.num_tokens, kept, always, lambda: self._keys(tokens[0]))
        ranks = Ranks(candidates, self.policy)
        alive = best(ranks.of(always), alive, kept) if evicts else alive
        self._settle(leaving, alive, ranks, room, evicts, prompt)

    def _settle(self, leaving: Leaving, alive: Tensor, ranks: Ranks, room: Tensor, evicts: bool, prompt: bool) -> None:
        """Move tokens to their places.

        alive: bool [B, H, T], slots and leaving tokens that stay.
        room: number of these that may stay, int64 [B, H] or [B, 1].
        evicts: some of them leave the cache.
        """
        sizes = [*self._sizes(), leaving.positions.shape[2]]
        stays, demoted, demotes, limits = alive, torch.zeros_like(alive), False, [room]
        if len(self.tiers) > 1:
            stays, demoted, limits = self._demoted(sizes, alive, ranks, room, prompt)
            demotes = bool(demoted.any())
        elif evicts:
            limits = [self._head_budget() - self.tail_tokens]
        limited = evicts or demotes
        weights = ranks.of(ranks.candidates.always) if limited else torch.zeros_like(leaving.votes)
        samples, sampled = self._samples(leaving)
        parts = zip(*(x.split(sizes, dim=2) for x in (alive, stays, demoted, weights, leaving.votes)), strict=True)
        *shares, of_leaving = (Share(*part) for part in parts)
        falling = self._falling(leaving, [*shares[:2], of_leaving]) if demotes else None
        for i, (held, share) in enumerate(zip(self.slots, shares, strict=True)):
            held.slots.note(**{WEIGHT: share.weights})
            held.keep(share.stays if i < 2 else share.alive)
        self.loose[0].take(leaving.tokens, leaving.positions, of_leaving.stays, of_leaving.fields())
        if falling is not None:
            self.loose[1].add(*falling)
        self._fit_both(samples, sampled)
        for tier, loose, most in zip(self.tiers, self.loose, limits, strict=True):
            blocks = tier.most_blocks(most) if limited else None
            self._pack(tier, loose, self._movable(loose), samples, sampled, blocks)
            for held in (tier, loose):
                held.slots.forget(WEIGHT)

    def _demoted(
        self, sizes: list[int], alive: Tensor, ranks: Ranks, room: Tensor, prompt: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return masks of tokens that keep the codec's rate and that lose it, and the most tokens per tier and head.

        sizes: numbers of slots, and of leaving tokens. Others: see `_settle`.
        """
        candidates = alive.clone()
        candidates[:, :, sum(sizes[:2]) : sum(sizes[:4])] = False  # these have the lower rate
        lower, always = self._lower(ranks.candidates.positions)
        most = torch.maximum((room - lower).clamp(min=0), (candidates & always).sum(-1))
        over = candidates.sum(-1) - most
        demotes = bool((over >= (1 if prompt else self.flush_tokens)).any())
        demotes = demotes and (prompt or self.policy.evicts != "never")
        stays = best(ranks.of(always), candidates, most) if demotes else candidates
        return stays, candidates & ~stays, [most + self.flush_tokens, lower]

    def _lower(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens of each head have the lower rate, and which tokens never have it.

        The codec's rate is for what the policy would keep with a budget that is smaller by the former.
        """
        policy, budget = self.policy, self._head_budget().tolist()
        lower = [[policy.lower(n) for n in row] for row in budget]
        latest = [
            [policy.latest(n - k) for n, k in zip(*rows, strict=True)] for rows in zip(budget, lower, strict=True)
        ]
        first = self.num_tokens - torch.tensor(latest, device=self.device)
        always = self._sinks(positions) | (positions >= first.unsqueeze(-1))
        return torch.tensor(lower, device=self.device), always

    def _falling(self, leaving: Leaving, shares: list[Share]) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Return the demoted tokens, their positions and fields, as `ExactTokens.add` takes them.

        shares: of the first tier, its loose tokens, and leaving ones.
        """
        demoted = torch.cat([share.demoted for share in shares], dim=2)
        order, (tier, loose) = in_front(demoted), (self.tiers[0], self.loose[0])
        some = bool(shares[0].demoted.any())
        views = tier.views(0, tier.tokens, self.angles(tier.slots.positions)) if some else []
        tokens = []
        for i, (exact, x) in enumerate(zip(loose.data, leaving.tokens, strict=True)):
            packed = views[i].decode().to(self.dtype) if views else x.new_zeros((*x.shape[:2], tier.tokens, x.shape[3]))
            tokens.append(gathered(torch.cat([packed, exact, x.to(self.dtype)], dim=2), order))
        positions = torch.cat([self.positions(0), leaving.positions], dim=2)
        each = [share.fields() for share in shares]
        fields = {name: torch.cat([own[name] for own in each], dim=2).gather(2, order) for name in each[0]}
        return tokens, positions.masked_fill(~demoted, -1).gather(2, order), fields

    def _fit_both(self, samples: list[Tensor], positions: Tensor) -> None:
        """Fit the codecs if a tier is about to pack for the first time. Both rates share the fit."""
        sides = self.tiers[0].sides
        if len(self.tiers) == 1 or all(side.codec.needs_fit is None for side in sides):
            return
        movable = [self._movable(loose).sum(-1) for loose in self.loose if loose.tokens]
        if any(int(tokens.max()) >= self.flush_tokens for tokens in movable):
            self._fit(self.tiers[0], samples, positions)
            for side, low in zip(sides, self.tiers[1].sides, strict=True):
                low.codec = side.codec.at_rate(low.bits)

    def _movable(self, loose: ExactTokens) -> Tensor:
        """Return the mask of loose slots that may be packed: all tokens but the sinks."""
        return loose.slots.alive & ~self._sinks(loose.slots.positions)

    def _samples(self, leaving: Leaving) -> tuple[list[Tensor], Tensor]:
        """Return the tokens that codecs are fitted on, and their positions: all exact ones but those of the
        window, also evicted ones.
        """
        loose = self.loose[0]
        positions = torch.cat([loose.slots.positions, leaving.positions], dim=2)
        if all(side.codec.needs_fit is None for side in self.tiers[0].sides):
            return leaving.tokens, positions
        return [torch.cat(both, dim=2) for both in zip(loose.data, leaving.tokens, strict=True)], positions

    def _head_budget(self) -> Tensor:
        """Return the number of tokens that each head keeps, int64 [B, H], or [B, 1] for all heads.

        Raises:
            UserError: the policy needs the importance of heads, and the plan has none.
        """
        if not self.policy.needs_scores:
            return self.budget[:, None]
        if self.plan.scores is None:
            raise UserError(NO_SCORES)
        rows = zip(self.budget.tolist(), self._received(), strict=True)
        kept = [self.policy.of_heads(mean, n, self.plan.scores)[self.plan.layer] for mean, n in rows]
        own = slice(None) if self.heads is None else slice(self.heads.first, self.heads.first + self.heads.count)
        return torch.stack(kept)[:, own].to(self.device)

    def _of_row(self, n: int) -> Tensor:
        """Return how many of the latest n positions hold a token, per row."""
        rows = torch.full_like(self.budget, n)
        return rows if self.padding is None else torch.minimum(rows, self.num_tokens - self.padding)

    def _keys(self, leaving: Tensor) -> Tensor:
        """Return keys of all slots and of tokens leaving the window, float32 [B, H, T, D]."""
        parts = []
        for tier, loose in zip(self.tiers, self.loose, strict=True):
            views = tier.views(0, tier.tokens, self.angles(tier.slots.positions)) if tier.tokens else []
            parts += [views[0].decode(), loose.keys.float()] if views else [loose.keys.float()]
        return torch.cat([*parts, leaving.float()], dim=2)

    def crop(self) -> None:
        """Follow a rollback of tokens of the window, or of all."""
        super().crop()
        self.tail_votes = self.tail_votes[:, :, : self.recent.tokens]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and window."""
        super().count(footprint)
        footprint.parts["selection"] += self.tail_votes.nbytes + self.queries.nbytes

    def fill(self, stream: Stream, queries: Tensor) -> tuple[int, int]:
        policy, scores = self.policy, self.plan.scores
        after = stream.tokens - stream.left  # tokens that stay in the window
        sinks = min(policy.sinks, min(stream.tokens, stream.budget) - after)
        budgets = [stream.budget]
        if policy.needs_scores and scores is not None:
            budgets = policy.of_heads(stream.budget, stream.tokens, scores)[self.plan.layer].tolist()
        kept = [min(stream.tokens, one) - after - sinks for one in budgets]
        low = [min(n, policy.lower(one)) if self.tiers[1:] else 0 for n, one in zip(kept, budgets, strict=True)]
        each, slack = ([n - lower for n, lower in zip(kept, low, strict=True)], low), 0
        ahead = math.ceil(stream.budget / 8) if policy.evicts_ahead else 0  # evicted down to 7/8, then filled again
        for i, (tier, loose) in enumerate(zip(self.tiers, self.loose, strict=True)):
            first = 0 if i else sinks
            if stream.fullest:
                tokens = [n + first for n in each[i]]
                slack += fill_most(tier, loose, tokens, ahead, tier is not self.tiers[-1], first)
            else:
                fill_chosen(tier, loose, each[i], 0 if i else stream.late, first)
        if policy.remembers:
            self.tail_votes = self.tail_votes.new_empty((*self.recent.keys.shape[:3],))
        if stream.fullest and self.keeps_queries:
            self.queries = queries
        return sinks, slack
