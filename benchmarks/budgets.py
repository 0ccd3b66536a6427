"""Language modelling at equal bytes: eviction, two rates before eviction, and codes for all tokens.

    python benchmarks/budgets.py --out FILE.jsonl --text wikitext=test.txt --text code=code.txt  # run or continue.
    python benchmarks/budgets.py --records FILE.jsonl                                 # print the tables.

A budget is a share of the bytes of the context in bfloat16. Every recipe has one open number: tokens
that are kept, exact latest tokens, or a share of tokens. It is as large as the predicted footprint
allows. Codes, scales, tables, exact tokens, positions and scores count; spare room of buffers does
not. A recipe has no row if it is too large even with its least number. A recipe that evicts has no row
if every token fits.

The context is read at once and packed. The next tokens are read a chunk at a time, and their distributions are
compared with those of the full cache. All recipes share one prefill of a window.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import recorded
from recorded import add_options, markdown, record, run_or_print
from tersekv.attention.observe import observe
from tersekv.cache.footprint import Footprint
from tersekv.calibration.capture import capture_prompt
from tersekv.hf.compress import compress
from tersekv.hf.facts import load_shape
from tersekv.hf.prefill import held_by, new_cache
from tersekv.lab.evals import runs
from tersekv.lab.evals.tasks.divergence import compare
from tersekv.lab.evals.tasks.perplexity import mean_nll
from tersekv.lab.evals.windows import read_text
from tersekv.models.loading import load
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict

BUDGETS = ("1/4", "1/8", "1/16", "1/32")
RECENT = {"1/4": 128, "1/8": 64, "1/16": 32, "1/32": 16}
"""Exact latest tokens of recipes with a codec."""
SMALLEST = 40
"""Fewest tokens that a policy is measured with."""
BLOCK = 32
"""Tokens that are packed together."""
TRELLIS, BITS = "trellis:bits={bits},calibration=prompt", (4, 3.5, 3, 2.5, 2, 1.5, 1)


@dataclass(frozen=True)
class Row:
    """A row of the tables.

    recipes: with one open number, the first that fits is used. {n} is a number of tokens, {half} half of it,
        {share} its share of the context, and {recent} the exact latest tokens of the budget.
    low: least value of the open number.
    """

    label: str
    recipes: tuple[str, ...]
    low: int = SMALLEST

    @property
    def evicts(self) -> bool:
        """True if the number is that of the tokens that are kept."""
        return self.recipes[0].partition(":")[0] not in ("window", "mixed")


def _trellis(policy: str, bits: float) -> str:
    return f"{policy}+{TRELLIS.format(bits=f'{bits:g}')}"


ROWS = (
    Row("StreamingLLM", ("streaming:budget={n}+exact",)),
    Row("H2O", ("h2o:budget={n}+exact",)),
    Row("SnapKV", ("snapkv:budget={n}+exact",)),
    Row("SubGen", ("subgen:budget={n},recent={half}+exact",)),
    Row("StreamingLLM, TurboQuant 4 and 2 bits", ("streaming:budget={n},recent={recent},rest=2+turboquant:bits=4",)),
    Row("StreamingLLM, trellis 4 and 2 bits", (_trellis("streaming:budget={n},recent={recent},rest=2", 4),)),
    Row("StreamingLLM, trellis 2 and 1 bits", (_trellis("streaming:budget={n},recent={recent},rest=1", 2),)),
    Row("H2O, TurboQuant 4 and 2 bits", ("h2o:budget={n},recent={recent},rest=2,evict=block+turboquant:bits=4",)),
    Row("H2O, trellis 4 and 2 bits", (_trellis("h2o:budget={n},recent={recent},rest=2", 4),)),
    Row("H2O, trellis 2 and 1 bits", (_trellis("h2o:budget={n},recent={recent},rest=1", 2),)),
    Row("SnapKV, trellis 4 and 2 bits", (_trellis("snapkv:budget={n},recent={recent},rest=2", 4),)),
    Row("SnapKV, trellis 2 and 1 bits", (_trellis("snapkv:budget={n},recent={recent},rest=1", 2),)),
    Row("SubGen, TurboQuant 4 bits", ("subgen:budget={n},recent={recent}+turboquant:bits=4",)),
    Row(
        "mixed",
        tuple(
            _trellis(f"mixed:budget={{share}},recent={{recent}},rest={rest},bias_correction=full", bits)
            for bits, rest in ((4, 2), (3, 1.5), (2.5, 1), (2, 1))
        ),
    ),
    Row("trellis, all tokens", tuple(_trellis("window:recent={n}", bits) for bits in BITS), 32),
    Row("KIVI, all tokens", ("window:recent={n}+kivi:bits=2",), 32),
    Row("TurboQuant, all tokens", tuple(f"window:recent={{n}}+turboquant:bits={bits}" for bits in (3, 2, 1)), 32),
)

OVERVIEW = (
    "StreamingLLM",
    "H2O",
    "SnapKV",
    "SubGen",
    "StreamingLLM, TurboQuant 4 and 2 bits",
    "StreamingLLM, trellis 4 and 2 bits",
    "H2O, TurboQuant 4 and 2 bits",
    "H2O, trellis 4 and 2 bits",
    "SubGen, TurboQuant 4 bits",
    "mixed",
    "trellis, all tokens",
    "TurboQuant, all tokens",
)
"""Rows of the short tables."""


def filled_in(template: str, n: int, tokens: int, recent: int) -> str:
    """Return the recipe with its open number."""
    share = f"{n / tokens:.4f}"
    return template.format(n=n, half=n // 2, share=share, recent=recent)


def used(held: Footprint) -> int:
    """Return the bytes without the spare room of buffers."""
    return held.total_bytes - held.parts.get("slack", 0)


def fitted(row: Row, shape: CacheShape, tokens: int, budget: str) -> tuple[str, int] | None:
    """Return the row's recipe for a budget with the largest number that fits, and its predicted bytes.

    None if nothing fits, or if a policy that evicts would keep every token. Bytes do not grow monotonically
    with the number, because an incomplete block stays exact. So the next numbers are tried, too.
    """
    room = math.floor(Fraction(budget) * 2 * shape.elements(tokens))

    def size(template: str, n: int) -> int:
        return used(predict(shape, filled_in(template, n, tokens, RECENT[budget]), tokens))

    for template in row.recipes:
        low, high = row.low, tokens - 1
        if size(template, low) > room:
            continue
        if row.evicts and size(template, high) <= room:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(template, middle) <= room else (low, middle)
        low = max(n for n in range(low, min(low + 2 * BLOCK, tokens)) if n == low or size(template, n) <= room)
        return filled_in(template, low, tokens, RECENT[budget]), size(template, low)
    return None


class Window:
    """A context and the tokens that follow it, read once with the full cache."""

    def __init__(self, model: Any, ids: Tensor, prefix: int, chunk: int) -> None:
        self.model, self.chunk, self.rest = model, chunk, ids[:, prefix:]
        self._captured, _ = capture_prompt(model, ids[:, :prefix], True)
        self._votes: dict[tuple[int, int], Any] = {}
        cache = new_cache(model, None)
        for layer, ((keys, values), _) in zip(cache.layers, self._captured, strict=True):
            layer.update(keys, values)
        self.full = self._read(cache)

    def _read(self, cache: Any) -> Tensor:
        parts = self.rest.split(self.chunk, dim=1)
        return torch.cat([self.model(input_ids=part, past_key_values=cache).logits[0] for part in parts])

    def _fill(self, cache: Any) -> None:
        """Fill the cache as `tersekv.hf.prefill` does. Votes are kept for other recipes, because every policy
        that observes as many queries gets the same ones."""
        for index, (layer, ((keys, values), call)) in enumerate(zip(cache.layers, self._captured, strict=True)):
            layer.lazy_initialization(keys, values)
            if layer.store.by_head and not layer.store.estimates:
                at = index, layer.store.observed(keys.shape[2])
                if at not in self._votes:
                    self._votes[at] = observe(layer.store, keys, values, call)
                seen = self._votes[at]
            else:
                seen = observe(layer.store, keys, values, call)
            layer.append(keys, values, None, seen)

    def measure(self, recipe: str) -> dict[str, Any]:
        """Return the metrics of one recipe, and the bytes that its cache holds."""
        torch.manual_seed(0)
        with compress(self.model, recipe):
            cache = new_cache(self.model, recipe)
            self._fill(cache)
            held = held_by(cache)
            logits = self._read(cache)
        kl, agree = compare(self.full, logits)
        line = {"kl": kl.mean().item(), "kl_p99": kl.quantile(0.99).item(), "top1": agree.mean().item()}
        line |= {"kl_quarters": [part.mean().item() for part in kl.tensor_split(4)]}
        line |= {"nll": mean_nll(logits, self.rest[0]), "full_nll": mean_nll(self.full, self.rest[0])}
        return line | sizes("context", held) | sizes("end", held_by(cache))


def sizes(when: str, held: Footprint) -> dict[str, Any]:
    """Return the bytes at one moment without spare room, and by part with it."""
    return {f"bytes_{when}": used(held), f"parts_{when}": {k: v for k, v in held.parts.items() if v}}


def windows(tokenizer: Any, path: str, tokens: int, count: int) -> Iterator[Tensor]:
    """Yield windows [1, tokens] of a text, evenly spaced so that they come from different parts of it."""
    ids = torch.tensor([tokenizer(read_text(path), verbose=False)["input_ids"]])
    there = ids.shape[1] // tokens
    for i in range(min(count, there)):
        start = (2 * i + 1) * there // (2 * count) * tokens
        yield ids[:, start : start + tokens]


def run(args: argparse.Namespace) -> None:
    """Measure every cell that the file does not have yet, window by window over all texts."""
    model, tokenizer = load(args.model)
    shape = load_shape(args.model, with_weights=False)[0]
    cells = [
        (budget, row, found)
        for budget in args.budgets
        for row in ROWS
        if not args.rows or row.label in args.rows
        if (found := fitted(row, shape, args.prefix, budget))
    ]
    about = {"model": args.model, "prefix": args.prefix, "scored": args.scored, "chunk": args.chunk, "seed": 0}
    about["bytes_full"] = 2 * shape.elements(args.prefix)
    held: set[tuple[str, ...]] = set()
    if args.out.is_file():
        lines = [x for x in runs.read(args.out) if x["model"] == args.model]
        held = {(x["text"], x["window"], x["budget"], x["recipe"]) for x in lines}
    named = dict(option.split("=", 1) for option in args.text)
    texts = {
        name: list(windows(tokenizer, path, args.prefix + args.scored, args.windows)) for name, path in named.items()
    }
    for i in range(args.windows):
        for text, ids in texts.items():
            if i >= len(ids):
                continue
            missing = [cell for cell in cells if (text, str(i), cell[0], cell[2][0]) not in held]
            if not missing:
                continue
            with torch.no_grad():
                window = Window(model, ids[i], args.prefix, args.chunk)
                for budget, row, (recipe, predicted) in missing:
                    line = {"text": text, "window": str(i), "budget": budget, "row": row.label, "recipe": recipe}
                    line |= {"predicted_bytes": predicted} | window.measure(recipe)
                    record(args.out, about, [line])
                    print(text, i, budget, recipe, f"{line['kl']:.4f}", flush=True)


def ratio(lines: list[dict[str, Any]]) -> float:
    """Return the perplexity over all windows, divided by the full cache's."""
    return math.exp(statistics.fmean(line["nll"] - line["full_nll"] for line in lines))


def cells(lines: list[dict[str, Any]], text: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the records of a text by row and budget. Rows that lack a window of the text are left out."""
    found, wanted = defaultdict(list), {line["window"] for line in lines if line["text"] == text}
    for line in lines:
        if line["text"] == text:
            found[line["row"], line["budget"]].append(line)
    return {at: group for at, group in found.items() if {line["window"] for line in group} == wanted}


def grown(lines: list[dict[str, Any]]) -> bool:
    """True if a cache ends with more than its budget for the context and the tokens that followed."""
    return any(
        x["bytes_end"] * x["prefix"] > x["bytes_full"] * Fraction(x["budget"]) * (x["prefix"] + x["scored"])
        for x in lines
    )


def overview(lines: list[dict[str, Any]]) -> str:
    """Return a table with a row per text and recipe and a column per budget: divergence, and ratio of perplexities.

    A star marks caches that have `grown`.
    """

    def cell(group: list[dict[str, Any]] | None) -> str:
        if not group:
            return "–"
        star = "\\*" if grown(group) else ""
        return f"{statistics.fmean(x['kl'] for x in group):.4f} ({ratio(group):.3f}){star}"

    rows = []
    for text in dict.fromkeys(line["text"] for line in lines):
        found = cells(lines, text)
        rows += [[text, label, *(cell(found.get((label, budget))) for budget in BUDGETS)] for label in OVERVIEW]
    return markdown(("text", "recipe", *BUDGETS), rows)


def details(lines: list[dict[str, Any]]) -> str:
    """Return a table with a row per text, budget and recipe."""
    rows = []
    for text in dict.fromkeys(line["text"] for line in lines):
        found = cells(lines, text)
        for budget, row in itertools.product(BUDGETS, ROWS):
            if group := found.get((row.label, budget)):
                kl, far = (statistics.fmean(x[name] for x in group) for name in ("kl", "kl_p99"))
                held = [statistics.fmean(x[f"bytes_{when}"] for x in group) / 1e6 for when in ("context", "end")]
                recipe = group[0]["recipe"].replace(",calibration=prompt", "")
                size = " → ".join(f"{x:.2f}" for x in held)
                rows.append([text, budget, f"`{recipe}`", size, f"{kl:.4f}", f"{far:.3f}", f"{ratio(group):.3f}"])
    columns = ("text", "budget", "recipe", "MB, context → end", "KL, mean", "99th percentile", "perplexity")
    return markdown(columns, rows)


def tables(lines: list[dict[str, Any]]) -> list[str]:
    """Return the tables of one model."""
    return [overview(lines), details(lines)]


def main(given: list[str] | None = None) -> None:
    """Parse the options; run, or print the tables."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, a text; repeat")
    parser.add_argument("--windows", type=int, default=3, help="windows of each text")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the context")
    parser.add_argument("--scored", type=int, default=256, help="tokens that follow and are scored")
    parser.add_argument("--chunk", type=int, default=64, help="of these, tokens per call")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), choices=BUDGETS, help="shares of bfloat16")
    parser.add_argument("--rows", nargs="+", choices=[row.label for row in ROWS], help="labels; all by default")
    add_options(parser)
    args = parser.parse_args(given)
    run_or_print(args, run, tables)


if __name__ == "__main__":
    main()
