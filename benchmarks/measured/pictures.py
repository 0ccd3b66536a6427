"""Pictures of docs/measured, each from the records of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import budgets
import studies
from measured.base import MODELS, cache, cpu, model, rows
from measured.kernels import attention_rows
from measured.speed import decodings
from measured.svg import WIDTH, Axis, Chart, grid, number
from recorded import RECORDS
from tersekv.lab.evals.reader import FULL

KL_TICKS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)


def pareto() -> Chart:
    """Draw the divergence of all recipes by their true bits."""
    found = studies.summaries([RECORDS / "recipes.jsonl"], "smollm2")["divergence"]
    chart = Chart(
        "KL divergence (nats) by true bits",
        "SmolLM2-135M, all recipes. Trellis codes have the lowest divergence at every size.", 430,
    )  # fmt: skip
    chart.keys(46, [("trellis, fitted on the prompt", "s0"), ("other codecs", "s1"), ("policies that evict", "s2")])
    across, up = Axis(2, 6.4, 50, WIDTH - 16), Axis(0.00018, 0.45, 390, 70, log=True)
    grid(chart, across, (2, 3, 4, 5, 6), up, KL_TICKS[:-1])
    points = {}
    for name, one in found.items():
        if name == FULL or name in ("trellis:bits=2", "trellis:bits=3"):
            continue
        style = "s0" if name.startswith("trellis") else "s2" if "budget" in name else "s1"
        points[name] = across(one.bits_per_element), up(one.metrics["kl"].mean), style
    chart.line(sorted((x, y) for x, y, style in points.values() if style == "s0"), "line s0")
    for x, y, style in points.values():
        chart.dot(x, y, style)
    for name, (x, y, _) in sorted(points.items(), key=lambda item: item[1][1]):
        chart.label(x, y, short(name))
    return chart


def short(recipe: str) -> str:
    """Return a recipe in a few letters."""
    name = cache(recipe).strip("`")
    for old, new in ((",calibration=prompt", ""), (":budget=0.25", ""), ("+exact", ""), (":bits=", " ")):
        name = name.replace(old, new)
    return name


def models() -> Chart:
    """Draw the divergence of methods on each model, a line per model."""
    recipes = (
        "safe",
        "default",
        "kivi:bits=4",
        "turboquant:bits=4",
        "normalfloat",
        "int4",
        "polarquant",
        "kvarn",
        "qjl",
    )
    cells = {
        model(row): row for row in rows("three_models.jsonl") if (row["text"], row["tokens"]) == ("wikitext", 2048)
    }
    chart = Chart(
        "KL divergence (nats) of recipes on three models",
        "wikitext-2, 2,048 packed tokens. Trellis and kivi stay below .002 on each; other methods lose most on Qwen.",
        70 + 30 * len(recipes) + 30,
    )
    names = list(dict.fromkeys(MODELS.values()))
    chart.keys(46, [(name, f"s{i}") for i, name in enumerate(names)])
    across = Axis(0.0003, 1.6, 130, WIDTH - 20, log=True)
    bottom = 62 + 30 * len(recipes)
    for tick in KL_TICKS:
        chart.line([(across(tick), 62), (across(tick), bottom)], "thin")
        chart.text(across(tick), bottom + 18, number(tick), "m")
    for i, recipe in enumerate(recipes):
        chart.text(122, 81 + 30 * i, recipe, "e")
    for i, name in enumerate(names):
        points = [(across(cells[name][recipe]["kl"]), 77 + 30 * j) for j, recipe in enumerate(recipes)]
        chart.line(points, f"line s{i}")
        for x, y in points:
            chart.dot(x, y, f"s{i}")
    return chart


def step() -> Chart:
    """Draw the time per token by length, by CPU and dtype."""
    panels = {
        "Zen 5, bfloat16": ("zen5", "Zen 5", "bfloat16"), "Zen 5, float32": ("zen5", "Zen 5", "float32"),
        "Zen 3, float32": ("avx2", "Zen 3", "float32"),
    }  # fmt: skip
    chart = Chart(
        "Milliseconds per token by length, SmolLM2-135M",
        "With a full cache a step grows with the length; with packed caches it hardly does in bfloat16.", 560,
    )  # fmt: skip
    chart.keys(46, [("full cache", "s4"), ("trellis, 3 or 3.5 bits", "s0"), ("kivi:bits=4", "s1")])
    for i, (title, (run, kind, dtype)) in enumerate(panels.items()):
        top = 78 + 162 * i
        across, up = Axis(0, 8400, 50, WIDTH - 16), Axis(0, 220, top + 112, top)
        chart.text(56, top + 4, title, "b")
        grid(chart, across, (1024, 4096, 7600), up, (0, 100, 200))
        lines: dict[str, list[tuple[float, float]]] = {}
        for one in decodings():
            whole = one.row.get("prefill_chunk") is None
            if (one.run, *one.about[:2]) == (f"generate_{run}", kind, f"SmolLM2-135M, {dtype}") and whole:
                at = across(one.row["context"]), up(statistics.median(one.steps))
                lines.setdefault(one.row["cache"], []).append(at)
        for name, points in lines.items():
            style = "s4" if name == FULL else "s1" if name.startswith("kivi") else "s0"
            chart.line(points, f"line {style}")
            for x, y in points:
                chart.dot(x, y, style)
    return chart


def kernels() -> Chart:
    """Draw the time of attention over 32,768 tokens by format."""
    found = [
        (row["what"], row["median_us"] / 1e3)
        for row, _ in attention_rows()
        if (cpu(row), row["shape"], row["T"], row["threads"]) == ("Zen 5", "32/8/128", 32768, 1)
        and not row["what"].startswith(("sdpa", "matmul float32"))
    ]
    found.sort(key=lambda one: one[1])
    packed = [ms for name, ms in found if not name.startswith("matmul")]
    chart = Chart(
        "Attention of one token over 32,768 tokens, ms",
        f"32/8/128 heads, one thread of Zen 5. Packed formats take {packed[0]:.1f} to {packed[-1]:.1f} ms, the dense "
        f"product in bfloat16 {dict(found)['matmul bfloat16']:.1f}.",
        50 + 24 * len(found),
    )
    across = Axis(0, 14, 150, WIDTH - 50)
    for i, (name, ms) in enumerate(found):
        y, style = 40 + 24 * i, "s4" if name.startswith("matmul") else "s0" if "trellis" in name else "s1"
        chart.text(142, y + 13, name, "e")
        chart.parts.append(
            f'<rect class="bar {style}" x="150" y="{y}" width="{across(ms) - 150:.1f}" height="16" rx="2"/>'
        )
        chart.text(across(ms) + 6, y + 13, f"{ms:.1f}")
    return chart


def equal_bytes() -> Chart:
    """Draw the divergence by budget, means over the three texts."""
    shown = {
        "StreamingLLM": "s4", "H2O": "s2", "SnapKV": "s3", "SubGen": "s6",
        "StreamingLLM, TurboQuant 4 and 2 bits": "s1", "H2O, trellis 4 and 2 bits": "s7",
        "mixed": "s0", "trellis, all tokens": "s5",
    }  # fmt: skip
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows("budgets.jsonl"):
        found.setdefault((row["row"], row["budget"]), []).append(row["kl"])
    chart = Chart(
        "KL divergence (nats) by budget of bytes",
        "SmolLM2-135M, means over three texts. Codes for all tokens are best in 1/4, two rates before eviction below.",
        470,
    )
    chart.keys(46, list(shown.items()))
    across, up = Axis(0, 3, 60, WIDTH - 30), Axis(0.0007, 0.6, 430, 128, log=True)
    grid(chart, across, (), up, KL_TICKS[1:-1])
    for i, budget in enumerate(budgets.BUDGETS):
        chart.text(across(i), 450, budget, "m")
    for name, style in shown.items():
        points = [
            (across(i), up(statistics.fmean(found[name, budget])))
            for i, budget in enumerate(budgets.BUDGETS)
            if (name, budget) in found
        ]
        chart.line(points, f"line {style}")
        for x, y in points:
            chart.dot(x, y, style)
    return chart


PICTURES: dict[str, Callable[[], Chart]] = {
    "pareto": pareto, "models": models, "step": step, "kernels": kernels, "budgets": equal_bytes,
}  # fmt: skip
"""Pictures by the name of their file."""
