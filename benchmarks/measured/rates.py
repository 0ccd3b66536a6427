"""Two rates: the policy `mixed`, simulated rates per token, bias correction and found sinks."""

from __future__ import annotations

import statistics

import studies
import token_rates
from measured.base import Page, Row, Section, earlier, estimate, model, rows
from recorded import RECORDS, markdown
from tersekv.hf.facts import load_shape
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.plots.groups import grouped, read_records
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict

SHAPES = {"Qwen2.5-Coder-0.5B": "qwen2.5-0.5b", "Gemma 3 270M": "gemma-3-270m"}
"""Published models with the same cache, by names in tables."""
TEXTS = {
    "wikitext-2/test_gptq_joined.txt": "wikitext-2", "c4/c4.utf8": "C4", "code.txt": "code",
}  # fmt: skip
OWN = "5f3643db892c9591"
"""The calibration whose text the model wrote itself."""


def divergences(name: str) -> str:
    """Return the table of divergences of a file, by text, with true bits at 32,768 tokens."""
    lines: list[tuple] = []
    every = read_records([RECORDS / name])
    for own in (" (own text)", ""):
        some = [row for row in every if row["recipe"] == "full" or (row.get("calibration") == OWN) is bool(own)]
        lines += _divergences(some, own)
    order = list(TEXTS.values())
    return markdown(
        ("text", "recipe", "windows", "true bits at 32k", "KL, nats (median)", "99th percentile", "same next token"),
        sorted(lines, key=lambda line: (order.index(line[0]), float(line[3]))),
    )


def _divergences(every: list[Row], own: str) -> list[tuple]:
    """Return the lines of the table of divergences. own: end of the recipes' names."""
    lines = []
    for group in grouped(every, "divergence"):
        full = {row["sample"]: row for row in group.records["full"]}
        parts: dict[tuple[str, str], list[dict]] = {}
        for recipe, records in group.records.items():
            for row in records if recipe != "full" else ():
                parts.setdefault((recipe, own + earlier(row)), []).append(row)
        for (recipe, ending), records in parts.items():
            metrics = group.task.summarise(
                [row["metrics"] for row in records], [full[row["sample"]]["metrics"] for row in records]
            )
            shape = studies.SMOLLM2
            bits = 8 * predict(shape, Recipe.parse(recipe), studies.LONG).total_bytes / shape.elements(studies.LONG)
            middle = statistics.median(row["metrics"]["kl"] for row in records)
            cells = (
                f"{estimate(metrics['kl'])} ({middle:.4f})",
                f"{metrics['kl_p99'].mean:.3f}",
                f"{metrics['top1_agreement'].mean:.3f}",
            )
            label = f"`{recipe.replace(',calibration=prompt', '')}`{ending}"
            lines.append((TEXTS[group.options["text"]], label, len(records), f"{bits:.2f}", *cells))
    return lines


def on_the_prompt() -> str:
    """Return the table of rates that the prompt chose beside those of a measurement of the model."""
    lines = []
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows("prompt_rates.jsonl"):
        found.setdefault(model(row), {}).setdefault(row["recipe"] + earlier(row), {})[row["sample"]] = row
    for name, recipes in found.items():
        shape = load_shape(SHAPES[name], with_weights=False)[0] if name in SHAPES else studies.SMOLLM2
        for recipe, samples in recipes.items():
            if recipe == FULL:
                continue
            kl = {sample: row["metrics"]["kl"] for sample, row in samples.items()}
            written, _, label = recipe.partition(" ")
            held = predict(shape, Recipe.parse(written), studies.LONG).total_bytes
            other = (
                recipes.get(recipe.replace("allot=prompt", "allot=model").replace(" (any share)", ""), {})
                if "allot=prompt" in recipe
                else {}
            )
            less = [value - other[sample]["metrics"]["kl"] for sample, value in kl.items() if sample in other]
            lines.append((
                name, f"`{written.replace(',calibration=prompt', '')}` {label}".strip(), len(kl),
                f"{8 * held / shape.elements(studies.LONG):.2f}",
                f"{estimate(Estimate.of(list(kl.values())))} ({statistics.median(kl.values()):.4f})",
                f"{max(kl.values()):.4f}", estimate(Estimate.of(less)) if less else "",
            ))  # fmt: skip
    columns = (
        "model", "recipe", "windows", "true bits at 32k", "KL, nats (median)", "worst window", "minus `allot=model`",
    )  # fmt: skip
    return markdown(columns, lines)


def lost_facts() -> str:
    """Return the tables of passkeys that are lost: by tokens and sides, and by heads."""
    found = rows("lost_facts.jsonl")
    names = list(found[0]["nll"])
    by_tokens = [(row["sample"], *(f"{row['nll'][name]:.2f}" for name in names)) for row in found]
    by_heads = [
        (
            row["sample"], f"{head['layer']}, {head['head']}", f"{head['bits']:g} and {head['rest']:g}",
            f"{head['share']:.0%}", f"{head['high']:.0%}", " → ".join(f"{x:.2f}" for x in head["attention"]),
            f"{head['nll']:.2f}",
        )
        for row in found for head in row["heads"][:2]
    ]  # fmt: skip
    columns = "sample", "layer, head", "bits", "text", "sentence", "attention", "NLL with its sentence exact"
    return f"{markdown(('sample', *names), by_tokens)}\n\n{markdown(columns, by_heads)}"


def found_passkeys() -> str:
    """Return a sentence about passkeys with found sinks."""
    (group,) = grouped(read_records([RECORDS / "found_sinks.jsonl"]), "passkey")
    said = [
        f"`{one.recipe}` {one.metrics['accuracy'].mean * one.samples:.0f} ({one.metrics['gold_nll'].mean:.3f})"
        for one in (group.full, *group.packed)
    ]
    return f"Passkeys of {group.full.samples} in 2,048 tokens (NLL of the answer): {', '.join(said)}."


def bias() -> list[Section]:
    """Return the sections of bias correction."""
    found = studies.summaries([RECORDS / "bias_correction.jsonl"], "smollm2")
    titles = {
        "divergence": ("Bias correction: divergence", "KL divergence, nats, over the first two windows of wikitext-2."),
        "passkey": ("Bias correction: passkeys", "2,048 tokens, 5 samples."),
        "lines": ("Bias correction: lines", "10 lines, 2 samples."),
        "needle": ("Bias correction: needles", "1,024 tokens, 3 samples."),
    }
    answer = " NLL of the answer, and in brackets the share of right answers; the full cache has {:.3f} ({:.1f})."
    made = []
    for task, metric, digits in studies.METRICS:
        title, note = titles[task]
        if metric == "gold_nll":
            full = found[task]["full"].metrics
            note += answer.format(full["gold_nll"].mean, full["accuracy"].mean)
        body = studies.table_of_bias(found[task], metric, digits)
        command = "python benchmarks/studies.py bias --text FILE --out FOLDER" if task == "divergence" else ""
        made.append(
            Section(title, f"{note} The best value of a row is bold.", body, ["bias_correction.jsonl"], command)
        )
    return made


def page() -> Page:
    """Return the page."""
    lines, ranked = rows("token_rates.jsonl"), rows("rankings.jsonl")
    evaluation = (
        "tersekv eval divergence --text FILE --windows {} --context 2304 --prefix 2048 --chunk 64 --recipe RECIPE "
        "--out FOLDER"
    )
    return Page(
        "Rates per token",
        "Two rates (`mixed`), simulated rates by importance, bias correction of packed keys, and found sinks.",
        "SmolLM2-135M, float32. Attention reads few tokens much and most tokens little, so a token that is read little "
        "can have fewer bits.",
        (
            Section(
                "Two rates through the real cache",
                "2,048 packed tokens, then 256 in calls of 64. `trellis` is fitted on the prompt. Rates of "
                "`allot=model` were measured on WikiText-2's training text, also for the other texts, or on the "
                "model's own text. Rows say where all heads of a layer had the same. One window of C4 repeats a "
                "forum's navigation and has most of the mean.",
                divergences("mixed.jsonl"), ["mixed.jsonl"], evaluation.format(8),
            ),
            Section(
                "Rates chosen on the prompt",
                "`allot=prompt` reads from the prompt how attention spreads, `allot=model` had the measurement of its "
                "first use. The last column is the mean of the differences of windows. wikitext-2, 2,048 packed "
                "tokens, then 256 in calls of 64. On Gemma 3, 15 of 18 layers have a sliding window, and so one rate. "
                "Rows say where all heads of a layer had the same rates, as in the section before, and where keys were "
                "fitted to the diagonal of the metric of their queries. SmolLM2 has 3 KV heads, Qwen2.5-Coder 2 and "
                "Gemma 3 1.\n\n"
                "**With the diagonal one window of Qwen2.5 is ruined.** Its divergence is .90 nats, and .0013 if all "
                "keys are exact. Layer 0 makes nearly all of it, KV head 1: its tokens have 4 bits, and a quarter of "
                "them .75. The mean query of one query head is 131 long, and keys hardly vary along it, because "
                "channels cancel each other. Codes of .75 bits leave errors in single components, which do not "
                "cancel. One token (`0` of `20th`) got a score that was 25 too high, and then nearly all attention of "
                "that query head. The whole metric Σ w·q·qᵀ counts such errors. With it the window has .0061 "
                "(`presets_divergence.jsonl`).",
                on_the_prompt(), ["prompt_rates.jsonl"],
                evaluation.format(8).replace("divergence", "divergence --model MODEL"),
            ),
            Section(
                "Facts that are lost with rates of the prompt",
                "Passkeys of 2,048 tokens that SmolLM2 lost with `allot=prompt` and 1.7 bits, when any share of a "
                "head's tokens could have its higher rate. The first table has the NLL of the answer if some tokens "
                "are exact; the sentence is that with the passkey. Tokens are decoded and read by transformers' "
                "attention, so without bias correction. The codes of the other tokens cost nothing. Errors in the "
                "sentence's keys and in its values both count.\n\n"
                "The second table has the two heads in which an exact sentence helps most: their rates, the shares of "
                "all tokens and of the sentence that have the higher one, and the attention of the answer's tokens to "
                "the sentence before and after packing (of the query head with the most). The text repeats five "
                "sentences, and nothing asks for the passkey yet. So both heads rank its sentence among the few tokens "
                "that get the lower rate, which is below 1 bit because the prompt's last queries hardly read these.\n\n"
                "Now at most three quarters of a head's tokens have its higher rate. The last quarter gets a rate near "
                "it, 4 bits beside 5 in the first of these heads, because most of it was read. All heads together give "
                "few bytes for that, and the [passkeys](presets.md) are found.",
                lost_facts(), ["lost_facts.jsonl"], "python benchmarks/lost_facts.py --sample 8 6 14 --out FILE",
            ),
            Section(
                "Bias correction with two rates",
                "The first four windows of wikitext-2; `trellis` with 4 and 2 bits, beside equal rates.",
                divergences("mixed_bias.jsonl"), ["mixed_bias.jsonl"], evaluation.format(4),
            ),
            Section(
                "Simulated rates",
                "`trellis` is fitted on a prompt of 2,048 tokens and encodes it at every rate; each token of each KV "
                "head takes one by its importance. Bits are those of the codes. A position is a copy if its token "
                "follows the same token in the prompt.\n\n"
                "- **seen**: mean attention from the prompt's queries that see a token.\n"
                "- **moved**: the same from queries moved behind the prompt, root mean square.\n"
                "- **reread**: the same from a second reading of the prompt.\n"
                "- **both**: the sum of seen and moved, each divided by its mean.\n"
                "- **future**: from the tokens that are scored, which no cache can know.",
                token_rates.table_of_texts(lines), ["token_rates.jsonl"],
                "python benchmarks/token_rates.py --text wikitext=FILE --settings shares --out FILE",
            ),
            Section(
                "Simulated rates: passkeys",
                "The same in 2,000 tokens that are packed before the question is read, 6 samples.",
                token_rates.table_of_passkeys(lines), ["token_rates.jsonl"],
                "python benchmarks/token_rates.py --text wikitext=FILE --out FILE",
            ),
            Section(
                "Rankings",
                "Tokens ranked in other ways, with two rates in the same shares of every head. A position is a copy "
                "as above; the worst windows are those that copy what hardly a query had looked at.\n\n"
                "- **centres**: TriAttention's score (arXiv 2604.04921): the logit of the mean query before RoPE, "
                "over distances 1 to 4,096, and the norm of a key where queries differ from their mean.\n"
                "- **gaussian**: the mean attention weight of queries with that mean and their variance.\n"
                "- **random**: no ranking.\n\n"
                "The centres of the prompt's queries rank as well as 512 moved queries do, without looking at a "
                "query again, but lose passkeys sooner. Only a second reading of the prompt finds what will be "
                "copied. At 1.38 bits a passkey is found as seldom with a ranking by one reading as by chance.",
                f"{token_rates.table_of_texts(ranked)}\n\n{token_rates.table_of_passkeys(ranked)}",
                ["rankings.jsonl"],
                "python benchmarks/token_rates.py --settings rankings --text wikitext=FILE --text C4=FILE --out FILE",
            ),
            *bias(),
            Section(
                "Found sinks",
                "`found=16` keeps 16 tokens of unusual norm per layer exact; `sinks=20` 16 more first tokens. The "
                f"first four windows of each text. {found_passkeys()}",
                divergences("found_sinks.jsonl"), ["found_sinks.jsonl"], evaluation.format(4),
            ),
        ),
    )  # fmt: skip
