"""How the user's optimizer updates in one session: by a kernel of the engine, or by its own step.

All that follows is decided here.

                    by a kernel               by its own step
    engine          any                       torch
    states          the kernel's table        what the optimizer keeps, and a master
    commit items    scalars                   the step of each row
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.config import Config
from hytrain_fx.errors import HytrainWarning, UnsupportedError
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.ir.states import MASTER_ALONE, MOMENTS, MOMENTS_SEED, StateTable, moments_of
from hytrain_fx.runtime.any_optimizer.row_step import no_step
from hytrain_fx.runtime.any_optimizer.rule import RuleProbe, UpdateRule
from hytrain_fx.runtime.arithmetic import AT_REST
from hytrain_fx.runtime.engine import CommitItem, Engine, RowSpec
from hytrain_fx.runtime.launch import torch_engine_config
from hytrain_fx.runtime.probe import UpdateProbe
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.rounding import RoundingPlace, parameter_key
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.runtime.updates import KERNEL_UPDATES, KernelUpdate, kernel_update
from hytrain_fx.session.commit import CommitBuilder
from hytrain_fx.session.group_members import GroupMembers


class OptimizerUpdate:
    """The update of one optimizer, by this one of several ranks.

    rule    its own step, None where a kernel does it
    table   the parameters, with what each rank updates of them. Where steps set numbers that all
            parameters share, every rank updates all, as it must see them

    moments    what groups that do not say it themselves are to have (`Config.moments`)

    Groups with moments in bf16 then have the options `moments` and `moments_seed`, so that every
    checkpoint says both. Raises UnsupportedError where parameters cannot be stepped one by one, or
    `moments` is for other optimizers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, table: ParameterTable, ranks: Ranks | None, moments: str | None) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._kernel = kernel_update(optimizer)
        self.rule = None if self._kernel else UpdateRule(optimizer, table.parameters, table.names)
        if ranks and not (self.rule and self.rule.sets):
            table = table.shared_among(ranks.size, ranks.rank, whole=self.rule is not None)
        self.table = table
        self._given: list[tuple[dict[str, Any], str, object]] = []
        self._ask_for(moments, optimizer.defaults)
        self._group_of = {id(p): group for group in self._groups for p in group["params"]}
        self._asked: dict[tuple[object, ...], StateTable] = {}  # by the options that tell

    def _ask_for(self, moments: str | None, own_options: Collection[str]) -> None:
        """Moments of the groups that do not say theirs, and the seed of those that have none."""
        if self.rule is not None:
            said = [moments, *(group.get(MOMENTS) for group in self._groups if MOMENTS not in own_options)]
            asked = next((one for one in said if one not in (None, "fp32")), None)
            if asked is not None:
                kernels = ", ".join(kind.__name__ for kind in KERNEL_UPDATES)
                raise UnsupportedError(f"{MOMENTS}={asked!r} with {self.rule.name}: that is for {kernels}; leave it out, and the optimizer "
                                       "keeps its states as it makes them")
            return
        defaults = {} if moments is None else {MOMENTS: moments}
        narrow = [moments_of(defaults | group) is not None for group in self._groups]
        if moments is not None and all(group.get(MOMENTS, moments) != moments for group in self._groups):
            warnings.warn(f"{MOMENTS}={moments!r} has no effect: every parameter group says {self._groups[0][MOMENTS]!r} itself, as the "
                          "groups of a checkpoint do that is loaded before compile()", HytrainWarning, stacklevel=5)
        for group, in_bf16 in zip(self._groups, narrow, strict=True):
            options: dict[str, object] = defaults | ({MOMENTS_SEED: 0} if in_bf16 else {})
            for key, value in options.items():
                if key not in group:
                    group[key] = value
                    self._given.append((group, key, value))

    @contextlib.contextmanager
    def left_on_error(self) -> Iterator[None]:
        """Of a refused model: the groups are as they were."""
        try:
            yield
        except BaseException:
            self.leave_groups()
            raise

    def leave_groups(self) -> None:
        """Take out of the groups what was put there, so that another compile() is asked again."""
        for group, key, value in self._given:
            if group.get(key) == value:
                group.pop(key, None)
        self._given.clear()

    def config(self, config: Config) -> Config:
        """The options with the engine that can run it.

        Raises UnsupportedError where another one is asked for.
        """
        return config if self.rule is None else torch_engine_config(config, self.rule.name)

    def make_states(self, engine: Engine, units: Sequence[Unit]) -> StateStore:
        """A row of the engine for each parameter, and the states that the optimizer keeps of it."""
        table, unit_of = self.table, unit_of_rows(units)
        states = StateStore(
            table.parameters, [unit_of[row] for row in range(len(table))], self._tables(), engine, table.names, table.shards,
            self._origins())
        for row, parameter in enumerate(table.parameters):
            memory = states.pieces.memory(row, parameter)
            engine.add_row(RowSpec(memory.numel(), unit_of[row], memory, table.names[row]))
        return states

    def _tables(self) -> list[StateTable]:
        if self.rule is not None:
            return [MASTER_ALONE if self.table.is_elsewhere(row) else self.rule.table(row) for row in range(len(self.table))]
        return [self._by_kernel.table.under(self._group_of[id(p)]) for p in self.table.parameters]

    def _origins(self) -> list[RoundingPlace]:
        """Keys are of the numbers in state_dict(), alike on every rank and after loading."""
        number_of = {id(p): number for number, p in enumerate(p for group in self._groups for p in group["params"])}
        begins = (self.table.shards[row].begin if row in self.table.shards else 0 for row in range(len(self.table)))
        return [RoundingPlace(parameter_key(number_of[id(p)]), begin) for p, begin in zip(self.table.parameters, begins, strict=True)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What `explain` says of the optimizer, in sentences."""
        if self.rule is not None:
            return self.rule.notes
        narrow = [group for group in self._groups if group.get(MOMENTS) == "bf16"]
        if not narrow:
            return ()
        seeds = dict.fromkeys(str(group.get(MOMENTS_SEED, 0)) for group in narrow)
        some = f" of {len(narrow)} of {len(self._groups)} parameter groups" if len(narrow) < len(self._groups) else ""
        return (f"moments in bf16{some}, rounded by chance (seed {', '.join(seeds)}); masters stay exact",)

    def make_probe(self, engine: Engine) -> UpdateProbe:
        """What times this update on the device."""
        if self.rule is not None:
            return RuleProbe(engine, self.table.parameters, self.rule)
        largest = max(self.table.parameters, key=torch.Tensor.numel)
        return UpdateProbe(engine, self.table.parameters, self._by_kernel, moments=self._group_of[id(largest)].get(MOMENTS, "fp32"))

    def make_builder(self, states: StateStore, gradients: SessionGradients) -> CommitBuilder:
        """What makes the items of each commit."""
        members = GroupMembers(self.table, states.table, None if self.rule else self._states_asked)
        if self.rule is not None:
            return RuleCommitBuilder(self.table, states, gradients, members, self.rule)
        return CommitBuilder(self.table, states, gradients, members, self._by_kernel.scalars)

    def completed(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A checkpoint's groups with what the optimizer's class takes for options that they lack.

        Its `__setstate__` says, as in torch's `load_state_dict`. It runs on another object, without
        parameters, and may raise.
        """
        shell = object.__new__(type(self._optimizer))
        vars(shell).update(vars(self._optimizer) | {"defaults": dict(self._optimizer.defaults)})
        groups = [copy.deepcopy({**saved, "params": []}) for saved in saved_groups]
        shell.__setstate__({"state": defaultdict(dict), "param_groups": groups})
        return [{**made, "params": saved["params"]} for made, saved in zip(shell.param_groups, saved_groups, strict=True)]

    def require_same_states(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise ValueError where a checkpoint's options of a group ask for other states."""
        if self._kernel is None:
            return
        here, there = ({key: value for key, value in options.items() if key != MOMENTS} for options in (group, {**group, **saved}))
        names, found = (self._kernel.table.under(options).names for options in (here, there))
        if found != names:
            raise ValueError(f"a parameter group of the checkpoint asks for the states {', '.join(found)}, and this run keeps "
                             f"{', '.join(names)}: give the optimizer the same amsgrad as the checkpoint's before compile()")

    def _states_asked(self, group: Mapping[str, Any]) -> StateTable:
        """What a group asks for now, looked up: every step asks for every group.

        Raises UnsupportedError.
        """
        table = self._by_kernel.table
        key = repr(group.get(MOMENTS)), *(bool(group.get(state.option)) for state in table.states if state.option is not None)
        if key not in self._asked:
            self._asked[key] = table.under(group)
        return self._asked[key]

    @property
    def _by_kernel(self) -> KernelUpdate:
        assert self._kernel is not None
        return self._kernel


class RuleCommitBuilder(CommitBuilder):
    """Builds the items of one `step()` of an optimizer without a kernel."""

    def __init__(
        self, table: ParameterTable, states: StateStore, gradients: SessionGradients, members: GroupMembers, rule: UpdateRule
    ) -> None:
        super().__init__(table, states, gradients, members, lambda group, step, torch_cuda: AT_REST)
        self._rule = rule

    def with_steps(self, groups: Iterable[Mapping[str, Any]], items: Sequence[CommitItem]) -> Sequence[CommitItem]:
        """With what each row's update runs; the groups have then what the step sets there."""
        here = {item.row: self._states[item.row] for item in items if not self._table.is_elsewhere(item.row)}
        steps = self._rule.steps(list(groups), here, may_set=not self._table.shards)
        return [item._replace(step=steps.get(item.row, no_step)) for item in items]
