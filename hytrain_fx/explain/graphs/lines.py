"""Finds the inserted nodes in the Python text of a graph, by the one form that they have there.

    grad_offload_default: "f32[0]" = torch.ops.hytrain_fx.grad_offload.default([mm_8, view_22], 0, [5, 6]);  mm_8 = view_22 = None

Works on the texts of pass records and of dump folders alike, so it needs neither the graph nor torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# The rows are the last argument, a list of integers.
_CALL = re.compile(r"torch\.ops\.hytrain_fx\.(?P<op>\w+)\.default\(.*\[(?P<rows>[\d, ]*)\]\)")
_DELETIONS = re.compile(r";  [\w =]* = None$")


@dataclass(frozen=True, slots=True)
class InsertedLine:
    """One inserted node in a text: line number from 0, operator name, rows, and the line itself."""

    line: int
    op: str
    rows: tuple[int, ...]
    text: str


def inserted_lines(text: str) -> Iterator[InsertedLine]:
    """The inserted nodes of a graph's text, in order."""
    for number, line in enumerate(text.splitlines()):
        found = _CALL.search(line)
        if found:
            yield InsertedLine(number, found["op"], tuple(int(row) for row in found["rows"].split(",") if row.strip()), line)


def count_inserted(text: str) -> Counter[str]:
    """Inserted nodes by operator name."""
    return Counter(node.op for node in inserted_lines(text))


def annotated_text(text: str, note: Callable[[InsertedLine], str]) -> str:
    """The whole text with `note` as a comment at the end of each inserted line."""
    lines = text.splitlines()
    for node in inserted_lines(text):
        lines[node.line] = f"{node.text}  # {note(node)}"
    return "\n".join(lines)


def diff_text(text: str, note: Callable[[InsertedLine], str], context: int = 1) -> str:
    """Only the inserted lines (`+`, with `note`), each between `context` lines of code; `...` where lines are left out."""
    lines = text.splitlines()
    ours = {node.line: node for node in inserted_lines(text)}
    code = [number for number, line in enumerate(lines) if _is_code(line)]
    place = {number: at for at, number in enumerate(code)}
    shown = sorted({near for number in ours for near in code[max(0, place[number] - context) : place[number] + context + 1]})
    return "\n".join(_diff_lines(lines, shown, ours, place, note))


def without_deletions(line: str) -> str:
    """A line without the `;  x = y = None` that generated code ends in."""
    return _DELETIONS.sub("", line)


def _diff_lines(
    lines: Sequence[str], shown: Sequence[int], ours: dict[int, InsertedLine], place: dict[int, int], note: Callable[[InsertedLine], str]
) -> Iterator[str]:
    last: int | None = None
    for number in shown:
        if last is not None and place[number] != place[last] + 1:
            yield "  ..."
        last = number
        line = without_deletions(lines[number]).strip()
        yield f"+ {line}  # {note(ours[number])}" if number in ours else f"  {line}"


def _is_code(line: str) -> bool:
    """Whether the line computes something: no comment, no blank, no head of the class or of `forward`."""
    text = line.strip()
    return bool(text) and not text.startswith(("#", "class ", "def "))
