"""Finds the inserted nodes in the Python text of a graph, by the one form that they have there.

    grad_offload_default: "f32[0]" = torch.ops.hytrain_fx.grad_offload.default(
        [mm_8, view_22], 0, [5, 6]);  mm_8 = view_22 = None

Works on the texts of pass records and of dump folders alike, so it needs neither the graph nor
torch. Nodes that a user's pass inserted may call any operator: they are found by their names, where
these are known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hytrain_fx.ir.pass_record import INSERTED_CALL

_OTHER_CALL = re.compile(r" = torch\.ops\.(?P<op>[\w.]+)\(")
_NAME = re.compile(r"\s*(?P<name>\w+)(?:: \"[^\"]*\")? = ")
_DELETIONS = re.compile(r";  [\w =]* = None$")


@dataclass(frozen=True, slots=True)
class InsertedLine:
    """One inserted node in a text.

    Line number from 0, the node's and the operator's name, rows, and the line itself.
    """

    line: int
    name: str
    op: str
    rows: tuple[int, ...]
    text: str


def inserted_lines(text: str, names: Collection[str] = ()) -> Iterator[InsertedLine]:
    """The inserted nodes of a graph's text, in order.

    Ours, and nodes of other operators that `names` names.
    """
    for number, line in enumerate(text.splitlines()):
        named, ours = _NAME.match(line), INSERTED_CALL.search(line)
        name = named["name"] if named else ""
        if ours:
            yield InsertedLine(number, name, ours["op"], tuple(int(row) for row in ours["rows"].split(",") if row.strip()), line)
        elif name in names:
            yield InsertedLine(number, name, _other_operator(name, line), (), line)


def count_inserted(nodes: Iterable[InsertedLine]) -> Counter[str]:
    """How many there are of each operator."""
    return Counter(node.op for node in nodes)


def annotated_text(text: str, notes: Mapping[int, str]) -> str:
    """The whole text with each note as a comment at the end of its line."""
    return "\n".join(f"{line}  # {notes[number]}" if number in notes else line for number, line in enumerate(text.splitlines()))


def diff_text(text: str, notes: Mapping[int, str], context: int = 1) -> str:
    """Only the lines that have a note (`+`), each between `context` lines of code.

    `...` stands where lines are left out.
    """
    lines = text.splitlines()
    code = [number for number, line in enumerate(lines) if _is_code(line)]
    place = {number: at for at, number in enumerate(code)}
    shown = sorted({near for number in notes for near in code[max(0, place[number] - context) : place[number] + context + 1]})
    return "\n".join(_diff_lines(lines, shown, notes, place))


def without_deletions(line: str) -> str:
    """A line without the `;  x = y = None` that generated code ends with."""
    return _DELETIONS.sub("", line)


def _diff_lines(lines: Sequence[str], shown: Sequence[int], notes: Mapping[int, str], place: Mapping[int, int]) -> Iterator[str]:
    last: int | None = None
    for number in shown:
        if last is not None and place[number] != place[last] + 1:
            yield "  ..."
        last = number
        line = without_deletions(lines[number]).strip()
        yield f"+ {line}  # {notes[number]}" if number in notes else f"  {line}"


def _other_operator(name: str, line: str) -> str:
    called = _OTHER_CALL.search(line)
    return called["op"].removesuffix(".default") if called else name.rstrip("0123456789").rstrip("_")


def _is_code(line: str) -> bool:
    """Whether the line computes something.

    It does not if it is a comment, a blank, or the head of the class or of `forward`.
    """
    text = line.strip()
    return bool(text) and not text.startswith(("#", "class ", "def "))
