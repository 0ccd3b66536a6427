"""Fit codecs to the samples of one side of one layer; what the worker processes of a calibration run.

It imports no transformers, so that a worker starts quickly.
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
from tersekv.codecs.transforms.rope import SequenceRope
from tersekv.errors import CacheError, UserError


class FitJob(NamedTuple):
    """Codecs of one side of one layer. source: name of its tensors in the files of the samples; outs: a file for each
    codec's tensors; turn: RoPE of a sample's tokens, for centred keys."""

    source: str
    samples: tuple[Path, ...]
    codecs: tuple[Codec, ...]
    outs: tuple[Path, ...]
    turn: SequenceRope | None = None


def prepare_worker() -> None:
    """One thread each; a worker ends with the process that started it, even where that was killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def fit(job: FitJob) -> int:
    """Fit every codec and write what it learnt; returns the peak resident memory of this process in bytes so far, 0
    where the system does not say.

    Raises:
        UserError, CacheError: what a codec cannot code, with the source's name.
    """
    x, gradient = (_joined(job.samples, f"{job.source}.{part}").float() for part in ("x", "gradient"))
    for codec, out in zip(job.codecs, job.outs, strict=True):
        try:
            save_whole(_fitted(codec, x, gradient, job.turn).fitted, out)
        except (UserError, CacheError) as error:
            raise type(error)(f"{job.source}: {error}") from error
    return _peak_bytes()


def _fitted(codec: Codec, x: Tensor, gradient: Tensor, turn: SequenceRope | None) -> Codec:
    """The codec with what it learns from x and gradient [1, H, T, D]; centred keys are turned first."""
    if not codec.centred:
        return codec.fit_corpus(x, gradient)
    assert turn is not None
    codec = codec.with_mean(x)
    return codec.fit_corpus(turn.apply(x - codec.fitted["mean"].float().unsqueeze(2)), turn.apply(gradient))


def _peak_bytes() -> int:
    """This process's own high-water mark; getrusage would count the copy of its parent that it began as."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _joined(samples: Sequence[Path], name: str) -> Tensor:
    """The samples' tensors [1, H, T, D] one behind the other."""
    parts = []
    for path in samples:
        with safe_open(path, framework="pt") as file:
            parts.append(file.get_tensor(name))
    return torch.cat(parts, dim=2)
