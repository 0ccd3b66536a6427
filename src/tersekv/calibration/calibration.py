"""Calibration files: tensors measured once per model, written by `tersekv calibrate` and read by
caches.

There are two kinds. One holds what codecs fitted on a corpus. The other holds the importance of the
model's heads, for token policies that need it. A recipe may need both.

The format is safetensors. Tensors of codecs are named `layers.<i>.keys.<name>` and
`layers.<i>.values.<name>`, shaped as in `Codec.fitted` with batch dimension 1. Importance is one
tensor, `scores`, float32 [layers, KV heads]. One metadata entry, in JSON, says how they were made.
The file is bound to the model and to a hash of its tensors and of this metadata. It serves recipes whose codecs have
the options that it was made with, or the token policy that it names.

Options that only set the rate (`Codec.rate_options`, the bits of `trellis`) are applied when it is
loaded, so one file serves all rates.

This module does not import transformers, because LMCache's processes read files without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tersekv import __version__
from tersekv.atomic_write import save_whole
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.recipe import LayerPlan, Recipe
from tersekv.tensors import TensorSpec

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

FORMAT = 2
ENTRY = "tersekv.calibration"
SUFFIX = ".safetensors"
SCORES = "scores"


@dataclass(frozen=True)
class Made:
    """Provenance of a calibration.

    recipe: the part of the recipe that it serves, see the module. All options are written out.
    architecture, model: hashes, see `fingerprint`.
    corpus: name of the corpus; length: tokens per sample; sinks: number of tokens left out at the
    start of each sample.
    """

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
    """Tensors of a calibration file. tensors: by name, as in the file. path: the file it was read
    from. heads: the importance of heads, if the recipe needs that next to fitted codecs."""

    made: Made
    tensors: dict[str, Tensor] = dataclasses.field(repr=False)
    path: Path | None = None
    _fitted: dict[tuple[str, int], dict[int, LayerPlan]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    heads: Calibration | None = None

    @property
    def digest(self) -> str:
        """Hash of all tensors, 16 hex digits."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def _seal(self) -> str:
        """Hash of the metadata and of all tensors, 16 hex digits."""
        said = json.dumps(dataclasses.asdict(self.made), sort_keys=True)
        return hashlib.sha256(f"{said} {self.digest}".encode()).hexdigest()[:16]

    def serves(self, recipe: Recipe, config: PreTrainedConfig) -> bool:
        """True if it was made with the options of every codec that the recipe must calibrate."""
        from tersekv.calibration.needs import attention_plans

        return self._serves(attention_plans(recipe, config), lambda made: attention_plans(made, config))

    def _serves(self, plans: dict[int, LayerPlan], plans_of: Callable[[Recipe], dict[int, LayerPlan]]) -> bool:
        try:
            made = plans_of(Recipe.parse(self.made.recipe))
        except UserError:  # a recipe of another version
            return False
        return all(
            codec.needs_fit != "corpus" or codec.for_all_rates() == getattr(made[layer], codec.side).for_all_rates()
            for layer, plan in plans.items()
            for codec in (plan.keys, plan.values)
        )

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        said = {"format": FORMAT, "digest": self._seal, **dataclasses.asdict(self.made)}
        save_whole(self.tensors, path, {ENTRY: json.dumps(said, sort_keys=True)})

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read a calibration file.

        Raises:
            UserError: the file does not exist, is no calibration, is damaged, or has another
                format.
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
            raise UserError(f"{path} is damaged: its metadata has unexpected fields; calibrate again")
        found = Calibration(Made(**said), tensors, path)
        if found._seal != digest:
            raise UserError(f"{path} is damaged: the hash of its contents differs; calibrate again")
        return found

    def about(self) -> dict[str, Any]:
        """Return digest and provenance, for the records of benchmarks."""
        heads = {} if self.heads is None else {"heads": self.heads.about()}
        return {"digest": self.digest, **dataclasses.asdict(self.made), **heads}

    def check(
        self, recipe: Recipe, config: PreTrainedConfig, model: str | None = None, part: str | None = None
    ) -> None:
        """Raise UserError unless the calibration was made for this recipe and config.

        model: a fingerprint that must match, too, or None. part: the part of the recipe that it must
        serve, by default that of the codecs.
        """
        from tersekv.calibration.needs import calibrated_part, how_to
        from tersekv.models.fingerprint import architecture

        where = self._where
        if not (self.serves(recipe, config) if part is None else self.made.recipe == part):
            part = part or calibrated_part(recipe)
            raise UserError(f"{where} was made for recipe '{self.made.recipe}', not for '{part}'; {how_to(recipe)}")
        if architecture(config) != self.made.architecture:
            raise UserError(
                f"{where} was made for a model of another architecture than this {config.model_type}; {how_to(recipe)}"
            )
        if model is not None and model != self.made.model:
            raise UserError(f"{where} was made for a model with other weights; {how_to(recipe)}")

    def plans(self, recipe: Recipe, config: PreTrainedConfig) -> dict[int, LayerPlan]:
        """Return the plans of all layers with keys and values, each with its calibrated codecs.

        They are made once per recipe; caches of the same calibration share their tensors.

        Raises:
            UserError: tensors are missing, or do not fit a codec.
        """
        from tersekv.calibration.needs import attention_plans
        from tersekv.models.config import AttentionShape, text_config

        plans, shape = attention_plans(recipe, config), AttentionShape.of(text_config(config))
        key = str(recipe), len(plans)
        if key not in self._fitted:
            dims = {"keys": shape.key_dim, "values": shape.value_dim}
            self._fitted[key] = self._made_plans(plans, shape.kv_heads, dims)
        return dict(self._fitted[key])

    def plans_by_shape(self, recipe: Recipe, layers: int, kv_heads: int, head_dim: int) -> dict[int, LayerPlan]:
        """Return the plans of a model of which only the shape is known. All its layers have keys and values.

        Raises:
            UserError: it was made for other options or another shape.
        """

        def plans_of(one: Recipe) -> dict[int, LayerPlan]:
            return {i: one.plan(i, layers) for i in range(layers)}

        plans = plans_of(recipe)
        if not self._serves(plans, plans_of):
            raise UserError(
                f"{self._where} was made for recipe '{self.made.recipe}', which has other options than '{recipe}'; "
                f"make one with `tersekv calibrate --model MODEL --recipe '{recipe}'`"
            )
        most = max((int(name.split(".")[1]) for name in self.tensors if name.startswith("layers.")), default=-1)
        if most >= layers:
            raise UserError(f"{self._where} has tensors of layer {most}, and there are {layers} layers")
        return self._made_plans(plans, kv_heads, {"keys": head_dim, "values": head_dim})

    def _made_plans(self, plans: dict[int, LayerPlan], kv_heads: int, dims: dict[str, int]) -> dict[int, LayerPlan]:
        learning = [
            (layer, codec)
            for layer, plan in plans.items()
            for codec in (plan.keys, plan.values)
            if codec.needs_fit == "corpus"
        ]
        read = [self._read(codec, layer, kv_heads, dims[codec.side]) for layer, codec in learning]
        made = dict(plans)
        for (layer, _), codec in zip(learning, _shared(read), strict=True):
            if fault := codec.learnt_fault(1, kv_heads, dims[codec.side]):
                raise UserError(f"{self._where} is wrong: layers.{layer}.{codec.side} {fault}; calibrate again")
            plan = made[layer]
            made[layer] = plan._replace(keys=codec) if codec.side == "keys" else plan._replace(values=codec)
        return made

    def _read(self, codec: Codec, layer: int, kv_heads: int, head_dim: int) -> Codec:
        """Return the codec of one side of a layer with its tensors, without `rate_tensors`."""
        start = f"layers.{layer}.{codec.side}."
        tensors = {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}
        learns = codec.learns(1, kv_heads, head_dim)
        for name, tensor in tensors.items():
            fault = learns[name].fault(tensor) if name in learns else f"is not a tensor of this codec for {codec.side}"
            if fault:
                raise UserError(f"{self._where} is wrong: {start}{name} {fault}; calibrate again")
        tensors = {name: t for name, t in tensors.items() if name not in codec.rate_tensors}
        made = dataclasses.replace(codec, fitted=tensors)
        missing = [name for name in learns if name not in tensors and name not in codec.rate_tensors]
        if missing if codec.rate_tensors else made.needs_fit == "corpus":
            raise UserError(f"{self._where} lacks tensors for the {codec.side} of layer {layer}; calibrate again")
        return made

    def scores(self, *shape: int) -> Tensor:
        """Return what a token policy needs: float32 [layers, KV heads, …], −1 where it is not used.

        The importance of heads, or how attention spreads, with one more dimension.

        Raises:
            UserError: it is missing, or does not fit the model.
        """
        spec = TensorSpec(torch.float32, shape, low=-1)
        fault = "is missing" if SCORES not in self.tensors else spec.fault(self.tensors[SCORES])
        if fault:
            raise UserError(f"{self._where} is wrong: {SCORES} {fault}; calibrate again")
        return self.tensors[SCORES]

    @property
    def _where(self) -> Path | str:
        return self.path or "this calibration"


def _shared(codecs: Sequence[Codec]) -> list[Codec]:
    """Return the codecs after `share_across_layers` of their methods."""
    made = list(codecs)
    methods: dict[type[Codec], list[int]] = {}
    for i, codec in enumerate(codecs):
        methods.setdefault(type(codec), []).append(i)
    for method, places in methods.items():
        for i, codec in zip(places, method.share_across_layers([codecs[i] for i in places]), strict=True):
            made[i] = codec
    return made


def _entry(entry: str | None, path: Path) -> dict[str, Any]:
    """Return the metadata of a file, without the format.

    Raises:
        UserError: the metadata is missing or damaged, or has another format.
    """
    if entry is None:
        raise UserError(f"{path} is a safetensors file, but not a calibration; give a file from `tersekv calibrate`")
    try:
        said = dict(json.loads(entry))
        found = said.pop("format")
        said["digest"] = str(said["digest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: its metadata is not readable; calibrate again") from error
    if found != FORMAT:
        raise UserError(f"{path} has format {found}; this version reads format {FORMAT}: calibrate again")
    return said
