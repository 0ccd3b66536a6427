"""Choose a recipe for a model, a length and a memory.

Candidates, the closest to the full cache first, are `safe`, `default` and `small`.
Without a memory, `default` is chosen. With one, the first that fits beside the weights is. What the
candidates lose was measured on three models (docs/measured/presets.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tersekv.codecs.common.layer_choice import WIDE
from tersekv.errors import UserError
from tersekv.hf.facts import Known, bias_fault, load_known, most_tokens, of_config, refusals
from tersekv.units import LONGEST, human_bytes, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FEW_TOKENS = 1024
"""Length below which little is gained."""

LEAST_MEMORY = 10**8
"""Bytes below which a policy that evicts tokens is not proposed."""


CLOSE = (
    "on wikitext hardly a token changes on three models, and passkeys up to 4,096 tokens are found as before; on web "
    "pages more changes, so try your text"
)
"""Findings about `default`, from docs/measured/presets.md."""


class Choice(NamedTuple):
    """A recipe for a model, and the reason.

    recipe: as a recipe string.
    why: one sentence.
    tokens: length that it was chosen for.
    bytes: of the whole cache at that length. bytes_bf16: of a cache in bfloat16.
    peak: bytes of weights, cache and activations while the prompt is read at once, in bfloat16, and
        in chunks of 512 tokens; None where the config does not tell.
    others: the other candidates that the model supports, the closest to the full cache first.
    """

    recipe: str
    why: str
    tokens: int
    bytes: int
    bytes_bf16: int
    peak: tuple[int | None, int | None]
    others: tuple[str, ...]


def choose(
    model: str | PreTrainedModel | PreTrainedConfig, memory: str | None = None, context: int | str | None = None
) -> Choice:
    """Return the recipe that suits a model, from its config alone.

    model: a transformers model or its config, or a name as `tersekv estimate --model` takes it.
    memory: for weights and cache, for example "24GB". By default it is not limited.
    context: number of tokens, for example 32768 or "32k". By default 32,768, or the model's longest
        context if that is shorter.

    Raises:
        UserError: no recipe fits into the memory or supports the model, or a value is not valid.
    """
    from tersekv.sizes.estimate import CHUNK, predict

    if not isinstance(model, str) and not hasattr(getattr(model, "config", model), "get_text_config"):
        raise UserError(f"choose takes a model, its config or a name first, got {type(model).__name__}")
    known = load_known(model) if isinstance(model, str) else of_config(getattr(model, "config", model))
    if context is None:
        context = known.usual_tokens
    tokens = parse_tokens(context, "context") if isinstance(context, str) else context
    if type(tokens) is not int or not 1 <= tokens <= LONGEST:
        raise UserError(f"context={tokens!r} is not allowed; give 1 to {LONGEST:,} tokens, or a text like 32k")
    if memory is not None and not isinstance(memory, str):
        raise UserError(f"memory={memory!r} is not a text; write for example 24GB")
    candidates = _candidates(known)
    sizes = {name: predict(known.shape, recipe, tokens).total_bytes for name, recipe in candidates.items()}
    peaks = {name: known.peak(candidates[name], size, tokens, chunk=CHUNK) for name, size in sizes.items()}
    full = 2 * known.shape.elements(tokens)

    def made(name: str, why: str) -> Choice:
        others = tuple(other for other in candidates if other != name)
        if name == "default" and known.shape.key_dim >= WIDE:
            why += f"; heads of {known.shape.key_dim} channels have 4 bits"
        if known.longest and tokens > known.longest:
            why += f"; the model itself reads at most {known.longest:,} tokens"
        whole = known.peak(candidates[name], sizes[name], tokens, chunk=0)
        return Choice(name, why, tokens, sizes[name], full, (whole, peaks[name]), others)

    name = "default" if "default" in candidates else next(iter(candidates))
    little = tokens < FEW_TOKENS or sizes[name] >= full
    if memory is None:
        return made(name, f"little is gained at {tokens:,} tokens: the full cache is as good" if little else CLOSE)
    weights, limit = known.weights(), parse_bytes(memory, "memory")
    room = limit - weights
    if room <= 0:
        raise UserError(
            f"the weights take {human_bytes(weights)} in bfloat16, more than memory={memory}: give more, or a smaller "
            "model"
        )
    if little and full <= room:
        return made(name, f"little is gained at {tokens:,} tokens: the full cache fits, too")
    before = None
    for name, size in sizes.items():
        if size <= room and (peaks[name] or 0) <= limit:
            left = f"{human_bytes(room - size)} of {human_bytes(room)} beside the weights in bfloat16 are left"
            if before is None:
                beside = f"; a cache in bfloat16, {human_bytes(full)}, would fit, too" if full <= room else ""
                return made(name, f"the closest to the full cache, and it fits: {left}{beside}")
            needs = f"{before} needs {human_bytes(sizes[before])}"
            if sizes[before] <= room:
                needs = f"reading the prompt in chunks of {CHUNK} with {before} needs {human_bytes(peaks[before] or 0)}"
            return made(name, f"the closest to the full cache that fits: {needs}")
        before = name
    name, least = min(sizes.items(), key=lambda item: item[1])
    if least <= room:
        raise UserError(
            f"{name} fits beside the weights, but reading {tokens:,} tokens in chunks of {CHUNK} needs "
            f"{human_bytes(peaks[name] or 0)}, more than memory={memory}: give more memory or a shorter context"
        )
    held = most_tokens(lambda n: predict(known.shape, candidates[name], n).total_bytes, room, tokens)
    evicts = f", or a policy that evicts tokens, for example h2o:memory={room // 10**6}MB+kivi:bits=4"
    raise UserError(
        f"no recipe that keeps every token fits: {name} needs {human_bytes(least)} for {tokens:,} tokens, and "
        f"{human_bytes(room)} are left beside the weights in bfloat16, enough for {held:,}; give a shorter context or "
        "more memory"
        f"{evicts * (room >= LEAST_MEMORY)}"
    )


def _candidates(known: Known) -> dict[str, Any]:
    """Return the recipes that the model supports and whose keys it does not ruin, by name, the closest first."""
    from tersekv.recipe import Recipe

    names = ("default", "small") if known.shape.key_dim >= WIDE else ("safe", "default", "small")
    found, biases = {}, bool(known.key_bias())
    for name in names:
        recipe = Recipe.parse(name)
        if not refusals(recipe, known.config) and not (biases and bias_fault(recipe, known.shape)):
            found[name] = recipe
    if not found:
        raise UserError("none of the usual recipes fits this model: `tersekv doctor MODEL` says why")
    return found
