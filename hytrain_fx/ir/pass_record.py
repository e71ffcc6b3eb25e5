"""What passes leave of a graph: a note for each node, a record for each pass.

Texts and numbers only, no graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Notes = tuple[str, ...]
"""What one pass says of its work, for people."""
INSERTED_CALL = re.compile(r"torch\.ops\.hytrain_fx\.(?P<op>\w+)\.default\(.*\[(?P<rows>[\d, ]*)\]\)")
"""A node of ours in a graph's text. Its rows are the last argument, a list of integers."""


@dataclass(frozen=True)
class NodeNote:
    """What is known of a node. Rows ascend.

    unit       the unit whose work the node is (None before the first unit's)
    holds      row whose weight, or a saved view of it, this placeholder holds
    reads      rows whose weight the node reads
    makes      rows whose gradient is this node's result
    made_by    the pass that inserted the node, "" for a node that was captured
    """

    unit: int | None = None
    holds: int | None = None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    made_by: str = ""

    def of_other_rows(self, row_of: Mapping[int, int], unit_of: Mapping[int, int]) -> NodeNote:
        """The same of the node when it acts for other rows, in whose order these are."""
        reads, makes = (tuple(row_of[row] for row in rows) for rows in (self.reads, self.makes))
        return replace(self, unit=None if self.unit is None else unit_of[self.unit],
                       holds=None if self.holds is None else row_of[self.holds], reads=reads, makes=makes)

    def __str__(self) -> str:
        parts = [f"unit {self.unit}" if self.unit is not None else ""]
        parts += [f"{word} {rows}" for word, rows in (("reads", self.reads), ("makes", self.makes)) if rows]
        parts.append(f"holds {self.holds}" if self.holds is not None else "")
        parts.append(f"made by {self.made_by}" if self.made_by else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph.

    `before` and `after` are the graph's Python text, `added` counts new nodes by operator.
    """

    name: str
    notes: Notes
    added: Mapping[str, int] = field(default_factory=dict)
    duration_us: float = 0.0
    rules: tuple[str, ...] = ()
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class PipelineRecord:
    """What the passes did to one graph, in their order.

    `nodes` has the note of each node after the last pass, by name in graph order.
    """

    passes: tuple[PassRecord, ...]
    nodes: Mapping[str, NodeNote] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The graph's Python text as captured ("captured") and after each pass, by pass name."""
        first = (("captured", self.passes[0].before),) if self.passes else ()
        return first + tuple((record.name, record.after) for record in self.passes)

    def of_other_rows(self, row_of: Mapping[int, int], unit_of: Mapping[int, int], index: int, code: str) -> PipelineRecord:
        """The same of graph number `index`, which runs the code of this one for other rows.

        code    the name of this graph
        """
        texts = {text: _text_of(text, row_of, index) for one in self.passes for text in (one.before, one.after)}
        first, *others = (replace(one, duration_us=0.0, before=texts[one.before], after=texts[one.after]) for one in self.passes)
        shared = replace(first, notes=(*first.notes, f"runs the code of {code}"))
        return PipelineRecord((shared, *others), {name: note.of_other_rows(row_of, unit_of) for name, note in self.nodes.items()})


def _text_of(text: str, row_of: Mapping[int, int], index: int) -> str:
    """A graph's text with other rows in the calls of our nodes, and another number of the graph."""

    def call(found: re.Match[str]) -> str:
        begin, end = (at - found.start() for at in found.span("rows"))
        head, rows = found[0][:begin], ", ".join(str(row_of[int(row)]) for row in found["rows"].split(",") if row.strip())
        if found["op"] == "backward_end":
            head = re.sub(r"\d+(, \[)$", rf"{index}\1", head)
        return head + rows + found[0][end:]

    return INSERTED_CALL.sub(call, text)
