"""Graphs, breaks, units, waits and inserted nodes of small models, counted without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor_config

import hytrain_fx
from benchmarks.families import SMALL, family_of
from benchmarks.markdown import table
from benchmarks.models import batches, build, loss_of, trained
from hytrain_fx.api import session_of
from hytrain_fx.capture.units import Unit, group_units
from hytrain_fx.forecast.bench.loops import ADAMW
from hytrain_fx.session.session import Session

HEAD = ("family", "parameters", "graphs", "breaks", "units", "largest unit", "waits a step", "nodes a unit", "large: units", "largest unit",
        "breaks at")
_STEPS = 2


@dataclass(frozen=True)
class Units:
    """How many units a model has, and the largest one's share of its parameters, 0..1."""

    count: int
    largest: float

    @classmethod
    def of(cls, units: Sequence[Unit], numels: Sequence[int]) -> Units:
        """Of parameters of these sizes, by row."""
        return cls(len(units), max(sum(numels[row] for row in unit.rows) for unit in units) / sum(numels))


@dataclass(frozen=True)
class Counts:
    """Of one compiled model that has trained.

    params      trained parameters
    graphs      captured graphs, forward and backward
    breaks      where and why torch.compile ended graphs before the forward's end
    units       layers that updates are placed, offloaded and waited for by
    waits       waits for new weights in one step, in graphs and in eager code
    inserted    nodes put into all graphs
    """

    params: int
    graphs: int
    breaks: tuple[str, ...]
    units: Units
    waits: int
    inserted: int

    @property
    def inserted_per_unit(self) -> float:
        """Inserted nodes for each unit."""
        return self.inserted / self.units.count


def counts_of(model: nn.Module, step: Callable[[], object]) -> Counts:
    """Count, over one more step of a model that has trained some."""
    session = session_of(model)
    with _waits(session) as waits:
        step()
    numels = [parameter.numel() for parameter in session.table.parameters]
    inserted = sum(hytrain_fx.inspect(model).counts().values())
    return Counts(sum(numels), len(session.capture.graphs), tuple(session.capture.breaks), Units.of(session.units, numels), len(waits),
                  inserted)


def units_of_large(name: str) -> Units:
    """Of a family's large model, which is made without memory."""
    family, size = family_of(name)
    with torch.device("meta"):
        model = family.make(size.config)
    numels = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Units.of(group_units(model, list(numels)), list(numels.values()))


def counts_of_family(name: str) -> Counts:
    """Train a family's small model for a few steps on the CPU, with every state on the host."""
    cpu, size = torch.device("cpu"), family_of(name + SMALL)[1]
    torch._dynamo.reset()
    model = build(name + SMALL, size.length, cpu, torch.float32)
    data = batches(name + SMALL, size.batch, size.length, cpu, torch.float32)
    with inductor_config.patch(fallback_by_default=True):  # kernels take most of the time, and change no count
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(trained(model), **ADAMW), gpu_states=0.0)

        def step() -> None:
            loss_of(model, next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(_STEPS):
            step()
        try:
            return counts_of(model, step)
        finally:
            hytrain_fx.close(model)


def counts_table(found: Mapping[str, tuple[Counts, Units]]) -> str:
    """A line for each family: its small model, and the units of its large one."""
    return table(HEAD, [
        [name, str(of.params), str(of.graphs), str(len(of.breaks)), str(of.units.count), f"{of.units.largest:.0%}", str(of.waits),
         f"{of.inserted_per_unit:.1f}", str(large.count), f"{large.largest:.1%}", "; ".join(of.breaks).replace("|", "\\|") or "-"]
        for name, (of, large) in found.items()])


@contextmanager
def _waits(session: Session) -> Iterator[list[Sequence[int]]]:
    """The rows of each wait for new weights meanwhile."""
    nodes: Any = session.nodes
    wait, found = nodes.wait_outside, list[Sequence[int]]()  # which a graph's own nodes wait by, too

    def noted(rows: Sequence[int]) -> None:
        found.append(rows)
        wait(rows)

    nodes.wait_outside = noted
    try:
        yield found
    finally:
        del nodes.wait_outside
