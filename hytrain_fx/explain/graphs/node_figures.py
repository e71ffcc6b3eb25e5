"""What one inserted node stands for in the plan in force.

Its layers, where they are updated, bytes, and times.

    grad_offload    gradients copied to the host                 rows updated by the CPU
    cpu_step        bytes that the update reads and writes       rows updated by the CPU
    gpu_step        bytes that the update reads and writes       rows updated on the device,
                                                                 streamed ones too
    reload          new weights copied to the device             rows updated by the CPU
    wait, release, backward_end    the weights they are about    all their rows

With several ranks `grad_offload` sends gradients from rank to rank first, and `wait` gathers new
weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hytrain_fx.explain.graphs.lines import InsertedLine
from hytrain_fx.explain.plan.explained import Explained, Measured
from hytrain_fx.ir.figures import bytes_text, shortened, time_text
from hytrain_fx.ir.pass_record import NodeNote
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.states import ADAMW_TRAFFIC, StateTraffic
from hytrain_fx.ir.task_graph import TaskId, TaskKind

_BY_CPU = frozenset({Placement.CPU})
_ON_DEVICE = frozenset({Placement.GPU, Placement.STREAM})
_ANYWHERE = frozenset(Placement)
_ACTS_FOR = {"grad_offload": _BY_CPU, "cpu_step": _BY_CPU, "gpu_step": _ON_DEVICE, "reload": _BY_CPU}
_BYTES_WORDS = {"grad_offload": "to the host", "cpu_step": "read and written", "gpu_step": "read and written", "reload": "to the device"}
TASKS = {"grad_offload": TaskKind.D2H, "cpu_step": TaskKind.CPU_UPDATE, "gpu_step": TaskKind.GPU_UPDATE, "reload": TaskKind.H2D}
_PROFILED = {"grad_offload": "d2h_us", "cpu_step": "cpu_update_us", "gpu_step": "gpu_update_us", "reload": "h2d_us"}


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One managed parameter.

    Its name and its unit's, the bytes of its gradient, what updates move of its states.

    placed       by where they are updated now: elements; a parameter that is cut has several places
    whole_bytes  bytes of what goes from rank to rank for it; 0 where there is one rank. All other
                 figures are of what this rank updates
    sharded      whether that is a shard
    owned        whether that is all of it, on one rank
    """

    name: str
    unit: str
    grad_bytes: int
    placed: Mapping[Placement, int] = field(hash=False)
    traffic: StateTraffic = ADAMW_TRAFFIC
    whole_bytes: int = 0
    sharded: bool = False
    owned: bool = False

    @property
    def numel(self) -> int:
        """Its elements."""
        return sum(self.placed.values())

    @property
    def placement(self) -> str:
        """`cpu`, or `gpu + cpu`."""
        return " + ".join(self.placed)

    def params_in(self, places: Collection[Placement]) -> int:
        """Its elements in these places."""
        return sum(numel for place, numel in self.placed.items() if place in places)


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Times of one unit in one training step by operator name, in microseconds.

    What is not known is left out.

    predicted    simulated for the plan in force
    measured     medians of the last steps under that plan: of `wait` and `cpu_step`
    profiled     measured before the plan was solved, in proportion to the share that the plan has
                 the operator act for
    """

    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    profiled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InspectedNode:
    """One inserted node.

    graph, op, line    "01.backward", "grad_offload", its line of code
    rows, parameters, layers    whom it acts for; a node of a user's operator has a layer only
    made_by            the pass that inserted it
    shares             placement -> share 0..1 of its parameters' elements
    nbytes             bytes it moves, updates or guards under this placement (see the module's
                       table)
    collective         what goes from rank to rank for it, in words; "" where nothing does
    predicted_us, measured_us, profiled_us    as in `UnitTimes`, summed over its layers; None where
                                              nothing is known
    """

    graph: str
    op: str
    rows: tuple[int, ...]
    parameters: tuple[str, ...]
    layers: tuple[str, ...]
    shares: Mapping[str, float] = field(hash=False)
    nbytes: int
    line: str
    made_by: str = ""
    collective: str = ""
    predicted_us: float | None = None
    measured_us: float | None = None
    profiled_us: float | None = None

    @property
    def place(self) -> str:
        """`on cpu`, or `60% cpu + 40% stream`."""
        if len(self.shares) == 1:
            return f"on {next(iter(self.shares))}"
        return " + ".join(f"{share:.0%} {name}" for name, share in self.shares.items())

    @property
    def times(self) -> str:
        """`predicted 12 us, measured 14 us`.

        A profiled time stands where nothing is measured under the plan.
        """
        found = {"predicted": self.predicted_us, "measured": self.measured_us}
        if self.measured_us is None:
            found["profiled"] = self.profiled_us
        return ", ".join(f"{word} {time_text(us)}" for word, us in found.items() if us is not None)

    @property
    def size(self) -> str:
        """Its bytes and what happens to them.

        `nothing to do` where the plan has another operator act for its layers.
        """
        if not self.rows:
            return ""
        return f"{bytes_text(self.nbytes)} {_BYTES_WORDS.get(self.op, 'of weights')}" if self.nbytes else "nothing to do"

    @property
    def note(self) -> str:
        """All of it in one line, after the code."""
        one = f"{self.layers[0]}." if len(self.layers) == 1 else ""
        names = shortened([name.removeprefix(one) for name in self.parameters])
        whom = [f"{shortened(self.layers)}: {names}", self.place] if self.rows else [*self.layers] or ["no parameter"]
        made_by = f"made by {self.made_by}" if self.made_by else ""
        return "; ".join(part for part in (*whom, self.size, self.collective, self.times, made_by) if part)


def describe(
    graph: str, node: InsertedLine, noted: NodeNote, units: Sequence[str], rows: Sequence[InspectedRow], times: Mapping[str, UnitTimes]
) -> InspectedNode:
    """The node with its figures.

    `units` are the units' names by number; `times` by name, empty for a graph outside training.
    """
    op, numbers = node.op, node.rows
    own = [rows[number] for number in numbers]
    layers = tuple(dict.fromkeys(row.unit for row in own))
    if not own and noted.unit is not None:
        layers = (units[noted.unit],)
    places = _ACTS_FOR.get(op, _ANYWHERE)
    elements: Counter[str] = Counter()
    for row in own:
        elements.update(row.placed)
    total = max(sum(elements.values()), 1)
    updates = op in ("cpu_step", "gpu_step")
    return InspectedNode(
        graph, op, numbers, tuple(row.name for row in own), layers, {name: count / total for name, count in elements.items()},
        sum(_moved_bytes(row, row.params_in(places), updates) for row in own), node.text.strip(), noted.made_by,
        _collective(op, own),
        *(_sum_us(kind, op, own, rows, times) for kind in ("predicted", "measured", "profiled")),
    )


def _moved_bytes(row: InspectedRow, params: int, updates: bool) -> int:
    return row.traffic.device_bytes(params) if updates else row.grad_bytes * params // max(row.numel, 1)


def _collective(op: str, own: Sequence[InspectedRow]) -> str:
    kinds = [(True, False), (False, True), (False, False)]
    sums = [sum(row.whole_bytes for row in own if (row.sharded, row.owned) == kind) for kind in kinds]
    words = {"grad_offload": ("reduce-scattered", "reduced to their owners", "all-reduced"),
             "wait": ("gathered from all ranks", "from their owners", "")}.get(op, ("", "", ""))
    return ", ".join(f"{bytes_text(nbytes)} {word}" for nbytes, word in zip(sums, words, strict=True) if nbytes and word)


def unit_times(explanation: Explained, rows: Sequence[InspectedRow]) -> dict[str, UnitTimes]:
    """Times by unit name, from what `explain` has.

    The schedule of the plan in force, medians under it, the profile before it.
    """
    schedule, measured, profile = explanation.schedule, explanation.measured, explanation.profile
    found: dict[str, UnitTimes] = {}
    for unit, name in {share.unit: share.unit_name for share in explanation.plan.rows}.items():
        found[name] = UnitTimes(
            predicted=_predicted(schedule, unit) if schedule else {},
            measured=_measured(measured, unit) if measured else {},
            profiled={op: getattr(profile.units[unit], time) * _acting_share(op, name, rows) for op, time in _PROFILED.items()}
            if profile else {},
        )
    return found


def _predicted(schedule: Schedule, unit: int) -> dict[str, float]:
    spent = {op: sum(piece.duration_us for piece in schedule.of(TaskId(kind, unit))) for op, kind in TASKS.items()}
    return spent | {"wait": schedule.stalls_us[unit]}


def _measured(measured: Measured, unit: int) -> dict[str, float]:
    cpu_us = measured.cpu_update_us[unit]
    return {"wait": measured.stall_us[unit]} | ({} if cpu_us is None else {"cpu_step": cpu_us})


def _acting_share(op: str, unit: str, rows: Sequence[InspectedRow]) -> float:
    own = [row for row in rows if row.unit == unit]
    return sum(row.params_in(_ACTS_FOR[op]) for row in own) / max(sum(row.numel for row in own), 1)


def _sum_us(
    kind: str, op: str, own: Sequence[InspectedRow], rows: Sequence[InspectedRow], times: Mapping[str, UnitTimes]
) -> float | None:
    """The sum over the node's layers.

    A node that has only some of a layer's rows takes their part of its time.
    """
    layers = dict.fromkeys(row.unit for row in own)
    known = {layer: getattr(times[layer], kind)[op] for layer in layers if layer in times and op in getattr(times[layer], kind)}
    if not known:
        return None
    places = _ACTS_FOR.get(op, _ANYWHERE)
    total = 0.0
    for layer, us in known.items():
        whole = sum(row.params_in(places) for row in rows if row.unit == layer)
        total += us * sum(row.params_in(places) for row in own if row.unit == layer) / whole if whole else 0.0
    return total
