"""Divergence and perplexity: what a divergence means, all recipes, both modes, three models, other packages."""

from __future__ import annotations

from pathlib import Path

import studies
import three_models
from measured.base import MODELS, NAMES, Page, Section, estimate, model, rows, wrapped
from recorded import RECORDS, markdown
from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.groups import grouped, read_records

RIVALS = """The rows:

- quanto and hqq are the back ends of transformers' own `QuantizedCache`.
- turboquant holds a byte for each code, and decoded floats of all tokens.
- turbo-attn is its codec alone, without a calibration; its attention needs a GPU.
- nexusquant-kv rounds keys and values and holds them as floats. Its README passes `rope_theta`, which \
transformers 5 has elsewhere, so its base is 10,000 here.
- tri-tier has 2-bit codes, exact attention sinks, recent and heavy tokens, and room for 2,304 tokens here."""


def modes() -> str:
    """Return the table of perplexities in both modes."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for group in grouped(read_records([RECORDS / "quality.jsonl"])):
        for one in group.packed:
            cells = f"{one.bits_per_element:.2f}", estimate(one.metrics["perplexity_ratio"], 3)
            found.setdefault(one.recipe, {})[group.options["mode"]] = cells
    none = ("–", "–")
    return markdown(
        ("recipe", "bits, simulate", "perplexity ratio, simulate", "bits, cache", "perplexity ratio, cache"),
        [(f"`{name}`", *of.get("simulate", none), *of.get("cache", none)) for name, of in found.items()],
    )


TEXTS = {"test_gptq_joined.txt": "wikitext-2", "c4.utf8": "C4", "code.txt": "code", "chat.txt": "chat"}


def presets() -> str:
    """Return the table of the presets' divergence and bits, by text and model."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for group in grouped(read_records([RECORDS / "presets_divergence.jsonl"])):
        text = TEXTS[Path(group.options["text"]).name]
        for one in group.packed:
            cell = f"{estimate(one.metrics['kl'])} (n {one.samples}), {one.bits_per_element:.2f} bits"
            cells.setdefault((text, one.recipe), {})[MODELS[group.model]] = cell
    names = list(dict.fromkeys(name for of in cells.values() for name in of))
    lines = [(text, NAMES.get(r, f"`{r}`"), *(of.get(name, "–") for name in names)) for (text, r), of in cells.items()]
    return markdown(("text", "recipe", *names), lines)


def key_errors() -> str:
    """Return the table of divergences, with the largest error of keys of any layer in brackets."""
    found = rows("key_error.jsonl")
    errors = {(model(row), row["recipe"]): row["error"] for row in found if "error" in row}
    kl = {(model(row), row["tokens"], row["recipe"]): row["metrics"]["kl"] for row in found if "metrics" in row}
    names = list(dict.fromkeys(MODELS.values()))
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in found if "metrics" in row and row["recipe"] != FULL):
        cells = []
        for name in names:
            error = f" ({errors[name, recipe]:.1f})" if (name, recipe) in errors else ""
            cells.append(f"{kl[name, 576, recipe]:.4f}{error}" if (name, 576, recipe) in kl else "–")
        far = kl.get((names[1], 2304, recipe))
        lines.append((f"`{recipe}`", *cells, "–" if far is None else f"{far:.4f}"))
    return markdown(("recipe", *names, f"{names[1]}, 2,048"), lines)


def page() -> Page:
    """Return the page."""
    cells = rows("three_models.jsonl")
    near = "2,048 tokens are packed after one exact prefill, and the next 256 are read 64 at a time."
    command = "python benchmarks/three_models.py {}--model Qwen/Qwen2.5-Coder-0.5B-Instruct --text C4=FILE --out FOLDER"
    return Page(
        "Quality",
        "What a divergence means, all recipes beside each other, three models, and other packages.",
        "KL divergence is between the next-token distributions of the full and of the packed cache, in nats. Numbers "
        "hardly depend on the CPU. Weights are float32.",
        (
            Section(
                "What a divergence means",
                "Median share of next tokens that stay the most likely ones, over all our records of divergence; in "
                "brackets the number of measurements. `tersekv choose --try FILE` uses these words.",
                three_models.of_words(), ["*.jsonl"],
            ),
            Section(
                "The presets",
                "2,048 tokens are packed after one exact prefill, and the next 256 are read 128 at a time; mean and "
                "standard error over n windows. `code` is the standard library's sources, `chat` the questions and "
                "reference answers of MT-Bench. On Gemma 3 `default` and `safe` are `kivi:bits=4` at this length.",
                presets(), ["presets_divergence.jsonl"],
                "tersekv eval divergence -m MODEL -r default -r safe -r kivi:bits=4 -r small --text FILE "
                "--context 2304 --prefix 2048 --windows 8 --out FOLDER",
            ),
            Section(
                "All recipes",
                f"SmolLM2-135M, wikitext-2 test, 8 windows: {near} Passkeys: 5 samples, packed before the question is "
                "read. MB: of a bfloat16 model at 32,768 tokens. `default` and `safe` are `trellis` with 3.5 and 4 "
                "bits, fitted on the prompt; `kvquant` and `trellis` without `calibration=prompt` were calibrated on "
                "16 × 2,048 tokens of the training text.\n\n![Divergence by true bits](pareto.svg)",
                studies.table_of_methods(studies.summaries([RECORDS / "recipes.jsonl"], "smollm2")),
                ["recipes.jsonl"], "python benchmarks/studies.py recipes --text FILE --calibration FOLDER --out FOLDER",
            ),
            Section(
                "Simulate and cache",
                "SmolLM2-135M, wikitext-2 test, 4 windows of 2,048 tokens. `simulate` codes every key and value, as "
                "many papers do (with one exact sink for `kvquant`); `cache` is the real cache, with 4 sinks and the "
                "latest 128 tokens exact. A few exact tokens are worth more than a bit.",
                modes(), ["quality.jsonl"],
                "tersekv eval perplexity --text FILE --windows 4 --mode simulate --recipe turboquant:bits=2..4 "
                "--out FOLDER",
            ),
            Section(
                "Methods on three models",
                f"One window of each text. {near} Without → with the mean of keys removed (`centre=true`). Qwen's keys "
                "have biases, which drown what tells its keys apart. Why `kvarn` loses with it is not known.\n\n"
                "![Divergence of each method on three models](models.svg)",
                three_models.of_methods(cells), ["three_models.jsonl"], command.format("--centred --lengths 2048 "),
            ),
            Section(
                "Keys with a large mean",
                "Divergence after a packed prompt of 512 tokens, or of 2,048 in the last column; one window of "
                "wikitext-2. In brackets: the largest error of any layer, in multiples of the spread of its keys. The "
                "cache warns above 3, which is above every model without biases. The error does not tell how bad it "
                "is, because the queries decide that.",
                key_errors(), ["key_error.jsonl"],
                "tersekv eval divergence --context 576 --prefix 512 --chunk 64 --windows 1 --text FILE --model MODEL "
                "--recipe RECIPE --out FOLDER\npython benchmarks/key_error.py --text FILE --model MODEL --out FILE",
            ),
            Section(
                "KVarN and OSCAR",
                f"SmolLM2-135M, wikitext-2 test, 4 windows: {near} Passkeys: share of 10 in 2,048 tokens, and the "
                "negative log-likelihood (NLL) of the answer. `window:` gives the published windows and rates.",
                studies.table_of_rivals(studies.summaries([RECORDS / "rivals.jsonl"], "smollm2")),
                ["rivals.jsonl"], "python benchmarks/studies.py rivals --text FILE --calibration FOLDER --out FOLDER",
            ),
            Section(
                "Beside other packages",
                "Six published packages, each through its public interface and with 4 bits, if it has them; one window "
                "of wikitext-2, 2,048 tokens and the next 256. Bits are all bytes held for each number that an exact "
                "cache holds; those that the package counts itself are in brackets.",
                f"{three_models.of_rivals(cells)}\n\n{wrapped(RIVALS)}", ["three_models.jsonl"],
                command.format("--rivals quanto hqq turboquant turbo-attn nexusquant-kv tri-tier --lengths 2048 "),
            ),
        ),
    )  # fmt: skip
