"""The passes in their order, and the one loop that runs them: contract, pass, lint, rules, record.

    backward              annotate_units -> insert_grad_offload -> insert_steps -> insert_reload -> insert_release
                          -> insert_backward_end -> drop_grad_outputs
    forward, inference    annotate_units -> insert_waits

With a dump folder each pass leaves its text before and after (`passes.graph_dump`).
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import ConfigError, GraphInvariantError
from hytrain_fx.passes.annotate_units import AnnotateUnits
from hytrain_fx.passes.base import Fact, NodeNote, Pass, PassContext, PassRecord, note
from hytrain_fx.passes.drop_grad_outputs import DropGradOutputs
from hytrain_fx.passes.insert_backward_end import InsertBackwardEnd
from hytrain_fx.passes.insert_grad_offload import InsertGradOffload
from hytrain_fx.passes.insert_release import InsertRelease
from hytrain_fx.passes.insert_steps import InsertReload, InsertSteps
from hytrain_fx.passes.insert_waits import InsertWaits
from hytrain_fx.passes.ops import ALL_OPS
from hytrain_fx.passes.verify import verify

DEFAULT_BACKWARD_PASSES: tuple[Pass, ...] = (
    AnnotateUnits(),
    InsertGradOffload(),
    InsertSteps(),
    InsertReload(),
    InsertRelease(),
    InsertBackwardEnd(),
    DropGradOutputs(),
)
DEFAULT_FORWARD_PASSES: tuple[Pass, ...] = (
    AnnotateUnits(),
    InsertWaits(),
)


@dataclass(frozen=True)
class PipelineRecord:
    """What the passes did to one graph, in their order, and what is noted of each node after the last, by name in graph order."""

    passes: tuple[PassRecord, ...]
    nodes: Mapping[str, NodeNote] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[tuple[str, str], ...]:
        """The graph's Python text as captured ("captured") and after each pass, by pass name."""
        first = (("captured", self.passes[0].before),) if self.passes else ()
        return first + tuple((record.name, record.after) for record in self.passes)


def rewrite(
    graph: CapturedGraph,
    *,
    session: int,
    units: Sequence[Unit],
    dump: GraphDump | None = None,
    passes: Sequence[Pass] | None = None,
) -> PipelineRecord:
    """Run the passes (by default those for this kind of graph) on `graph.module`, in place.

    Raises GraphInvariantError where a pass's contract or a rule of `passes.verify` does not hold; nothing is compiled then.
    """
    chosen = default_passes(graph.kind) if passes is None else passes
    check_contracts(chosen)
    context = PassContext(graph, tuple(units), session)
    records: list[PassRecord] = []
    facts: set[Fact] = set()
    text = readable(graph.module)
    for number, one in enumerate(chosen):
        record = _run(one, context, facts, text)
        text = record.after
        records.append(record)
        if dump is not None:
            dump.write(graph.name, number, record.name, record.before, record.after)
    graph.module.recompile()
    return PipelineRecord(tuple(records), {node.name: note(node) for node in graph.module.graph.nodes})


def default_passes(kind: GraphKind) -> tuple[Pass, ...]:
    """The passes for a kind of graph, in order."""
    return DEFAULT_BACKWARD_PASSES if kind is GraphKind.BACKWARD else DEFAULT_FORWARD_PASSES


def check_contracts(passes: Sequence[Pass]) -> None:
    """Check, before anything runs, that each pass finds what it needs. Raises GraphInvariantError naming pass and fact."""
    facts: set[Fact] = set()
    ran: list[str] = []
    for one in passes:
        missing = sorted(one.contract.requires - facts)
        present = sorted(one.contract.conflicts & facts)
        if missing or present:
            state = f"needs that {missing[0]}" if missing else f"must not run when {present[0]}"
            before = ", ".join(ran) or "no passes"
            raise GraphInvariantError(f"pass {one.name} {state}; before it come: {before}. Change the order of passes")
        facts |= one.contract.provides
        ran.append(one.name)


def readable(module: fx.GraphModule) -> str:
    """The graph as Python text, with dtypes and shapes."""
    return str(module.print_readable(print_output=False))


def _run(one: Pass, context: PassContext, facts: set[Fact], before: str) -> PassRecord:
    module = context.graph.module
    counts = _inserted(module)
    started = time.perf_counter()
    notes = one(module, context)
    duration_us = (time.perf_counter() - started) * 1e6
    module.graph.lint()
    facts |= one.contract.provides
    rules = verify(module, context, facts, f" after {one.name}")
    return PassRecord(one.name, notes, _inserted(module) - counts, duration_us, rules, before, readable(module))


def _inserted(module: fx.GraphModule) -> Counter[str]:
    """Inserted nodes by operator name (`grad_offload`)."""
    return Counter(node.target.name().partition("::")[2] for node in module.graph.nodes if node.target in ALL_OPS)


# ---- The folder that receives each graph's text before and after each pass (`Config.dump`) ----
#
#     01.backward.02.insert_steps.before.txt
#     01.backward.02.insert_steps.after.txt       a sorted listing of the folder is the story
#
# A folder that cannot be written is an error when the model is compiled. One that cannot be written any more (the disk is full, the
# folder was removed) ends the dump with one warning: it must not end the training.


class GraphDump:
    """Writes texts into a folder, which is made if it is missing. Raises ConfigError where it cannot be written."""

    def __init__(self, folder: str | Path) -> None:
        self._ended = False
        try:
            self.folder = Path(folder).absolute()  # the script may go to another one
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(b"\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"option dump={str(folder)!r} cannot be written: {error}; expected a folder that is there or can be made, "
                              "with room on its disk") from error

    def write(self, graph: str, number: int, name: str, before: str, after: str) -> None:
        """The two texts of pass `name`, the `number`th over `graph` (`01.backward`)."""
        if self._ended:
            return
        try:
            for side, text in (("before", before), ("after", after)):
                (self.folder / f"{graph}.{number:02}.{name}.{side}.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self._ended = True
            warnings.warn(f"the dump in {str(self.folder)!r} ends before {graph}.{number:02}.{name}, training goes on: {error}",
                          stacklevel=2)
