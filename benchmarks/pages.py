"""Make docs/measured, the pages and pictures of everything that was measured, from benchmarks/records.

    python benchmarks/pages.py

They are committed, so that they can be read on GitHub and the site's environment needs no torch. A test compares them
with the records. A page is made by a module of benchmarks/measured. Its sentences are there, beside the table that they
explain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import recorded
from measured import (
    gpu,
    kernels,
    latent,
    pictures,
    presets,
    quality,
    rates,
    reproduced,
    selection,
    serving_pages,
    speed,
    trellis_codes,
)
from measured.base import MODELS, Page, Section, rows
from recorded import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs" / "measured"
PAGES: dict[str, Callable[[], Page]] = {
    "quality": quality.page, "presets": presets.page, "speed": speed.page, "kernels": kernels.page,
    "gpu": gpu.page,
    "latent": latent.page, "serving": serving_pages.page, "equal-bytes": selection.bytes_page,
    "selection": selection.page, "rates": rates.page, "trellis": trellis_codes.page, "kvquant": reproduced.kvquant_page,
    "papers": reproduced.page,
}  # fmt: skip
"""Pages by the name of their file, in the order of the site."""
RECORDS = """A program of the project makes each record: `tersekv eval`, `tersekv bench` or a file of `benchmarks/`, \
with `--out`. Records are JSON lines in `benchmarks/records/`. A header has what the rows below it share: command, \
commit, machine, versions, model and options. A row without a field has the one of the last header above it. Below \
each table are its record and a command that makes one; `FILE`, `FOLDER` and `MODEL` are yours. `python \
benchmarks/pages.py` makes these pages and pictures from the records, and a test compares them.

- **Texts**: `wikitext-2/test_gptq_joined.txt` is wikitext-2's test set, its rows joined by two newlines.
- **True bits**: all bytes held, in bits per number of keys and values, with scales, tables, sinks and window.
- **KL divergence**: from the full cache's distribution of the next token, in nats, mean over tokens.
- **Perplexity ratio**: divided by the full cache's on the same tokens. `±` is the standard error over samples, of \
paired differences where two caches are compared.
- **Times**: caches take turns in one process, and ratios are of the same round. Sizes, codes and greedy answers \
repeat exactly on the same versions and instruction set; times do not."""
NOT_CLAIMED = """One GPU ran the kernels once, which were changed since ([GPU](gpu.md)); no model of \
use was run on one. Three small models were measured, of 135 to 500 million \
parameters, and most tables are of one. Samples are few where the tables say so. CPUs timed: AMD's \
Zen 3 (AVX2), Zen 4 and Zen 5, Intel's Skylake, Ice Lake and a Xeon with AMX; all were shared."""


def dropped() -> Page:
    """Return the page of what was tried and dropped."""
    columns = ("area", "tried", "figure", "why")
    body = markdown(columns, [[row[name] for name in columns] for row in rows("dropped.jsonl")])
    return Page(
        "Tried and dropped",
        "What did not help, with the figure that decided, and why.",
        "Informal measurements on SmolLM2-135M from the time before the first release; they have no records of their "
        "own. Divergences are in nats.",
        (Section("Experiments", "", body, ["dropped.jsonl"]),),
    )


def index(pages: dict[str, Page]) -> str:
    """Return the list of pages."""
    names = {name: hub for hub, name in MODELS.items() if "/" in hub}
    models = ", ".join(f"{name} (`{hub}`)" for name, hub in names.items())
    listed = [(f"[{page.title}]({name}.md)", page.shows) for name, page in pages.items()]
    return str(
        Page(
            "Measured",
            "",
            f"Every table is made from a record, which a command of the project made; only the experiments that were "
            f"[dropped](dropped.md) are informal measurements. Models: {models}.",
            (
                Section("Pages", "", markdown(("page", "what it shows"), listed)),
                Section("How records are made", RECORDS, ""),
                Section("Not claimed", NOT_CLAIMED, ""),
            ),
        )
    )


def files() -> dict[str, str]:
    """Return the text of every file by its name."""
    pages = {name: page() for name, page in (PAGES | {"dropped": dropped}).items()}
    made = {"index.md": index(pages)} | {f"{name}.md": str(page) for name, page in pages.items()}
    return made | {f"{name}.svg": str(chart()) for name, chart in pictures.PICTURES.items()}


def wrong(made: dict[str, str], folder: Path = DOCS) -> list[str]:
    """Return the names of files that are missing, differ, or that nothing makes."""
    held = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} if folder.is_dir() else {}
    return sorted(name for name in held.keys() | made.keys() if held.get(name) != made.get(name))


def main() -> None:
    """Write the files that differ, and delete others."""
    recorded.parser(__doc__).parse_args()
    DOCS.mkdir(exist_ok=True)
    made = files()
    for name in wrong(made):
        if name in made:
            (DOCS / name).write_text(made[name], encoding="utf-8")
        else:
            (DOCS / name).unlink()
        print(DOCS / name)


if __name__ == "__main__":
    main()
