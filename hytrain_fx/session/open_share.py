"""Batches of which the loop has trained a part and not the rest, or trains one now.

    begin, on_cpu, joined    the device's part is handed out; the CPU's; its gradients are added
    left                     the loop has left `share` half-way, or an error has ended it
    require_none             step() and the next share() are errors while a part has gradients
    require_both             before and after the CPU's part: that of the device must still be there
    dropped                  zero_grad(): a batch that was left is left out. One that is trained now
                             has lost its first part, so it cannot be joined. Before the first
                             backward of that part nothing of it is lost

A list of the parts has its backwards when both have been handed out. The CPU's gradients come late
then, which step() sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from enum import Enum, auto
from typing import Final

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function


class _Phase(Enum):
    DEVICE = auto()
    CPU = auto()
    DROPPED = auto()  # the device's part has no gradients any more
    LEFT = auto()
    JOINED = auto()


class OpenBatch:
    """One batch in two parts.

    backwards   the session's number of them before it
    rows        that had gradients before it; of the CPU's part: that have the device's
    """

    def __init__(self, backwards: int, rows: Set[int]) -> None:
        self.phase = _Phase.DEVICE
        self.backwards = backwards
        self.rows = rows
        self.came_late: Callable[[], Callable[[], bool] | None] | None = None  # weak


_OPEN: Final[weakref.WeakKeyDictionary[Session, OpenBatch]] = weakref.WeakKeyDictionary()


def begin(session: Session) -> OpenBatch:
    """A batch in two parts begins. Raises UnsupportedError as `require_none`."""
    require_none(session, "share()")
    batch = _OPEN[session] = OpenBatch(session.nodes.backwards, _rows_with_gradients(session))
    return batch


def on_cpu(session: Session, batch: OpenBatch, has_gradients: Callable[[], bool]) -> None:
    """The CPU's part is handed out. Raises UnsupportedError as `require_both`.

    has_gradients   a method: whether gradients are there that are not joined
    """
    batch.rows = _rows_with_gradients(session)
    if not batch.rows and session.nodes.backwards > batch.backwards:
        batch.phase = _Phase.DROPPED  # by model.zero_grad(), or by hand
    require_both(session, batch)
    batch.phase, batch.came_late = _Phase.CPU, weakref.WeakMethod(has_gradients)


def joined(batch: OpenBatch) -> None:
    """Both parts are trained and joined."""
    batch.phase = _Phase.JOINED


def left(batch: OpenBatch) -> None:
    """The loop does not come back for the rest."""
    if batch.phase is not _Phase.JOINED:
        batch.phase = _Phase.LEFT


def require_both(session: Session, batch: OpenBatch) -> None:
    """Raises UnsupportedError where the device's part was dropped meanwhile."""
    if batch.phase is _Phase.DROPPED or _OPEN.get(session) is not batch or (
            batch.phase is _Phase.CPU and not batch.rows <= _rows_with_gradients(session)):
        raise UnsupportedError("zero_grad() or another share() was called in the loop over the parts of a batch, and has dropped the "
                               "gradients of the device's part; call them before that loop, and step() after it")


def dropped(session: Session) -> None:
    """All gradients are about to be dropped."""
    batch = _OPEN.get(session)
    if batch is None:
        return
    if batch.phase in (_Phase.LEFT, _Phase.JOINED):
        del _OPEN[session]
    elif batch.phase is _Phase.CPU or session.nodes.backwards > batch.backwards or not _rows_with_gradients(session) <= batch.rows:
        batch.phase = _Phase.DROPPED


def require_none(session: Session, called: str) -> None:
    """Raises UnsupportedError where a part alone has gradients, or where some have come late."""
    batch = _OPEN.get(session)
    if batch is None:
        return
    if batch.phase is _Phase.JOINED:
        has_gradients = None if batch.came_late is None else batch.came_late()
        if has_gradients is not None and has_gradients():
            raise UnsupportedError(f"{called} found gradients of the CPU's part that came after share() had ended; call backward() in the "
                                   "loop over the parts, not over a list of them, and leave this batch out with optimizer.zero_grad()")
        del _OPEN[session]
        return
    if _rows_with_gradients(session):
        raise UnsupportedError(f"{called} was called before share() had come to its end, without the CPU's gradients of that batch; "
                               "run the loop over the parts to its end, or leave the batch out with optimizer.zero_grad()")
    if batch.phase is _Phase.LEFT:
        del _OPEN[session]


def _rows_with_gradients(session: Session) -> Set[int]:
    with without_torch_function():
        return {row for row, parameter in enumerate(session.table.parameters) if get_grad(parameter) is not None}
