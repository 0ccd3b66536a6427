"""Build tasks from option texts. A task's fields are its options and are parsed by their types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from tersekv.errors import UserError, hint
from tersekv.lab.evals.tasks import Task, tasks
from tersekv.registry import sentences

UNITS = {"": 1, "k": 1024, "m": 1024**2}


def fields(task: type[Task]) -> dict[str, tuple[Any, Any]]:
    """Return the type and default of every option."""
    kinds = get_type_hints(task)
    made = task()
    return {f.name: (kinds[f.name], getattr(made, f.name)) for f in dataclasses.fields(task)}


def all_options() -> dict[str, tuple[dict[str, str], str]]:
    """Return every option of any task: its defaults as text by task, and what it means."""
    defaults: dict[str, dict[str, str]] = {}
    means: dict[str, dict[str, list[str]]] = {}
    for name, task in tasks().items():
        said = sentences(task)
        for option, (_, default) in fields(task).items():
            defaults.setdefault(option, {})[name] = written(default)
            means.setdefault(option, {}).setdefault(said[option], []).append(name)
    told = {
        option: " ".join(
            f"({', '.join(names)}) {text}" if len(texts) > 1 else text[0].upper() + text[1:]
            for text, names in texts.items()
        )
        for option, texts in means.items()
    }
    return {option: (defaults[option], told[option]) for option in defaults}


def build(names: Sequence[str], given: Mapping[str, str]) -> dict[str, Task]:
    """Build the tasks by name, each with those given options that it has.

    Raises:
        UserError: an unknown task, an option that none of the tasks has, or an invalid value.
    """
    known = tasks()
    for name in names:
        if name not in known:
            near = hint(name, known) or "."
            raise UserError(f"unknown task '{name}'{near} Known are {', '.join(known)}")
    for option in given:
        having = [name for name, task in known.items() if option in fields(task)]
        if not set(having) & set(names):
            raise UserError(
                f"--{option.replace('_', '-')} is not an option of {' or '.join(names)}; "
                f"{', '.join(having) if having else 'no task'} {'has' if len(having) == 1 else 'have'} it"
            )
    return {name: _build(known[name], given) for name in dict.fromkeys(names)}


def _build(task: type[Task], given: Mapping[str, str]) -> Task:
    mine = {option: (kind, given[option]) for option, (kind, _) in fields(task).items() if option in given}
    return task(**{option: parse(option, text, kind) for option, (kind, text) in mine.items()})


def parse(option: str, text: str, kind: Any) -> Any:
    """Parse `text` as the type `kind`: str, int (k is 1024, M is 1024²), float, bool, or a choice
    of texts.

    Choices and lists with commas are returned as text; the task checks them itself.

    Raises:
        UserError: the text is not valid for the type.
    """
    given = f"--{option.replace('_', '-')} {text!r}"
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{given} is not a valid value; write true or false")
        return text.lower() == "true"
    if kind is int:
        found = re.fullmatch(r"(\d{1,18})([km]?)", text, re.IGNORECASE)
        if not found:
            raise UserError(f"{given} is not a whole number; write one like 2048 or 2k")
        return int(found[1]) * UNITS[found[2].lower()]
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{given} is not a number; write one like 0.5") from None
    return text


def written(value: Any) -> str:
    """Return an option's value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
