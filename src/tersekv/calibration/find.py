"""The calibration of a recipe for a model: where its files are, and what caches get from them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.cache.segments import STEPS
from tersekv.calibration import first_use
from tersekv.calibration.calibration import SUFFIX, Calibration
from tersekv.calibration.needs import (
    attention_plans,
    calibrated_part,
    calibrates_itself,
    how_to,
    needs_corpus,
    needs_profile,
    profile_of,
    written,
)
from tersekv.errors import UserError
from tersekv.models.config import AttentionShape, attention_layers, cache_shape, text_config
from tersekv.models.fingerprint import fingerprint
from tersekv.models.loading import cache_dir
from tersekv.recipe import LayerPlan, Recipe
from tersekv.sizes.rate_allotment import allotted

log = logging.getLogger(__name__)


def calibrated_plans(
    recipe: Recipe, config: PreTrainedConfig, calibration: Calibration | str | Path | None
) -> dict[int, LayerPlan]:
    """Return the plans of all layers with keys and values, each with its calibrated codecs.

    They also have what the policy needs: the importance of heads, or rates of each layer.

    calibration: a file, a folder of such files, or a loaded calibration; None if the recipe needs
    none.

    Raises:
        UserError: the recipe needs a calibration and got none, or one made for another recipe or
            model.
    """
    check_allotment(recipe, config)
    if not needs_corpus(recipe, config) and not needs_profile(recipe, config):
        return attention_plans(recipe, config)
    if calibration is None:
        itself = "give the model in place of its config, and it is calibrated at first use; or "
        itself = itself if calibrates_itself(recipe, config) else ""
        raise UserError(f"recipe '{recipe}' needs a calibration: {itself}{how_to(recipe)}")
    found = _found(recipe, config, calibration)
    plans = found.plans(recipe, config)
    if not needs_profile(recipe, config):
        return plans
    profile, text = found.heads or found, text_config(config)
    heads = len(attention_layers(text)), AttentionShape.of(text).kv_heads
    if recipe.policy().needs_scores:
        scores = profile.scores(*heads)
        return {i: plan._replace(scores=scores) for i, plan in plans.items()}
    shape = cache_shape(config)
    return allotted(plans, profile.scores(*heads, STEPS + 1), (shape.key_dim, shape.value_dim))


def calibration_for(
    model: PreTrainedModel, recipe: str | Recipe, calibration: Calibration | str | Path | None = None
) -> Calibration | None:
    """Return a model's calibration for a recipe; None if the recipe needs none.

    calibration: a file, a folder of such files, the Hub id of a repository with such files, or a
    loaded calibration. By default it is read from the model's default folder. If that has none and
    the recipe's codecs allow it, the model is calibrated now, see `first_use`.

    Raises:
        UserError: there is no calibration, or it was made for another recipe or model.
    """
    recipe = Recipe.parse(recipe)
    if not needs_corpus(recipe, model.config) and not needs_profile(recipe, model.config):
        return None
    mark = fingerprint(model)
    if calibration is None:
        calibration = default_folder(mark)
        missing = [path for path in _files(recipe, model.config, calibration) if not path.is_file()]
        check_allotment(recipe, model.config)
        if missing and calibrates_itself(recipe, model.config):
            for path in missing:
                first_use.calibrate_once(model, recipe, path)
        elif missing:
            raise UserError(f"recipe '{recipe}' needs a calibration, and {missing[0]} does not exist: {how_to(recipe)}")
    return _found(recipe, model.config, calibration, mark)


def check_allotment(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raise UserError if the layers of a recipe cannot get rates of their own, whatever is measured."""
    if not recipe.policy().allots or cache_shape(config).latent:  # of latents there is one head; the cache refuses
        return
    kinds, shape = attention_layers(text_config(config)), cache_shape(config)
    plans = {i: plan for i, plan in attention_plans(recipe, config).items() if kinds[i].window is None}
    some = torch.arange(STEPS + 1.0).expand(len(kinds), shape.kv_heads, -1)
    allotted(plans, some, (shape.key_dim, shape.value_dim))


def place(folder: Path, recipe: Recipe) -> Path:
    """Return the path of a recipe's calibration in a folder."""
    slug = re.sub(r"[^\w.=-]+", "_", written(recipe, in_full=False))[:100]
    return folder / f"{slug}-{hashlib.sha256(calibrated_part(recipe).encode()).hexdigest()[:8]}{SUFFIX}"


def found_in(folder: Path, recipe: Recipe, config: PreTrainedConfig) -> Path:
    """Return the path of the calibration in a folder that serves a recipe.

    It is the file at `place`, or any other that serves it. Without one, `place` is returned.
    """
    path = place(folder, recipe)
    if path.is_file():
        return path
    for other in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found = Calibration.load(other)
        except UserError:
            continue
        if found.serves(recipe, config):
            return other
    return path


def profile_place(folder: Path, profile: str) -> Path:
    """Return the path of a policy's measurement in a folder. profile: its name, see `TokenPolicy.profile`."""
    return folder / f"{profile}{SUFFIX}"


def default_folder(model: str) -> Path:
    """Return the default folder of calibrations for the model with this fingerprint."""
    return cache_dir() / "calibrations" / model[:16]


def _files(recipe: Recipe, config: PreTrainedConfig, path: Path) -> list[Path]:
    """Return the files that a recipe needs: of its codecs, then of its token policy.

    path: their folder, or the file if there is one.

    Raises:
        UserError: the recipe needs two files, and the path is one.
    """
    of_codecs = [found_in(path, recipe, config)] if needs_corpus(recipe, config) else []
    policy = profile_of(recipe) if needs_profile(recipe, config) else None
    files = [*of_codecs, *([profile_place(path, policy)] if policy else [])]
    if not path.is_file():
        return files if path.is_dir() or path.suffix != SUFFIX else [path] * len(files)
    if len(files) > 1:
        raise UserError(f"recipe '{recipe}' needs two calibrations, and {path} is one file; give the folder of both")
    return [path]


def _found(
    recipe: Recipe, config: PreTrainedConfig, calibration: Calibration | str | Path, model: str | None = None
) -> Calibration:
    """Return the calibration of a recipe that needs one, after checks. model: its fingerprint."""
    codecs, policy = needs_corpus(recipe, config), profile_of(recipe) if needs_profile(recipe, config) else None
    if isinstance(calibration, Calibration):
        found = calibration
    else:
        files = _files(recipe, config, _local(calibration))
        log.info("%s uses the calibration %s", recipe, ", ".join(map(str, files)))
        loaded = [_loaded(path, path.stat().st_mtime_ns if path.is_file() else 0) for path in files]
        found = loaded[0] if len(loaded) == 1 else dataclasses.replace(loaded[0], heads=loaded[1])
    if codecs:
        found.check(recipe, config, model)
    heads = found.heads if codecs else found
    if policy and heads is None:
        raise UserError(f"the calibration has no measurement that recipe '{recipe}' needs; {how_to(recipe)}")
    if policy and heads is not None:
        heads.check(recipe, config, model, policy)
    return found


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Calibration:
    """Return the calibration in a file, the same object until the file changes. So caches share it."""
    return Calibration.load(path)


def _local(place: str | Path) -> Path:
    """Return the file or folder; that of a Hub id is downloaded.

    Raises:
        UserError: there is no such repository on the Hub, or it cannot be reached.
    """
    path = Path(place).expanduser()
    if isinstance(place, Path) or path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", place) or path.suffix == SUFFIX:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(place, allow_patterns=[f"*{SUFFIX}"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"there is no file or folder {place}, and it is not on the Hub ({reason}): give a file, a folder or the id "
            "of a repository with calibrations"
        ) from error
