"""Rates per token, simulated: each token of a prompt is coded with bits by its importance.

    python benchmarks/token_rates.py --out file.jsonl --text wikitext=test.txt --text code=code.txt  # run or continue.
    python benchmarks/token_rates.py --records file.jsonl --into docs/token-rates.md       # write the tables.

`trellis` is fitted on the prompt and encodes all its tokens at every rate. Then each token takes the
rate that minimises Σ importance·error at a mean rate, per KV head. Attention reads the decoded
tokens. Positions and rate maps are not counted, so the bits are those of the codes alone.

Divergence: 2,048 tokens are packed, the next 256 are read at once. Passkey: the text is packed before
the question is read, and the answer's negative log-likelihood per token is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import tersekv
from tersekv.attention import masks
from tersekv.attention.read import grouped
from tersekv.cache import coding
from tersekv.cache.lost_variance import LostVariance
from tersekv.codecs.codebooks.bits import SQUARED_ERROR
from tersekv.hf.models import load
from tersekv.lab.evals.tasks.passkey import build
from tersekv.lab.evals.windows import read_text

RECIPE = "trellis:bits=2,calibration=prompt"
RATES = (1, 1.5, 2, 2.5, 3, 4)
MEANS = (1.5, 2, 2.5)
PREFIX, CONTEXT = 2048, 2304
FLOORS = {"seen": 1.0, "moved": 1.0, "reread": 0.1, "future": 0.03}
"""Share of the mean importance that every token gets in addition. Chosen on two windows of wikitext."""
TILE = 256
PASSKEYS, REPETITIONS = 6, 75
NAME = "token-rates"

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
        return self.layers[0][RATES[0]][0].shape[1]


class Simulation:
    """The model with `Attention` in place of its own."""

    def __init__(self, name: str) -> None:
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
        - moved: root mean square of attention from the same queries, moved behind the prompt by RoPE.
        - reread: the same, from a second reading of the prompt after the first.
        - future: the same, from the tokens that follow. No cache can know it.
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
            rows = grouped(query * cos + half * sin, cache.layers[layer].keys.shape[1])[0].flatten(1, 2)
            keys = cache.layers[layer].keys[0].float() * query.shape[-1] ** -0.5
            parts = (torch.einsum("hrd,htd->hrt", part, keys).softmax(-1) for part in rows.split(TILE, dim=1))
            moved.append(sum(part.square().sum(1) for part in parts).sqrt())  # type: ignore[union-attr]
        again = copied(cache)

        def reread() -> None:
            for part in ids.split(TILE, dim=1):
                self.forward(part, again, 1)

        found = {"seen": [x / age for x in mean], "moved": moved}
        found["reread"] = [x.sqrt() for x in self._sums(reread, tokens, 2)]
        found["future"] = [x.sqrt() for x in self._sums(lambda: self.forward(later, copied(cache), 1), tokens, 2)]
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
            for rate in RATES:
                decoded = []
                for side, x in zip(store.sides, (exact.keys, exact.values), strict=True):
                    part = x[:, :, first : first + count]
                    codec = replace(side.codec, bits=rate)._with_own_bits()
                    tokens = side._tokens(part, first)
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
    rates, of_bits = torch.tensor(RATES), SQUARED_ERROR["trellis"]
    error = torch.tensor([(of_bits[math.floor(r)] * of_bits[math.ceil(r)]) ** 0.5 for r in RATES])
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


def settings(prompt: Prompt, importances: dict[str, Maps]) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield importance, mean rate, rates per token and whether the bias is corrected."""
    heads = importances["seen"][0].shape[0]
    for rate in RATES:
        yield "equal rates", rate, [torch.full((heads, prompt.packed), float(rate))] * len(prompt.layers), False
    for name, weights in importances.items():
        for mean in MEANS:
            maps = water_filled(weights, prompt, mean, FLOORS[name])
            yield name, mean, maps, True
            if name == "seen":
                yield f"{name}, bias not corrected", mean, maps, False


def windows(simulation: Simulation, path: str, count: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield number, packed tokens and later tokens of the first windows of a text."""
    ids = torch.tensor([simulation.tokenizer(read_text(path), verbose=False)["input_ids"]])
    for i in range(count):
        window = ids[:, i * CONTEXT : (i + 1) * CONTEXT]
        yield str(i), window[:, :PREFIX], window[:, PREFIX:]


def passkeys(simulation: Simulation) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield number, context of about 2,000 tokens, and question with answer of passkeys."""
    for i in range(PASSKEYS):
        case = build("pose", REPETITIONS, Random(f"rates-{i}"), str(i), PREFIX)
        encode = simulation.tokenizer
        context = encode(case.prompt.context, return_tensors="pt")["input_ids"]
        rest = f"{case.prompt.question} {case.expected[0]}"
        yield str(i), context, encode(rest, return_tensors="pt")["input_ids"]


def measured(simulation: Simulation, text: str, first: Tensor, rest: Tensor) -> Iterator[dict[str, Any]]:
    """Yield the results of all settings on one sample."""
    full, importances = simulation.importances(first, rest)
    prompt = simulation.pack(first, full)
    reference = simulation.forward(rest, copied(full))
    pairs = set(zip(first[0].tolist(), first[0, 1:].tolist(), strict=False))
    copies = torch.tensor([pair in pairs for pair in zip(rest[0].tolist(), rest[0, 1:].tolist(), strict=False)])
    for name, mean, maps, corrects in settings(prompt, importances):
        got = simulation.read(prompt, maps, rest, corrects)
        line = {"importance": name, "bits": mean, "mean_bits": sum(float(m.mean()) for m in maps) / len(maps)}
        if text == "passkey":
            line |= answered(simulation, rest, got, reference)
        else:
            kl = (reference.exp() * (reference - got)).sum(-1)
            line |= {"kl": float(kl.mean()), "p99": float(kl.quantile(0.99))}
            line |= {"kl_copies": float(kl[:-1][copies].mean()), "kl_others": float(kl[:-1][~copies].mean())}
            line |= {"copies": float(copies.float().mean())}
        yield line


def answered(simulation: Simulation, rest: Tensor, got: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the negative log-likelihood of the answer's digits, and whether all are most likely."""
    words = simulation.tokenizer.convert_ids_to_tokens(rest[0].tolist())
    digits = [i for i, word in enumerate(words) if word.strip("Ġ ").isdigit()]
    at, target = torch.tensor(digits) - 1, rest[0, digits]
    found = {}
    for name, logits in (("nll", got), ("full_nll", reference)):
        found[name] = float(-logits[at, target].mean())
        found[f"{name}_right"] = float(bool((logits[at].argmax(-1) == target).all()))
    return found


def run(args: argparse.Namespace) -> None:
    """Measure every sample that the file does not have yet."""
    simulation, held = Simulation(args.model), set()
    if args.out.is_file():
        held = {(x["text"], x["sample"]) for x in map(json.loads, args.out.read_text(encoding="utf-8").splitlines())}
    for option in [*args.text, "passkey="]:
        text, _, path = option.partition("=")
        samples = windows(simulation, path, args.windows) if path else passkeys(simulation)
        for sample, first, rest in samples:
            if (text, sample) in held:
                continue
            with torch.no_grad():
                lines = [
                    {"model": args.model, "text": text, "sample": sample} | line
                    for line in measured(simulation, text, first, rest)
                ]
            with args.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            print(f"{text} {sample}: done", flush=True)


def table(lines: list[dict[str, Any]], text: str) -> str:
    """Return the table of a text in Markdown: a row per importance and mean rate."""
    groups = defaultdict(list)
    for line in lines:
        if line["text"] == text:
            groups[line["importance"], line["bits"]].append(line)
    mean = lambda name, found: statistics.fmean(line[name] for line in found)  # noqa: E731
    if text == "passkey":
        head, full = "NLL of the answer | answered", next(iter(groups.values()))
        rows = [f"| full cache | | {mean('full_nll', full):.2f} | {sum(x['full_nll_right'] for x in full):.0f} |"]
        rows += [
            f"| {name} | {bits:g} | {mean('nll', found):.2f} | {sum(x['nll_right'] for x in found):.0f} |"
            for (name, bits), found in groups.items()
        ]
    else:
        head, rows = "KL, mean | windows | 99th percentile | copies | other tokens", []
        for (name, bits), found in groups.items():
            each = " ".join(f"{line['kl']:.4f}" for line in found)
            rest = " | ".join(f"{mean(key, found):.4f}" for key in ("p99", "kl_copies", "kl_others"))
            rows.append(f"| {name} | {bits:g} | {mean('kl', found):.4f} | {each} | {rest} |")
    return "\n".join([f"| importance | mean bits | {head} |", f"|---|---|{'---|' * head.count('|')}---|", *rows])


def filled(page: str, lines: list[dict[str, Any]]) -> str:
    """Return the page with the table of every text made from the records."""
    for text in dict.fromkeys(line["text"] for line in lines):
        begin, end = f"<!-- {text}: made by benchmarks/token_rates.py -->", f"<!-- end of {text} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table(lines, text)}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Parse the options; run, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name, folder or Hub id of a Llama-like model")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, a text; repeat")
    parser.add_argument("--windows", type=int, default=4, help="windows of each text")
    parser.add_argument("--out", type=Path, help="run, and add records to this file")
    parser.add_argument("--records", type=Path, help="records to make the tables from")
    parser.add_argument("--into", type=Path, help="page whose tables are replaced")
    args = parser.parse_args()
    if args.out is not None:
        run(args)
    if args.records is not None and args.into is not None:
        lines = [json.loads(line) for line in args.records.read_text(encoding="utf-8").splitlines()]
        args.into.write_text(filled(args.into.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
