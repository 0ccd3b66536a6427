"""One self-contained HTML page of an evaluation: styles and figures are inside, and nothing is
fetched.

Figures are SVG in `img` elements, so that their ids do not clash. Each has a white background, so
that it is readable in dark mode. The same records give the same bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from tersekv.errors import UserError
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.records import Record
from tersekv.lab.evals.tasks import Estimate
from tersekv.lab.plots.base import model_name
from tersekv.lab.plots.groups import Group, grouped
from tersekv.lab.plots.held import held_at_longest, longest
from tersekv.lab.plots.kinds import plot
from tersekv.lab.plots.kinds.needle import has_cells
from tersekv.lab.plots.style import render, to_bytes

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --dim: #595959; --back: #fff; --card: #f4f5f7; --line: #d5d8dd;
  --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --dim: #a9adb4; --back: #15171a; --card: #1f2226; --line: #3a3f46; --link: #7db9ff; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  padding: 1.5rem; max-width: 72rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { max-width: 46rem; } a { color: var(--link); } .dim { color: var(--dim); }
nav { background: var(--card); border-radius: .5rem; padding: .6rem 1rem; }
nav ul { margin: 0; padding-left: 1.2rem; columns: 2 18rem; }
figure { margin: 1rem 0; background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .6rem; }
figure { overflow-x: auto; } figure img { display: block; width: 100%; min-width: 36rem; max-width: 64rem;
  height: auto; margin: 0 auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { border-bottom-width: 2px; } th:first-child, td:first-child { text-align: left; }
td:first-child, code { font-family: ui-monospace, monospace; font-size: .85rem; }
tr.full td { color: var(--dim); }
pre { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Section(NamedTuple):
    """A section of the page: its anchor, heading and HTML."""

    anchor: str
    heading: str
    body: str


def page(records: Sequence[Record], folder: str, out: str, quarters: bool = False) -> str:
    """Return the whole page.

    folder, out: as in the command. quarters: True to include divergence's quarters and nll.
    """
    groups = grouped(records)
    models = ", ".join(dict.fromkeys(model_name(group.model) for group in groups))
    sections = [
        *_pareto(records),
        *(_task(i, group, quarters) for i, group in enumerate(groups, 1)),
        *_needles(groups),
        *_memory(groups),
        _versions(records),
        _made(groups, folder, out),
    ]
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.heading)}</a></li>' for s in sections)
    body = "".join(f'<section id="{s.anchor}"><h2>{escape(s.heading)}</h2>{s.body}</section>' for s in sections)
    recipes = len({record["recipe"] for record in records}) - 1
    lead = (
        f"{len(groups)} task{'s' if len(groups) > 1 else ''}, the full cache and {recipes} recipes, "
        f"{len(records):,} records. Tables say which recipes read fewer samples than the full cache. True bits are all "
        "bytes held (codes, scales, norms, indices, tables, exact tokens, slack) over the elements of a full cache."
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Packed caches of {escape(models)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>Packed caches of {escape(models)}</h1><p>{escape(lead)}</p></header>"
        f'<nav aria-label="Contents"><ul>{links}</ul></nav><main>{body}</main></body></html>\n'
    )


def _picture(kind: str, source: object, **options: object) -> str:
    made = render(plot(kind), source, **options)
    data = base64.b64encode(to_bytes(made, "svg")).decode()
    return f'<figure><img alt="{escape(made.alt)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _pareto(records: Sequence[Record]) -> Iterable[Section]:
    text = (
        "<p>Each point is a recipe; filled ones are on the front, where no other recipe is better at as few bits. Bars "
        "are standard errors over samples. The dashed line is the full cache.</p>"
    )
    try:
        yield Section("pareto", "Quality against true bits", text + _picture("pareto", records))
    except UserError:  # the records hold only the full cache
        yield Section("pareto", "Quality against true bits", "<p>The records hold no packed recipe to compare.</p>")


def _task(number: int, group: Group, quarters: bool) -> Section:
    shown = dict.fromkeys(name for summary in group.summaries for name in summary.metrics)
    names = [name for name in shown if quarters or name not in group.task.more]
    heads = (
        "recipe",
        "samples",
        "tokens",
        "true bits",
        "bytes",
        *(name.replace("_", " ") for name in names),
        "seconds",
    )
    rows = [
        _row(summary, names, group.full.samples)
        for summary in (group.full, *sorted(group.packed, key=lambda s: s.bits_per_element))
    ]
    said = escape(f"{group.model}: {group.task.about()}")
    body = (
        f'<p class="dim">{said}</p><div class="wide" tabindex="0" role="region" '
        f'aria-label="{escape(group.title)}"><table><thead><tr>'
        + "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    return Section(f"task-{number}", f"Task {group.title}", body)


def _row(summary: Summary, names: Sequence[str], samples: int) -> str:
    done = f"{summary.samples}" if summary.samples == samples else f"{summary.samples} of {samples}"
    cells = [
        *(summary.recipe, done, f"{summary.tokens:,}"),
        *(f"{summary.bits_per_element:.2f}", f"{summary.bytes:,}"),
        *(_estimate(summary.metrics.get(name)) for name in names),
        f"{summary.seconds:,.1f}",
    ]
    kind = ' class="full"' if summary.recipe == "full" else ""
    return f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None or not math.isfinite(estimate.mean):
        return "–"
    return f"{estimate.mean:.4g}" + (f" ± {estimate.stderr:.2g}" if math.isfinite(estimate.stderr) else "")


def _needles(groups: Sequence[Group]) -> Iterable[Section]:
    """Return maps of the groups whose samples form a grid of lengths and depths."""
    for i, group in enumerate(groups, 1):
        if has_cells(group) and "accuracy" in group.full.metrics:
            records = [record for found in group.records.values() for record in found]
            heading = f"By depth and length: {group.title}"
            yield Section(f"map-{i}", heading, _picture("needle", records, task=group.name))


def _memory(groups: Sequence[Group]) -> Iterable[Section]:
    held = held_at_longest(longest(groups))
    if any(not one.full for one in held):
        yield Section("memory", "Bytes by part", _picture("memory", held))


def _versions(records: Sequence[Record]) -> Section:
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for package, version in record.get("versions", {}).items():
            found.setdefault(package, {})[str(version)] = None
    rows = "".join(f"<tr><td>{escape(p)}</td><td>{escape(', '.join(v))}</td></tr>" for p, v in found.items())
    head = '<thead><tr><th scope="col">package</th><th scope="col">version</th></tr></thead>'
    return Section("versions", "Versions", f"<table>{head}<tbody>{rows}</tbody></table>")


def _made(groups: Sequence[Group], folder: str, out: str) -> Section:
    commands = [*(group.command(folder) for group in groups), f"tersekv report {folder} --out {out}"]
    body = (
        f"<p>These commands make the records and this page.</p><pre><code>{escape(chr(10).join(commands))}</code></pre>"
    )
    return Section("made", "How this was made", body)
