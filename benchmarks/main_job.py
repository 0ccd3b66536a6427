"""Agreement, size and decoding speed of a packed cache, compared with the full one.

For each of `--prompts` places in Python's language reference the context has `--tokens` tokens.
Then `--new-tokens` tokens are decoded greedily with transformers' own cache (float32, default SDPA)
and with the recipe. Decoding speed is measured at `--speed-tokens` tokens, both caches in turns in
the same run. Prints a table; appends JSON lines to --out.

    python benchmarks/main_job.py --out benchmarks/records/main_job.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import tersekv
from recorded import add_models
from tersekv.calibration.text import pydoc_text
from tersekv.cli import measure, output
from tersekv.cli.installation import cpu_features
from tersekv.kernels import cpu
from tersekv.lab.bench.generate import prompt
from tersekv.models import loading


def main() -> None:
    """Run both parts with each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--recipe", default="kivi:bits=4")
    parser.add_argument("--prompts", type=int, default=10, help="0 skips the first part")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--speed-tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5, help="0 skips the second part")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = [part for part, runs in ((agreement, args.prompts), (speed, args.rounds)) if runs]
    for name in args.model or ["smollm2"]:
        model, tokenizer = loading.load(name, report=output.report)
        measure.warm_up(model)
        for record in (part(args, model, tokenizer) for part in parts):
            record |= environment(args, name)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


def environment(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the settings, versions and machine of the run."""
    return {
        "model": model,
        "recipe": args.recipe,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "isa": cpu.isa() if cpu.why_not_built() is None else None,
        "cpu": cpu_features()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tersekv": tersekv.__version__,
    }


def agreement(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Measure the common prefix of greedy continuations of prompts from the whole corpus, and the
    cache's size."""
    sampling = measure.Sampling(args.new_tokens, min_tokens=args.new_tokens)
    common, packed = [], None
    for i in range(args.prompts):
        ids = prompt(tokenizer, args.tokens, i * len(pydoc_text()) // args.prompts)
        full, packed = (measure.generate(model, tokenizer, ids, r, sampling) for r in (None, args.recipe))
        common.append(measure.agreement(full, packed))
        output.report(f"prompt {i + 1} of {args.prompts}: the first {common[-1]} of {args.new_tokens} tokens agree")
    assert packed is not None
    held = packed.footprint
    share = 1 / held.ratio(16)
    Console().print(
        f"{args.recipe} at {args.tokens:,} + {args.new_tokens} tokens: {share:.3f} of bfloat16's bytes, "
        f"{held.bits_per_element:.2f} bits per element; at least 16 tokens agree on "
        f"{sum(c >= 16 for c in common)} of {args.prompts} prompts, median {statistics.median(common)}"
    )
    return {
        "what": "agreement",
        "context_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "common_prefix": common,
        "at_least_16": sum(c >= 16 for c in common),
        "bytes": held.total_bytes,
        "bytes_by_part": held.parts,
        "bits_per_element": held.bits_per_element,
        "share_of_bf16": share,
    }


def speed(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Measure decoding tokens/s at a long context, the two caches in turns.

    The ratio is the median of the rounds' ratios.
    """
    sampling = measure.Sampling(args.new_tokens, min_tokens=args.new_tokens)
    ids = prompt(tokenizer, args.speed_tokens)
    rates: dict[str, list[float]] = {"full": [], args.recipe: []}
    prefill: dict[str, list[float]] = {"full": [], args.recipe: []}
    for i in range(args.rounds):
        for recipe in (None, args.recipe):
            outcome = measure.generate(model, tokenizer, ids, recipe, sampling)
            rates[recipe or "full"].append(outcome.decode_tokens_per_second)
            prefill[recipe or "full"].append(outcome.prefill_seconds)
        output.report(f"round {i + 1} of {args.rounds}: " + ", ".join(f"{k} {v[-1]:.2f}/s" for k, v in rates.items()))
    ratios = [packed / full for full, packed in zip(rates["full"], rates[args.recipe], strict=True)]
    full, packed = (statistics.median(rates[k]) for k in ("full", args.recipe))
    Console().print(
        f"decode at {args.speed_tokens:,} tokens: {packed:.2f} tokens/s packed, {full:.2f} full, "
        f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f} over {args.rounds} rounds)"
    )
    return {
        "what": "decode speed",
        "context_tokens": args.speed_tokens,
        "new_tokens": args.new_tokens,
        "full_tokens_per_second": rates["full"],
        "packed_tokens_per_second": rates[args.recipe],
        "full_prefill_seconds": prefill["full"],
        "packed_prefill_seconds": prefill[args.recipe],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
