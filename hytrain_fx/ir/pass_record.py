"""What passes leave of a graph: a note for each node, a record for each pass.

Texts and numbers only, no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Notes = tuple[str, ...]
"""What one pass says of its work, for people."""


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
