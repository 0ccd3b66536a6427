"""Engines and files: vLLM, and caches of prompts on disk."""

from __future__ import annotations

import serving
from measured.base import Page, Section, cache, estimate, model, rows
from recorded import markdown
from tersekv.lab.evals.tasks.base import Estimate

FILES = ("serving.jsonl", "serving_load.jsonl", "serving_robust.jsonl")
PYTHON = "build/serving/vllm/bin/python"
BUSY = "In rows with `busy` two processes computed without end beside the engine."
CPUS = (
    (
        "Zen 4",
        "Engines in turns of eight steps in one process, two to four rounds; the last columns compare with vLLM's own "
        "cache. Elsewhere a turn was a whole answer, which other load on the machine changed more. Prefill is vLLM's "
        "own attention plus the time to encode; `trellis` searches its codes. Gemma's two runs had the engines in "
        "two orders, and `kivi`'s prefill differs by an eighth: why is not known. 32 requests were timed before "
        "commands were kept.",
        "serving_speed.jsonl",
    ),
    (
        "Zen 5",
        f"The same on two threads of Zen 5, where prompts of 1,024 tokens and more are read by our kernel. {BUSY}",
        "serving_speed_zen5.jsonl",
    ),
    (
        "a Xeon with AMX",
        "Two threads of a shared Xeon, whose speed varied by a factor of two between rounds. vLLM's own attention and "
        f"ours of prompts multiply by AMX. {BUSY} They are of another Xeon and of older code.",
        "serving_speed_amx.jsonl",
    ),
    (
        "another Xeon with AMX",
        "Two threads of a Xeon, family 6, model 167, which was shared with other programs.",
        "serving_speed_amx167.jsonl",
    ),
)
"""CPUs of the tables of speed: name, text and record."""

CACHE_FILES = ("prompt_cache.jsonl", "prompt_cache_qwen.jsonl")


def prompt_caches() -> str:
    """Return the table of prompt caches: seconds of the processor, and in brackets of the clock."""
    found = rows(*CACHE_FILES)

    def seconds(row: dict, name: str) -> str:
        clock, processor = row[f"{name}_seconds"]
        return f"{processor:.2f} ({clock:.1f})"

    lines = []
    for row in found:
        spent = [seconds(row, part) for part in ("prefill", "pack", "save", "load")]
        about = model(row), f"{row['tokens']:,}"
        lines.append(
            (*about, f"`{row['recipe']}`", f"{row['file_bytes'] / 1e6:.1f}", f"{row['ratio_bf16']:.2f}", *spent)
        )
    columns = ("model", "tokens", "recipe", "file, MB", "smaller than bfloat16", "prefill, s", "packing, s")
    return markdown((*columns, "saving, s", "loading, s"), lines)


def storage_files() -> str:
    """Return the table of storage files beside others: bytes, and divergence over windows."""
    groups: dict[tuple[str, int, str, str], list[dict]] = {}
    for row in rows("storage.jsonl"):
        if "task" in row:
            continue
        groups.setdefault((model(row), row["tokens"], row["cache"], row.get("bases", "")), []).append(row)
    lines = []
    for (name, tokens, held, bases), found in groups.items():
        ratio = sum(row["bf16_bytes"] for row in found) / sum(row["file_bytes"] for row in found)
        kind = {"calibration": ", calibrated", "prompt": "", "layer": ", layer by layer"}.get(bases, "")
        shown = held if held.startswith(("storage", "bfloat16")) else cache(held)
        size = f"{sum(row['file_bytes'] for row in found) / len(found) / 1e6:.2f}"
        kl = "0" if held.startswith("bfloat16") else estimate(Estimate.of([row["kl"] for row in found]))
        lines.append((name, f"{tokens:,}", f"{shown}{kind}", size, f"{ratio:.2f}", kl, len(found)))
    columns = ("model", "tokens", "file", "MB", "smaller than bfloat16", "KL divergence", "windows")
    return markdown(columns, lines)


def storage_passkeys() -> str:
    """Return the table of passkeys that were found after loading."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows("storage.jsonl"):
        if row.get("task") == "passkey":
            found.setdefault((model(row), f"{row['tokens']:,}", row["cache"]), []).append(row["accuracy"])
    lines = [(*about, f"{sum(right):.0f} of {len(right)}") for about, right in found.items()]
    return markdown(("model", "tokens", "file", "found"), lines)


def storage_times() -> str:
    """Return the table of seconds of the processor to read, store and load a prompt, and of memory while loading."""
    lines = []
    for row in rows("storage.jsonl"):
        if row.get("task") == "times":
            read, save, load = (row[f"{name}_seconds"][1] for name in ("read", "save", "load"))
            memory = f"{row['held_bytes'] / 1e6:.1f}", f"{(row['load_peak_bytes'] - row['held_bytes']) / 1e6:.1f}"
            spent = f"{read:.2f}", f"{save:.2f}", f"{load:.2f}", f"{read / load:.1f}"
            lines.append((model(row), f"{row['tokens']:,}", row["cache"], *spent, *memory))
    columns = ("model", "tokens", "file", "read, s", "save, s", "load, s", "faster", "holds, MB", "more at peak, MB")
    return markdown(columns, lines)


def tables(*files: str) -> dict[str, str]:
    """Return the tables of records of engines."""
    return serving.tables([row | {"model": model({"model": "smollm2"} | row)} for row in rows(*files)])


def commands(file: str) -> str:
    """Return the commands that made a record, but for rows from before commands were kept."""
    kept = dict.fromkeys(row["command"] for row in rows(file) if "command" in row)
    return "\n".join(f"{PYTHON} benchmarks/{command}" for command in kept)


def page() -> Page:
    """Return the page."""
    made = tables(*FILES)
    command = f"{PYTHON} benchmarks/serving.py {{}} --out FILE"
    return Page(
        "Serving and prompt caches",
        "vLLM on CPUs with packed pages: speed, memory pressure, a thousand requests, agreement; prompt caches on "
        "disk.",
        "SmolLM2-135M in bfloat16, vLLM's CPU backend, two threads of Zen 4 where no other CPU is named. Nothing was "
        "served on a GPU.",
        (
            *(
                Section(f"Speed on {cpu}", text, tables(file)["speed"], [file], commands(file))
                for cpu, text, file in CPUS
            ),
            Section(
                "Under memory pressure",
                "The cache holds about a quarter of what runs at once natively, or as many bytes of packed pages. "
                "Prompts are random ids: 48 requests, 32 at once, or 16 conversations of 6 turns, 4 at once.",
                made["load"], FILES[1:2], command.format("load --recipe full"),
            ),
            Section(
                "A thousand requests",
                "Two threads of Zen 5, one of a Xeon for `amx`, and two of Zen 4 for `kivi` with `avx512bf16`, beside "
                "other work; float32, 8 to 200 prompt tokens, 4 to 48 new ones, "
                "48 at once; a third share a beginning, a tenth are repeated, 100 are closed early, and the server is "
                "killed and started again. At a tie two tokens' logits differ by less than 0.01. Kernels with "
                "`avx512bf16` round products of few queries to bfloat16, so how prompts are cut changes their logits "
                "by up to 0.14.",
                made["robust"], FILES[2:], command.format("robust --recipe turboquant:bits=4"),
            ),
            Section(
                "Capacity",
                "Tokens in 1 GiB, from vLLM's own line `CPU KV cache size`.",
                made["capacity"], FILES[:1], command.format("run --engine vllm --recipe full"),
            ),
            Section(
                "Agreement",
                "64 questions about passages of 512 tokens, answered greedily with 64 new tokens.",
                made["agreement"], FILES[:1], command.format("run --engine vllm --recipe full"),
            ),
            Section(
                "Divergence",
                "Next-token distributions over the prompts, read in steps of 128 tokens, so most of a prompt is read "
                "from packed pages.",
                made["divergence"], FILES[:1], command.format("kl --recipes turboquant:bits=4"),
            ),
            Section(
                "Prompt caches",
                "float32, one thread, medians. Seconds of the processor, in brackets of the clock: other work had the "
                "machine at a load of 12 for SmolLM2, and at .5 for Qwen. Loading checks every byte. Packing with "
                "`default` reads the prompt again, because its fit needs the prompt's queries.",
                prompt_caches(), CACHE_FILES, "python benchmarks/prompt_cache.py --out FILE",
            ),
            Section(
                "Storage files",
                "Files of a prompt, and the divergence of the next 256 tokens after loading: wikitext-2's test text, "
                "float32, 128 tokens at a time. `storage 1` has 1 bit per number and is loaded into exact tokens, "
                "`storage 1>default` into `default`. Calibrated on 65,536 tokens (Gemma: 16,384) of wikitext-2's "
                "training text and C4, but where a row says “layer by layer”. “By bytes” has all low bytes before all "
                "high ones. CacheGen (arXiv 2310.07240) publishes files 3.5 to 4.3 times smaller, and KVTC (ICLR 2026) "
                "up to 20 times.",
                storage_files(), ["storage.jsonl"],
                "tersekv calibrate --storage --text FILE --samples 64 --length 1024 --dtype bfloat16\n"
                "python benchmarks/storage.py --text FILE --model smollm2 --out FILE",
            ),
            Section(
                "Storage files: passkeys",
                "A passkey in a text, which is stored and loaded before the question is read.",
                storage_passkeys(), ["storage.jsonl"],
                "python benchmarks/storage.py --text FILE --passkeys 20 --prefix 4000 --out FILE",
            ),
            Section(
                "Storage files: time and memory",
                "Seconds of the processor, one thread of Zen 5 (AMD EPYC), float32, medians of 2 to 3 rounds. Products "
                "with the bases take most of the time to load exact tokens, packing most of that of `default`. Peak "
                "memory is that of the file, a basis and 2,304 tokens of a group of layers; it does not grow "
                "with a model's number of layers.",
                storage_times(), ["storage.jsonl"], "python benchmarks/storage.py --text FILE --times 3 --out FILE",
            ),
        ),
    )  # fmt: skip
