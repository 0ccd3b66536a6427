"""Measure how far recipes' errors drown what tells a model's keys apart (`calibration/key_error.py`).

    python benchmarks/key_error.py --text FILE [--model NAME] [--name NAME] [--out benchmarks/records/key_error.jsonl]

Keys of 576 tokens: codecs are fitted on the first 512 of them without the sinks, and the last 128 of
these are coded. One row per recipe, with the figures of the layer that has the largest error.
"""

from __future__ import annotations

from pathlib import Path

import recorded
from recorded import record
from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.parallel import HeadShard
from tersekv.cache.rotary import Rotary
from tersekv.calibration.capture import capture
from tersekv.calibration.key_error import MOST_TOKENS, key_error
from tersekv.models import loading
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.transforms.rope import NO_ROPE

TOKENS, PREFIX, SINKS = 576, 512, 4
RECIPES = (
    "turboquant:bits=4", "turboquant:bits=3", "polarquant", "qjl", "int4", "uniform", "normalfloat", "kvarn",
    "kivi:bits=2", "kivi:bits=4", "kvquant:bits=3,calibration=prompt", "trellis:bits=2,calibration=prompt", "default",
)  # fmt: skip


def figures_of(codec, keys, rope):
    """Return the figures of keys [1, H, T, D] of one layer."""
    rotary = Rotary(rope)

    def tokens(first: int, stop: int) -> Tokens:
        angles = rotary.angles(first, stop - first, keys.device) if codec.needs_rope else None
        return Tokens(keys[:, :, first:stop], angles)

    fitted = coding.fitted(codec, [tokens(SINKS, PREFIX)], tokens(0, SINKS))
    first = PREFIX - MOST_TOKENS
    H, angles = keys.shape[1], rotary.angles(first, MOST_TOKENS, keys.device)
    every = HeadShard(0, H, H, lambda x: x)  # with it, keys are coded whatever their mean is
    return key_error(fitted, keys[:, :, first:PREFIX], angles, heads=every)


def main() -> None:
    parser = recorded.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", help="name of the model in the records")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, tokenizer = loading.load(options.model)
    ids = tokenizer(options.text.read_text()[:8000], return_tensors="pt").input_ids[:, :TOKENS]
    captured, ropes = capture(model, ids), cache_shape(model.config).ropes
    for recipe in RECIPES:
        plans = [Recipe.parse(recipe).plan(i, len(captured)).keys for i in range(len(captured))]
        layers = [
            figures_of(codec, kv.keys, rope or NO_ROPE) for codec, kv, rope in zip(plans, captured, ropes, strict=True)
        ]
        worst = max(layers, key=lambda one: one.error)
        row = {
            "recipe": recipe,
            "layer": layers.index(worst), "mean": round(worst.mean, 2), "error": round(worst.error, 3),
            "layers_warned_of": sum(one.is_large for one in layers), "layers": len(layers),
        }  # fmt: skip
        print(f"{recipe:36} layer {row['layer']:3}  mean {row['mean']:7.1f}  error {row['error']:6.2f}")
        about = {"bench": "key_error", "model": options.name or options.model, "text": options.text.name}
        record(options.out, about, [row])


if __name__ == "__main__":
    main()
