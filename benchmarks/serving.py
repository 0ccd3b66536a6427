"""vLLM's caches: agreement with the full cache, capacity, speed, load, and a thousand requests.

    python benchmarks/serving.py run --engine vllm --recipe turboquant:bits=4 --out FILE          # also: --recipe full.
    python benchmarks/serving.py kl --recipes turboquant:bits=4 --out FILE      # distributions.
    python benchmarks/serving.py speed --recipes full turboquant:bits=4 --shapes 8x400x129 --out FILE  # seconds.
    python benchmarks/serving.py load --recipe full --out FILE             # and --recipe turboquant:bits=4.
    python benchmarks/serving.py robust --recipe turboquant:bits=4 --out FILE                     # and --speculate.
    python benchmarks/serving.py table FILE...                             # print the tables of records.

`run --engine transformers` answers with transformers. Prompts are passages of Python's documentation
at seeded random places, each with a request to explain it, as one turn of a chat. Both engines get
the same ids. The dtype is bfloat16. vLLM chooses its own batch; transformers answers one prompt at a
time.

`kl` compares the next-token distributions over the prompts themselves. They are read in chunks of 128
tokens, so that later chunks read packed what earlier ones left.

`speed` has all engines in one process, which take turns: each reads the prompts, then each decodes 8
steps, until all have answered, so that other load on the machine meets all alike. A shape is
requests x prompt tokens x new tokens. Prompts are random ids, which greedy decoding continues without
stopping. Prefill is the sum of steps until the last request has its first token. Decode is the
median step after that, with all requests running, without the first one of a turn.

`load` and `robust` are described in `serving_server.py`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import serving_server
from measured.base import estimate
from recorded import markdown, parser, record
from tersekv.lab.evals import runs
from tersekv.lab.evals.tasks.base import Estimate

REQUEST = "Explain this text in your own words."
FULL = serving_server.FULL
TURN = 8
"""Decoding steps after which it is another engine's turn. On a shared machine, times change within seconds."""
MAX_MODEL_LEN = 2048
"""Maximum number of tokens per sequence. vLLM's capacity depends on it slightly."""


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
    about = {"vllm": vllm.__version__, "max_model_len": MAX_MODEL_LEN, "tokens_in_1_gib": capacity(llm)}
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
        answers, more = in_vllm(where, *job, calibration=args.calibration)
    else:
        answers, more = in_transformers(where, *job)
    seconds = round(time.perf_counter() - started, 1)
    about = {"engine": args.engine, "model": args.model, "prompt_tokens": args.tokens, "new_tokens": args.new_tokens}
    record(args.out, about, [{"recipe": args.recipe, "answers": answers, "seconds": seconds, **more}])
    print(f"{args.engine} {args.recipe}: {len(ids)} answers in {seconds} s")


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
    about = {"engine": "vllm", "chunk": args.chunk, "model": args.model, "prompt_tokens": args.tokens}
    record(args.out, about, [{"kl": found}])
    print(kl_table([{"kl": found}]))


def answer(llm: Any, ids: list[list[int]], new_tokens: int, seconds: list[float]) -> Iterator[None]:
    """Answer one batch. Append the seconds of prefill, then those of decoding steps with all requests running.

    Pauses after the prefill and after each `TURN` steps. The first step after a pause is not timed,
    because the CPU's caches hold what another engine read.
    """
    import vllm

    sampling = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    core, made = llm.llm_engine, {str(i): 0 for i in range(len(ids))}
    for name, row in zip(made, ids, strict=True):
        core.add_request(name, {"prompt_token_ids": row}, sampling)
    prefill, turn = 0.0, 0
    while core.has_unfinished_requests():
        begun, running = all(made.values()), all(n < new_tokens for n in made.values())
        started = time.perf_counter()
        outs = core.step()
        spent = time.perf_counter() - started
        for out in outs:
            made[out.request_id] = len(out.outputs[0].token_ids)
        if not begun:
            prefill += spent
            if all(made.values()):
                seconds.append(prefill)
                yield
        elif turn and running:
            seconds.append(spent)
        turn = (turn + 1) % TURN if begun else 0
        if begun and not turn:
            yield


def capacity(llm: Any) -> int:
    """Return the tokens that an engine's cache holds."""
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def speed(args: argparse.Namespace) -> None:
    """Measure all recipes in turns and append a record per shape."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import vllm

    from tersekv.models.loading import prepare

    torch.set_num_threads(args.threads)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    longest, most = max(p + n for _, p, n in shapes), max(b for b, _, _ in shapes)
    options = {"max_model_len": longest, "max_num_seqs": most, "enable_prefix_caching": False}
    engines = {recipe: engine(prepare(args.model), recipe, args.calibration, **options) for recipe in args.recipes}
    about = {"model": args.model, "rounds": args.rounds, "vllm": vllm.__version__}
    for requests, prompt, new in shapes:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 40000, (requests, prompt), generator=draw).tolist()
        times: dict[str, list[tuple[float, float]]] = {recipe: [] for recipe in engines}
        for llm in engines.values():
            list(answer(llm, [row[: args.warm_up] for row in ids], 3, []))  # first calls allocate memory
        for _ in range(args.rounds):
            spent: dict[str, list[float]] = {recipe: [] for recipe in engines}
            turns = [answer(llm, ids, new, spent[recipe]) for recipe, llm in engines.items()]
            for _ in itertools.zip_longest(*turns):  # one turn of each engine
                pass
            for recipe, (prefill, *decode) in spent.items():
                # short answers may end before the last one begins
                times[recipe].append((prefill, statistics.median(decode or [math.nan])))
        held = {recipe: capacity(llm) for recipe, llm in engines.items()}
        row = {"shape": [requests, prompt, new], "seconds": times, "tokens_in_1_gib": held}
        record(args.out, about, [row])
        print(speed_table([about | row]))


def speed_table(records: list[dict[str, Any]]) -> str:
    """Return a table: medians over rounds, and the median of the ratios to vLLM's own cache of a round."""
    lines = []
    for one in records:
        native = one["seconds"][FULL]
        for recipe, times in one["seconds"].items():
            spent = [statistics.median(t[i] for t in times) for i in (0, 1)]
            faster = [statistics.median(own[i] / t[i] for own, t in zip(native, times, strict=True)) for i in (0, 1)]
            shape = " x ".join(f"{n:,}" for n in one["shape"]) + (", busy" if "beside" in one else "")
            about = one["model"], shape, f"`{recipe}`"
            lines.append([*about, f"{spent[0]:.2f}", f"{1e3 * spent[1]:.1f}", *(f"{x:.2f}x" for x in faster)])
    columns = ("model", "requests x prompt x new", "cache", "prefill s", "decode ms per step", "prefill", "decode")
    return markdown(columns, lines)


def kl_table(records: list[dict[str, Any]]) -> str:
    """Return the table of divergences; ± is the standard error of the mean over prompts."""
    lines = []
    for one in records:
        for recipe, pairs in one["kl"].items():
            nats, top = zip(*pairs, strict=True)
            lines.append([f"`{recipe}`", estimate(Estimate.of(nats)), f"{statistics.mean(top):.1%}"])
    return markdown(("cache in vLLM", "KL divergence from the full cache, nats", "same most likely token"), lines)


def same(a: list[int], b: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def beside(record: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Compare a record's answers with another's to the same prompts. Return the cells of a table
    row.

    ± is the standard error of the mean.
    """
    pairs = [same(a, b) for a, b in zip(record["answers"], other["answers"], strict=True)]
    new_tokens = record["new_tokens"]
    whole = sum(n == new_tokens for n in pairs)
    mean = estimate(Estimate.of(pairs), 1)
    return [f"{whole} of {len(pairs)}", f"{mean} of {new_tokens}", f"{statistics.median(pairs):g}"]


def capacity_table(records: list[dict[str, Any]]) -> str:
    """Return the table of tokens that vLLM holds."""
    held = {r["recipe"]: r["tokens_in_1_gib"] for r in records if r.get("engine") == "vllm" and "answers" in r}
    rows = [[f"`{name}`", f"{n:,}", f"{n / held[FULL]:.2f}"] for name, n in held.items()]
    return markdown(("cache in vLLM", "tokens in 1 GiB", "times bfloat16"), rows)


def agreement_table(records: list[dict[str, Any]]) -> str:
    """Return the table of each engine's answers compared with its full cache's."""
    records = [r for r in records if "answers" in r]
    full = {r["engine"]: r for r in records if r["recipe"] == FULL}
    lines = []
    for r in records:
        if r["recipe"] != FULL:
            lines.append([r["engine"], f"`{r['recipe']}`", f"{r['engine']}, `{FULL}`", *beside(r, full[r["engine"]])])
    first, *others = full.values()
    lines += [[r["engine"], f"`{FULL}`", f"{first['engine']}, `{FULL}`", *beside(r, first)] for r in others]
    compared = ("same answer", "tokens before the first difference: mean", "median")
    return markdown(("engine", "cache", "compared with", *compared), lines)


TABLES = {
    "capacity": (capacity_table, "answers"),
    "agreement": (agreement_table, "answers"),
    "divergence": (kl_table, "kl"),
    "speed": (speed_table, "shape"),
    "load": (serving_server.load_table, "preemptions"),
    "robust": (serving_server.robust_table, "after_restart"),
}
"""Table by name, and a field that only its records have."""


def tables(records: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of the records by name."""
    found = {name: [one for one in records if field in one] for name, (_, field) in TABLES.items()}
    return {name: TABLES[name][0](of) for name, of in found.items() if of}


def table(args: argparse.Namespace) -> None:
    """Print the tables of the records."""
    print("\n\n".join(tables([one for path in args.records for one in runs.read(path)]).values()))


def main() -> None:
    """Parse the options and run the command."""
    options = parser(__doc__)
    commands = options.add_subparsers(required=True)
    go = commands.add_parser("run", help="answer the prompts with one recipe and append a record")
    go.add_argument("--engine", choices=("vllm", "transformers"), required=True)
    go.add_argument("--new-tokens", type=int, default=64)
    far = commands.add_parser("kl", help="compare next-token distributions and append a record")
    far.add_argument("--chunk", type=int, default=128, help="tokens of a prompt per step")
    for one in (go, far):
        one.add_argument("--prompts", type=int, default=64)
        one.add_argument("--tokens", type=int, default=512)
    fast = commands.add_parser("speed", help="measure recipes in turns and append a record per shape")
    fast.add_argument("--shapes", nargs="+", default=["8x400x129"])
    fast.add_argument("--rounds", type=int, default=3)
    fast.add_argument("--warm-up", type=int, default=400, help="prompt tokens of a batch that is not timed")
    fast.add_argument("--threads", type=int, default=3)
    busy, hard = serving_server.add_parsers(commands)
    for one in (go, busy, hard):
        one.add_argument("--recipe", required=True, help=f"a recipe, or {FULL!r}")
    for one in (far, fast):
        one.add_argument("--recipes", nargs="+", required=True, help=f"{FULL!r} is vLLM's own cache; speed needs it")
    for one, function in (
        (go, run),
        (far, kl),
        (fast, speed),
        (busy, serving_server.load),
        (hard, serving_server.robust),
    ):
        one.add_argument("--model", default="smollm2")
        one.add_argument("--calibration", help="calibration file of recipes with trellis, in vLLM")
        one.add_argument("--out", type=Path, required=True)
        one.set_defaults(run=function)
    show = commands.add_parser("table", help="print the tables of records")
    show.add_argument("records", type=Path, nargs="+")
    show.set_defaults(run=table)
    args = options.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
