"""Latent attention (MLA): steps and prompts of published shapes, and divergence on small models trained here.

    python benchmarks/latent.py speed [--shape v3] [--tokens 8192] [--dtype bfloat16] [--recipe exact] [--out FILE]
    python benchmarks/latent.py prompt [the same options]
    python benchmarks/latent.py train FOLDER --text FILE [--steps 600]
    python benchmarks/latent.py divergence FOLDER --text FILE [--recipe default] [--out FILE]

No trained model with latent attention is small enough to be measured here. `speed` and `prompt` take a model of one
layer with the attention of a published model, random weights, 32 words and an MLP of 32 channels. `transformers` is
its own cache, `exact` absorbed attention with nothing packed, under `tersekv.compress` as the recipes are. A step
feeds one token to the model; ways take turns. `--shape minicpm3-whole` is a whole model. `prompt` reads all tokens
at once, and reports the time and the peak of memory above that of the model. Before steps a model with one head fills
the caches, because they hold latents alone.

`train` makes models of bytes in FOLDER, from fixed seeds. `divergence` reads the first bytes of each window exactly,
as `tersekv eval divergence` does, and scores the next ones 128 at a time. Beside recipes it rounds the latents of
transformers' own cache: `fp8` has one scale per token, `fp4` scales per 16 numbers in fp8 (NVFP4); rotated keys are
fp8 in both.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

import recorded
import tersekv
from measured.base import estimate
from recorded import Row, median_of, record, show
from tersekv.hf.cache import CompressedCache
from tersekv.lab.bench.memory import PeakMemory
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.evals.tasks.divergence import compare

OWN = "transformers"
SHAPES: dict[str, tuple[str, dict[str, int | None]]] = {
    "v2-lite": ("DeepseekV2", {"hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None}),
    "minicpm3": (
        "MiniCPM3",
        {
            "hidden_size": 2560, "num_attention_heads": 40, "q_lora_rank": 768, "kv_lora_rank": 256,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        },
    ),
    "v3": ("DeepseekV3", {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536}),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {
            "hidden_size": 2048, "num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
    ),
}  # fmt: skip
WHOLE = "minicpm3-whole"
WHOLE_FIELDS = {"num_hidden_layers": 62, "intermediate_size": 6400, "vocab_size": 73448}
SHAPES[WHOLE] = "MiniCPM3", SHAPES["minicpm3"][1] | WHOLE_FIELDS
"""Class and config of DeepSeek-V2-Lite, MiniCPM3-4B, DeepSeek-V3 and GLM-4.7-Flash, from their published configs.
The whole MiniCPM3-4B has random weights of 8 GB in bfloat16, and is run only if asked for.
Fields that are missing have the values of `LATENT`, which are those of DeepSeek-V2-Lite."""

LATENT: dict[str, int | None] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def one_layer(shape: str, dtype: torch.dtype, **changed: Any) -> Any:
    """Return a model of one layer with the attention of a published model, or a whole one."""
    name, fields = SHAPES[shape]
    small = {"num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 32, "max_position_embeddings": 65536}
    fields = LATENT | small | fields | {"mlp_layer_types": ["dense"], "first_k_dense_replace": 1} | changed
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    torch.manual_seed(0)
    made = getattr(tf, f"{name}ForCausalLM")
    return made._from_config(getattr(tf, f"{name}Config")(**fields), dtype=dtype).eval()


@torch.inference_mode()
def filled(shape: str, recipe: str, tokens: int, dtype: torch.dtype) -> Any:
    """Return a cache of the layer's latents of `tokens` random tokens: transformers' own, or of a recipe."""
    model = one_layer(shape, dtype, num_attention_heads=1, hidden_size=64)
    ids = torch.randint(0, 32, (1, tokens), generator=torch.Generator().manual_seed(1))
    if recipe == OWN:
        return model(ids, logits_to_keep=1).past_key_values
    with tersekv.compress(model, recipe):
        cache = CompressedCache(model, recipe)
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(shape: str, recipe: str, tokens: int, model: Any) -> Callable[[], float]:
    """Return a function that feeds a token to a model with a cache of `tokens` tokens and returns the milliseconds."""
    cache, token = filled(shape, recipe, tokens, model.dtype), torch.zeros(1, 1, dtype=torch.long)
    cache.config = model.config  # the model that filled it has fewer heads

    def step() -> float:
        with contextlib.nullcontext() if recipe == OWN else tersekv.compress(model, recipe):
            start = time.perf_counter()
            model(token, past_key_values=cache)
            return 1e3 * (time.perf_counter() - start)

    return step


@torch.inference_mode()
def speed(args: argparse.Namespace, shape: str, tokens: int, dtype: str) -> list[Row]:
    """Return the time of a step each way, in rounds until the slowest way has taken `--seconds`.

    A way that is not transformers' own takes eight steps in each turn.
    """
    model = one_layer(shape, getattr(torch, dtype))
    run = {recipe: steps(shape, recipe, tokens, model) for recipe in (OWN, *args.recipe)}
    rounds = max(3, min(25, round(1e3 * args.seconds / run[OWN]())))
    taken: dict[str, list[float]] = {recipe: [] for recipe in run}
    for turn in range(rounds + 1):
        for recipe, step in run.items():
            milliseconds = [step() for _ in range(1 if recipe == OWN else 8)]
            taken[recipe] += milliseconds if turn else []
    return [{"way": way, "ms": median_of(each), "steps": len(each)} for way, each in taken.items()]


@torch.inference_mode()
def prompt(args: argparse.Namespace, shape: str, tokens: int, dtype: str) -> list[Row]:
    """Return the time of a prompt each way, and the peak of memory above that of the model."""
    model = one_layer(shape, getattr(torch, dtype))
    ids = torch.randint(0, 32, (1, tokens), generator=torch.Generator().manual_seed(1))

    def read(recipe: str) -> None:
        if recipe == OWN:
            model(ids, logits_to_keep=1)
            return
        with tersekv.compress(model, recipe):
            model(ids, past_key_values=CompressedCache(model, recipe), logits_to_keep=1)

    times: dict[str, list[float]] = {way: [] for way in (OWN, *args.recipe)}
    peaks: dict[str, list[int]] = {way: [] for way in times}
    for turn in range(4):
        for way in times:
            with PeakMemory() as peak:
                start = time.perf_counter()
                read(way)
                taken = time.perf_counter() - start
            if turn:
                times[way].append(taken)
                peaks[way].append(peak.peak_bytes)
    return [
        {"way": way, "prompt_ms": median_of(each) * 1e3, "peak_bytes": min(peaks[way]), "rounds": len(each)}
        for way, each in times.items()
    ]


def run_shapes(args: argparse.Namespace) -> None:
    """Measure all shapes, lengths and types that were asked for."""
    torch.set_num_threads(args.threads)
    for shape in args.shape or [name for name in SHAPES if name != WHOLE]:
        for tokens in args.tokens or (2048, 8192, 32768):
            for dtype in args.dtype or ("float32", "bfloat16"):
                rows = args.measure(args, shape, tokens, dtype)
                about = {"bench": "latent", "threads": args.threads}
                record(args.out, about, [{"shape": shape, "tokens": tokens, "dtype": dtype, **row} for row in rows])
                show(f"{shape}, {tokens:,} tokens, {dtype}", tuple(rows[0]), (row.values() for row in rows))


# ---------------------------------------------------------------- small models

SMALL: dict[str, int | float | None] = {
    "vocab_size": 256, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "first_k_dense_replace": 3,
    "num_attention_heads": 6, "num_key_value_heads": 6, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2, 64 latents": ("DeepseekV2", {"kv_lora_rank": 64, "q_lora_rank": None}),
    "deepseek-v3, 128 latents": ("DeepseekV3", {"kv_lora_rank": 128, "q_lora_rank": 96}),
    "glm4-moe-lite, 128 latents": (
        "Glm4MoeLite", {"kv_lora_rank": 128, "q_lora_rank": 96, "mlp_layer_types": ["dense"] * 3}
    ),
}  # fmt: skip
"""Models of three dense layers that predict bytes."""

PREFIX, SCORED, CHUNK = 1024, 256, 128
BYTES = 4 * (PREFIX + SCORED)
"""Bytes of a step of training: 20 pieces of 256 in the first half of the steps, then 4 of the length of a window."""


def small(name: str) -> Any:
    """Return an untrained small model."""
    made, fields = TRAINED[name]
    torch.manual_seed(0)
    return getattr(tf, f"{made}ForCausalLM")(getattr(tf, f"{made}Config")(**SMALL | fields))


def train(args: argparse.Namespace) -> None:
    """Train the small models that FOLDER does not have yet, and save them."""
    torch.set_num_threads(args.threads)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    for name in TRAINED:
        if folder_of(args.folder, name).exists():
            continue
        model, made, losses = small(name), torch.Generator().manual_seed(0), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps, pct_start=0.1)
        for step in range(args.steps):
            length = 256 if step < args.steps / 2 else PREFIX + SCORED
            at = torch.randint(0, len(text) - length, (BYTES // length,), generator=made)
            ids = torch.stack([text[i : i + length] for i in at])
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            if len(losses) % 50 == 0:
                print(f"{name}: {len(losses)} steps, loss {statistics.mean(losses[-50:]):.3f} nats", flush=True)
        model.config.update({"trained": f"{args.steps} steps of {BYTES} bytes of {args.text.name}"})
        model.config.update({"train_loss": round(statistics.mean(losses[-50:]), 4)})
        model.save_pretrained(folder_of(args.folder, name))


def folder_of(folder: Path, name: str) -> Path:
    """Return the folder of a small model."""
    return folder / name.replace(", ", "-").replace(" ", "-")


def fp8(x: Tensor) -> Tensor:
    """Round to fp8 (e4m3) with one scale per token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def fp4(x: Tensor) -> Tensor:
    """Round to e2m1 with scales in e4m3 per 16 numbers, which are relative to one of all tokens (NVFP4)."""
    steps = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=x.dtype)
    parts = x.unflatten(-1, (-1, 16))
    whole = x.abs().max().clamp(min=1e-12) / (6 * 448)
    scale = (parts.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).to(x.dtype) * whole
    near = (parts.abs() / scale.clamp(min=1e-12)).unsqueeze(-1).sub(steps).abs().argmin(-1)
    return (steps[near] * parts.sign() * scale).flatten(-2)


ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    "fp8": (fp8, lambda rank: 8 + 32 / rank),
    "fp4": (fp4, lambda rank: 4.5),
}
"""Roundings of latents, and the bits of each number; the scale of a token is a float32."""


def read_rounded(model: Any, first: Tensor, parts: Sequence[Tensor], rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits of tokens, read through a cache whose latents are rounded as soon as they are cached."""
    cache, seen, found = tf.DynamicCache(config=model.config), 0, []
    for part in (first, *parts):
        found.append(model(part, past_key_values=cache).logits[0])
        for layer in cache.layers:
            layer.keys[:, :, seen:] = rounding(layer.keys[:, :, seen:])
            layer.values[:, :, seen:] = fp8(layer.values[:, :, seen:])
        seen = cache.get_seq_length()
    return torch.cat(found[1:])


@torch.inference_mode()
def divergence(args: argparse.Namespace) -> None:
    """Report how far the next byte's distribution is from that of the exact cache."""
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    for name in TRAINED:
        model = getattr(tf, f"{TRAINED[name][0]}ForCausalLM").from_pretrained(folder_of(args.folder, name)).eval()
        rank, rotated = model.config.kv_lora_rank, model.config.qk_rope_head_dim
        rows: list[Row] = []
        for i in range(args.windows):
            ids = data[None, i * (PREFIX + SCORED) : (i + 1) * (PREFIX + SCORED)]
            first, parts = ids[:, :PREFIX], ids[:, PREFIX:].split(CHUNK, dim=1)
            full = model(ids, use_cache=False).logits[0, PREFIX:]
            for way, (rounding, bits) in ROUNDED.items():
                logits = read_rounded(model, first, parts, rounding)
                held = (rank * bits(rank) + rotated * (8 + 32 / rotated)) / (rank + rotated)
                rows.append({"way": way, "window": i, "kl": compare(full, logits)[0].mean().item(), "bits": held})
            for recipe in args.recipe or DIVERGENCE:
                with tersekv.compress(model, recipe):
                    cache = CompressedCache(model, recipe)
                    model(first, past_key_values=cache)
                    bits = cache.footprint().bits_per_element
                    logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])
                rows.append({"way": recipe, "window": i, "kl": compare(full, logits)[0].mean().item(), "bits": bits})
        about = {"trained": model.config.trained, "train_loss": model.config.train_loss}
        about |= {"bench": "latent_divergence", "text": args.text.name, "model": name, "tokens": PREFIX}
        record(args.out, about, rows)
        lines = []
        for way in dict.fromkeys(row["way"] for row in rows):
            own = [row for row in rows if row["way"] == way]
            lines.append((way, f"{own[0]['bits']:.2f}", estimate(Estimate.of([row["kl"] for row in own]), 7)))
        show(f"{name} ({model.config.train_loss} nats per byte)", ("way", "bits", "KL, nats"), lines)


DIVERGENCE = ("uniform:bits=8", "safe", "kivi:bits=4", "turboquant:bits=4", "uniform:bits=4", "default",
              "trellis:bits=3,calibration=prompt", "trellis:bits=2,calibration=prompt", "kivi:bits=2")  # fmt: skip


def main() -> None:
    """Run as described above."""
    parser = recorded.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, measure in (("speed", speed), ("prompt", prompt)):
        one = commands.add_parser(name)
        one.add_argument("--shape", choices=SHAPES, action="append")
        one.add_argument("--tokens", type=int, action="append")
        one.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
        one.add_argument("--recipe", nargs="+", default=["exact", "kivi:bits=4", "turboquant:bits=4", "default"])
        one.add_argument("--threads", type=int, default=2)
        one.add_argument("--seconds", type=float, default=3, help="time for the slowest way")
        one.add_argument("--out", type=Path)
        one.set_defaults(run=run_shapes, measure=measure)
    for name, run in (("train", train), ("divergence", divergence)):
        one = commands.add_parser(name)
        one.add_argument("folder", type=Path, help="the small models")
        one.add_argument("--text", type=Path, required=True)
        one.set_defaults(run=run)
        if name == "train":
            one.add_argument("--steps", type=int, default=600)
            one.add_argument("--threads", type=int, default=1)
        else:
            one.add_argument("--windows", type=int, default=8)
            one.add_argument("--recipe", action="append")
            one.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
