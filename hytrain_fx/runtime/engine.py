"""The engine as the rest of the library sees it, and what is handed to it.

Two engines implement this Protocol: `native` (C++ threads that never take the GIL) and `fallback`
(one Python thread and plain torch ops, where the native one cannot be had). Both give the same
bits.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from hytrain_fx.errors import DroppedNodeError, EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS
from hytrain_fx.ir.states import StateTable
from hytrain_fx.runtime.own_states import OwnStates
from hytrain_fx.runtime.rounding import NO_PLACE, RoundingPlace, rounded
from hytrain_fx.runtime.scalars import UpdateScalars

_STAGING_ALIGN_PARAMS = 64


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One managed parameter: its flat size, its unit (priority), and the weight on the device."""

    numel: int
    unit: int
    weight: torch.Tensor  # the parameter's own memory, dense, any shape; fp32, bf16, fp16
    name: str = ""  # for messages


@dataclass(frozen=True, slots=True)
class RowStates:
    """Where one row's optimizer states rest: flat tensors, all on the host or all on the device.

    For fp32 rows on the device `master` is the weight itself. `slot` (host only) has the gradient's
    dtype; of rows with a copy it is fp32, and a bf16 gradient fills half of it. An update leaves
    the gradient there: `.grad` may be read after `step()`. With `low` the master is in two halves
    (split_master.py), and the signs of the state `table.tie` are part of it. `out` (host only) is
    there for 16-bit weights whose master is whole. A row whose optimizer has no kernel keeps `own`
    instead of `states`. `place` is for states that are rounded by chance. `pinned`: whether the
    driver could pin that host memory; for a model on the CPU nothing has to be.
    """

    table: StateTable
    master: torch.Tensor  # [numel] fp32; with `low` bf16, the new weight
    states: tuple[torch.Tensor, ...] = ()  # [numel] each, in the table's order
    # [numel] gradient in; None on the device and for streamed rows
    slot: torch.Tensor | None = None
    low: torch.Tensor | None = None  # [numel] int16, bf16 rows on the host
    # [numel] the new 16-bit weight, going to the device; None where the master holds it
    out: torch.Tensor | None = None
    own: OwnStates | None = None
    place: RoundingPlace = NO_PLACE
    pinned: bool = True

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RowStates:
        """The same with every tensor changed; `own` states stay."""
        slot, low, out = (None if tensor is None else change(tensor) for tensor in (self.slot, self.low, self.out))
        return replace(self, master=change(self.master), states=tuple(map(change, self.states)), slot=slot, low=low, out=out)

    def part(self, begin: int, end: int) -> RowStates:
        """The same range of every tensor: views."""
        return replace(self.changed(lambda tensor: tensor[begin:end]), place=self.place.after(begin))

    def update_(self, scalars: UpdateScalars, grad: torch.Tensor, out: torch.Tensor | None) -> None:
        """`scalars.update_` with the states in whichever dtype they rest; masters are whole."""
        if all(state.dtype == torch.float32 for state in self.states):
            return scalars.update_(grad, self.master, self.states, out)
        wide = [state.float() for state in self.states]
        scalars.update_(grad, self.master, wide, out)
        for number, (state, values) in enumerate(zip(self.states, wide, strict=True)):
            state.copy_(rounded(values, self.place, scalars.rounding_key, number))

    def named(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(zip(self.table.names, self.states, strict=True))

    def marked(self) -> torch.Tensor:
        """The state whose signs are part of a master in halves.

        Raises EngineError for a table without such a state.
        """
        if self.table.tie is None:
            raise EngineError(f"internal: no state of {self.table.optimizer} has signs to spare, so its masters are whole")
        return self.states[self.table.tie]


class RowStep(Protocol):
    """One step of one row of any optimizer, its numbers fixed.

    It updates whole tensors where they rest.

    gradient   [numel] in the weight's dtype; it may be written to
    factors    multiplications of the gradient, in order, each rounded to its dtype
    out        [numel] the new weight, for 16-bit weights
    """

    def __call__(self, states: RowStates, gradient: torch.Tensor, factors: Sequence[float], out: torch.Tensor | None) -> None: ...


class CommitItem(NamedTuple):
    """One row's part of a `step()`.

    grad     the real gradient of a row updated on the device (its states rest there or are
             streamed), None for a gradient that went to its slot
    at_end   the weight or the gradient was touched outside the graphs: go by the present point of
             the compute stream
    factors  multiplications logged on the gradient, each a float or a 0-dim fp32 tensor on the
             device, unchanged until the next commit
    step     what to run for a row whose optimizer has no kernel, instead of `scalars`
    """

    row: int
    scalars: UpdateScalars
    grad: torch.Tensor | None = None
    at_end: bool = False
    factors: tuple[float | torch.Tensor, ...] = ()
    step: RowStep | None = None


class Stage(IntEnum):
    """A stage of the pipeline, for recording and for delays in tests.

    STREAM_IN and STREAM_OUT copy states of streamed rows.
    """

    D2H = 0
    CPU_UPDATE = 1
    GPU_UPDATE = 2
    H2D = 3
    LANDING = 4
    ISSUE = 5
    STREAM_IN = 6
    STREAM_OUT = 7


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task that ran: times in microseconds on the engine's clock (monotonic host clock).

    `workers` share the CPU's updates meanwhile: all, or those that update before a step.
    """

    stage: Stage
    row: int
    chunk: int
    worker: int
    begin_us: float
    end_us: float
    workers: int = 1


def staging_shape(largest_params: int, arrays: int) -> tuple[int, int, int]:
    """Slots, arrays in each, fp32 elements in each array.

    This is the device memory that the states of streamed rows pass through.

    largest_params   of the largest of them
    arrays           fp32 tensors that a row may have there: master and states
    """
    params = min(largest_params, CHUNK_PARAMS)
    return STAGING_SLOTS, arrays, -(-params // _STAGING_ALIGN_PARAMS) * _STAGING_ALIGN_PARAMS


@dataclass(frozen=True, slots=True)
class GuessCounts:
    """Updates that began before the factors of their gradients were known.

    They guessed the factors that last came twice running.

    Counted since the engine was made:

    commits   steps with such updates
    missed    those of them in which a factor came out differently and updates were made again
    params    parameters updated so
    redone    those of them that were updated again
    shadow_bytes    the most host memory that new places for states have taken, in such updates and
                    in those ahead of `step()`
    sent      parameters, of `params`, whose new weights were sent before the factors had come
    """

    commits: int = 0
    missed: int = 0
    params: int = 0
    redone: int = 0
    shadow_bytes: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class EarlyCounts:
    """Updates that began before `step()`, on a guess at its hyper-parameters and factors.

    Counted since the engine was made:

    commits   steps with such updates
    missed    those of them in which some updates were put back or made again; if a factor that came
              later was the cause, that counts as a missed guess
    params    parameters updated so
    redone    those of them that were put back or updated again
    host_params, landed_params    of the last commit: parameters in rows on the host, and those of
                                  them whose gradients had arrived by then
    waiting_params, guessed_params    of host_params: those whose factors had not arrived by then,
                                      and those of them that may begin on a guess
    """

    commits: int = 0
    missed: int = 0
    params: int = 0
    redone: int = 0
    host_params: int = 0
    landed_params: int = 0
    waiting_params: int = 0
    guessed_params: int = 0


@dataclass(frozen=True, slots=True)
class FinishTimes:
    """When the updates of a step ended, in microseconds from its commit.

    Of the step before the last committed one, but for `launching_us`, which is of the last. 0 where
    there were none of the kind, or where not all had ended.

    cpu_paused_us     idle time of the workers, over their number, from the first update by the CPU
                      to the last: gradients had not come yet
    cpu_begun_us      when the first update by the CPU began
    streamed_held_us  how long states to be streamed stood on the lane after new weights that the
                      CPU had not updated
    launching_us      what the launching thread took from its last wait to the last commit,
                      without what held it up (a full queue); 0 where the loop waited for the device
                      before the commit
    ahead             gradients offloaded by then, before their rows' previous updates had ended
    at_once           parameters whose updates were put on the lane to the device together, as the
                      rest of the step, which the launching thread did not wait for
    promised          of these, parameters whose gradients were not on the host by then
    """

    cpu_us: float = 0.0
    streamed_us: float = 0.0
    cpu_paused_us: float = 0.0
    cpu_begun_us: float = 0.0
    streamed_held_us: float = 0.0
    launching_us: float = 0.0
    ahead: int = 0
    at_once: int = 0
    promised: int = 0


def engine_error(message: str, names: Sequence[str]) -> EngineError:
    """The error for an engine's message, with the parameters' names next to their rows."""

    def named(match: re.Match[str]) -> str:
        row = int(match[1])
        return f"{match[0]} ({names[row]})" if row < len(names) and names[row] else match[0]

    text = re.sub(r"row (\d+)", named, message)
    if "dropped node" in message:
        return DroppedNodeError(text)
    return EngineError(text)


def forked_error() -> EngineError:
    """The error for a forked child that asks something of an engine.

    It does not have the engine's threads. Its weights were settled before the fork.
    """
    return EngineError(
        "this process was forked from the one that compiled the model: it has the weights, but no engine to train with. Train in the "
        "parent, or start the process with multiprocessing's \"spawn\" method and compile there"
    )


class Engine(Protocol):
    """Takes gradients, updates, and brings new weights back.

    Every method raises EngineError when a worker has failed.
    """

    name: str
    library_origin: str | None  # where its library comes from, in words; None for an engine without one
    workers: int
    can_stream: bool  # whether rows may be placed with place_streamed
    splits_masters: bool  # whether bf16 rows on the host have masters in halves
    can_skip: bool  # whether there are `commit_unless` and `skipped`
    takes_copies: bool  # whether there is `use_copy`
    can_begin_early: bool  # whether there is `commit_early`

    @property
    def rows(self) -> int: ...  # how many were added
    def add_row(self, spec: RowSpec) -> int: ...  # its number
    def set_unit(self, row: int, unit: int) -> None: ...
    def set_weight(self, row: int, weight: torch.Tensor) -> None: ...
    def use_copy(self, row: int, copy: torch.Tensor) -> None: ...  # replaces an fp32 weight
    def place_on_host(self, row: int, states: RowStates) -> None: ...
    def place_on_device(self, row: int, states: RowStates) -> None: ...
    def place_streamed(self, row: int, states: RowStates) -> None: ...
    def send_weight(self, row: int, on: bool) -> None: ...  # only where can_stream
    # The ring's size. Without `streams` no row is streamed, and memory for that is let go. All rows
    # are at rest.
    def set_transit(self, ring_bytes: int, streams: bool) -> None: ...
    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None: ...
    # Copies of gradients that stay on the device: dense, with the dtype and order of memory of what
    # they are copied to.
    def keep_grads(self, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None: ...
    def arm_cpu(self, rows: Sequence[int]) -> None: ...
    def arm_gpu(self, rows: Sequence[int]) -> None: ...
    def arm_reload(self, rows: Sequence[int]) -> None: ...
    def release(self, rows: Sequence[int]) -> None: ...
    def commit(self, items: Sequence[CommitItem]) -> None: ...
    # updates nothing where `skip` is not 0
    def commit_unless(self, items: Sequence[CommitItem], skip: torch.Tensor) -> None: ...
    # whether the last commit_unless updated nothing; ask before the next commit
    def skipped(self) -> bool: ...
    def knows_skipped(self) -> bool: ...  # whether `skipped` would answer without a wait
    # a guess at the next commit's scalars for these rows; until that commit so many workers
    # update, at least one
    def commit_early(self, rows: tuple[int, ...], scalars: UpdateScalars, workers: int) -> None: ...
    def wait(self, rows: Sequence[int]) -> None: ...
    # until new weights are there and may be read and written
    def settle(self, rows: Sequence[int]) -> None: ...
    def drain(self, rows: Sequence[int]) -> None: ...  # and states are at rest in their own memory
    # Gradients in slots go to `out`, dense, of any dtype: in order, each padded to 64 bytes. They
    # may be read, and `out` may be let go, once the compute stream has been made to wait by
    # `fetched`, with the number that `fetch` gave.
    def fetch(self, rows: Sequence[int], out: torch.Tensor) -> int: ...
    def fetched(self, fetch: int) -> None: ...
    # until gradients that were sent to these slots are there, and the host may add to them
    def landed(self, rows: Sequence[int]) -> None: ...
    def discard(self, rows: Sequence[int]) -> None: ...
    def pending(self, row: int) -> bool: ...
    # whether `wait` would return at once; False where that is not known
    def issued(self, rows: Sequence[int]) -> bool: ...
    def record(self, on: bool) -> None: ...
    def take_records(self) -> list[TaskRecord]: ...  # all that have ended since the last call
    def guess_counts(self) -> GuessCounts: ...
    def early_counts(self) -> EarlyCounts: ...
    # of the step before the last commit; zeros if it had not ended by then
    def finish_times(self) -> FinishTimes: ...
    def cpu_update_us(self, row: int) -> float: ...
    def set_delay(self, stage: Stage, mean_us: float) -> None: ...
    def fail_next_update(self, row: int) -> None: ...
    # an idle row is not used for now: its states may be let go
    def retire(self, row: int) -> None: ...
    def close(self) -> None: ...


def settling(engine: Engine) -> Callable[[], None]:
    """What waits for all updates, before a fork.

    The child gets what memory holds then, and no threads that could finish an update.
    """
    found = weakref.ref(engine)

    def settle() -> None:
        alive = found()
        if alive is not None:
            with suppress(EngineError):  # closed, or the parent learns of it at its next gate
                alive.drain(range(alive.rows))
                alive.skipped()  # the child asks for it, of no engine

    return settle
