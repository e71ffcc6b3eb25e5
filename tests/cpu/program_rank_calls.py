"""The calls of programs that several ranks run together.

Most are those of one process, made by every rank on its own batches. The others differ from rank to
rank: `at % ranks` says which one is meant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch import distributed

import hytrain_fx
from hytrain_fx.errors import RankError
from hytrain_fx.runtime.engine import Stage

from . import program_calls as calls
from .program_calls import Kind
from .program_models import Setup, Side

# Left out: what makes a part of a gradient in eager code (refused with several ranks), and Ctrl-C
# in calls that all ranks make together (docs/several_gpus.md: end all, start from a checkpoint).
_OF_ONE_PROCESS_ALONE: Final = (
    "part of the model", "penalty", "place", "write grad", "train beside a thread", "signal in forward", "signal in backward",
    "signal in zero_grad", "signal in step", "signal in load", "signal in clip", "signal in look")


class Gone(BaseException):
    """This rank leaves the program: its process ends, or it never comes to another call."""


class LossError(Exception):
    """Raised by a loss function of the user's."""


def _left_of(side: Side, at: int) -> int:
    """What is left of the number after it has chosen a rank."""
    return at // side.setup.ranks


def _retried(side: Side, at: int) -> torch.Tensor:
    """One rank's loss function raises, and it takes the batch again."""
    left = _left_of(side, at)
    if side.chosen(at):
        with suppress(LossError):
            calls._loss(side, left % 3)
            raise LossError
    return calls._backward(side, left)


def _retried_after_hook(side: Side, at: int) -> torch.Tensor:
    """One rank's backward raises before it comes to a graph; it takes the batch again."""
    left = _left_of(side, at)
    if side.chosen(at):
        with suppress(calls.Stop):
            calls._interrupted_backward(side, left)
    return calls._backward(side, left)


def _bad_forward(side: Side, at: int) -> str:
    return calls._bad_forward(side, _left_of(side, at)) if side.chosen(at) else ""


def _slow(side: Side, at: int) -> None:
    if side.chosen(at) and side.is_ours:
        time.sleep((0.001, 0.02, 0.1)[_left_of(side, at) % 3])


def _delay(side: Side, at: int) -> None:
    """One stage of one rank's engine is slow from now on."""
    if side.chosen(at) and side.is_ours:
        stages = list(Stage)
        side.session.engine.set_delay(stages[_left_of(side, at) % len(stages)], 1000)


def _look(side: Side, at: int) -> Any:
    """What reads weights, and no gradient or state."""
    looks: tuple[Callable[[Side, int], Any], ...] = (
        calls._read_weight, calls._evaluate, calls.sum_of_weights, calls._copy_model, calls._explain)
    return looks[at % len(looks)](side, at)


def _look_alone(side: Side, at: int) -> Any:
    """All settle, and one rank looks."""
    if side.is_ours:
        hytrain_fx.settle(side.model)
    return _look(side, _left_of(side, at)) if side.chosen(at) else None


def _look_ahead(side: Side, at: int) -> Any:
    """One rank looks, and waits for weights until the others come to their next call."""
    return _look(side, _left_of(side, at)) if side.chosen(at) else None


def _other_length(side: Side, at: int) -> torch.Tensor:
    """One rank has a batch of another shape."""
    return calls._backward_other_shape(side, at) if side.chosen(at) else calls._backward(side, _left_of(side, at))


def _mean_loss(side: Side, at: int) -> float:
    """A backward, then a collective of the loop's own."""
    loss = calls._backward(side, at).clone()
    distributed.all_reduce(loss)
    return float(loss)


def _infinite_on_one(side: Side, at: int) -> tuple[torch.Tensor, float]:
    return calls._scaled_train(side, _left_of(side, at), side.chosen(at))


def _place(side: Side, at: int) -> None:
    """Each rank moves its states to another plan."""
    calls._place(side, at + 5 * side.rank)


def _write_grad(side: Side, at: int) -> None:
    """Where a backward has made one: else `step()` takes it for one rank's own, and refuses it."""
    if calls._gradient(side, at) is not None:
        calls._write_grad(side, at)


def _train_beside(side: Side, at: int) -> torch.Tensor:
    """Another thread of each rank looks at weights; state_dict() asks all ranks, so it may not."""
    return calls._train_beside(side, (0, 2, 3)[at % 3])


def _one_ends(side: Side, at: int) -> None:
    """One rank leaves: between calls, between forward and backward, after it, or in step()."""
    if not side.chosen(at):
        return
    left = _left_of(side, at) % 4
    if left == 1:
        calls._loss(side, 0)
    if left == 2:
        calls._backward(side, 0)
    if left == 3:
        side.optimizer.register_step_pre_hook(_leave)
        side.optimizer.step()
    raise Gone


def _leave(*_: Any) -> None:
    raise Gone


def _signal_in_look(side: Side, at: int) -> None:
    """Ctrl-C while one rank looks, which may wait for the others then."""
    if side.is_ours and side.chosen(at):
        calls._signalled(side, at, lambda: _look(side, _left_of(side, at)))


def _signal_in_forward(side: Side, at: int) -> torch.Tensor:
    """Ctrl-C in one rank's forward; it takes the batch again."""
    left = _left_of(side, at)
    if side.is_ours and side.chosen(at):
        calls._signalled(side, at, lambda: calls._loss(side, left % 3))
    return calls._backward(side, left)


RANK_KINDS: dict[str, Kind] = {name: kind for name, kind in calls.KINDS.items() if name not in _OF_ONE_PROCESS_ALONE} | {
    "place": Kind(_place, 4),
    "write grad": Kind(_write_grad, 1),
    "train beside a thread": Kind(_train_beside, 1),
    "retried batch": Kind(_retried),
    "retried after a hook": Kind(_retried_after_hook),
    "bad forward on one rank": Kind(_bad_forward, 1),
    "slow rank": Kind(_slow, 3),
    "delay": Kind(_delay, 3),
    "look alone": Kind(_look_alone, 3),
    "look ahead": Kind(_look_ahead),
    "other length on one rank": Kind(_other_length, 3),
    "mean loss": Kind(_mean_loss),
    "scaled step, infinite on one rank": Kind(_infinite_on_one, 3),
    # Not drawn at random: a program has one of these at most, and may end in RankError after it.
    "one rank ends": Kind(_one_ends, 0, (RankError,)),
    "one rank stops": Kind(_one_ends, 0, (RankError,)),
    "signal in look on one rank": Kind(_signal_in_look, 0, (RankError,)),
    "signal in forward on one rank": Kind(_signal_in_forward, 0, (RankError,)),
}
# One rank alone makes a forward, looks at weights that all have not settled, or has another thread
# or a forked process look: with sharded weights all ranks would have to gather them.
_OF_WHOLE_WEIGHTS: Final = (
    "look ahead", "retried batch", "retried after a hook", "bad forward on one rank", "train beside a thread", "fork")
ENDINGS: Final = tuple(name for name, kind in RANK_KINDS.items() if RankError in kind.refusals)


def kinds_of(setup: Setup) -> dict[str, Kind]:
    """The calls that programs of this setup are made of."""
    if setup.device != "cpu":
        return {name: kind for name, kind in (calls.KINDS | calls.ON_GPU).items() if name not in calls.ON_CPU}
    if setup.ranks == 1:
        return calls.KINDS
    return {name: kind for name, kind in RANK_KINDS.items() if name not in _OF_WHOLE_WEIGHTS} if setup.shards_weights else RANK_KINDS
