"""The update of any optimizer, parameter by parameter.

It says what a `step()` runs for each row, and what it keeps.

    step()      for every row with a gradient: its step, recorded with the present options and
                scalars (rows that are alike share it)
                known operations: their graph with these numbers
                a step that cannot be recorded: the class's own step, op by op
    the engine  runs it where the row rests, when the gradient is there
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

import torch
from torch import fx

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MASTER_ALONE, StateTable
from hytrain_fx.runtime.any_optimizer.alike import entry_of, kinds_of, values_of
from hytrain_fx.runtime.any_optimizer.check import Untrusted, check_one_by_one, refuse_searches
from hytrain_fx.runtime.any_optimizer.marks import Marks, fixed, marks_of
from hytrain_fx.runtime.any_optimizer.recording import Form, Recording, Untraceable, entry_after, record
from hytrain_fx.runtime.any_optimizer.row_step import OpByOpStep, TracedStep, graph_of, own_of
from hytrain_fx.runtime.any_optimizer.shell import Options, Shells, options_of
from hytrain_fx.runtime.arithmetic import AT_REST
from hytrain_fx.runtime.engine import CommitItem, Engine, RowStates, RowStep
from hytrain_fx.runtime.own_states import Entry, OwnStates, is_tensor, map_leaves
from hytrain_fx.runtime.probe import MAX_PARAMS, UpdateProbe


class UpdateRule:
    """The step of the user's optimizer on one parameter.

    parameters   the managed parameters by row
    names        their names

    sets   what steps set on the optimizer and in its groups, as far as the trial of it showed

    Raises UnsupportedError where parameters cannot be stepped one by one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self.name = type(optimizer).__name__
        refuse_searches(optimizer)
        self._optimizer = optimizer
        self._shells = Shells.of(optimizer)
        self._parameters = tuple(parameters)
        self._forms = [Form.of(parameter) for parameter in parameters]
        self._names = tuple(names)
        self._graphs: dict[Hashable, fx.GraphModule] = {}
        self._untraceable: dict[Hashable, str] = {}  # why, by what rows and their states are
        self._op_by_op: dict[int, str] = {}  # why, by row
        self.sets: frozenset[str] = frozenset()
        try:
            self.sets = check_one_by_one(self._shells, optimizer)
            self._distrust: str | None = None
        except Untrusted as why:
            self._distrust = str(why)
        self._alike: dict[Hashable, Recording] = {}  # recordings of the last step()
        self._row_of = row_of = {id(parameter): row for row, parameter in enumerate(parameters)}
        groups = [(options_of(group), group["params"]) for group in optimizer.param_groups]
        self._first_options = {row_of[id(p)]: options for options, of in groups for p in of if id(p) in row_of}
        given = {row_of[id(p)]: dict(entry) for p, entry in optimizer.state.items() if id(p) in row_of}
        first: dict[Hashable, Entry] = {}  # entries of rows that are alike, and begin with nothing
        self._first: list[Entry] = []
        for row, form in enumerate(self._forms):
            options, entry, marks = self._first_options[row], given.get(row), self._marks(row)
            key = (form, id(options), values_of(marks)) if entry is None else row
            if key not in first:
                first[key] = entry_after(self._shells, form, options, entry, marks)
            self._first.append(first[key])

    def steps(self, groups: Sequence[Mapping[str, Any]], rows: Mapping[int, RowStates], *, may_set: bool = True) -> dict[int, RowStep]:
        """What one `step()` runs for these rows, with the present options of the groups.

        It has the attributes of the user's optimizer, and sets what the step sets there.

        may_set   False: other ranks step other rows of these groups, and would not see it

        The rows must be at rest. Raises UnsupportedError, and has done nothing, for groups that
        have lost an option, or the kind of one, and for a step that sets what it may not.
        """
        for group in groups:
            self._require_options(group)
        made: dict[int, RowStep] = {}
        attributes: dict[str, Any] = {}
        before, self._alike = self._alike, {}  # what no row of this step shares is not kept
        self._shells = Shells.of(self._optimizer)
        of_all = values_of(self._shells.attributes)
        for group in groups:
            options, changed = options_of(group), Options()
            group_key = of_all, values_of(options)
            for row in (self._row_of[id(p)] for p in group["params"] if id(p) in self._row_of):
                if row in rows:
                    made[row] = step = self._step(row, options, rows[row], group_key, before)
                    if isinstance(step, TracedStep):
                        changed = step.recording.options
                        attributes |= step.recording.attributes
                        if not may_set and (found := sorted({*changed, *attributes})):
                            raise self._set_alone(found[0])
            cast(dict[str, Any], group).update(changed)
        vars(self._optimizer).update(attributes)
        return made

    def step_of(self, row: int, states: RowStates) -> RowStep:
        """What a step runs for states like this row's, with the first options of its group."""
        return self._step(row, self._first_options[row], states, None, {})

    def table(self, row: int) -> StateTable:
        """The table of a row: only what the optimizer keeps itself, next to the master."""
        return MASTER_ALONE.with_own(OwnStates(self._first[row]).nbytes)

    def first_entry(self, row: int) -> Entry:
        """What is kept for a row after a step, tensors on the meta device.

        As far as a step without values gets.
        """
        return self._first[row]

    def expected_entry(self, row: int, group: Mapping[str, Any]) -> Entry:
        """What is kept for a row after a step with this group's options, as `first_entry` says."""
        return entry_after(self._shells, self._forms[row], options_of(group), None, self._marks(row)) or self._first[row]

    @property
    def notes(self) -> tuple[str, ...]:
        """How updates run, in sentences."""
        if self._distrust is not None:
            return (f"{self.name} runs op by op: {self._distrust}",)
        said = []
        if self._graphs:
            sizes = sorted(sum(node.op == "call_function" for node in graph.graph.nodes) for graph in self._graphs.values())
            count = str(sizes[0]) if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
            graphs = "1 graph" if len(sizes) == 1 else f"{len(sizes)} graphs"
            said.append(f"{self.name} is traced: {graphs} of {count} torch operations, run one after the other")
        why: dict[str, list[int]] = {}
        for row, reason in sorted(self._op_by_op.items()):
            why.setdefault(reason, []).append(row)
        for reason, rows in why.items():
            some = f"{len(rows)} parameters ({self._names[rows[0]]}, ...)"
            said.append(f"{self.name} cannot be traced for {some}, its own step runs op by op: {reason}")
        return tuple(said)

    def _set_alone(self, option: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name}.step() sets {option!r} on itself or in its group, and did not when it was tried at compile: each rank updates "
            "parameters of its own, so others would not see it. Keep such numbers in optimizer.state[parameter], or set them in every step"
        )

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Check that an option that was a number still is one.

        A step that fails on a worker ends the engine.
        """
        first = next((self._first_options[self._row_of[id(p)]] for p in group["params"] if id(p) in self._row_of), Options())
        for key, value in first.items():
            if key not in group:
                raise UnsupportedError(f"a parameter group has no {key!r}, only {sorted(group)}; write it back: group[{key!r}] = ...")
            if _is_number(value) and not isinstance(value, bool) and not _is_number(group[key]):
                raise UnsupportedError(f"{key} of a parameter group is {group[key]!r}: expected a number, as it was at compile")

    def _step(self, row: int, options: Options, states: RowStates, group: Hashable, before: Mapping[Hashable, Recording]) -> RowStep:
        """Record a step.

        `group` stands for the options; `before` has recordings of the previous step, which may be
        the same.
        """
        form, own, marks = self._forms[row], own_of(states), self._marks(row)
        if self._distrust is None:
            try:
                return self._traced(row, options, own, marks, group, before)
            except (Untraceable, TypeError) as error:
                self._op_by_op[row] = str(error)
        return OpByOpStep(form, self._shells, options, fixed(marks))

    def _traced(
        self, row: int, options: Options, own: OwnStates, marks: Marks, group: Hashable, before: Mapping[Hashable, Recording]
    ) -> TracedStep:
        """Raises Untraceable; TypeError where a state or a constant cannot be compared."""
        form = self._forms[row]
        kinds = form, kinds_of(options), kinds_of(own.entry), kinds_of(marks)
        if kinds in self._untraceable:  # so is the next step
            raise Untraceable(self._untraceable[kinds])
        key = group, form, entry_of(own.entry), values_of(marks)
        try:
            recording = self._alike.get(key) or before.get(key) or record(self._shells, form, options, own.entry, marks)
            self._alike[key] = recording
        except Untraceable as error:
            self._untraceable[kinds] = str(error)
            raise
        self._op_by_op.pop(row, None)
        return TracedStep(form, self._graph(recording), recording)

    def _marks(self, row: int) -> Marks:
        """What is on the parameter now, as far as the step may read it."""
        return marks_of(self._parameters[row]) if self._shells.reads_marks else {}

    def _graph(self, recording: Recording) -> fx.GraphModule:
        key = recording.key
        if key not in self._graphs:
            self._graphs[key] = graph_of(recording)
        return self._graphs[key]


def _is_number(value: object) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


# ---- Times the user's optimizer on the device, on a row like one of the model's ----


class RuleProbe(UpdateProbe):
    """Like `UpdateProbe`, for any optimizer.

    The row has the form of the largest of the model's rows that is no larger than the probe's, else
    of the smallest.
    """

    def __init__(self, engine: Engine, parameters: Sequence[torch.Tensor], rule: UpdateRule) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        fitting = [row for row, size in enumerate(sizes) if size <= MAX_PARAMS]
        self._model_row = max(fitting, key=sizes.__getitem__) if fitting else min(range(len(sizes)), key=sizes.__getitem__)
        self._rule = rule
        super().__init__(engine, [parameters[self._model_row]], most_params=max(MAX_PARAMS, sizes[self._model_row]))

    def _states(self, master: torch.Tensor) -> RowStates:
        def made(leaf: object) -> object:
            return torch.zeros_like(leaf, device=master.device) if isinstance(leaf, torch.Tensor) and is_tensor(leaf) else leaf

        return RowStates(MASTER_ALONE, master, own=OwnStates(map_leaves(self._rule.first_entry(self._model_row), made) or None))

    def _item(self, row: int, states: RowStates, grad: torch.Tensor) -> CommitItem:
        return CommitItem(row, AT_REST, grad, at_end=True, step=self._rule.step_of(self._model_row, states))
