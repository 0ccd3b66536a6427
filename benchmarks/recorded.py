"""Options and last step of benchmarks that add records to a file and make a page's tables from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the records and the page."""
    parser.add_argument("--out", type=Path, help="run, and add records to this file")
    parser.add_argument("--records", type=Path, help="records to make the tables from")
    parser.add_argument("--into", type=Path, help="page whose tables are replaced")


def run_or_fill(
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace], None],
    filled: Callable[[str, list[dict[str, Any]]], str],
) -> None:
    """Run if there is a file for records. Write the page's tables if records and page are given."""
    if args.out is not None:
        run(args)
    if args.records is not None and args.into is not None:
        lines = [json.loads(line) for line in args.records.read_text(encoding="utf-8").splitlines()]
        args.into.write_text(filled(args.into.read_text(encoding="utf-8"), lines), encoding="utf-8")
