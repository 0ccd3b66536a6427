"""Passkeys that a packed cache loses: by which tokens, which side, and which heads.

Tokens of a packed prompt are decoded, and some are replaced by exact ones. The likelihood of the answer then shows
which errors matter. Heads are tried in the order of the attention to the passkey's sentence that packing takes away.

    python benchmarks/lost_facts.py --out FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from recorded import Row, parser, record
from tersekv.hf.layer import compressed_layers
from tersekv.lab.evals.reader import Reader
from tersekv.lab.evals.tasks.passkey import Passkey
from tersekv.lab.evals.tokenise import split_ids
from tersekv.models import loading

RECIPE = "mixed:allot=prompt,bias_correction=full+trellis:bits=1.7,calibration=prompt"
TRIED = 8
"""Heads of a sample that are tried."""

Side = list[Tensor]
"""Keys, or values, of all layers."""


def sentence(tokenizer: Any, text: str) -> Tensor:
    """Return the mask of the tokens of the passkey's sentence."""
    first = text.index("The pass key is")
    last = text.index("is the pass key.", first) + len("is the pass key.")
    places = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    return torch.tensor([end > first and begin < last for begin, end in places])


class Question:
    """A question with its answer, asked after any keys and values of the prompt."""

    def __init__(self, model: Any, ids: Tensor, answer: int) -> None:
        self.model, self.ids, self.answer = model, ids, answer

    def nll(self, keys: Side, values: Side) -> float:
        """Return the negative log-likelihood of the answer per token, nats."""
        logits = self._read(keys, values).logits[0, -self.answer - 1 : -1].log_softmax(-1)
        return -float(logits[range(self.answer), self.ids[0, -self.answer :]].mean())

    def attention(self, keys: Side, values: Side, mask: Tensor) -> Tensor:
        """Return the attention to the tokens in a mask, mean over tokens of the answer, [layers, query heads]."""
        kept = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            weights = self._read(keys, values, output_attentions=True).attentions
        finally:
            self.model.set_attn_implementation(kept)
        at = slice(-self.answer - 1, -1)
        return torch.stack([layer[0, :, at, : len(mask)][..., mask].sum(-1).mean(-1) for layer in weights])

    def _read(self, keys: Side, values: Side, **options: Any) -> Any:
        cache = DynamicCache(config=self.model.config)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            cache.update(k, v, i)
        return self.model(self.ids, past_key_values=cache, **options)


def mixed(one: Side, other: Side, mask: Tensor) -> Side:
    """Return the tokens of one side where the mask [T] or [H, T] is true, and of the other elsewhere."""
    return [torch.where(mask[..., None], a, b) for a, b in zip(one, other, strict=True)]


@torch.no_grad()
def explained(reader: Reader, task: Passkey, length: int, number: int) -> Row:
    """Return the row of a sample."""
    case = task._case(reader, length, number)
    split, model = split_ids(reader.tokenizer, case.prompt, case.gold), reader.model
    exact, needle = DynamicCache(config=model.config), sentence(reader.tokenizer, case.prompt.context)
    model(split.context, past_key_values=exact, logits_to_keep=1)
    K, V = [layer.keys for layer in exact.layers], [layer.values for layer in exact.layers]
    with reader.reading():
        layers = compressed_layers(reader.read_context(split.context))
    k, v = (list(side) for side in zip(*(layer.store.decoded(torch.float32) for layer in layers), strict=True))
    gold = torch.as_tensor(split.gold).view(1, -1)
    asked = Question(model, torch.cat([split.rest, gold], dim=1), gold.shape[1])
    pairs = {
        "full cache": (K, V),
        "all tokens packed": (k, v),
        "only the sentence packed": (mixed(k, K, needle), mixed(v, V, needle)),
        "all but the sentence packed": (mixed(K, k, needle), mixed(V, v, needle)),
        "its keys exact": (mixed(K, k, needle), v),
        "its values exact": (k, mixed(V, v, needle)),
    }
    nll = {name: asked.nll(*pair) for name, pair in pairs.items()}
    before, after = (asked.attention(*pairs[name], needle) for name in ("full cache", "all tokens packed"))
    heads = K[0].shape[1]
    lost = (before - after).unflatten(1, (heads, -1)).amax(-1).flatten()
    found = [
        head_row(asked, layers, (K, V, k, v), needle, divmod(at, heads), (before, after))
        for at in lost.argsort(descending=True)[:TRIED].tolist()
    ]
    return {"sample": case.id, "details": case.cell, "nll": nll, "heads": sorted(found, key=lambda row: row["nll"])}


def head_row(
    asked: Question, layers: Sequence[Any], sides: Sequence[Side], needle: Tensor, at: tuple[int, int],
    attention: tuple[Tensor, Tensor],
) -> Row:  # fmt: skip
    """Return the row of a head: the likelihood with its tokens of the sentence exact, their rates, its attention."""
    (layer, head), (K, V, k, v) = at, sides
    heads = K[0].shape[1]
    own = needle & (torch.arange(heads) == head)[:, None]
    with_own = [[*b[:layer], mixed(a[layer : layer + 1], b[layer : layer + 1], own)[0], *b[layer + 1 :]]
                for a, b in ((K, k), (V, v))]  # fmt: skip
    store = layers[layer].store
    places = needle.nonzero().flatten() - store.packed_first
    high = store.ranked[0].is_high()[0, head, places[places < store.packed_tokens]]
    bits, rest, share = layers[layer].plan.rates[head].tolist()
    masses = [float(x[layer].view(heads, -1)[head].max()) for x in attention]
    return {
        "layer": layer, "head": head, "nll": asked.nll(*with_own), "bits": bits, "rest": rest, "share": share,
        "high": float(high.float().mean()), "attention": masses,
    }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each sample."""
    model, tokenizer = loading.load("smollm2", "float32")
    reader = Reader(model, tokenizer, RECIPE)
    task = Passkey(lengths=str(args.length), samples=max(args.sample) + 1)
    yield from (explained(reader, task, args.length, number) for number in args.sample)


def main() -> None:
    """Run, and add records to a file."""
    options = parser(__doc__)
    options.add_argument("--out", type=Path, required=True, help="file of records")
    options.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    options.add_argument("--sample", type=int, nargs="+", default=[6, 8, 14], help="numbers of the samples")
    args = options.parse_args()
    about = {"bench": "lost_facts", "model": "smollm2", "recipe": RECIPE}
    record(args.out, about, rows(args))


if __name__ == "__main__":
    main()
