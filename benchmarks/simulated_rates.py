"""A model whose cached tokens are decoded from rates of their own, for benchmarks/token_rates.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import tersekv
from tersekv.attention import masks
from tersekv.attention.read import grouped
from tersekv.cache import coding, packing
from tersekv.cache.lost_variance import LostVariance
from tersekv.codecs import Codec
from tersekv.models.loading import load

RECIPE = "trellis:bits=2,calibration=prompt"
RATES = (1, 1.5, 2, 2.5, 3, 4)
EXACT = 16.0
EVERY = 4  # queries that are moved
TILE = 256
NAME = "token-rates"
DISTANCES = tuple(2**i for i in range(13))
"""Distances to later queries that `from_centres` looks at, in tokens."""
FARTHEST = DISTANCES[-1]

Maps = list[Tensor]


class Attention:
    """Attention over tensors that adds a bias per token and reports softmax weights.

    biases: per layer, rate index [H, T] of each token (−1 for exact ones) and lost variances
        [rates, H, D], or None. queries: of each layer, kept if it is a dict. seen: called with
        layer and weights [H, G·q, T].
    """

    def __init__(self) -> None:
        self.biases: list[tuple[Tensor, Tensor]] | None = None
        self.maps: list[Any] = []
        self.queries: dict[int, Tensor] | None = None
        self.seen: Callable[[int, Tensor], None] | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """Return attention output [1, q, Hq, D] for causal queries of the latest tokens."""
        layer, (q, tokens) = module.layer_idx, (query.shape[2], key.shape[2])
        if self.queries is not None:
            self.queries[layer] = query
        rows, outs = grouped(query, key.shape[1])[0], []
        for start in range(0, q, TILE):
            part = rows[:, :, start : start + TILE]
            scores = torch.einsum("hgqd,htd->hgqt", part, key[0].float()) * scaling
            if self.biases is not None:
                place, lost = self.biases[layer]
                mapped = self.maps[layer].query(part.flatten(1, 2)[None])[0, ..., : key.shape[-1]].square()
                bias = 0.5 * scaling**2 * torch.einsum("hrd,nhd->hrn", mapped, lost)
                bias = torch.nn.functional.pad(bias, (0, 1))  # the last entry belongs to exact tokens
                of_token = (place % bias.shape[2])[:, None].expand(-1, bias.shape[1], -1)
                scores[..., : place.shape[1]] += bias.gather(2, of_token).view(*scores.shape[:3], -1)
            visible = masks.causal(q, tokens, query.device)[0, start : start + TILE]
            weights = scores.masked_fill_(~visible, -torch.inf).softmax(-1)
            if self.seen is not None:
                self.seen(layer, weights.flatten(1, 2))
            outs.append(torch.einsum("hgqt,htd->hgqd", weights, value[0].float()))
        out = torch.cat(outs, dim=2).flatten(0, 1)
        return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None


class Prompt(NamedTuple):
    """A packed prompt: its full cache, and per layer the decoded tokens and lost variance by rate."""

    full: DynamicCache
    sinks: int
    layers: list[dict[float, tuple[Tensor, Tensor, Tensor]]]

    @property
    def packed(self) -> int:
        """Number of packed tokens."""
        return next(iter(self.layers[0].values()))[0].shape[1]


class Simulation:
    """The model with `Attention` in place of its own. rates: bits at which prompts are packed."""

    def __init__(self, name: str, rates: Sequence[float] = RATES) -> None:
        self.rates = rates
        self.model, self.tokenizer = load(name)
        self.attention = Attention()
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)

    def forward(self, ids: Tensor, cache: DynamicCache, logits: int = 0) -> Tensor:
        """Return log-probabilities [q, vocabulary]."""
        self.model.set_attn_implementation(NAME)
        out = self.model(ids, past_key_values=cache, logits_to_keep=logits).logits
        return out[0].float().log_softmax(-1)

    def importances(self, ids: Tensor, later: Tensor) -> tuple[DynamicCache, dict[str, Maps]]:
        """Return the full cache of a prompt [1, T], and the tokens' importance by name, [H, T] per layer.

        - seen: mean attention from the prompt's queries that see the token.
        - moved: root mean square of attention from every fourth of them, moved behind the prompt by RoPE.
        - both: sum of these two, each divided by its mean.
        - reread: the same, from a second reading of the prompt after the first.
        - future: the same, from the tokens that follow. No cache can know it.
        - centres, gaussian: from the centres of queries before RoPE, see `from_centres`.
        - norm: how far the norm of key or value is from its median, in mean deviations.
        """
        tokens, cache = ids.shape[1], DynamicCache()
        self.attention.queries = {}
        mean = self._sums(lambda: self.forward(ids, cache, 1), tokens, 1)
        queries, self.attention.queries = self.attention.queries, None
        age = torch.arange(tokens, 0, -1)
        moved = []
        cos, sin = self.model.model.rotary_emb(torch.zeros(1), torch.tensor([[tokens]]))
        for layer, query in queries.items():
            half = torch.cat([-query[..., query.shape[-1] // 2 :], query[..., : query.shape[-1] // 2]], dim=-1)
            behind = (query * cos + half * sin)[:, :, ::EVERY]
            rows = grouped(behind, cache.layers[layer].keys.shape[1])[0].flatten(1, 2)
            keys = cache.layers[layer].keys[0].float() * query.shape[-1] ** -0.5
            parts = (torch.einsum("hrd,htd->hrt", part, keys).softmax(-1) for part in rows.split(TILE, dim=1))
            moved.append(sum(part.square().sum(1) for part in parts).sqrt())  # type: ignore[union-attr]
        again = copied(cache)
        angles = self.model.model.rotary_emb(torch.zeros(1), torch.arange(tokens + FARTHEST)[None])
        centres = [
            from_centres(queries[layer][0], one.keys[0].float(), *angles) for layer, one in enumerate(cache.layers)
        ]

        def reread() -> None:
            for part in ids.split(TILE, dim=1):
                self.forward(part, again, 1)

        found = {"seen": [x / age for x in mean], "moved": moved}
        found["reread"] = [x.sqrt() for x in self._sums(reread, tokens, 2)]
        relative = ([x / x.mean(-1, keepdim=True) for x in found[name]] for name in ("seen", "moved"))
        found["both"] = [a + b for a, b in zip(*relative, strict=True)]
        found["future"] = [x.sqrt() for x in self._sums(lambda: self.forward(later, copied(cache), 1), tokens, 2)]
        found["centres"], found["gaussian"] = map(list, zip(*centres, strict=True))
        found["norm"] = [torch.maximum(unusual(x.keys), unusual(x.values)) for x in cache.layers]
        return cache, found

    def _sums(self, run: Callable[[], Any], tokens: int, power: int) -> Maps:
        """Return Σ weight^power over the queries of `run`, [H, tokens] per layer."""
        sums: dict[int, Tensor] = {}

        def add(layer: int, weights: Tensor) -> None:
            part = weights[..., :tokens].pow(power).sum(1)
            missing = torch.nn.functional.pad(part, (0, tokens - part.shape[1]))
            sums[layer] = sums[layer] + missing if layer in sums else missing

        self.attention.seen = add
        run()
        self.attention.seen = None
        return [sums[layer] for layer in sorted(sums)]

    def pack(self, ids: Tensor, full: DynamicCache) -> Prompt:
        """Fit the codec on the prompt and decode its tokens at every rate."""
        self.model.set_attn_implementation("sdpa")
        with tersekv.compress(self.model, RECIPE):
            cache = tersekv.CompressedCache(self.model, RECIPE)
            self.model(ids, past_key_values=cache, logits_to_keep=1)
        layers, self.attention.maps = [], []
        for layer, exact in zip(cache.layers, full.layers, strict=True):
            store = layer.store
            first, count = store.packed_first, store.packed_tokens
            by_rate = {}
            for rate in self.rates:
                decoded = []
                for i, (side, x) in enumerate(zip(store.sides, (exact.keys, exact.values), strict=True)):
                    part = x[:, :, first : first + count]
                    codec = side.codec.at_rate(rate)
                    tokens = packing.with_angles(store, i, part, first)
                    view = coding.view(codec, coding.encode(codec, tokens), part.shape[-1], tokens.angles)
                    decoded.append(view.decode()[0])
                    if side is store.keys:
                        sums = LostVariance()
                        sums.add(part, view)
                        linear, lost = view.linear, sums.value()
                assert lost is not None
                by_rate[rate] = (*decoded, lost[0])
            layers.append(by_rate)
            self.attention.maps.append(linear)
        return Prompt(full, first, layers)

    def read(self, prompt: Prompt, maps: Maps, ids: Tensor, corrects: bool) -> Tensor:
        """Return log-probabilities of ids [1, q] after the prompt with a rate per token [H, packed]."""
        cache, biases, place = copied(prompt.full), [], slice(prompt.sinks, prompt.sinks + prompt.packed)
        for layer, by_rate, rates in zip(cache.layers, prompt.layers, maps, strict=True):
            at = torch.full((rates.shape[0], layer.keys.shape[2]), -1)
            for i, (rate, (keys, values, _)) in enumerate(by_rate.items()):
                chosen = (rates == rate).unsqueeze(-1)
                layer.keys[0, :, place] = torch.where(chosen, keys, layer.keys[0, :, place])
                layer.values[0, :, place] = torch.where(chosen, values, layer.values[0, :, place])
                at[:, place].masked_fill_(rates == rate, i)
            biases.append((at, torch.stack([lost for *_, lost in by_rate.values()])))
        self.attention.biases = biases if corrects else None
        out = self.forward(ids, cache)
        self.attention.biases = None
        return out


def from_centres(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return two importances [H, T] of keys [H, T, D] from what queries [Hq, T, D] have in common before RoPE.

    cos, sin: [1, T + FARTHEST, D], angles of all positions.

    The first is the score of TriAttention (arXiv 2604.04921). In the pair of channels f, let q_f be a query
    before RoPE as a complex number. The centre E q_f, rotated to a later position, gives a key the logit
    Σ_f Re(E q_f·k_f*), mean over distances 1, 2, 4, … Beside it counts Σ_f (E|q_f| − |E q_f|)·|k_f|. Both together
    are normalised over the tokens of each query head, and the largest of a KV head's query heads counts.

    The second takes q_f for Gaussian: its mean attention weight is in proportion to exp(logit + half of its
    variance). It is the root mean square of the weights over distances and query heads.
    """
    half, scaling = keys.shape[-1] // 2, keys.shape[-1] ** -0.5
    turn = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
    q = torch.complex(query[..., :half].float(), query[..., half:].float()) * turn[: query.shape[1]].conj()
    k = torch.complex(keys[..., :half], keys[..., half:]).repeat_interleave(len(query) // len(keys), dim=0)
    centre, length = q.mean(1), q.abs().mean(1)
    variance = (q - centre[:, None]).abs().square().mean(1)
    later = turn[keys.shape[1] - 1 + torch.tensor(DISTANCES)]
    logits = torch.einsum("hpf,htf->hpt", centre[:, None] * later, k.conj()).real * scaling
    beside = torch.einsum("hf,htf->ht", length - centre.abs(), k.abs()) * scaling
    score = logits.mean(1) + beside
    score = (score - score.mean(-1, keepdim=True)) / score.std(-1, keepdim=True)
    spread = torch.einsum("hf,htf->ht", variance, k.abs().square()) * (scaling**2 / 4)
    weights = (logits + spread[:, None]).softmax(-1).square().mean(1).sqrt()
    return score.unflatten(0, (len(keys), -1)).amax(1), weights.unflatten(0, (len(keys), -1)).square().mean(1).sqrt()


def unusual(x: Tensor) -> Tensor:
    """Return how far the norms of x [1, H, T, D] are from their median, in mean deviations, [H, T]."""
    norms = x[0].float().norm(dim=-1).log()
    away = (norms - norms.median(-1, keepdim=True).values).abs()
    return away / away.mean(-1, keepdim=True)


def copied(cache: DynamicCache) -> DynamicCache:
    """Return a copy of a cache."""
    other = DynamicCache()
    for i, layer in enumerate(cache.layers):
        other.update(layer.keys.clone(), layer.values.clone(), i)
    return other


def water_filled(importance: Maps, prompt: Prompt, mean: float, floor: float) -> Maps:
    """Return the rates [H, packed] that minimise Σ importance·error at a mean rate, for each head.

    floor: share of the mean importance that every token gets in addition.
    """
    rates, error = torch.tensor(RATES), torch.tensor([Codec.expected_error(r) for r in RATES])
    found = []
    for weights in importance:
        own = weights[:, prompt.sinks : prompt.sinks + prompt.packed]
        own = own / own.mean(-1, keepdim=True) + floor
        low, high = torch.full((len(own), 1, 1), 1e-9), 100 * own.amax(-1)[:, None, None]
        for _ in range(50):  # the price of a bit
            price = (low * high).sqrt()
            chosen = rates[(own.unsqueeze(-1) * error + price * rates).argmin(-1)]
            above = (chosen.mean(-1) > mean)[:, None, None]
            low, high = torch.where(above, price, low), torch.where(above, high, price)
        found.append(rates[(own.unsqueeze(-1) * error + high * rates).argmin(-1)])
    return found


def fixed(importance: Maps, prompt: Prompt, shares: tuple[tuple[float, float], ...]) -> Maps:
    """Return the rates [H, packed] with fixed shares of each head's tokens, see `SHARES`."""
    found = []
    for weights in importance:
        own = weights[:, prompt.sinks : prompt.sinks + prompt.packed]
        rank = own.argsort(-1, descending=True).argsort(-1)
        rates, first = torch.empty(own.shape), 0
        for rate, share in shares:
            rates[rank >= first] = float(rate)
            first += round(share * prompt.packed)
        found.append(rates)
    return found
