"""Arm the copy of new weights to the device behind each unit's updates.

    Before:  gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6])
    After:   gpu_step = hytrain_fx.gpu_step(cpu_step, 0, [5, 6]);  reload = hytrain_fx.reload(gpu_step, 0, [5, 6])

The copy itself starts when the rows are updated and released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from hytrain_fx.passes.base import Fact, Notes, PassContext, PassContract, note, rows_of
from hytrain_fx.passes.insertion import after_last, insert
from hytrain_fx.passes.ops import GPU_STEP, RELOAD


@dataclass(frozen=True)
class InsertReload:
    """A `reload` behind each `gpu_step`."""

    name: ClassVar[str] = "insert_reload"
    contract: ClassVar[PassContract] = PassContract(
        requires=frozenset({Fact.STEPS_INSERTED}),
        provides=frozenset({Fact.RELOADS_INSERTED}),
        conflicts=frozenset({Fact.RELOADS_INSERTED}),
    )

    def __call__(self, module: fx.GraphModule, context: PassContext) -> Notes:
        """Insert behind each token."""
        steps = module.graph.find_nodes(op="call_function", target=GPU_STEP)
        for step in steps:
            with after_last(module.graph, [step]):
                insert(module.graph, RELOAD, (step, context.session, list(rows_of(step))), note(step).unit)
        return (f"{len(steps)} reloads armed",)
