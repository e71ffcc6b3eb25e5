"""The code of one graph at all its stages as one list of lines.

Each line knows the first stage that has it and the first that no longer has it.

    stage 0 (as captured)            mm = aten.mm(a, b);  mul = aten.mul(mm, c)
    stage 2 (insert_grad_offload)    mm = aten.mm(a, b)
                                     grad_offload = hytrain_fx.grad_offload([mm], 0, [5])
                                     mul = aten.mul(mm, c)
    lines                            mm 0..;  grad_offload 2..;  mul 0..

So a page holds a graph before and after each pass in little more than the space of one text. The
`;  x = None` at the ends of lines is left out: it only says when Python may free a value.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hytrain_fx.explain.graphs.lines import without_deletions

_HEAD = re.compile(r"def forward\(self(?:, (?P<arguments>.*))?\):")
_ARGUMENT = re.compile(r'\w+(?:: "[^"]*")?')
_NAME = re.compile(r"(?P<name>\w+)(?:: \"[^\"]*\")? = ")
_PLACE = re.compile(r"# File: (?:.*/)?(?P<place>[^/]+:\d+) in \S+, code: (?P<code>.*)")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """One node.

    Its name ("" for `return`), its code, the line of the user's code that it comes from ("" where
    unknown).
    """

    name: str
    text: str
    origin: str
    is_argument: bool = False


@dataclass(frozen=True, slots=True)
class StagedLine:
    """A line that the stages `begin` to `end` - 1 have.

    `end` is None for a line that the last stage has.
    """

    line: CodeLine
    begin: int
    end: int | None = None


def code_lines(text: str) -> list[CodeLine]:
    """The nodes of a graph's text in order, an argument a line.

    Nodes of graphs inside the graph follow after it.
    """
    found: list[CodeLine] = []
    origin = ""
    for line in map(str.strip, text.splitlines()):
        place, head = _PLACE.fullmatch(line), _HEAD.fullmatch(line)
        if line.startswith("#"):
            origin = f"{place['place']}  {place['code']}" if place else ""
        elif head:
            found += [CodeLine(one.partition(":")[0], one, "", True) for one in _ARGUMENT.findall(head["arguments"] or "")]
        elif line and not line.startswith("class "):
            named = _NAME.match(line)
            found.append(CodeLine(named["name"] if named else "", without_deletions(line), origin if named else ""))
    return found


def staged(texts: Sequence[str]) -> list[StagedLine]:
    """The lines of all stages, each stage's own in its order.

    A line that only moved counts as gone and added again.
    """
    merged: list[StagedLine] = [StagedLine(line, 0) for line in code_lines(texts[0])] if texts else []
    for stage, (before, after) in enumerate(itertools.pairwise(texts), start=1):
        if before != after:
            merged = list(_next_stage(merged, code_lines(after), stage))
    return merged



def _next_stage(merged: Sequence[StagedLine], new: Sequence[CodeLine], stage: int) -> Iterator[StagedLine]:
    alive = [place for place, one in enumerate(merged) if one.end is None]
    old_texts = [merged[place].line.text for place in alive]
    matcher = difflib.SequenceMatcher(None, old_texts, [line.text for line in new], autojunk=False)
    emitted = 0
    for tag, old_begin, old_end, new_begin, new_end in matcher.get_opcodes():
        upto = alive[old_end - 1] + 1 if old_end > old_begin else emitted
        for one in merged[emitted:upto]:
            yield one if tag == "equal" or one.end is not None else StagedLine(one.line, one.begin, stage)
        emitted = upto
        if tag != "equal":
            yield from (StagedLine(line, stage) for line in new[new_begin:new_end])
    yield from merged[emitted:]
