"""Batches of which the loop has trained a part and not the rest: it has left `share` half-way.

    begin, end           the device's part is handed out; the CPU's gradients are added
    require_none         in between, step() and the next share() are errors
    dropped              zero_grad(): the batch is left out, and nothing is half done

Where nothing has a gradient the batch is left out as well, whoever has dropped them.
"""

from __future__ import annotations

import weakref
from typing import Final

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function

_OPEN: Final[weakref.WeakSet[Session]] = weakref.WeakSet()


def begin(session: Session) -> None:
    """A batch in two parts begins."""
    _OPEN.add(session)


def end(session: Session) -> None:
    """Both parts are trained and joined."""
    _OPEN.discard(session)


dropped = end


def require_none(session: Session, called: str) -> None:
    """Raises UnsupportedError where gradients are there of the device's part alone."""
    if session not in _OPEN:
        return
    with without_torch_function():
        if any(get_grad(parameter) is not None for parameter in session.table.parameters):
            raise UnsupportedError(f"{called} was called before share() had come to its end, without the CPU's gradients of that batch; "
                                   "run the loop over the parts to its end, or leave the batch out with optimizer.zero_grad()")
    _OPEN.discard(session)
