"""Latent attention: what is computed, steps and prompts of published shapes, divergence on small trained models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from measured.base import Page, Row, Section, cpu, rows
from recorded import markdown
from tersekv.lab.evals.tasks.base import Estimate

SPEED, DIVERGENCE = "latent_speed.jsonl", "latent_divergence.jsonl"
SHAPES = {
    "v2-lite": "DeepSeek-V2-Lite", "minicpm3": "MiniCPM3-4B", "v3": "DeepSeek-V3", "glm-4.7-flash": "GLM-4.7-Flash",
    "minicpm3-whole": "MiniCPM3-4B, all 62 layers",
}  # fmt: skip
OWN = "transformers"
IDEA = """Such a layer caches a latent c of 256 or 512 numbers and a rotated key r of 32 or 64 for each token. Head h \
has the key [U·c, r] and the value V·c, so that q·[U·c, r] = [Uᵀ·q, q_r]·[c, r], and Σ p·V·c = V·(Σ p·c). Under \
`tersekv.compress` the query absorbs U and the output V. Attention has one KV head, whose key is [c, r] and \
whose value is c: each token is read and decoded once for all heads. Calls of many queries, such as prompts, \
expand the past tile by tile instead, because that needs fewer products there."""
DRAWING = "![Expanded and absorbed attention](../img/latent.svg)"
VLLM = """vLLM 0.32 asks a backend for the bytes of a page also for these models, so that pages of ours are possible, \
but no backend of ours exists. Without AMX vLLM's CPU platform fixes pages of 16 tokens, half a block of ours, and \
switches prefix caching and chunked prompts off. Its prompts over cached pages read 16-bit latents themselves."""


def about(row: Row) -> tuple[str, ...]:
    """Return the shape, the number of tokens and the type of a row."""
    return SHAPES[row["shape"]], f"{row['tokens']:,}", row["dtype"]


def by_way(field: str, cell: Callable[[Row, Row], str]) -> str:
    """Return a table with a column for each way. cell: text for a row beside transformers' own."""
    lines, names = [], []
    for key, found in groupby((row for row in rows(SPEED) if field in row), about):
        ways = {row["way"]: row for row in found}
        names = [OWN, *(name for name in ways if name != OWN)]
        lines.append([*key, *(cell(ways[name], ways[OWN]) for name in names)])
    return markdown(("shape", "tokens", "dtype", *(name if name == OWN else f"`{name}`" for name in names)), lines)


def step(row: Row, own: Row) -> str:
    """Return milliseconds, and how many times as fast as transformers' own."""
    faster = own["ms"] / row["ms"]
    return f"{row['ms']:,.1f}" + (f" ({faster:.{0 if faster >= 10 else 1}f})" if row is not own else "")


def slower() -> str:
    """Return how often a packed step of 8,192 tokens and more takes longer than one over exact latents."""
    times: dict[str, list[float]] = {}
    for _, found in groupby((row for row in rows(SPEED) if "ms" in row and row["tokens"] >= 8192), about):
        ways = {row["way"]: row["ms"] for row in found}
        for way in ways.keys() - {OWN, "exact"}:
            times.setdefault(way, []).append(ways[way] / ways["exact"])
    return ", ".join(
        f"`{way}` in {sum(x > 1 for x in found)} of {len(found)} cells (at most {max(found):.2f} times as long)"
        for way, found in sorted(times.items())
    )


def prompt(row: Row, own: Row) -> str:
    """Return seconds and gigabytes."""
    return f"{row['prompt_ms'] / 1e3:.2f} s, {row['peak_bytes'] / 1e9:.2f} GB"


def divergence() -> str:
    """Return the table of true bits and divergence on the small models."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows(DIVERGENCE):
        found.setdefault(row["way"], {}).setdefault(row["model"], []).append(row)
    models = list(dict.fromkeys(row["model"] for row in rows(DIVERGENCE)))
    lines = []
    for way, of in found.items():
        cells = [f"{kl_of(of[name])} at {of[name][0]['bits']:.2f}" for name in models]
        lines.append((way if way.startswith("fp") else f"`{way}`", *cells))
    return markdown(("latents", *models), lines)


def kl_of(found: list[Row]) -> str:
    """Return the mean of a divergence with its standard error, in millionths of a nat."""
    kl = Estimate.of([1e6 * row["kl"] for row in found])
    return f"{kl.mean:,.0f} ± {kl.stderr:,.0f}"


def page() -> Page:
    """Return the page."""
    first, trained = rows(SPEED)[0], {row["model"]: row for row in rows(DIVERGENCE)}
    windows = len({row["window"] for row in rows(DIVERGENCE)})
    losses = ", ".join(f"{row['train_loss']:.2f} nats per byte ({name})" for name, row in trained.items())
    data = next(iter(trained.values()))["trained"]
    command = "python benchmarks/latent.py {} --out FILE"
    return Page(
        "Latent attention",
        "Absorbed and packed latents of DeepSeek, GLM, Kimi and MiniCPM3: time, memory, divergence.",
        "No trained model of this kind is small enough for the machines here: shapes have random weights, and "
        "divergence is of small models that the benchmark trains. Nothing was run on a GPU: Triton's kernels, "
        "which decode a tile once for both uses, too, agree with torch when they are interpreted, and "
        "[their loops are counted](gpu.md#counts).",
        (
            Section("What is computed", IDEA, DRAWING),
            Section(
                "Steps",
                f"Milliseconds of a step of one layer with its projections, on a {cpu(first)} with "
                f"{first['threads']} threads, medians in turns; in brackets how many times as fast as transformers' "
                "own cache. `exact` packs nothing. With few tokens the projections, which all ways share, take most "
                "of a step. MiniCPM3-4B is also run whole, with its MLPs and its vocabulary. With 8,192 tokens "
                f"and more, packed latents take longer than exact ones: {slower()}.",
                by_way("ms", step), [SPEED], command.format("speed"),
            ),
            Section(
                "Prompts",
                "A prompt read at once: median time of three, and the peak of memory above the model. Values are "
                "padded to the width of keys for torch's fused attention, which holds no scores; transformers "
                "takes torch's other one, but where both are equally wide, as in GLM-4.7-Flash.",
                by_way("prompt_ms", prompt), [SPEED], command.format("prompt --tokens 2048 --tokens 4096"),
            ),
            Section(
                "Divergence",
                f"KL divergence in millionths of a nat at true bits per number, {windows} windows of 1,024 bytes and "
                f"256 scored ones of wikitext-2's test text. Models of three layers, trained for {data}: {losses}. "
                "They are weak models: use the "
                "order of codecs, not the figures. `fp8` has one scale per token, `fp4` scales per 16 numbers "
                "(NVFP4), both on all tokens; recipes keep the first 4 and the last 128 exact, which is a part of "
                "their bits at this length. `tersekv estimate --model deepseek-v2-lite` tells those of longer ones.",
                divergence(), [DIVERGENCE],
                "python benchmarks/latent.py train FOLDER --text FILE --steps 300\n"
                "python benchmarks/latent.py divergence FOLDER --text FILE --out FILE",
            ),
            Section("In vLLM", VLLM, ""),
        ),
    )  # fmt: skip
