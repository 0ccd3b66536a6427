"""Show the project's docstrings as the documentation site's pages: an extension of griffe, named in mkdocs.yml.

Docstrings describe parameters as lines `name: text`, and examples as lines with `>>>`. Both would run together in
Markdown, so they become items of a list and a block of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def readable(text: str, names: set[str]) -> str:
    """A docstring in Markdown; `names` are the object's parameters and fields."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.lstrip().startswith(">>>"):
            lines.append(f"```python\n{paragraph}\n```")
        elif not re.match(r"\w+:\n", paragraph):  # sections such as `Raises:` stay
            lines.append(_items(paragraph, names))
        else:
            lines.append(paragraph)
    return "\n\n".join(lines)


def _items(paragraph: str, names: set[str]) -> str:
    found = [m for m in re.finditer(r"(?:^|(?<=[.;)\]]\s))(\w+): ", paragraph) if m.group(1) in names]
    if not found:
        return paragraph
    ends = [*(m.start() for m in found[1:]), len(paragraph)]
    items = [f"- `{m.group(1)}`: {' '.join(paragraph[m.end() : e].split())}" for m, e in zip(found, ends, strict=True)]
    head = paragraph[: found[0].start()].rstrip()
    return "\n".join([head, "", *items] if head else items)


class Readable(griffe.Extension):
    """Rewrite each docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        names = {str(member) for member in obj.members}
        if isinstance(obj, (griffe.Function, griffe.Class)):
            names |= {parameter.name for parameter in obj.parameters}
        obj.docstring.value = readable(obj.docstring.value, names)
