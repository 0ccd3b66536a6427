"""Tasks, one per file. A task is registered under its file's name."""

from __future__ import annotations

import functools

from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.tasks.base import Estimate, Result, Sample, Task
from tersekv.registry import modules

__all__ = ["Estimate", "Prompt", "Result", "Sample", "Task", "tasks"]


@functools.lru_cache(maxsize=1)
def tasks() -> dict[str, type[Task]]:
    """Return all tasks in this folder by name, sorted."""
    return {name: module.TASK for name, module in modules(__name__, __path__).items()}
