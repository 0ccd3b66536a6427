"""`tersekv report`: write the records of an evaluation as one self-contained HTML page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tersekv.cli import output
from tersekv.cli.files import check_out, write_whole
from tersekv.extras import require

QUARTERS_HELP = "Also show divergence by quarters of its windows, and the negative log-likelihood."


def report(
    folder: Annotated[Path, typer.Argument(help="Folder from `tersekv eval --out`.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file.")] = Path("report.html"),
    quarters: Annotated[bool, typer.Option("--quarters", help=QUARTERS_HELP)] = False,
    as_json: output.Json = False,
) -> None:
    """Write an evaluation's tables and figures to one HTML page.

    It shows quality against true bits, tasks, depths and bytes.
    """
    path = check_out(out, ("html", "htm"))
    require("tersekv report", "matplotlib")
    with output.step("loading torch and matplotlib"):
        from tersekv.lab.plots.groups import read_records
        from tersekv.lab.plots.page import page

        records = read_records([folder])
    with output.step("drawing"):
        data = page(records, shlex.quote(str(folder)), shlex.quote(str(out)), quarters).encode()
        write_whole(path, data)
    if as_json:
        output.print_json({"report": str(path), "records": len(records), "bytes": len(data)})
    else:
        output.show(f"{len(records):,} records: {path} ({output.human_bytes(len(data))})")
