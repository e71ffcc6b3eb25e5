"""Optimizer states in torch's checkpoint form, read from and written to wherever they rest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from hytrain_fx.errors import HytrainWarning
from hytrain_fx.ir.states import MOMENTS, MOMENTS_SEED
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.session.own_entries import OwnEntries
from hytrain_fx.session.session import Session
from hytrain_fx.session.turns import in_turn
from hytrain_fx.torch_private.tensors import without_torch_function


class ParameterStates(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`optimizer.state`: by parameter `step`, its states, and `master` for 16-bit parameters.

    They are read from wherever they rest.

    As torch's, it has no entry before a parameter's first step, and gives an empty one where it is
    asked. An entry is a copy on the CPU whose tensors refuse writes in place, which would be lost:
    assign a tensor to its key, or an entry, instead. (As inference tensors do; docs/limits.md has
    what torch lets pass.) Deleting or emptying an entry makes it as
    before the first step. Raises KeyError where a parameter that is not managed is assigned to or
    deleted, ValueError where what is assigned does not fit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.turns = session.turns

    @in_turn
    def __len__(self) -> int:
        return sum(_has_entry(self._session, row) for row in range(len(self._session.table)))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([p for p in self._session.table.parameters if p in self])

    @in_turn
    def __contains__(self, parameter: object) -> bool:
        row = self._session.table.row_of.get(id(parameter))
        return row is not None and _has_entry(self._session, row)

    @in_turn
    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        write = partial(self._write, parameter)
        if parameter not in self:
            return StateEntry({}, write)
        row = self._at_rest(parameter, reads=True)
        with torch.inference_mode():  # torch refuses to write to what is made here
            return StateEntry(_read_row(self._session, row) or {}, write)

    @in_turn
    def __setitem__(self, parameter: torch.Tensor, entry: dict[str, Any]) -> None:
        row = self._at_rest(parameter)
        check_row(self._session, row, entry, next(g for g in self._session.groups if any(p is parameter for p in g["params"])))
        tell_of_rounding(self._session, {row: entry})
        with self._session.states.loading(all_states=False):
            load_row(self._session, row, entry)
        self._session.gather_loaded([row])

    @in_turn
    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        row = self._at_rest(parameter)
        with self._session.states.loading(all_states=False):
            load_row(self._session, row, None)

    @in_turn
    def clear(self) -> None:
        """Make every parameter as before its first step; the weights stay."""
        for parameter in list(self):
            del self[parameter]

    def leave_groups(self) -> None:
        """Of a closed session: take out of the groups what its compile() has put there."""
        if self._session.closed:
            self._session.update.leave_groups()

    def _write(self, parameter: torch.Tensor, entry: dict[str, Any]) -> None:
        if entry:
            self[parameter] = entry
        else:
            self.pop(parameter, None)

    def _at_rest(self, parameter: torch.Tensor, *, reads: bool = False) -> int:
        self._session.states.require_whole()
        row = self._session.table.row_of.get(id(parameter), -1)
        if row < 0:
            raise KeyError(f"a {type(parameter).__name__} that is no parameter of the optimizer when the model was compiled")
        self._session.drain()
        self._session.eager.before_states(may_stay=reads and own_entries(self._session) is None)
        return row


def read_states(session: Session) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Every entry of `ParameterStates` as copies of its own. The session must be drained."""
    session.states.require_whole()
    session.eager.before_states(may_stay=own_entries(session) is None)
    rows = filter(partial(_has_entry, session), range(len(session.table)))
    read = ((row, _read_row(session, row)) for row in rows)
    trained = {session.table.parameters[row]: entry for row, entry in read if entry is not None}
    return trained | {parameter: copy.deepcopy(entry) for parameter, entry in session.frozen_states.items()}


def _has_entry(session: Session, row: int) -> bool:
    """As torch, too, has no state for a parameter before its first step.

    Of one that has an owner, whether it was stepped: that is known on all ranks. Reading it tells
    whether the step keeps anything.
    """
    entries = own_entries(session)
    return session.builder.steps[row] > 0 if entries is None or row in session.table.shards else entries.has(row)


def own_entries(session: Session) -> OwnEntries | None:
    """What reads and writes the states of another optimizer than Adam and AdamW."""
    if session.rule is None:
        return None
    return OwnEntries(session.rule, session.states, session.table.parameters, session.table.names)


def step_count(steps: float) -> torch.Tensor:
    """A 0-dim tensor on the CPU, in the dtype that torch's optimizers count in.

    Not in the default dtype: bf16 has no 257.
    """
    return torch.tensor(float(steps), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32, device="cpu")


def _read_row(session: Session, row: int) -> dict[str, torch.Tensor] | None:
    """The entry; None where the step of its owner has kept nothing."""
    with without_torch_function():
        if (own := own_entries(session)) is not None:
            return _read_own(session, own, row)
        states, parameter = whole_states(session, row), session.table.parameters[row]
    entry = {"step": step_count(session.builder.steps[row])}
    entry |= {name: shaped(flat, parameter) for name, flat in states.named().items()}
    if parameter.dtype != torch.float32:
        entry["master"] = shaped(states.master, parameter)
    return entry


def _read_own(session: Session, own: OwnEntries, row: int) -> dict[str, torch.Tensor] | None:
    entry = own.read(row) if own.has(row) else None
    if row in session.table.shards:
        assert session.nodes.gathered is not None
        entry = session.nodes.gathered.from_owner(row, entry)
    return entry


def whole_states(session: Session, row: int) -> RowStates:
    """As `StateStore.whole_as_written`, with what other ranks keep."""
    if (gathered := session.nodes.gathered) is None or row not in session.table.shards:
        return session.states.whole_as_written(row) if session.eager.may_be_written(row) else session.states.whole(row)
    states = session.states.whole(row)
    whole = partial(gathered.whole, row)  # not of slots, which a rank has or not, as its plan says
    return RowStates(states.table, whole(states.master), tuple(map(whole, states.states)))


def follow_weights(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Elements of weights that were written since a session was closed become those of masters.

    state_dict   what that session has left
    """
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            master = state_dict["state"].get(number, {}).get("master")
            if master is not None and not parameter.is_meta:
                weight = parameter.detach().to("cpu")
                state_dict["state"][number]["master"] = torch.where(master.to(weight.dtype) == weight, master, weight.float())


def load_states(session: Session, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Write a checkpoint's states and group options.

    Its form is checked. The session is drained; the groups are those of its optimizer.

    Raises ValueError, and writes nothing, where groups, shapes or the kinds of states do not match.
    After an error while they are written, memory that runs out say, nothing is trained or saved
    until all have been loaded (`StateStore.require_whole`).
    """
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    require_alike_groups([len(g["params"]) for g in groups], saved_groups)
    for group, saved in zip(groups, saved_groups, strict=True):
        session.update.require_same_states(group, saved)
    saved_of_row: dict[int, dict[str, Any] | None] = {}
    frozen: dict[torch.Tensor, dict[str, Any]] = {}
    group_of_row: dict[int, dict[str, Any]] = {}
    for group, saved in zip(groups, saved_groups, strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            row = session.table.row_of.get(id(parameter))
            if row is not None:
                saved_of_row[row] = state_dict["state"].get(number)
                group_of_row[row] = group | saved
            elif state_dict["state"].get(number):
                frozen[parameter] = state_dict["state"][number]
    for row, entry in saved_of_row.items():
        if entry is not None:
            check_row(session, row, entry, group_of_row[row])
    tell_of_rounding(session, saved_of_row)
    session.follow_written_weights()  # or the next step() would take weights that were loaded before for newer than these masters
    with session.states.loading(all_states=True):
        for group, saved in zip(groups, saved_groups, strict=True):
            load_options(group, saved, optimizer.defaults)
        for row, entry in saved_of_row.items():
            load_row(session, row, entry)
        session.gather_loaded(saved_of_row)
        session.frozen_states = {parameter: dict(entry) for parameter, entry in frozen.items()}


def require_form(state_dict: object) -> None:
    """Raise ValueError for what is no optimizer's state_dict."""
    kinds = {"state": Mapping, "param_groups": Sequence}
    if not isinstance(state_dict, Mapping) or not all(isinstance(state_dict.get(key), kind) for key, kind in kinds.items()):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"this is no optimizer's state_dict: found {found}, expected a dict of 'state' and 'param_groups'")


def require_alike_groups(expected: Sequence[int], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where the groups of a checkpoint do not have so many parameters."""
    found = [len(group["params"]) for group in saved]
    if found != list(expected):
        raise ValueError(f"the checkpoint has parameter groups of {found} parameters, this optimizer has {list(expected)}")


def load_options(group: dict[str, Any], saved: Mapping[str, Any], known: Collection[str]) -> None:
    """The options of the checkpoint, and those of the optimizer that it lacks.

    What a scheduler has put there since (`initial_lr`) goes. In what states rest stays.
    """
    for key in group.keys() - saved.keys() - set(known) - {"params", "param_names", MOMENTS, MOMENTS_SEED}:
        del group[key]
    group.update(copy.deepcopy({key: value for key, value in saved.items() if key not in ("params", MOMENTS)}))


def load_row(session: Session, row: int, saved: Mapping[str, Any] | None) -> None:
    """Write a checked entry; None: as before the first step."""
    if (own := own_entries(session)) is not None:
        session.builder.steps[row] = int(saved is not None)
        if not session.table.is_elsewhere(row):
            own.load(row, saved)
        return
    states, table = session.states, session.states.table(row)
    session.builder.steps[row] = 0 if saved is None else int(saved["step"])
    if saved is None:
        states.clear(row)
        return
    with without_torch_function():
        if "master" in saved and session.table.parameters[row].dtype != torch.float32:
            master = _home(session, row, saved["master"])
        else:
            states.take_weight(row)
            master = states.whole(row).master
        states.write(row, RowStates(table, master, tuple(_home(session, row, saved[name]) for name in table.names)))
        session.eager.writes.note([row])  # it has written the weight, which nobody else has


def _home(session: Session, row: int, saved: torch.Tensor) -> torch.Tensor:
    """What is updated here of a state, flat, in fp32, in the order of the parameter's memory."""
    local = _local(saved)
    if local is not saved:
        return local.to(torch.float32).reshape(-1)
    parameter = session.table.parameters[row]
    flat = torch.empty(parameter.numel(), dtype=torch.float32, device=saved.device)
    _view(flat, parameter).copy_(saved.detach())
    return session.states.pieces.memory(row, flat)


def _local(saved: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's shard; else the tensor."""
    return cast(torch.Tensor, saved.to_local()) if hasattr(saved, "to_local") else saved


def tell_of_rounding(session: Session, entries: Mapping[int, Mapping[str, Any] | None]) -> None:
    """Warn, once, of states of these rows that bf16 may not hold. Call it before any is written."""
    tables = ((session.states.table(row), entry) for row, entry in entries.items() if entry and session.rule is None)
    rounded = {entry[of.name].dtype for table, entry in tables for of in table.states if of.dtype == "bfloat16"} - {torch.bfloat16}
    if rounded:
        found = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rounded))
        warnings.warn(f"the checkpoint has moments in {found}, and this run keeps them in bf16: they are rounded to nearest once, now",
                      HytrainWarning, stacklevel=4)


def check_row(session: Session, row: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises ValueError where an entry does not fit, under these options."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"the entry of {session.table.names[row]} is {saved!r} in the checkpoint, expected a dict of states")
    if (own := own_entries(session)) is not None:
        own.check(row, saved, group)
        return
    table = session.states.table(row)
    needed = table.names
    missing = [name for name in ("step", *needed) if name not in saved]
    if missing:
        raise ValueError(f"the checkpoint has no {missing[0]} for {session.table.names[row]}, only {sorted(saved)}; "
                         f"is it of {table.optimizer}?")
    name_of_row, expected = session.table.names[row], session.table.parameters[row].shape
    if not _is_count(saved["step"]):
        raise ValueError(f"step of {name_of_row} is {saved['step']!r} in the checkpoint, expected a number of steps")
    keeps_master = session.table.parameters[row].dtype != torch.float32  # else the weight is the master, whatever the entry has
    for name in (*needed, *(["master"] if keeps_master else [])):
        if name in saved and not isinstance(saved[name], torch.Tensor):
            raise ValueError(f"{name} of {name_of_row} is {saved[name]!r} in the checkpoint, expected a tensor")
        if name in saved and saved[name].shape != expected:
            raise ValueError(f"{name} of {name_of_row} has shape {tuple(saved[name].shape)} in the checkpoint, expected {tuple(expected)}")
    for state in table.states:
        if state.marks_ties and bool((_local(saved[state.name]) < 0).any()):
            raise ValueError(f"{state.name} of {name_of_row} has negative elements in the checkpoint; none can be")


def _is_count(value: object) -> bool:
    try:
        return int(value) >= 0  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return _view(flat, parameter).to("cpu", copy=True)


# ---- What `optimizer.state[parameter]` gives: every change by key is written to the states ----


Write = Callable[[dict[str, Any]], None]
"""Takes the entry as it is to be, empty for none.

Raises ValueError, and changes nothing, where it does not fit.
"""


class StateEntry(dict[str, Any]):
    """A dict whose changes reach `write` before they show; a copy of it is a plain dict."""

    def __init__(self, entry: dict[str, Any], write: Write) -> None:
        super().__init__(entry)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        self._become({**self, key: value})

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._become({name: value for name, value in self.items() if name != key})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As dict's; written once."""
        self._become({**self, **dict(*args, **kwargs)})

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As dict's."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """As dict's."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """As dict's."""
        if not self:
            raise KeyError("the entry is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """As before the parameter's first step."""
        self._become({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def _become(self, entry: dict[str, Any]) -> None:
        self._write(entry)
        super().clear()
        super().update(entry)
