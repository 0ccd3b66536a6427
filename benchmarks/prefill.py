"""Cost of packing a prompt: within a whole prefill, of one layer, in memory, and of one block while decoding.

    python benchmarks/prefill.py [--model smollm2] [--tokens 4096 8192] [--threads 4] [--rounds 3] [--out FILE]
    python benchmarks/prefill.py --parts layer --tokens 8192 --rounds 7 --out benchmarks/records/encode.jsonl

- **Prefill.** The model reads a prompt with transformers' own cache and with each recipe, in turns
  in every round. The time within the cache's layers is packing; the rest of the same prefill is the
  model. Their ratio is reported, because it depends less on other programs than two prefills do.
  For the policy `mixed`, ranking the tokens is reported likewise, and is no part of the rest.
  Presets are fitted within it, on the prompt.
- **Layer.** One decoder layer of SmolLM2-135M's shape reads the tokens (9 query heads, 3 KV heads, head
  dim 64; random weights, float32, SDPA). Then recipes fit and encode keys and values of as many tokens,
  1,024 at a time. They do so with the kernels and with the torch reference. All take turns in
  every round, and ratios are taken within a round. It runs with `--parts layer` only.
- **Memory.** Exact keys and values of one layer are packed by as many layers as the model has. The
  peak of resident memory above the start is compared with the bytes held.
- **Blocks.** Blocks of 32 tokens of one layer are encoded with a fitted codec, both sides.
- **Vectors.** Microseconds per vector of 64 and 128 components, one thread. The share in a prefill of
  a model of 8 billion parameters is an estimate from them: see `estimate`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import recorded
import tersekv
from recorded import in_turns, median_of, record
from tersekv.attention import observe
from tersekv.cache.coding import chunks
from tersekv.cache.layer import LayerStore
from tersekv.hf.layer import CompressedLayer
from tersekv.kernels import backends
from tersekv.lab.bench.generate import prompt
from tersekv.lab.bench.memory import PeakMemory
from tersekv.malloc_trim import malloc_trim
from tersekv.models import loading
from tersekv.recipe import PRESETS, Recipe
from tersekv.transforms.rope import standard_rope

METHODS = (
    "trellis:bits=3,calibration=prompt",
    *("kivi:bits=4", "kivi:bits=2", "int4", "normalfloat", "qjl", "polarquant", "turboquant:bits=3"),
    "kvquant:bits=3,calibration=prompt",
)
BLOCK, BLOCKS = 32, 40
PACKED = (
    *("polarquant", "polarquant:codebook=online", "polarquant:rotation=none", "turboquant:bits=3"),
    *("turboquant:bits=2.5", "turboquant:bits=3,variant=prod", "qjl", "kivi:bits=2"),
    *(f"trellis:bits={bits},calibration=prompt" for bits in (2, 3, 4)),
)
"""Recipes of the part `layer`."""
SLOW = "trellis"
"""Method that is measured with the kernels only, because its search takes minutes in torch alone."""
LARGE = {"layers": 32, "kv_heads": 8, "head_dim": 128, "parameters": 8e9}
"""Shape of the model in the estimate."""


@contextmanager
def time_of(owner: Any, name: str) -> Iterator[list[float]]:
    """Collect the seconds of each call of a function of a module or class, but of calls within a call."""
    taken: list[float] = []
    run, depth = getattr(owner, name), 0

    def timed(*args: Any, **named: Any) -> Any:
        nonlocal depth
        depth, start = depth + 1, time.perf_counter()
        result = run(*args, **named)
        depth -= 1
        if not depth:
            taken.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    try:
        yield taken
    finally:
        setattr(owner, name, run)


class Prefill(NamedTuple):
    """Seconds of a prefill, of packing in it, and of ranking its tokens (policy `mixed`)."""

    whole: float
    packing: float
    ranking: float

    @property
    def rest(self) -> float:
        """Seconds of the model alone."""
        return self.whole - self.packing - self.ranking


@torch.inference_mode()
def prefill(model: Any, ids: Tensor, recipe: str | None, calibration: Path | None) -> Prefill:
    """Read a prompt and return the times."""
    opened = nullcontext() if recipe is None else tersekv.compress(model, recipe, calibration)
    ranking = [time_of(observe, name) for name in ("importance", "importance_and_spread")]
    with opened, time_of(CompressedLayer, "append") as packing, ranking[0] as ranks, ranking[1] as spreads:
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return Prefill(time.perf_counter() - start, sum(packing), sum(ranks + spreads))


def on_corpus(recipe: str | None) -> bool:
    """Return True if a recipe is fitted on a corpus."""
    return recipe is not None and Recipe.parse(recipe).plan(0, 1).keys.needs_fit == "corpus"


def prefills(options: argparse.Namespace, recipes: list[str]) -> Iterator[dict[str, Any]]:
    """Time prefills in turns. Yield a row per model, dtype, length and recipe."""
    for name_of_model, dtype in itertools.product(options.model or ["smollm2"], options.dtypes):
        model, tokenizer = loading.load(name_of_model, dtype=dtype)
        for tokens in options.tokens:
            ids = prompt(tokenizer, tokens)
            times: dict[str | None, list[Prefill]] = {name: [] for name in (None, *recipes)}
            prefill(model, ids[:, :512], None, None)
            for _ in range(options.rounds):
                for name, own in times.items():
                    own.append(prefill(model, ids, name, options.calibration if on_corpus(name) else None))
            full = [own.whole for own in times[None]]
            for name, own in times.items():
                shares = sorted(each.packing / each.rest for each in own)
                ranking = statistics.median(each.ranking / each.rest for each in own)
                yield {
                    "what": "prefill", "model": name_of_model, "recipe": name or "full", "dtype": dtype,
                    "T": tokens, "rounds": options.rounds,
                    "seconds": round(statistics.median(each.whole for each in own), 4),
                    "packing_seconds": round(statistics.median(each.packing for each in own), 5),
                    "share": round(statistics.median(shares), 4),
                    "share_range": [round(shares[0], 4), round(shares[-1], 4)],
                    "times_full": round(
                        statistics.median(each.whole / base for each, base in zip(own, full, strict=True)), 3
                    ),
                } | ({"ranking_share": round(ranking, 4)} if ranking else {})  # fmt: skip


def drawn(tokens: int, heads: int = 3, head_dim: int = 64) -> tuple[Tensor, Tensor]:
    """Return keys and values [1, H, T, D] with outlier channels, as real keys have."""
    keys, values = torch.randn(2, 1, heads, tokens, head_dim).unbind(0)
    keys[..., ::9] *= 6
    return keys, values


def layer_prefill(tokens: int) -> Callable[[], None]:
    """Return the prefill of one decoder layer over `tokens` tokens."""
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=16, max_position_embeddings=tokens,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    hidden = torch.randn(1, tokens, 576)

    @torch.no_grad()
    def run() -> None:
        model(inputs_embeds=hidden, use_cache=True)

    return run


def packing(recipe: str, keys: Tensor, values: Tensor, backend: str) -> Callable[[], None]:
    """Return a function that fits and encodes keys and values."""
    plan = Recipe.parse(recipe).plan(20, 30)

    def run() -> None:
        with backends.forced(backend):
            for codec, x in ((plan.keys, keys), (plan.values, values)):
                fitted = codec.fit(x) if codec.fits_on else codec
                for start, stop in chunks(0, x.shape[2], fitted.layout(x.shape[-1]).block_tokens, x):
                    fitted.encode(x[:, :, start:stop])

    return run


def layer(tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time fitting and encoding beside one layer's prefill, in turns."""
    keys, values = drawn(tokens)
    runs = {"one layer's prefill": layer_prefill(tokens)}
    for recipe in PACKED:
        runs[recipe] = packing(recipe, keys, values, backends.AUTO)
        if not recipe.startswith(SLOW):
            runs[f"{recipe} (torch alone)"] = packing(recipe, keys, values, "reference")
    times = in_turns(runs, rounds)
    base = next(iter(times.values()))
    for name, taken in times.items():
        ratios = sorted(t / one for t, one in zip(taken, base, strict=True))
        yield {
            "what": name, "T": tokens, "rounds": rounds, "median_ms": round(statistics.median(taken) * 1e3, 1),
            "ratio_to_prefill": round(statistics.median(ratios), 3),
            "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        }  # fmt: skip


def memory(tokens: int, recipe: str, layers: int = 30) -> dict[str, Any]:
    """Return the peak while `layers` layers pack a prompt, without the exact prompt itself.

    Codecs that are fitted on a corpus are shared by the layers.
    """
    rope = standard_rope(64, 100_000.0)
    keys, values = drawn(tokens)
    plan = Recipe.parse(recipe).plan(0, layers)
    if on_corpus(recipe):
        plan = plan._replace(keys=plan.keys.fit(keys), values=plan.values.fit(values))
    warm = LayerStore(plan, keys[:, :, :1], values[:, :, :1], None, rope)
    warm.append(keys[:, :, :512], values[:, :, :512])
    del warm
    stores = []
    with PeakMemory() as peak:
        for layer in range(layers):
            own = plan if on_corpus(recipe) else Recipe.parse(recipe).plan(layer, layers)
            store = LayerStore(own, keys[:, :, :1], values[:, :, :1], None, rope)
            store.append(keys, values)
            malloc_trim()
            stores.append(store)
    held = sum(store.footprint().total_bytes for store in stores)
    return {
        "what": "memory", "recipe": recipe, "T": tokens, "layers": layers, "held_mb": round(held / 1e6, 2),
        "peak_mb": round(peak.peak_bytes / 1e6, 2), "peak_over_held": round(peak.peak_bytes / held, 3),
    }  # fmt: skip


def fitted(recipe: str, keys: Tensor, values: Tensor) -> list[tuple[Any, Tensor]]:
    """Return the codecs of both sides, fitted, with their tensors."""
    plan = Recipe.parse(recipe).plan(0, 30)
    return [(codec.fit(x) if codec.needs_fit else codec, x) for codec, x in ((plan.keys, keys), (plan.values, values))]


def block(recipe: str) -> dict[str, Any]:
    """Time a block of 32 tokens of both sides of one layer, with fitted codecs."""
    sides = fitted(recipe, *drawn(2048))

    def run() -> None:
        for codec, x in sides:
            codec.encode(x[:, :, :BLOCK])

    return {
        "what": "block",
        "recipe": recipe,
        "ms": round(median_of(in_turns({"block": run}, BLOCKS)["block"]) * 1e3, 3),
    }


def vectors(head_dim: int, recipe: str = "default") -> dict[str, Any]:
    """Time the encoding of vectors with a fitted codec on one thread."""
    sides = fitted(recipe, *drawn(4096, 3, head_dim))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = median_of(in_turns({"all": lambda: [codec.encode(x) for codec, x in sides]}, 5)["all"])
    torch.set_num_threads(threads)
    each = taken / sum(x.numel() // head_dim for _, x in sides)
    return {"what": "vectors", "recipe": recipe, "head_dim": head_dim, "us_per_vector": round(each * 1e6, 2)}


def estimate(us_per_vector: float, small: dict[str, Any], parameters: float = 134.5e6) -> dict[str, Any]:
    """Estimate packing's share in a prefill of a model of the shape `LARGE`.

    A token of it costs `parameters` times as many operations as one of the small model, at the same
    rate. Attention is not counted, which makes the share larger. All work is taken to use all cores.

    small: row of the small model's prefill with transformers' own cache.
    """
    per_token = small["seconds"] * torch.get_num_threads() / small["T"] * LARGE["parameters"] / parameters
    packing = 2 * LARGE["layers"] * LARGE["kv_heads"] * us_per_vector * 1e-6
    return {
        "what": "estimate",
        **LARGE,
        "us_per_token": round(packing * 1e6, 1),
        "share": round(packing / per_token, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run all parts; print each row, and append it to a file."""
    parser = recorded.parser(__doc__)
    recorded.add_models(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", default=[*PRESETS, *METHODS])
    parser.add_argument("--calibration", type=Path, help="output of `tersekv calibrate --recipe trellis`")
    parser.add_argument("--parts", nargs="+", default=["prefill", "memory", "block", "vectors"])
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    full: dict[str, Any] | None = None

    def write(row: dict[str, Any]) -> None:
        print(row, flush=True)
        record(options.out, {"bench": "prefill"}, [row])

    if "prefill" in options.parts:
        for row in prefills(options, options.recipes):
            write(row)
            full = row if row["recipe"] == "full" and full is None else full
    alone = [recipe for recipe in options.recipes if not Recipe.parse(recipe).plan(0, 1).policy.observes]
    if "layer" in options.parts:
        for tokens in options.tokens:
            for row in layer(tokens, options.rounds):
                write(row)
    if "memory" in options.parts:
        for tokens in options.tokens:
            for recipe in alone:  # the others need a model's queries
                write(memory(tokens, recipe))
    if "block" in options.parts:
        for recipe in alone:
            write(block(recipe))
    if "vectors" in options.parts:
        for head_dim in (64, 128):
            row = vectors(head_dim)
            write(row)
        if full is not None:
            write(estimate(row["us_per_vector"], full))


if __name__ == "__main__":
    main()
