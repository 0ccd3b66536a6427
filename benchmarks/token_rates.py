"""Rates per token, simulated: each token of a prompt is coded with bits by its importance.

    python benchmarks/token_rates.py --out file.jsonl --text wikitext=test.txt --text code=code.txt  # run or continue.
    python benchmarks/token_rates.py --out file.jsonl --text … --settings shares           # two rates, fixed shares.
    python benchmarks/token_rates.py --out file.jsonl --text … --settings rankings         # ways to rank tokens.
    python benchmarks/token_rates.py --out file.jsonl --text … --settings layers --spread FOLDER  # rates by layer.
    python benchmarks/token_rates.py --records file.jsonl                                  # print the tables.

`trellis` is fitted on the prompt and encodes all its tokens at every rate. Then each token takes the
rate that minimises Σ importance·error at a mean rate, per KV head. Attention reads the decoded
tokens. Positions and rate maps are not counted, so the bits are those of the codes alone.

Divergence: 2,048 tokens are packed, the next 256 are read at once. Passkey: the text is packed before
the question is read, and the answer's negative log-likelihood per token is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import recorded
from recorded import add_options, markdown, record, run_or_print
from simulated_rates import EXACT, RATES, Maps, Prompt, Simulation, copied, fixed, water_filled
from tersekv.cache.segments import STEPS
from tersekv.calibration.calibration import SCORES, Calibration
from tersekv.lab.evals import runs
from tersekv.lab.evals.tasks.passkey import build
from tersekv.lab.evals.windows import read_text
from tersekv.sizes.rate_allotment import Option, least_loss

MEANS = (1.5, 2, 2.5)
PREFIX, CONTEXT = 2048, 2304
FLOORS = {"seen": 1.0, "moved": 1.0, "both": 1.0, "reread": 0.1, "future": 0.03}
"""Share of the mean importance that every token gets in addition. Chosen on two windows of wikitext."""
SHARES = (((4, 1 / 4), (2, 1)), ((4, 1 / 8), (2.5, 1 / 2), (2, 1)))
"""Fixed shares of each head's tokens: rate and share, the most important first. The last takes the rest."""
LOW_SHARES = (
    ((4, 0.25), (2, 1)),
    ((3, 0.25), (2, 1)),
    ((4, 0.15), (1.5, 1)),
    ((3, 0.25), (1.5, 1)),
    ((2.5, 0.25), (1, 1)),
    ((3, 0.17), (1, 1)),
)
"""Fixed shares for `--settings shares`."""
RANKINGS = "seen", "moved", "centres", "gaussian", "reread", "future"
"""Importances that `--settings rankings` compares."""
ALL_RATES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6)
"""Rates for `--settings layers`."""
FOUND = 16
"""Tokens of unusual norm per head that stay exact."""
PASSKEYS, REPETITIONS = 6, 75


def settings(prompt: Prompt, importances: dict[str, Maps]) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield importance, mean rate, rates per token and whether the bias is corrected."""
    yield from equal(prompt, importances, RATES, (2, 3))
    for name, weights in importances.items():
        if name not in FLOORS:
            continue
        for mean in MEANS:
            maps = water_filled(weights, prompt, mean, FLOORS[name])
            yield name, mean, maps, True
        if name in ("both", "future"):
            for shares in SHARES:
                maps = fixed(weights, prompt, shares)
                mean = statistics.fmean(float(x.mean()) for x in maps)
                label = f"{name}, fixed shares of {'/'.join(f'{rate:g}' for rate, _ in shares)} bits"
                yield label, round(mean, 2), maps, True
                yield f"{label}, bias not corrected", round(mean, 2), maps, False


def equal(
    prompt: Prompt, importances: dict[str, Maps], rates: Sequence[float], found: Sequence[float]
) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield settings with equal rates, and the same with tokens of unusual norm kept exact."""
    heads = importances["seen"][0].shape[0]
    for rate in rates:
        yield "equal rates", rate, [torch.full((heads, prompt.packed), float(rate))] * len(prompt.layers), False
    for rate in found:
        maps = [torch.full((heads, prompt.packed), float(rate))] * len(prompt.layers)
        yield f"equal rates, {FOUND} tokens of unusual norm exact", rate, kept_exact(maps, prompt, importances), False


def kept_exact(maps: Maps, prompt: Prompt, importances: dict[str, Maps]) -> Maps:
    """Return the rates with `FOUND` tokens of unusual norm per head exact."""
    found = []
    for rates, weights in zip(maps, importances["norm"], strict=True):
        few = weights[:, prompt.sinks : prompt.sinks + prompt.packed].topk(FOUND, dim=-1).indices
        found.append(rates.clone().scatter_(-1, few, EXACT))
    return found


def shares(prompt: Prompt, importances: dict[str, Maps]) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield the same as `settings` for fixed shares of two rates."""
    yield from equal(prompt, importances, (1.5, 2, 2.5, 3), (1.5, 2, 2.5, 3))
    for parts in LOW_SHARES:
        label = f"{parts[0][1]:.0%} with {parts[0][0]:g} bits, others {parts[1][0]:g}"
        for name in ("moved", "reread"):
            maps = fixed(importances[name], prompt, parts)
            mean = round(statistics.fmean(float(x.mean()) for x in maps), 2)
            if name == "moved":
                yield f"{name}: {label}, bias not corrected", mean, maps, False
            yield f"{name}: {label}", mean, maps, True
            yield f"{name}: {label}; {FOUND} exact", mean, kept_exact(maps, prompt, importances), True


def layers(prompt: Prompt, importances: dict[str, Maps], spread: Path) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield two rates: the same in all layers, by layer, and by layer and head.

    spread: folder of measurements, see `tersekv calibrate`.
    """
    sizes = {rate: rate for rate in ALL_RATES}
    for name, file in (("moved", "mixed"), ("reread", "mixed-reread")):
        received = Calibration.load(spread / f"{file}.safetensors").tensors[SCORES].double()
        heads = received.shape[1]
        for parts in (LOW_SHARES[3], LOW_SHARES[4]):
            (high, share), (rest, _) = parts
            mean = round(share * high + (1 - share) * rest, 2)
            yield (
                f"{name}: {share:.0%} with {high:g} bits, others {rest:g}",
                mean,
                fixed(importances[name], prompt, parts),
                True,
            )
            of_layers = [one for one in least_loss(received.sum(1), sizes, mean) for _ in range(heads)]
            for label, options in (
                ("layer", of_layers),
                ("layer and head", least_loss(received.flatten(0, 1), sizes, mean)),
            ):
                yield f"{name}: rates by {label}", mean, with_options(importances[name], prompt, options), True


def rankings(prompt: Prompt, importances: dict[str, Maps]) -> Iterator[tuple[str, float, Maps, bool]]:
    """Yield fixed shares of two rates with tokens ranked by each importance, and at random."""
    names = {name: importances[name] for name in RANKINGS}
    chance = torch.Generator().manual_seed(0)
    names["random"] = [torch.rand(x.shape, generator=chance) for x in importances["seen"]]
    for parts in (LOW_SHARES[3], LOW_SHARES[4]):
        label = f"{parts[0][1]:.0%} with {parts[0][0]:g} bits, others {parts[1][0]:g}"
        for name, weights in names.items():
            maps = fixed(weights, prompt, parts)
            yield f"{name}: {label}", round(statistics.fmean(float(x.mean()) for x in maps), 2), maps, True


def with_options(importance: Maps, prompt: Prompt, options: Sequence[Option]) -> Maps:
    """Return the rates [H, packed] with two rates and a share for each head of each layer."""
    found, left = [], iter(options)
    for weights in importance:
        own = weights[:, prompt.sinks : prompt.sinks + prompt.packed]
        rank = own.argsort(-1, descending=True).argsort(-1)
        of_heads = [next(left) for _ in own]
        most = torch.tensor([[round(one.steps / STEPS * prompt.packed)] for one in of_heads])
        rates = torch.tensor([[one.bits, one.rest] for one in of_heads], dtype=torch.float32)
        found.append(torch.where(rank < most, rates[:, :1], rates[:, 1:]))
    return found


SETTINGS = {"rates": settings, "shares": shares, "layers": layers, "rankings": rankings}
PACKED = {"layers": ALL_RATES, "rankings": (1, 1.5, 2.5, 3)}
"""Rates at which prompts are packed, if they are not `RATES`."""


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


def measured(
    simulation: Simulation, text: str, first: Tensor, rest: Tensor, which: str, spread: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the results of all settings on one sample. which: a name in `SETTINGS`."""
    full, importances = simulation.importances(first, rest)
    prompt = simulation.pack(first, full)
    reference = simulation.forward(rest, copied(full))
    pairs = set(zip(first[0].tolist(), first[0, 1:].tolist(), strict=False))
    copies = torch.tensor([pair in pairs for pair in zip(rest[0].tolist(), rest[0, 1:].tolist(), strict=False)])
    for name, mean, maps, corrects in SETTINGS[which](prompt, importances, *([spread] if which == "layers" else [])):
        got = simulation.read(prompt, maps, rest, corrects)
        line = {"importance": name, "bits": mean, "mean_bits": sum(float(m.mean()) for m in maps) / len(maps)}
        if text.startswith("passkey"):
            line |= answered(simulation, rest, got, reference)
        else:
            kl = (reference.exp() * (reference - got)).sum(-1)
            line |= {"kl": float(kl.mean()), "p99": float(kl.quantile(0.99))}
            line |= {"copies": float(copies.float().mean())}
            for label, at in (("kl_copies", copies), ("kl_others", ~copies)):
                line[label] = float(kl[:-1][at].mean()) if bool(at.any()) else None
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
    simulation, held = Simulation(args.model, PACKED.get(args.settings, RATES)), set()
    if args.out.is_file():
        lines = runs.read(args.out)
        held = {(x["text"], x["sample"]) for x in lines if x["model"] == args.model}
    for option in [*args.text, "passkey="]:
        text, _, path = option.partition("=")
        samples = windows(simulation, path, args.windows) if path else passkeys(simulation)
        text += "" if args.settings == "rates" else f", {args.settings}"
        for sample, first, rest in samples:
            if (text, sample) in held:
                continue
            with torch.no_grad():
                lines = [
                    {"text": text, "sample": sample} | line
                    for line in measured(simulation, text, first, rest, args.settings, args.spread)
                ]
            record(args.out, {"model": args.model}, lines)
            print(f"{text} {sample}: done", flush=True)


def mean(name: str, lines: list[dict[str, Any]]) -> float:
    """Return the mean of a metric over the lines that have it."""
    return statistics.fmean(line[name] for line in lines if line[name] is not None)


def grouped(lines: list[dict[str, Any]], passkeys: bool) -> dict[tuple[str, str, float], list[dict[str, Any]]]:
    """Return the lines of passkeys, or of texts, by text, importance and mean rate."""
    groups = defaultdict(list)
    for line in lines:
        if line["text"].startswith("passkey") == passkeys and not line["importance"].startswith("future, "):
            groups[line["text"], line["importance"], line["bits"]].append(line)
    return groups


def table_of_texts(lines: list[dict[str, Any]]) -> str:
    """Return the table of divergences: a row per text, importance and mean rate."""
    rows = []
    for (text, name, bits), found in grouped(lines, False).items():
        numbers = [f"{mean(metric, found):.4f}" for metric in ("kl", "kl_copies", "kl_others")]
        numbers.append(f"{max(line['kl'] for line in found):.4f}")
        rows.append([text, name, f"{bits:g}", len(found), *numbers])
    return markdown(
        ("text", "importance", "mean bits", "windows", "KL, mean", "copies", "other tokens", "worst window"), rows
    )


def table_of_passkeys(lines: list[dict[str, Any]]) -> str:
    """Return the table of passkeys: a row per setting, importance and mean rate."""
    rows, groups = [], grouped(lines, True)
    for (text, name, bits), found in groups.items():
        if text not in {row[0] for row in rows}:
            right = sum(x["full_nll_right"] for x in found)
            rows.append([text, "full cache", "", f"{mean('full_nll', found):.2f}", f"{right:.0f} of {len(found)}"])
        right = sum(x["nll_right"] for x in found)
        rows.append([text, name, f"{bits:g}", f"{mean('nll', found):.2f}", f"{right:.0f} of {len(found)}"])
    return markdown(("text", "importance", "mean bits", "NLL of the answer", "answered"), rows)


def tables(lines: list[dict[str, Any]]) -> list[str]:
    """Return the tables of one model."""
    return [table_of_texts(lines), table_of_passkeys(lines)]


def main() -> None:
    """Parse the options; run, or print the tables."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, a text; repeat")
    parser.add_argument("--windows", type=int, default=4, help="windows of each text")
    parser.add_argument("--settings", choices=list(SETTINGS), default="rates", help="settings that are measured")
    parser.add_argument("--spread", type=Path, help="folder of measurements of `tersekv calibrate`, for layers")
    add_options(parser)
    args = parser.parse_args()
    run_or_print(args, run, tables)


if __name__ == "__main__":
    main()
