"""Fit codecs to the samples of one side of one layer, in the worker processes of a calibration.

This module does not import transformers, so that workers start quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tersekv.atomic_write import save_whole
from tersekv.codecs import Codec
from tersekv.errors import CacheError, UserError


class FitJob(NamedTuple):
    """Codecs to fit on one side of one layer.

    source: name of the tensors in the sample files. samples: those files. outs: output file of each
    codec.
    """

    source: str
    samples: tuple[Path, ...]
    codecs: tuple[Codec, ...]
    outs: tuple[Path, ...]


def prepare_worker() -> None:
    """Use one thread, and end this worker when its parent process ends, even if that is killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def fit(job: FitJob) -> int:
    """Fit every codec and write its calibrated tensors.

    Returns the peak resident memory of this process in bytes, or 0 if the system does not report
    it.

    Raises:
        UserError, CacheError: a codec cannot encode the samples; the message names the source.
    """
    x, gradient = (_joined(job.samples, f"{job.source}.{part}").float() for part in ("x", "gradient"))
    for codec, out in zip(job.codecs, job.outs, strict=True):
        try:
            fitted = codec.fit_corpus(x, gradient).fitted
            save_whole({name: t for name, t in fitted.items() if name not in codec.rate_tensors}, out)
        except (UserError, CacheError) as error:
            raise type(error)(f"{job.source}: {error}") from error
    return _peak_bytes()


def _peak_bytes() -> int:
    """Return this process's peak resident memory. `getrusage` is not used, because after a fork it
    includes memory of the parent."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _joined(samples: Sequence[Path], name: str) -> Tensor:
    """Read the tensor `name` of each sample and concatenate along tokens: [1, H, T, D]."""
    parts = []
    for path in samples:
        with safe_open(path, framework="pt") as file:
            parts.append(file.get_tensor(name))
    return torch.cat(parts, dim=2)
