"""Calibration of `trellis` on different texts: the divergence that each gives on others.

    python benchmarks/calibration_texts.py --out folder --text wikitext=test.txt --text c4=c4.txt \\
        --corpus "wikitext (train)=train.txt"                    # run, or continue a stopped run.
    python benchmarks/calibration_texts.py --out folder --record   # keep the results as records.
    python benchmarks/calibration_texts.py --into docs/methods/trellis-measured.md  # write the table from them.

The model's own text, Python's documentation (pydoc) and random tokens are always among the sources.
So is the prompt itself, without calibration. Divergence is measured as for the README.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.find import place
from tersekv.calibration.own_text import NAME as OWN
from tersekv.calibration.own_text import own_text
from tersekv.calibration.text import pydoc_text
from tersekv.errors import UserError
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.options import build
from tersekv.lab.evals.records import Records
from tersekv.models.loading import load
from tersekv.recipe import Recipe

PROMPT, RANDOM, PYDOC = "the prompt", "random tokens", "pydoc"
RECORDS = Path(__file__).parent / "records" / "calibration_texts.jsonl"
BEGIN, END = "<!-- texts: made by benchmarks/calibration_texts.py -->", "<!-- end of texts -->"
CONTEXT = {"mode": "cache", "context": "2304", "prefix": "2048", "chunk": "64"}


def corpora(
    model: Any, tokenizer: Any, files: dict[str, Path], shape: tuple[int, int]
) -> dict[str, Callable[[], Corpus]]:
    """Return the texts to calibrate on by name, as functions that draw samples of `shape`."""

    def drawn(name: str, read: Callable[[], str]) -> Corpus:
        return Corpus.draw(name, read(), tokenizer(read(), verbose=False)["input_ids"], *shape, seed=0)

    def made(name: str, ids: Tensor) -> Corpus:
        return Corpus(name, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), ids, 0)

    chance = torch.Generator().manual_seed(0)
    return {
        PYDOC: partial(drawn, PYDOC, pydoc_text),
        **{name: partial(drawn, name, partial(path.read_text, encoding="utf-8")) for name, path in files.items()},
        RANDOM: lambda: made(RANDOM, torch.randint(model.config.vocab_size, shape, generator=chance)),
        OWN: lambda: made(OWN, own_text(model, *shape)),
    }


def run(args: argparse.Namespace, bits: list[float], texts: dict[str, Path]) -> list[dict[str, Any]]:
    """Calibrate, evaluate and return results; whatever the folder has is kept."""
    model, tokenizer = load(args.model)
    shape = args.samples, args.length
    recipes = [f"trellis:bits={b:g}" for b in bits]
    folders: dict[str, Path | None] = {PROMPT: None}
    made = args.out / f"{args.samples}x{args.length}"
    for name, corpus in corpora(model, tokenizer, dict(pairs(args.corpus)), shape).items():
        folders[name] = folder = made / hashlib.sha256(name.encode()).hexdigest()[:8]
        path = place(folder, Recipe.parse(recipes[0]))
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            calibrator = Calibrator(model, [Recipe.parse(recipes[0])], corpus(), work=made / "work")
            calibrator.run()[0].save(path)
            calibrator.clean()
            print(f"calibrated on {name}", flush=True)
    found: list[dict[str, Any]] = []
    for source, calibration in folders.items():
        if args.source and source not in args.source:
            continue
        names = [f"{name},calibration=prompt" for name in recipes] if calibration is None else recipes
        harness = Harness(model, tokenizer, args.model, names, calibration)
        for text, path in texts.items():
            options = CONTEXT | {"text": str(path), "windows": str(args.windows)}
            with Records(args.out / "records") as records:
                summaries = harness.run(build(["divergence"], options), records)
            for b, summary in zip(bits, summaries[1:], strict=True):
                kl = summary.metrics["kl"]
                line = {"source": source, "shape": list(shape), "text": text, "bits": b, "kl": kl.mean}
                line |= {"stderr": kl.stderr, "windows": summary.samples, "true_bits": summary.bits_per_element}
                found.append(line | {"model": args.model})
                print(json.dumps(found[-1]), flush=True)
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table in Markdown: a row per source and number of bits, a column per text."""
    texts = list(dict.fromkeys(line["text"] for line in lines))
    sources = list(dict.fromkeys((line["source"], tuple(line["shape"]), line["bits"]) for line in lines))
    cells = {
        ((line["source"], tuple(line["shape"]), line["bits"]), line["text"]): f"{line['kl']:.4f} ± {line['stderr']:.4f}"
        for line in lines
    }
    rows = [f"| calibrated on | tokens | bits | {' | '.join(texts)} |", f"|---|---|---|{'---|' * len(texts)}"]
    for key in sorted(sources, key=lambda key: key[2]):
        name, (samples, length), bits = key
        size = "" if name == PROMPT else f"{samples} × {length:,}"
        rows.append(f"| {name} | {size} | {bits:g} | {' | '.join(cells.get((key, text), '–') for text in texts)} |")
    return "\n".join(rows)


def pairs(options: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield name and file of options NAME=FILE.

    Raises:
        UserError: an option has another form, or the file does not exist.
    """
    for option in options:
        name, _, path = option.partition("=")
        if not path or not Path(path).is_file():
            raise UserError(f"{option!r} is not NAME=FILE with a file that exists")
        yield name, Path(path)


def main() -> None:
    """Parse the options; run, keep the results, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="run, and keep calibrations and raw records in this folder")
    parser.add_argument("--model", default="smollm2", help="name, folder or Hub id")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, a text to evaluate on; repeat")
    parser.add_argument("--corpus", action="append", default=[], help="NAME=FILE, one more text to calibrate on")
    parser.add_argument("--source", action="append", help="evaluate this source only; repeat")
    parser.add_argument("--samples", type=int, default=16, help="samples of a calibration")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--windows", type=int, default=4, help="windows of each text")
    parser.add_argument("--bits", default="2,3", help="bits, separated by commas")
    parser.add_argument("--record", action="store_true", help="add the results to benchmarks/records")
    parser.add_argument("--into", type=Path, help="page whose table is made from the records")
    args = parser.parse_args()
    if args.out is not None:
        found = run(args, [float(b) for b in args.bits.split(",")], dict(pairs(args.text)))
        print(table(found))
        if args.record:
            with RECORDS.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in found)
    if args.into is not None:
        lines = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
        text = args.into.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        made = f"{before}{BEGIN}\n{table(lines)}\n{END}{rest.split(END)[1]}"
        args.into.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
