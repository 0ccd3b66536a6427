"""Agreement of packed and full caches in vLLM and transformers, and vLLM's token capacity.

It makes the tables of docs/serving.md from greedy answers.

    python benchmarks/serving.py run --engine vllm --recipe turboquant:bits=4 --out FILE          # also: --recipe full
    python benchmarks/serving.py kl --recipes turboquant:bits=4 --out FILE

`run --engine transformers` answers with transformers; `table FILE… --into docs/serving.md` writes the tables.

Prompts are passages of Python's documentation at seeded random places, each with a request to
explain it, as one turn of a chat. Both engines get the same ids. The dtype is bfloat16. vLLM
chooses its own batch; transformers answers one prompt at a time.

`kl` compares the next-token distributions over the prompts themselves. They are read in chunks of 128
tokens, so that later chunks read packed what earlier ones left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

REQUEST = "Explain this text in your own words."
FULL = "full"
MAX_MODEL_LEN = 2048
"""Maximum number of tokens per sequence. vLLM's capacity depends on it slightly."""

BEGIN, END = "<!-- agreement: made by benchmarks/serving.py -->", "<!-- end of agreement -->"


def prompts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """Return the ids of `count` prompts with passages of about `tokens` tokens."""
    from tersekv.calibration.text import pydoc_document, question_prompt

    texts = [question_prompt(tokenizer, pydoc_document(tokenizer, tokens, seed=i), REQUEST) for i in range(count)]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def engine(model: str, recipe: str, calibration: str | None, **options: Any) -> Any:
    """Return an engine of vLLM with a recipe. calibration: given to recipes with trellis."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm

    section = {"recipe": recipe} | ({"calibration": calibration} if calibration and "trellis" in recipe else {})
    extra = {} if recipe == FULL else {"tersekv": section}
    options = {"max_model_len": MAX_MODEL_LEN} | options
    return vllm.LLM(model, dtype="bfloat16", enforce_eager=True, additional_config=extra, **options)


def in_vllm(
    model: str, recipe: str, ids: list[list[int]], new_tokens: int, calibration: str | None = None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Answer with vLLM. Return the answers and what the engine reports."""
    llm = engine(model, recipe, calibration)
    import vllm

    sampling = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
    held = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    about = {"vllm": vllm.__version__, "max_model_len": MAX_MODEL_LEN, "tokens_in_1_gib": held}
    return [list(out.outputs[0].token_ids) for out in outs], about


def in_transformers(
    model: str, recipe: str, ids: list[list[int]], new_tokens: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Answer with transformers. Return the answers and the version."""
    import contextlib

    import transformers

    import tersekv
    from tersekv.models.loading import load

    network, _ = load(model, dtype="bfloat16")
    answers = []
    for row in ids:
        with contextlib.nullcontext() if recipe == FULL else tersekv.compress(network, recipe):
            out = network.generate(
                torch.tensor([row]), do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens
            )
        answers.append(out[0, len(row) :].tolist())
    return answers, {"transformers": transformers.__version__}


def run(args: argparse.Namespace) -> None:
    """Answer the prompts and append a record."""
    from tersekv.models.loading import load_tokenizer, resolve

    ids = prompts(load_tokenizer(args.model), args.prompts, args.tokens)
    started = time.perf_counter()
    where, job = resolve(args.model), (args.recipe, ids, args.new_tokens)
    if args.engine == "vllm":
        answers, about = in_vllm(where, *job, calibration=args.calibration)
    else:
        answers, about = in_transformers(where, *job)
    record = {
        "engine": args.engine, "recipe": args.recipe, "model": args.model, "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens, "answers": answers, "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__, "machine": platform.machine(), **about,
    }  # fmt: skip
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{args.engine} {args.recipe}: {len(ids)} answers in {record['seconds']} s")


def prompt_logits(llm: Any, ids: list[int], first: int) -> torch.Tensor:
    """Return the log-probabilities after the tokens from `first` on of one prompt, float32 [n, vocabulary]."""
    import vllm

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    compute, held = type(model).compute_logits, []
    model.compute_logits = lambda *args, **named: held.append(compute(model, *args, **named)) or held[-1]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    del model.compute_logits
    rows = torch.cat([x for x in held if len(x) > 1])[first:]
    return torch.log_softmax(rows.float(), dim=-1)


def kl(args: argparse.Namespace) -> None:
    """Compare the distributions of recipes with the full cache's and append a record."""
    from tersekv.models.loading import load_tokenizer, resolve

    ids = prompts(load_tokenizer(args.model), args.prompts, args.tokens)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": args.chunk, "max_num_seqs": 2}
    llms = {r: engine(resolve(args.model), r, args.calibration, **options) for r in (FULL, *args.recipes)}
    found: dict[str, list[list[float]]] = {recipe: [] for recipe in args.recipes}
    for row in ids:
        own = prompt_logits(llms[FULL], row, args.chunk)
        for recipe in args.recipes:
            other = prompt_logits(llms[recipe], row, args.chunk)
            divergence = (own.exp() * (own - other)).sum(-1).mean()
            found[recipe].append([float(divergence), float((own.argmax(-1) == other.argmax(-1)).float().mean())])
    record = {
        "engine": "vllm", "kl": found, "chunk": args.chunk, "model": args.model, "prompt_tokens": args.tokens,
        "torch": torch.__version__, "machine": platform.machine(),
    }  # fmt: skip
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print("\n".join(kl_rows([record])))


def kl_rows(records: list[dict[str, Any]]) -> list[str]:
    """Return the table of divergences; ± is the standard error of the mean over prompts."""
    lines = ["| cache in vLLM | KL divergence from the full cache, nats | same most likely token |", "|---|---|---|"]
    for record in records:
        for recipe, pairs in record["kl"].items():
            nats, top = zip(*pairs, strict=True)
            error = statistics.stdev(nats) / len(nats) ** 0.5
            lines.append(f"| `{recipe}` | {statistics.mean(nats):.4f} ± {error:.4f} | {statistics.mean(top):.1%} |")
    return lines


def same(a: list[int], b: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def beside(record: dict[str, Any], other: dict[str, Any]) -> str:
    """Compare a record's answers with another's to the same prompts. Return the cells of a table
    row.

    ± is the standard error of the mean.
    """
    pairs = [same(a, b) for a, b in zip(record["answers"], other["answers"], strict=True)]
    new_tokens = record["new_tokens"]
    whole = sum(n == new_tokens for n in pairs)
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{whole} of {len(pairs)} | {mean:.1f} ± {error:.1f} of {new_tokens} | {statistics.median(pairs):g}"


def rows(records: list[dict[str, Any]]) -> list[str]:
    """Return two tables: vLLM's token capacity, and each engine's answers compared with its full
    cache's."""
    divergences, records = [r for r in records if "kl" in r], [r for r in records if "kl" not in r]
    full = {r["engine"]: r for r in records if r["recipe"] == FULL}
    lines = ["| cache in vLLM | tokens in 1 GiB | times bfloat16 |", "|---|---|---|"]
    for r in records:
        if r["engine"] == "vllm":
            held = r["tokens_in_1_gib"]
            lines.append(f"| `{r['recipe']}` | {held:,} | {held / full['vllm']['tokens_in_1_gib']:.2f} |")
    lines += [
        "",
        "| engine | cache | compared with | same answer | tokens before the first difference: mean | median |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for r in records:
        if r["recipe"] != FULL:
            agree = beside(r, full[r["engine"]])
            lines.append(f"| {r['engine']} | `{r['recipe']}` | {r['engine']}, `{FULL}` | {agree} |")
    first, *others = full.values()
    lines += [f"| {r['engine']} | `{FULL}` | {first['engine']}, `{FULL}` | {beside(r, first)} |" for r in others]
    return lines + (["", *kl_rows(divergences)] if divergences else [])


def table(args: argparse.Namespace) -> None:
    """Print the tables, or write them between their markers."""
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    write_between(args.into, BEGIN, END, rows(records))


def write_between(page: Path | None, begin: str, end: str, lines: list[str]) -> None:
    """Write lines into a page between two markers, or print them without a page."""
    text = "\n".join(lines)
    if page is None:
        print(text)
        return
    before = page.read_text()
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise SystemExit(f"{page} has no place for the tables: add the lines\n{begin}\n{end}\n")
    head, tail = before.split(begin)[0], before.split(end)[1]
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def main() -> None:
    """Parse the options and run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    go = commands.add_parser("run", help="answer the prompts with one recipe and append a record")
    go.add_argument("--engine", choices=("vllm", "transformers"), required=True)
    go.add_argument("--recipe", required=True, help=f"a recipe, or {FULL!r}")
    go.add_argument("--new-tokens", type=int, default=64)
    go.set_defaults(run=run)
    far = commands.add_parser("kl", help="compare next-token distributions and append a record")
    far.add_argument("--recipes", nargs="+", required=True)
    far.add_argument("--chunk", type=int, default=128, help="tokens of a prompt per step")
    far.set_defaults(run=kl)
    for one in (go, far):
        one.add_argument("--model", default="smollm2")
        one.add_argument("--calibration", help="calibration file of recipes with trellis, in vLLM")
        one.add_argument("--prompts", type=int, default=64)
        one.add_argument("--tokens", type=int, default=512)
        one.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("table", help="print or write the tables of records")
    show.add_argument("records", type=Path, nargs="+")
    show.add_argument("--into", type=Path)
    show.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
