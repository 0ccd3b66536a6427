"""Options and last step of benchmarks that add records to a file and make a page's tables from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the option --model, which may be repeated."""
    said = "name, folder, GGUF file or Hub id; repeat for several models (default: smollm2)"
    parser.add_argument("--model", action="append", help=said)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the models, the records and the page."""
    add_models(parser)
    parser.add_argument("--out", type=Path, help="run, and add records to this file")
    parser.add_argument("--records", type=Path, help="records to make the tables from")
    parser.add_argument("--into", type=Path, help="page whose tables are replaced")


def run_or_fill(
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace], None],
    filled: Callable[[str, list[dict[str, Any]]], str],
) -> None:
    """Run each model if there is a file for records. Write the page's tables if records and page are
    given; they are of one model."""
    if args.out is not None:
        for model in args.model or ["smollm2"]:
            run(argparse.Namespace(**vars(args) | {"model": model}))
    if args.records is not None and args.into is not None:
        lines = [json.loads(line) for line in args.records.read_text(encoding="utf-8").splitlines()]
        found = args.model or list(dict.fromkeys(line["model"] for line in lines))
        if len(found) > 1:
            raise SystemExit(f"a page has tables of one model: choose one with --model ({', '.join(found)})")
        lines = [line for line in lines if line["model"] in found]
        args.into.write_text(filled(args.into.read_text(encoding="utf-8"), lines), encoding="utf-8")
