"""Calibration: gradients over samples of a corpus, then codecs fitted layer by layer.

Codecs that are fitted on sums need two passes over the corpus, see `corpus_moments`. Others need
all vectors: one file per sample, and then one per codec of a layer, fitted in parallel. A run that
was killed continues from the files of its work folder. Codecs that several recipes share are fitted
once. Samples and results are independent of interruptions and of the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.atomic_write import ELSEWHERE, lock, save_whole
from tersekv.calibration.calibration import Calibration, Made
from tersekv.calibration.corpus_moments import CorpusMoments, Wanted
from tersekv.calibration.fitting import FitJob, fit, prepare_worker
from tersekv.calibration.gradients import Source, layer_gradients
from tersekv.calibration.needs import attention_plans, calibrated_part, needs_corpus
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.models.config import AttentionShape, text_config
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.models.loading import cache_dir
from tersekv.recipe import Recipe

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Progress callback: name of the phase, steps done, and steps in total."""

BYTES_PER_ELEMENT = 4 + 2  # an activation and its gradient
BYTES_PER_SUM = 2 * 8 + 2 * 8  # the squares of vectors and of gradients, in the old file and the new one


@dataclass(frozen=True)
class Corpus:
    """Samples of a text. windows: ids [samples, length]; name, sha256: of the text; seed: of the
    random positions."""

    name: str
    sha256: str
    windows: Tensor
    seed: int

    @staticmethod
    def draw(name: str, text: str, ids: Sequence[int], samples: int, length: int, seed: int) -> Corpus:
        """Draw windows of the tokenised text at random positions, as GPTQ and KVQuant do.

        Raises:
            UserError: the text is too short.
        """
        if len(ids) <= length:
            raise UserError(
                f"text {name!r} has {len(ids):,} tokens, too few for samples of {length:,} tokens: "
                "give a longer text or a shorter --length"
            )
        chance = random.Random(seed)
        starts = [chance.randint(0, len(ids) - length - 1) for _ in range(samples)]
        windows = torch.tensor([ids[start : start + length] for start in starts])
        return Corpus(name, hashlib.sha256(text.encode()).hexdigest(), windows, seed)

    def made(self, recipe: str, config: PreTrainedConfig, model: str, sinks: int) -> Made:
        """Return the provenance of a calibration on these samples. model: fingerprint."""
        samples, length = self.windows.shape
        return Made(recipe, architecture(config), model, self.name, self.sha256, samples, length, self.seed, sinks)


class Calibrator:
    """Calibrate a model for several recipes in one run.

    sinks: number of tokens left out at the start of each sample.
    workers: number of processes that fit codecs; 1 fits in this process.
    work: work folder of intermediate results, by default in the cache folder.

    Raises:
        UserError: a recipe has nothing to calibrate or does not fit the model, or `sinks` leaves no
            tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipes: Sequence[Recipe],
        corpus: Corpus,
        sinks: int = 1,
        workers: int = 1,
        work: Path | None = None,
    ) -> None:
        if not 0 <= sinks < corpus.windows.shape[1]:
            raise UserError(f"{sinks} sinks leave nothing of samples of {corpus.windows.shape[1]} tokens; give fewer")
        self.model, self.recipes, self.corpus, self.sinks, self.workers = model, recipes, corpus, sinks, workers
        self.codecs: dict[Source, list[Codec]] = {}  # fitted on vectors
        self.summed: dict[Wanted, list[Codec]] = {}  # fitted on sums
        self._fitted: dict[tuple[Wanted, Codec], dict[str, Tensor]] = {}
        self.peak_worker_bytes = 0  # highest peak memory of one fitting process
        for recipe in recipes:
            self._add(recipe)
        self.mark = fingerprint(model)
        self.work = (cache_dir() / "calibrations" / "work" if work is None else work) / self._key()

    def _add(self, recipe: Recipe) -> None:
        """Add the codecs of a recipe that need calibration."""
        if not needs_corpus(recipe, self.model.config):
            raise UserError(
                f"recipe '{recipe}' has nothing to calibrate: its codecs are not fitted, or fitted on the prompt; "
                "use it without calibration, or give a recipe like kvquant:bits=3"
            )
        shape = AttentionShape.of(text_config(self.model.config))
        for layer, plan in attention_plans(recipe, self.model.config).items():
            for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
                codec.layout(dim)
                if codec.needs_fit == "corpus":
                    if codec.takes_moments:
                        known = self.summed.setdefault(_wanted(layer, codec), [])
                    else:
                        known = self.codecs.setdefault(Source(layer, codec.side, codec.pre_rope), [])
                    if (one := codec.for_all_rates()) not in known:
                        known.append(one)

    def _key(self) -> str:
        """Return the name of the work folder: a hash of everything that samples depend on."""
        names = sorted([source.name for source in self.codecs] + [wanted.name for wanted in self.summed])
        asked = [self.mark, self.corpus.sha256, self.sinks, names]
        ids = self.corpus.windows.numpy().tobytes()
        return hashlib.sha256(repr(asked).encode() + ids).hexdigest()[:16]

    @property
    def work_bytes(self) -> int:
        """Size of all samples and sums on disk in bytes."""
        shape = AttentionShape.of(text_config(self.model.config))

        def dim(source: Source) -> int:
            return shape.key_dim if source.side == "keys" else shape.value_dim

        samples, length = self.corpus.windows.shape
        vectors = samples * (length - self.sinks) * shape.kv_heads * BYTES_PER_ELEMENT * sum(map(dim, self.codecs))
        return vectors + BYTES_PER_SUM * shape.kv_heads * sum(dim(one.source) ** 2 for one in self.summed)

    def run(self, progress: Progress = lambda *_: None) -> list[Calibration]:
        """Return the calibration of each recipe. The work folder stays until `clean`.

        Raises:
            UserError, CacheError: the disk is full, another run uses the same work folder, or
                activations are not finite.
        """
        with locked(self.work):
            self._check_space()
            if self.summed:
                self._fit_sums(progress)
            if self.codecs:
                self._fit(self._samples(progress), progress)
            return [self._gathered(recipe) for recipe in self.recipes]

    def _check_space(self) -> None:
        held = sum(path.stat().st_size for path in self.work.iterdir())
        needed, free = self.work_bytes - held, shutil.disk_usage(self.work).free
        if needed > free:
            raise UserError(
                f"the samples need {needed:,} bytes in {self.work}, and {free:,} are free there: set TERSEKV_CACHE to "
                "a folder with more space, or use fewer or shorter samples"
            )

    def clean(self) -> None:
        """Remove the work folder."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _samples(self, progress: Progress) -> tuple[Path, ...]:
        """Return the files of the samples' activations and gradients; create those that are
        missing."""
        paths = tuple(self.work / f"sample-{i:04}.safetensors" for i in range(len(self.corpus.windows)))
        for i, path in enumerate(paths):
            progress("samples", i, len(paths))
            if not path.exists():
                ids = self.corpus.windows[i : i + 1].to(self.model.device)
                save_whole(layer_gradients(self.model, ids, self.codecs, self.sinks), path)
        progress("samples", len(paths), len(paths))
        return paths

    def _out(self, source: Source, codec: Codec) -> Path:
        """Return the file of a codec's calibrated tensors."""
        return self.work / f"fitted-{source.name}-{hashlib.sha256(repr(codec).encode()).hexdigest()[:16]}.safetensors"

    def _fit(self, samples: tuple[Path, ...], progress: Progress) -> None:
        """Fit every codec whose file is missing."""
        jobs = []
        for source, codecs in self.codecs.items():
            left = [codec for codec in codecs if not self._out(source, codec).exists()]
            if left:
                outs = tuple(self._out(source, codec) for codec in left)
                jobs.append(FitJob(source.name, samples, tuple(left), outs))
        done = len(self.codecs) - len(jobs)
        progress("layers", done, len(self.codecs))
        for peak in _each(jobs, self.workers):
            done += 1
            self.peak_worker_bytes = max(self.peak_worker_bytes, peak)
            progress("layers", done, len(self.codecs))

    def _fit_sums(self, progress: Progress) -> None:
        """Fit the codecs that need only sums."""
        moments = CorpusMoments(self.model, self.corpus.windows, tuple(self.summed), self.sinks)
        found = moments.run(self.work, progress)
        for done, (one, codecs) in enumerate(self.summed.items()):
            progress("sums", done, len(self.summed))
            for codec in codecs:
                fitted = moments.codec(codec, one.source.layer).fit_moments(found[one]).fitted
                kept = {name: t for name, t in fitted.items() if name not in codec.rate_tensors}
                self._fitted[one, codec] = kept
        progress("sums", len(self.summed), len(self.summed))

    def _gathered(self, recipe: Recipe) -> Calibration:
        tensors: dict[str, Tensor] = {}
        for layer, plan in attention_plans(recipe, self.model.config).items():
            for codec in (plan.keys, plan.values):
                if codec.needs_fit == "corpus":
                    one = codec.for_all_rates()
                    if codec.takes_moments:
                        fitted = self._fitted[_wanted(layer, codec), one]
                    else:
                        fitted = load_file(self._out(Source(layer, codec.side, codec.pre_rope), one))
                    tensors |= {f"layers.{layer}.{codec.side}.{name}": t for name, t in fitted.items()}
        made = self.corpus.made(calibrated_part(recipe), self.model.config, self.mark, self.sinks)
        return Calibration(made, tensors)


def _wanted(layer: int, codec: Codec) -> Wanted:
    return Wanted(Source(layer, codec.side, codec.pre_rope), codec.centred, codec.weighted_by)


def _each(jobs: Sequence[FitJob], workers: int) -> Iterator[int]:
    """Run the jobs, here or in worker processes; yield the peak memory in bytes of each job's
    process."""
    if workers == 1 or len(jobs) < 2:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that sums round as in a worker
        try:
            yield from map(fit, jobs)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, prepare_worker)
    try:
        yield from (future.result() for future in as_completed([pool.submit(fit, job) for job in jobs]))
    except BrokenProcessPool as error:
        raise UserError(
            "the system killed a fitting process, usually because memory ran out: run it again with fewer --workers or "
            "--samples; it continues where it was"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. The system releases it when the process ends.

    wait: until another run ends.

    Raises:
        UserError: the folder cannot be written, or another run holds the lock and `wait` is False.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; {ELSEWHERE}") from error
    with opened as file:
        try:
            said = partial(log.warning, "another run makes this calibration in %s; waiting for it", folder)
            lock(file, said if wait else None)
        except BlockingIOError as error:
            raise UserError(f"another run makes this calibration in {folder}: wait until it is done") from error
        yield
