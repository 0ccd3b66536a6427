"""Calibration at the first use of a recipe with a model.

It needs no corpus. Codecs that are fitted on sums are calibrated on a text that the model writes itself
(`own_text`); which text hardly matters for them (docs/measured/trellis.md). The spread of
attention, for `mixed` with `allot=model`, is measured on the text behind Python's `help()`: reading takes
seconds where writing takes minutes, and a real text is better. Without the model's tokenizer it is
measured on the model's own text, too. The file is kept in the model's default folder, and a stopped run
continues. The environment variable TERSEKV_CALIBRATE=never forbids it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import tqdm

from tersekv import steps
from tersekv.atomic_write import save_whole
from tersekv.calibration.attention_spread import profile_on
from tersekv.calibration.calibrate import Calibrator, Corpus, locked
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.needs import how_to, profile_of
from tersekv.calibration.own_text import NAME, Begun, own_text
from tersekv.calibration.text import pydoc_text
from tersekv.errors import UserError
from tersekv.models.config import text_config
from tersekv.recipe import Recipe

log = logging.getLogger(__name__)

SAMPLES, LENGTH, SINKS = 12, 512, 1
"""Samples of the model's own text, tokens of each, and first tokens that are left out."""

READ = 3
"""Samples of the text behind `help()` that attention is measured on."""

VARIABLE = "TERSEKV_CALIBRATE"
ALLOWED = "first-use", "never"
PROBE = 256
"""Tokens of the pass that is timed, to say beforehand how long a calibration takes."""

PASSES, PASSES_OF_PROFILE = 6, 3
"""Work of a calibration in forward passes over its text: a pass for means, one with gradients, which costs
three, and fitting; or a pass, its ranking and a second reading."""

STEPS = {"means": "reading the text", "samples": "computing gradients", "sums": "fitting"}
UNITS = {"means": "samples", "samples": "samples", "sums": "sides of layers"}


def calibrate_once(model: PreTrainedModel, recipe: Recipe, path: Path) -> Calibration:
    """Calibrate a model on its own text and write the file; if another process does so, wait for it.

    Raises:
        UserError: it is forbidden, or the model cannot write a text.
    """
    _check(model, recipe, path)
    with locked(path.parent, wait=True):
        if path.is_file():
            return Calibration.load(path)
        read = _pydoc(model) if path.stem == profile_of(recipe) else None
        text = f"{SAMPLES} × {LENGTH} tokens that the model writes itself"
        if read is not None:
            text = f"{READ} × {LENGTH} tokens of the text behind Python's help()"
        with _evaluating(model):
            minutes = usual_minutes(model, read is None, path.stem == profile_of(recipe))
            warnings.warn(
                f"{type(model).__name__} has no calibration for '{recipe.name}' yet; it is made once, in about "
                f"{minutes} min, on {text}, and kept in {path}. Ctrl-C stops it, and the next run goes on from there. "
                f"To do without: {_way_out(recipe)}. {VARIABLE}=never forbids it",
                stacklevel=3,
            )
            start = time.monotonic()
            try:
                found = _calibrated(model, recipe, path, read)
            except KeyboardInterrupt:
                warnings.warn(
                    f"the calibration was stopped; what is done is kept in {path.parent}, and the next run goes on "
                    "from there",
                    stacklevel=3,
                )
                raise
        log.info("calibrated in %.0f s", time.monotonic() - start)
        return found


def usual_minutes(model: PreTrainedModel, writes: bool, profile: bool) -> int:
    """Return about how many minutes a calibration takes, rounded up.

    One pass of a few tokens is timed. writes: the model writes its text. profile: attention is measured.
    """
    ids = torch.zeros(SAMPLES, 1, dtype=torch.int64, device=model.device)
    step, token = _seconds(model, ids), _seconds(model, ids[:1].expand(1, PROBE)) / PROBE
    tokens = (READ if not writes else SAMPLES) * LENGTH
    seconds = token * tokens * (PASSES_OF_PROFILE if profile else PASSES)
    return math.ceil((seconds + (step * LENGTH if writes else 0)) / 60)


@torch.inference_mode()
def _seconds(model: PreTrainedModel, ids: Tensor) -> float:
    def run() -> float:
        start = time.perf_counter()
        model.forward(input_ids=ids, use_cache=False).logits[0, -1, 0].item()
        return time.perf_counter() - start

    return min(run(), run())


def _way_out(recipe: Recipe) -> str:
    """Return how the measurement at first use is avoided."""
    policy, plus, rest = str(recipe).partition("+")
    other = str(recipe.learning_from_prompt() or recipe)
    if profile_of(recipe):
        other = f"{policy.replace('allot=model', 'allot=layer')}{plus}{rest}"
    make = "`tersekv calibrate` with this recipe makes it beforehand"
    return f"use '{other}', which needs none; {make}" if other != str(recipe) else make


def _check(model: PreTrainedModel, recipe: Recipe, path: Path) -> None:
    asked = os.environ.get(VARIABLE, ALLOWED[0])
    if asked not in ALLOWED:
        raise UserError(f"{VARIABLE}={asked} is not allowed; choose {' or '.join(ALLOWED)}")
    reason = None
    if asked == "never":
        reason = f"{VARIABLE}=never forbids making it now"
    elif model.config.is_encoder_decoder or not model.can_generate():
        reason = f"{type(model).__name__} cannot write a text to calibrate on"
    elif getattr(model, "_device_mesh", None) is not None:
        reason = "a model split over processes is not calibrated; calibrate it in one process first"
    if reason is not None:
        raise UserError(f"recipe '{recipe}' needs a calibration, {path} does not exist, and {reason}: {how_to(recipe)}")


def _calibrated(model: PreTrainedModel, recipe: Recipe, path: Path, read: Corpus | None) -> Calibration:
    text = path.with_name(f"{NAME.replace(' ', '-')}-{SAMPLES}x{LENGTH}.ids")
    corpus = _written(model, text) if read is None else read
    if path.stem == profile_of(recipe):
        with steps.step("measuring attention", len(corpus.windows), "samples", _bar) as done:
            parts = path.with_suffix(".parts")
            kept = _kept(parts)

            def keep(sums: Sequence[Tensor]) -> None:
                _keep(parts, {"sums": torch.stack(list(sums)), "windows": corpus.windows})

            same = torch.equal(kept.get("windows", torch.empty(0)), corpus.windows)
            profile_on(model, recipe, corpus, done, list(kept["sums"]) if same else (), keep).save(path)
        parts.unlink(missing_ok=True)
        text.unlink(missing_ok=True)
        return Calibration.load(path)
    run = Calibrator(model, [recipe], corpus, SINKS)
    with contextlib.ExitStack() as latest:
        shown: dict[str, steps.At] = {}

        def at(phase: str, done: int, total: int) -> None:
            if phase not in shown:
                latest.close()
                shown[phase] = latest.enter_context(steps.step(STEPS[phase], total, UNITS[phase], _bar))
            shown[phase](done)

        (found,) = run.run(at)
    found.save(path)
    run.clean()
    text.unlink(missing_ok=True)
    return Calibration.load(path)


def _pydoc(model: PreTrainedModel) -> Corpus | None:
    """Return samples of the text behind `help()`. None if the model's folder has no tokenizer that fits it."""
    try:
        # remote code is not run for this, and nothing is downloaded
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True, trust_remote_code=False)
        text = pydoc_text()
    except Exception as error:  # a damaged tokenizer raises a bare Exception, and the model can write a text instead
        log.info("no tokenizer of %s, or no text, at hand: %s", type(model).__name__, error)
        return None
    corpus = Corpus.draw("pydoc", text, tokenizer(text, verbose=False)["input_ids"], READ, LENGTH, 0)
    fits = int(corpus.windows.max()) < text_config(model.config).vocab_size
    return corpus if fits else None


def _written(model: PreTrainedModel, path: Path) -> Corpus:
    """Return the model's own text. It is kept in a file until the calibration is done."""
    ids = _kept(path).get("ids")
    if ids is None or (ids.dtype, ids.shape) != (torch.int64, (SAMPLES, LENGTH)):
        begun = path.with_suffix(".begun")
        held = _kept(begun)

        with steps.step("the model writes a text", LENGTH, "tokens", _bar) as at:
            start = Begun(**held) if held.keys() == set(Begun._fields) else None
            ids = own_text(model, SAMPLES, LENGTH, 0, at, start, lambda text: _keep(begun, text._asdict()))
        _keep(path, {"ids": ids})
        begun.unlink(missing_ok=True)
    return Corpus(NAME, _digest({"ids": ids}), ids, 0)


def _kept(path: Path) -> dict[str, Tensor]:
    """Return the tensors that a stopped run has left in a file. Remove the file if it is damaged."""
    if not path.is_file():
        return {}
    with contextlib.suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dictionary
        if _digest(tensors) == (file.metadata() or {}).get("sha256"):
            return tensors
    log.info("%s is damaged, and made again", path)
    path.unlink(missing_ok=True)
    return {}


def _keep(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file that `_kept` reads."""
    save_whole(tensors, path, {"sha256": _digest(tensors)})


def _digest(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


@contextlib.contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[steps.At]:
    """Show a step as a bar; `transformers.utils.logging.disable_progress_bar` turns bars off."""
    shown = 0  # counted here, because a bar that is turned off has no count

    def at(done: int) -> None:
        nonlocal shown
        bar.update(done - shown)
        shown = done

    with tqdm(desc=what, total=total, unit=f" {unit}", leave=False) as bar:
        yield at
