"""Ranks of `torchrun`: how tests start them, and the process group of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def torchrun(script: str, *arguments: str, ranks: int = 2) -> None:
    """Run a script of this folder on `ranks` ranks."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    call = [*program, str(HERE / script), *arguments]
    out = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr[-4000:]


@contextmanager
def process_group() -> Iterator[None]:
    """Run the body in a gloo group, and end the process with it.

    A thread of the group releases the tensors of a collective after the call has returned, and needs
    the interpreter for it. If the interpreter is ending by then, the process aborts (pytorch issue
    179291). The threads live until nothing refers to the group, and transformers' meshes keep it. So
    the process ends here without ending the interpreter.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)
