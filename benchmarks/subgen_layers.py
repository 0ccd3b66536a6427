"""Find the error of SubGen's Algorithm 1 (arXiv 2402.06082) layer by layer on a model's own prompts.

The cache of each layer receives the first `--tokens` tokens of a window. The next 64 tokens attend to
it and, exactly, to each other. The program reports per layer:

- error: ‖attention − exact‖ / ‖exact‖, mean over queries, heads and windows, for each recipe;
- for Algorithm 1, the terms of its error, over `--seeds` seeds:
  - mass: share of attention on tokens that are sampled, not exact;
  - numerator: error of z alone, divided by ‖exact‖ (root mean square);
  - predicted: ‖p‖₂‖V‖_F/√s / ‖exact‖, the standard deviation of z by theory (p: weights of the sampled
    tokens, V: their values);
  - mean of seeds: error of the mean of z over the seeds; numerator/√seeds if z is unbiased;
  - denominator: error of τ as a share of the true softmax denominator;
  - heaviest: largest mean attention of one sampled token; its value's norm over the median norm;
  - exponent: 2δr of Theorem 1, where r is the longest scaled query. The theorem wants e^{2δr} samples
    per cluster.

    python benchmarks/subgen_layers.py --text FILE --out benchmarks/records/subgen_layers.jsonl
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

import recorded
from recorded import record, show
from tersekv.attention.read import AttentionCall, attend_chunk
from tersekv.cache.layer import LayerStore
from tersekv.cache.slots import Slots
from tersekv.cache.tier import WEIGHT
from tersekv.calibration.capture import capture_calls
from tersekv.cli import output
from tersekv.lab.evals.windows import read_text
from tersekv.models.loading import load
from tersekv.recipe import Recipe

QUERIES = 64
STREAM = "subgen:variant=stream,budget=559"
RECIPES = (
    *("streaming:budget=512+exact", "subgen:budget=512+exact", f"{STREAM}+exact"),
    *("streaming:budget=512,sinks=64+exact", "subgen:budget=512,sinks=64+exact"),
    *(
        f"subgen:variant=stream,{options}+exact"
        for options in (
            "budget=541,sinks=64",
            "budget=569,recent=32",
            "budget=579,values=0.3",
            "budget=553,values=0.7",
            "budget=507,slots=1",
            "budget=601,slots=16",
        )
    ),
    f"{STREAM}+turboquant:bits=8",
)
"""Recipes of equal bytes after 1,024 tokens, apart from the last one."""
Row = dict[str, Any]


class Layer(NamedTuple):
    """One layer of a window: keys and values [1, H, T, D] and queries [1, Hq, T, D]."""

    keys: Tensor
    values: Tensor
    query: Tensor
    scaling: float


class Exact(NamedTuple):
    """Exact attention of the queries: weights [H, G, q, T] and outputs [H, G, q, D]."""

    weights: Tensor
    out: Tensor


def main() -> None:
    """Measure all recipes and the terms of Algorithm 1."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="pydoc", help="text file, or pydoc")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    windows = list(captured(args))
    setting = {"model": args.model, "text": Path(args.text).name, "context_tokens": args.tokens}
    setting |= {"windows": args.windows}
    rows: list[Row] = []
    for recipe in args.recipes:
        errors, share = errors_of(recipe, windows, args.tokens)
        rows.append({"what": "attention error", "recipe": recipe, "share": share, "layers": errors})
        output.report(f"{recipe}: {share:.3f} of 16 bits, error {fmean(errors):.3f}")
    found = [
        {name: fmean(part[name] for part in parts) for name in parts[0]}
        for parts in zip(*([terms(layer, i, args) for i, layer in enumerate(w)] for w in windows), strict=True)
    ]
    rows.append({"what": "terms of Algorithm 1", "recipe": f"{STREAM}+exact", "seeds": args.seeds, "layers": found})
    show_all(rows)
    record(args.out, setting, map(rounded, rows))


def captured(args: argparse.Namespace) -> Iterator[list[Layer]]:
    """Yield the layers of each window."""
    model, tokenizer = load(args.model)
    length = args.tokens + QUERIES
    ids = tokenizer(read_text(args.text), return_tensors="pt", verbose=False)["input_ids"]
    for i in range(args.windows):
        made = capture_calls(model, ids[:, i * length : (i + 1) * length])
        yield [Layer(tokens.keys, tokens.values, call.query, call.scaling) for tokens, call in made]


def exact(layer: Layer) -> Exact:
    """Return exact attention of the last `QUERIES` tokens."""
    H, T = layer.keys.shape[1:3]
    query = layer.query[0, :, -QUERIES:].float().unflatten(0, (H, -1))
    scores = torch.einsum("hgqd,htd->hgqt", query, layer.keys[0].float()) * layer.scaling
    later = torch.arange(T) > torch.arange(T - QUERIES, T)[:, None]
    weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
    return Exact(weights, torch.einsum("hgqt,htd->hgqd", weights, layer.values[0].float()))


def filled(recipe: str, layer: Layer, index: int, tokens: int) -> Any:
    """Return a layer's cache after the prompt."""
    keys, values = (x[:, :, :tokens] for x in (layer.keys, layer.values))
    store = LayerStore(Recipe.parse(recipe).plan(index, index + 1), keys, values)
    store.append(keys, values)
    return store


def errors_of(recipe: str, windows: list[list[Layer]], tokens: int) -> tuple[list[float], float]:
    """Return the relative error of each layer, and the share of 16-bit bytes held without slack."""
    errors: list[list[float]] = [[] for _ in windows[0]]
    shares = []
    for window in windows:
        for i, layer in enumerate(window):
            store, truth = filled(recipe, layer, i, tokens), exact(layer).out.flatten(0, 1).transpose(0, 1)
            keys, values, query = (x[:, :, tokens:] for x in layer[:3])
            out = attend_chunk(store, keys, values, AttentionCall(query, None, layer.scaling))[0]
            errors[i].append(float(((out - truth).norm(dim=-1) / truth.norm(dim=-1)).mean()))
            held = store.footprint()
            shares.append((held.total_bytes - held.parts["slack"]) / (2 * held.elements))
    return [fmean(of) for of in errors], fmean(shares)


def terms(layer: Layer, index: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the terms of Algorithm 1's error in one layer, means over heads and queries."""
    truth = exact(layer)
    values = layer.values[0, :, : args.tokens].float()
    stores = [filled(f"{STREAM},seed={seed}+exact", layer, index, args.tokens) for seed in range(args.seeds)]
    sampled = slice(stores[0].policy.sinks, args.tokens - stores[0].recent.tokens)
    weights = truth.weights[..., : args.tokens]
    p, v = weights[..., sampled], values[:, sampled]
    z, size = torch.einsum("hgqt,htd->hgqd", p, v), truth.out.norm(dim=-1)
    above, below = zip(*(estimated(store, weights, values) for store in stores), strict=True)
    off = torch.stack(above) - z
    samples = stores[0].chosen[0].reservoir.slots.shape[-1]
    spread = p.norm(dim=-1) * v.norm(dim=(1, 2))[:, None, None] / math.sqrt(samples)
    mean_weights = p.mean((1, 2))
    heaviest = mean_weights.argmax(-1, keepdim=True)
    norms = v.norm(dim=-1)
    delta = fmean(float(store.chosen[0].clusters.delta.mean()) for store in stores)
    longest = float(layer.query[0, :, -QUERIES:].float().norm(dim=-1).amax() * layer.scaling)
    return {
        "mass": float(p.sum(-1).mean()),
        "numerator": _rms(off.norm(dim=-1) / size),
        "predicted": _rms(spread / size),
        "mean of seeds": _rms(off.mean(0).norm(dim=-1) / size),
        "denominator": _rms(torch.stack(below) - p.sum(-1)),
        "heaviest": float(mean_weights.amax(-1).mean()),
        "its norm": float((norms.gather(-1, heaviest)[:, 0] / norms.median(-1).values).mean()),
        "exponent": 2 * delta * longest,
    }


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def estimated(store: LayerStore, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the estimates of z [H, G, q, D] and τ [H, G, q], in units of the true softmax denominator.

    weights: [H, G, q, T], the exact ones. values: [H, T, D].
    """
    each = [by_position(held.slots, weights.shape[-1]) for held in store.chosen[0].slots]
    above, below = each[0] + each[1], each[2] + each[3]
    return torch.einsum("hgqt,ht,htd->hgqd", weights, above, values), torch.einsum("hgqt,ht->hgq", weights, below)


def by_position(slots: Slots, tokens: int) -> Tensor:
    """Return the weight of each position in a sum, float32 [H, tokens]; 0 if it is not held."""
    positions = slots.positions[0].long()
    weights = slots.fields[WEIGHT][0].exp().masked_fill(positions < 0, 0.0)
    return weights.new_zeros(len(positions), tokens).scatter_add(1, positions.clamp(min=0), weights)


def rounded(row: Row) -> Row:
    """Return a row with its numbers in four digits."""

    def short(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: short(value) for name, value in x.items()}
        if isinstance(x, list):
            return [short(value) for value in x]
        return float(f"{x:.4g}") if isinstance(x, float) else x

    made: Row = short(row)
    return made


def show_all(rows: list[Row]) -> None:
    """Print the errors by recipe, and the terms by layer."""
    errors, terms_of = rows[:-1], rows[-1]["layers"]
    cells = [
        (row["recipe"], f"{row['share']:.3f}", f"{fmean(row['layers']):.3f}", f"{max(row['layers']):.2f}")
        for row in errors
    ]
    show("Relative error of attention", ("recipe", "share", "mean", "worst layer"), cells)
    parts = [(str(i), *(f"{x:.3g}" for x in of.values())) for i, of in enumerate(terms_of)]
    show("Terms of Algorithm 1", ("layer", *terms_of[0]), parts)


if __name__ == "__main__":
    main()
