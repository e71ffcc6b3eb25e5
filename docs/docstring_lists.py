"""Turn the aligned lists of our docstrings into Markdown lists, for the API reference.

mkdocstrings loads it.

    k              units updated on the device    ->    - `k`: units updated on the device and more
                   and more

A paragraph is such a list if each of its lines is `name  text`, with two spaces or more between, or
is indented deeper than the first.
Indented code and plain text stay as they are.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^( *)(\S+(?: \S+)*?) {2,}([^\s#].*)$")


def as_markdown(text: str) -> str:
    """A docstring with its aligned lists as Markdown lists."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n[ \t]*\n", text))


def _paragraph(part: str) -> str:
    items: list[str] = []
    indent = None
    for line in part.splitlines():
        found = _ENTRY.match(line)
        if found and indent in (None, found[1]):
            indent = found[1]
            items.append(f"- `{found[2]}`: {found[3]}")
        elif items and indent is not None and line.startswith(indent + "  "):
            items[-1] += f" {line.strip()}"
        else:
            return part
    return "\n".join(items)


class DocstringLists(griffe.Extension):
    """Rewrites each docstring when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
