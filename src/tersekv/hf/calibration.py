"""What codecs learnt from a corpus, as a file: made by `tersekv calibrate`, used by caches.

A file is safetensors with tensors `layers.<i>.keys.<name>` and `layers.<i>.values.<name>`, shaped as in `Codec.fitted`
with batch dimension 1, and one metadata entry: JSON that says what they were made of. It is bound to the recipe (but
for its token policy), to the model, and by a hash to its own tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv import __version__
from tersekv.atomic_write import save_whole
from tersekv.codecs import Codec, methods
from tersekv.errors import UserError
from tersekv.hf.config import AttentionShape, attention_layers, text_config
from tersekv.hf.fingerprint import architecture, fingerprint
from tersekv.hf.models import cache_dir
from tersekv.recipe import PRE_ROPE, Coder, LayerPlan, Recipe, Term

log = logging.getLogger(__name__)
FORMAT = 1
ENTRY = "tersekv.calibration"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Made:
    """What a calibration was made of. recipe: its calibrated part, all options written out. architecture, model: see
    `fingerprint`. corpus: its name; length: tokens per sample; sinks: first tokens of each that were left out."""

    recipe: str
    architecture: str
    model: str
    corpus: str
    corpus_sha256: str
    samples: int
    length: int
    seed: int
    sinks: int
    tersekv: str = __version__


@dataclass(frozen=True)
class Calibration:
    """What codecs learnt from a corpus. tensors: by name, as in the file. path: where it was read from."""

    made: Made
    tensors: dict[str, Tensor] = dataclasses.field(repr=False)
    path: Path | None = None

    @property
    def digest(self) -> str:
        """16 hex digits that change with any tensor."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        said = {"format": FORMAT, "digest": self.digest, **dataclasses.asdict(self.made)}
        save_whole(self.tensors, path, {ENTRY: json.dumps(said, sort_keys=True)})

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read a file.

        Raises:
            UserError: no such file, no calibration, one that is damaged or of another format.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise UserError(f"there is no calibration at {path}; make one with `tersekv calibrate`")
        try:
            with safe_open(path, framework="pt") as file:
                entry = (file.metadata() or {}).get(ENTRY)
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}): calibrate again") from error
        said = _entry(entry, path)
        digest = said.pop("digest")
        kinds = {field.name: int if field.type == "int" else str for field in dataclasses.fields(Made)}
        if {name: type(value) for name, value in said.items()} != kinds:
            raise UserError(f"{path} is damaged: what it says of itself has other fields; calibrate again")
        found = Calibration(Made(**said), tensors, path)
        if found.digest != digest:
            raise UserError(f"{path} is damaged: its tensors are not those that were written; calibrate again")
        return found

    def about(self) -> dict[str, Any]:
        """What a record should know."""
        return {"digest": self.digest, **dataclasses.asdict(self.made)}

    def check(self, recipe: Recipe, config: PreTrainedConfig, model: str | None = None) -> None:
        """Raise UserError unless it was made for this recipe and model (config alone, or its fingerprint, too)."""
        where = self.path or "this calibration"
        part = calibrated_part(recipe)
        if part != self.made.recipe:
            raise UserError(f"{where} was made for recipe '{self.made.recipe}', not for '{part}'; {how_to(recipe)}")
        if architecture(config) != self.made.architecture:
            raise UserError(
                f"{where} was made for a model of another architecture than this {config.model_type}; {how_to(recipe)}"
            )
        if model is not None and model != self.made.model:
            raise UserError(f"{where} was made for a model with other weights; {how_to(recipe)}")

    def fitted(self, codec: Codec, layer: int, kv_heads: int, head_dim: int) -> Codec:
        """The codec of one side of a layer with what it learnt.

        Raises:
            UserError: tensors are missing, or are not those that such a codec learns.
        """
        start = f"layers.{layer}.{codec.side}."
        tensors = {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}
        where, learns = self.path or "this calibration", codec.learns(1, kv_heads, head_dim)
        for name, tensor in tensors.items():
            fault = learns[name].fault(tensor) if name in learns else f"is nothing that {codec.side} learn"
            if fault:
                raise UserError(f"{where} is wrong: {start}{name} {fault}; calibrate again")
        made = dataclasses.replace(codec, fitted=tensors)
        if made.needs_fit == "corpus":
            raise UserError(f"{where} holds too little for the {codec.side} of layer {layer}; calibrate again")
        if fault := made.learnt_fault(1, kv_heads, head_dim):
            raise UserError(f"{where} is wrong: {start.rstrip('.')} {fault}; calibrate again")
        return made


def _entry(entry: str | None, path: Path) -> dict[str, Any]:
    """What a file says of itself, without the format."""
    if entry is None:
        raise UserError(f"{path} is a safetensors file, but no calibration; give what `tersekv calibrate` wrote")
    try:
        said = dict(json.loads(entry))
        found = said.pop("format")
        said["digest"] = str(said["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it does not say what it is; calibrate again") from error
    if found != FORMAT:
        raise UserError(f"{path} has format {found}; this version reads format {FORMAT}: calibrate again")
    return said


# ---------------------------------------------------------------- recipes and places


def calibrated_part(recipe: Recipe) -> str:
    """The recipe without its token policy and with all options written out: what a calibration is bound to."""
    return _written(recipe, in_full=True)


def how_to(recipe: Recipe) -> str:
    """The end of a sentence that says how to get a calibration."""
    prompt = f", or use '{other}', which learns from the prompt" if (other := recipe.learning_from_prompt()) else ""
    make = f"make one with `tersekv calibrate --model MODEL --recipe '{recipe}'`, which later runs find"
    return f"{make} (elsewhere give calibration=FILE){prompt}"


def place(folder: Path, recipe: Recipe) -> Path:
    """The file of a recipe's calibration in a folder."""
    slug = re.sub(r"[^\w.=-]+", "_", _written(recipe, in_full=False))[:100]
    return folder / f"{slug}-{hashlib.sha256(calibrated_part(recipe).encode()).hexdigest()[:8]}{SUFFIX}"


def default_folder(model: str) -> Path:
    """Where calibrations of the model with this fingerprint are looked for."""
    return cache_dir() / "calibrations" / model[:16]


def _written(recipe: Recipe, in_full: bool) -> str:
    def term(one: Term) -> Term:
        method = methods()[one.name]
        defaults = {name: p.default for name, p in method.parameters.items()}
        defaults[PRE_ROPE] = method.build().keys.pre_rope
        options = defaults | dict(one.options)
        return Term(one.name, tuple(sorted((k, v) for k, v in options.items() if in_full or v != defaults[k])))

    def coder(one: Coder) -> Coder:
        return Coder(term(one.keys), one.values and term(one.values))

    return str(Recipe(coder(recipe.coder), layers=tuple((spec, coder(c)) for spec, c in recipe.layers)))


# ---------------------------------------------------------------- use


def attention_plans(recipe: Recipe, config: PreTrainedConfig) -> dict[int, LayerPlan]:
    """The plans of the layers that keep keys and values, by layer."""
    kinds = attention_layers(text_config(config))
    return {i: recipe.plan(i, len(kinds)) for i, kind in enumerate(kinds) if kind.type == "attention"}


def needs_corpus(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Whether some layer has yet to learn from a corpus."""
    plans = attention_plans(recipe, config).values()
    return any(codec.needs_fit == "corpus" for plan in plans for codec in (plan.keys, plan.values))


def calibrated_plans(
    recipe: Recipe, config: PreTrainedConfig, calibration: Calibration | str | Path | None
) -> dict[int, LayerPlan]:
    """The plans of the layers that keep keys and values, each with what its codecs learnt. calibration: a file, a
    folder of them, or one that was loaded; recipes that need none do without.

    Raises:
        UserError: none is given where the recipe needs one, or one that was made for something else.
    """
    plans, shape = attention_plans(recipe, config), AttentionShape.of(text_config(config))
    dims = {"keys": shape.key_dim, "values": shape.value_dim}
    if not needs_corpus(recipe, config):
        return plans
    if calibration is None:
        raise UserError(f"recipe '{recipe}' learns from a corpus first: {how_to(recipe)}")
    found = _loaded(calibration, recipe)
    found.check(recipe, config)

    def learnt(codec: Codec, layer: int) -> Codec:
        if codec.needs_fit != "corpus":
            return codec
        return found.fitted(codec, layer, shape.kv_heads, dims[codec.side])

    return {i: plan._replace(keys=learnt(plan.keys, i), values=learnt(plan.values, i)) for i, plan in plans.items()}


def calibration_for(
    model: PreTrainedModel, recipe: str | Recipe, calibration: Calibration | str | Path | None = None
) -> Calibration | None:
    """The calibration of a model for a recipe: the given one (a file, a folder of them, or one that was loaded), else
    the one in the default place; None where the recipe needs none.

    Raises:
        UserError: there is none, or the given one was made for something else.
    """
    recipe = Recipe.parse(recipe)
    if not needs_corpus(recipe, model.config):
        return None
    mark = fingerprint(model)
    if calibration is None:
        path = place(default_folder(mark), recipe)
        if not path.is_file():
            raise UserError(f"recipe '{recipe}' learns from a corpus first, and {path} is not there: {how_to(recipe)}")
        calibration = path
    found = _loaded(calibration, recipe)
    found.check(recipe, model.config, mark)
    return found


def _loaded(calibration: Calibration | str | Path, recipe: Recipe) -> Calibration:
    if isinstance(calibration, Calibration):
        return calibration
    path = Path(calibration).expanduser()
    path = place(path, recipe) if path.is_dir() else path
    log.info("%s uses the calibration %s", recipe, path)
    return Calibration.load(path)
