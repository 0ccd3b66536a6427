"""Feed caches with made tokens through `cache.update` and the attention function, without a model's
forward pass.

A story is a text of steps:

- `150`: one call of 150 tokens; `1x20`: 20 calls of one token;
- `w9`, `d9`: 9 tokens with attention weights, or with dropout so rare that it drops nothing;
- `again300`: 300 tokens that are read twice;
- `nan40`: 40 tokens with a NaN; `huge40`: 40 tokens, in layer 1 with 8 keys for which no scale is large enough;
- `crop7`, `crop`: remove 7 tokens, or all; `reset`: the same by another call;
- `rows1,0,1`: select batch rows, as beam search does; `repeat2`: repeat every row;
- `save`: save, load and go on with the loaded cache;
- `copy`: go on with a copy, after its original was fed; `pickle`: go on with a pickled copy;
- `offload`: move the cache to the CPU and back;
- `record`: let sliding windows evict at a crop only.

Keys, values and queries are small integers. So every product and every sum over them is exact,
whatever the order of a kernel.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers as tf
from torch import Tensor

from conftest import SHAPE
from golden_content import digest, positions, saved, signature, sizes, tokens, walk
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.segments import STEPS
from tersekv.calibration.find import calibrated_plans
from tersekv.errors import CacheError, UserError
from tersekv.hf.attention import attention_forward
from tersekv.hf.cache import CompressedCache
from tersekv.kernels import backends, softmax
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict
from tersekv.sizes.rate_allotment import allotted
from test_context_parallel import together

LAYERS = ["sliding_attention", "full_attention", "full_attention"]
WINDOW, TOKENS, ROWS, KV_HEADS, GROUPS = 48, 4096, 6, 2, 2
PADDING = [0, 37, 5]
"""Positions without a token at the start of each row of a ragged batch."""

SCALING = 1 / 64

ESTIMATED = [(100, 2), (300, 2, 0, 40), (5000, 1, 256, 100)]
"""Numbers of tokens, rows, tokens of a call and generated tokens, for which the bytes are estimated."""

Step = dict[str, Any]


class Case(NamedTuple):
    """One way to feed one recipe.

    ragged: the rows have left padding. dim: channels of a head. shares: "tokens" or "heads" if two
    processes share the cache. handles: attention reads packed bytes. exact: tokens and saved tensors do
    not depend on the CPU. hashed: steps have the hashes of what is held, and not attention alone.
    """

    recipe: str
    story: str
    dtype: str = "float32"
    ragged: bool = False
    dim: int = 32
    backend: str = ""
    shares: str = ""
    handles: bool = True
    exact: bool = True
    hashed: bool = True

    @property
    def name(self) -> str:
        """Return everything that the case is made of."""
        said = [self.recipe, self.story, self.dtype, "ragged" if self.ragged else "", str(self.dim)]
        said += [self.backend, self.shares, "" if self.handles else "decoded"]
        return " | ".join(word for word in said if word)


@functools.lru_cache
def model_of(dim: int) -> tuple[tf.PreTrainedModel, Any]:
    """Return a model with heads of `dim` channels, and its RoPE tables, which all caches share."""
    torch.manual_seed(0)
    config = tf.Gemma3TextConfig(**SHAPE, head_dim=dim, sliding_window=WINDOW, layer_types=LAYERS)
    return tf.Gemma3ForCausalLM(config).eval(), CompressedCache(config, "exact").ropes


@functools.lru_cache
def stream(layer: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values [ROWS, KV_HEADS, TOKENS, dim] and queries of one layer.

    The first tokens are four times as large as most, and some others three times.
    """
    generator = torch.Generator().manual_seed(1 + layer)

    def made(heads: int, most: int, every: int) -> Tensor:
        x = torch.randint(-most, most + 1, (ROWS, heads, TOKENS, dim), generator=generator)
        x[:, :, every - 1 :: every] *= 3
        x[:, :, :2] *= 4
        return x

    return made(KV_HEADS, 40, 37), made(KV_HEADS, 40, 53), made(KV_HEADS * GROUPS, 1, TOKENS + 1)


@mock.patch.object(softmax, "_fast_bfloat16", bool)  # bool() is False
def run(case: Case, folder: Path) -> list[Step]:
    """Return what was found after each step of a story. folder: for the files of saved caches.

    Products of many queries are in float32, as on a CPU without products of bfloat16, whose roundings differ too much.
    """
    if not case.shares:
        return Feeder(case, folder).run()

    Feeder(case._replace(story="100", shares=""), folder).run()  # makes tables that threads would make twice

    def of_rank(share: ContextParallel) -> list[Step]:
        return Feeder(case, folder, share).run()

    return [step for steps in together(2, of_rank) for step in steps]


class Feeder:
    """A cache that is fed. share: this process's part of it, or None."""

    def __init__(self, case: Case, folder: Path, share: ContextParallel | None = None) -> None:
        self.case, self.folder, self.share = case, folder, share
        self.model, self.ropes = model_of(case.dim)
        self.config = self.model.config
        self.rows = list(range(3 if case.ragged else 2))
        self.padding = PADDING if case.ragged else [0, 0]
        self.at = 0  # tokens of the stream that were fed
        self.cache: Any = None

    def run(self) -> list[Step]:
        """Return what was found after each step, or the class of the error that refused it."""
        found: list[Step] = []
        self.config._attn_implementation = "tersekv" if self.case.handles else "sdpa"
        with warnings.catch_warnings(), torch.no_grad(), backends.forced(self.case.backend or backends.chosen()):
            warnings.simplefilter("ignore")
            for word in ["new", *self.case.story.split()]:
                try:
                    self.outputs, self.steps, self.beside = [], [], {}
                    name, number = re.fullmatch(r"([a-z]+|1x|)([\d,]*)", word).groups()  # type: ignore[union-attr]
                    (getattr(self, f"do_{name}") if name not in CALLS else functools.partial(self.feed, name))(number)
                except (CacheError, UserError) as error:
                    found.append({"step": word, "refused": type(error).__name__})
                    if self.cache is None or not self.is_whole():
                        break
                    continue
                found.append({"step": word, **self.found()})
        return found

    def is_whole(self) -> bool:
        """True if all layers have the same tokens, after those of a refused call are removed."""
        counts = {layer.get_seq_length() for layer in self.cache.layers}
        try:
            if len(counts) > 1:
                self.cache.crop(min(counts) - max(counts))
        except CacheError:
            return False
        return True

    def found(self) -> Step:
        """Return the hashes of a step."""
        if not self.case.hashed:
            return {"attention": signature(self.outputs)} if self.outputs else {}
        self.look()
        found: Step = {"held": digest(self.places()), "parts": digest(self.steps), "bytes": self.bytes}
        found["tokens"] = digest(*(x for store in walk(self.cache) for x in tokens(store).values()))
        if self.outputs and self.case.handles:
            found["attention"] = signature(self.outputs)
        if self.outputs:
            found["bits" if self.case.handles else "read"] = digest(*self.outputs)
        return found | self.beside

    def look(self, places: bool = False) -> None:
        """Note what is held after a call: numbers of tokens and bytes, and positions if asked for."""
        size = sizes(self.cache)
        self.bytes = sum(size["parts"].values())
        self.steps.append([self.places() if places else "", size])

    def places(self) -> str:
        """Return the hash of the positions that layers hold, and of the lengths that they name."""
        lengths = [(layer.get_seq_length(), layer.get_mask_sizes(1)) for layer in self.cache.layers]
        held = [place for store in walk(self.cache) for place in positions(store).items()]
        return digest(lengths, *(x for place in held for x in place))

    # ------------------------------------------------------------------ steps

    def do_new(self, _: str) -> None:
        recipe = Recipe.parse(self.case.recipe)
        if recipe.policy().profile == "mixed":
            spread = torch.linspace(0, 1, STEPS + 1).pow(torch.tensor([[0.2], [0.2], [0.7]])[:, None])
            spread = spread.expand(3, KV_HEADS, -1).contiguous()
            spread[0] = -1
            plans = allotted({i: recipe.plan(i, 3) for i in range(3)}, spread, (self.case.dim,) * 2)
        else:
            plans = calibrated_plans(recipe, self.config, None)
        spread = self.share if self.case.shares == "tokens" else None
        if self.case.hashed and not self.share:
            shape = cache_shape(self.config)
            self.beside = {"estimate": [predict(shape, recipe, *fed).total_bytes for fed in ESTIMATED]}
        self.cache = CompressedCache.of(self.config, recipe, plans, spread, self.ropes)
        if self.case.shares == "heads":
            self.cache.heads = self.shard

    def shard(self, count: int, layer: int) -> HeadShard:
        """Return this process's heads."""
        assert self.share is not None
        gather = self.share.gather
        return HeadShard(self.share.rank * count, count, KV_HEADS, lambda x: torch.cat(gather(x), dim=1))

    def feed(self, kind: str, number: str) -> None:
        """Feed calls. kind: one of CALLS."""
        if kind != "1x":
            return self.call(kind, int(number))
        for i in range(int(number)):
            if i and self.case.hashed:
                self.look(i % 3 == 0)
            self.call("", 1)
        return None

    def call(self, kind: str, n: int) -> None:
        """Feed n tokens to all layers."""
        for layer in range(len(LAYERS)):
            keys, values, query = self.tokens(layer, n)
            if kind == "nan":
                keys[0, 0, -1, 0] = torch.nan
            if kind == "huge" and layer == 1:
                keys[:, :, :8] *= 1e6
            if kind == "again":
                keys, values, query = (torch.cat([x, x], dim=2) for x in (keys, values, query))
                self.cache.read_again = n
            got = self.cache.update(keys, values, layer)
            if self.case.handles:
                mask = self.mask(layer, keys.shape[2])
                options = {"dropout": 1e-30} if kind == "d" else {}
                if kind == "w":
                    options["output_attentions"] = True
                got = attention_forward(MODULE, query, *got, mask, scaling=SCALING, **options)
            self.cache.read_again = 0
            self.outputs += [x for x in got if x is not None]
        self.at += n

    def tokens(self, layer: int, n: int) -> list[Tensor]:
        """Return the next n keys, values and queries of a layer."""
        assert self.at + n <= TOKENS
        parts = [x[: len(self.rows), :, self.at : self.at + n] for x in stream(layer, self.case.dim)]
        if self.case.shares == "heads":
            assert self.share is not None
            parts = [x.chunk(2, dim=1)[self.share.rank] for x in parts]
        return [x.to(getattr(torch, self.case.dtype), copy=True) for x in parts]

    def mask(self, layer: int, n: int) -> Tensor | None:
        """Return the mask bool [B, 1, n, T] of new tokens as transformers makes it, None if it hides none."""
        past = self.cache.layers[layer].get_seq_length()
        window = WINDOW if LAYERS[layer].startswith("sliding") else None
        if not any(self.padding) and (n == 1 or not past) and (window is None or past + n <= window):
            return None
        query, key = torch.arange(past, past + n)[:, None], torch.arange(past + n)
        seen = (key <= query) & (query - key < (window or TOKENS))
        padding = torch.tensor(self.padding)[:, None, None]
        return (seen & (key >= padding))[:, None]

    def do_crop(self, number: str) -> None:
        self.cache.crop(-int(number) if number else -self.cache.get_seq_length())

    def do_rows(self, number: str) -> None:
        rows = [int(row) for row in number.split(",")]
        self.cache.reorder_cache(torch.tensor(rows))
        self.rows, self.padding = [self.rows[i] for i in rows], [self.padding[i] for i in rows]

    def do_repeat(self, number: str) -> None:
        self.cache.batch_repeat_interleave(int(number))
        self.rows, self.padding = ([x for x in held for _ in range(int(number))] for held in (self.rows, self.padding))

    def do_save(self, _: str) -> None:
        path = self.folder / f"{self.share.rank if self.share else 0}.safetensors"
        self.cache.save(path, model=self.model)
        self.beside = saved(path) if self.case.hashed else {}
        self.cache = CompressedCache.load(path, self.model)

    def do_copy(self, _: str) -> None:
        original, self.cache = self.cache, copy.deepcopy(self.cache)
        for n in (33, 1):
            self.cache, other = original, self.cache
            self.call("", n)
            self.cache = other
            self.at -= n

    def do_pickle(self, _: str) -> None:
        self.cache = pickle.loads(pickle.dumps(self.cache))
        self.cache.bind_model(self.model)

    def do_offload(self, _: str) -> None:
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    def do_record(self, _: str) -> None:
        for layer in self.cache.layers:
            layer.activate_past_recording()

    def do_reset(self, _: str) -> None:
        self.cache.reset()


CALLS = ("", "1x", "w", "d", "again", "nan", "huge")
MODULE = torch.nn.Module().eval()
MODULE.num_key_value_groups, MODULE.is_causal = GROUPS, True  # type: ignore[assignment]
