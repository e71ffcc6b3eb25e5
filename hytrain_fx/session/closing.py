"""The end of a compiled model: its weights go back to the device, or stay on the host.

A model whose weights were streamed may be larger than its device. Then `close` leaves it a plain
model on the CPU. It has taken memory for every weight before the first one comes back, so none or
all do. Shards of several ranks cannot be left so: each rank would hold all of them.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

from torch import nn

from hytrain_fx.errors import EngineError, HostMemoryError, HytrainWarning, RankError, UnsupportedError
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.session.call_gate import forget_graphs
from hytrain_fx.session.rank_stages import stages_with
from hytrain_fx.session.session import Session


def close_model(session: Session, model: nn.Module) -> None:
    """Close the session; `model` has all its weights then.

    Raises UnsupportedError, and closes nothing, where sharded weights do not fit on some rank's
    device, HostMemoryError where streamed ones fit neither memory. Raises RankError where another
    rank does not come to this, and EngineError where an update has failed; all is closed then, and
    the model has what this rank has.
    """
    streamed = session.eager.streamed
    try:
        _require_room(session)
        session.close()
    except RankError:
        session.leave_ranks()
        session.close()
        raise
    finally:
        if session.closed:
            forget_graphs(model)
            if stages := stages_with(session):
                stages.closed(session)
    streamed.release()
    if streamed.left_on_host:
        device = session.table.device
        model.cpu()
        warnings.warn(f"the weights of this model do not fit on {device}, so close() has left it on the CPU, whole: it can be saved "
                      "there", HytrainWarning, stacklevel=3)


def _require_room(session: Session) -> None:
    streamed, gathered = session.eager.streamed, session.nodes.gathered
    if session.closed or not streamed.wanted or (gathered and gathered.left):
        return
    with suppress(EngineError):  # one that has failed can be closed too
        session.follow_written_weights()
        session.drain()
    found = streamed.returning
    # Slots go on all ranks or on none: what a slot has is not gathered again.
    if _on_all(session, "room for whole weights", found.fits) and _on_all(session, "memory for whole weights", streamed.reserve()):
        return
    streamed.release()
    needed, there = bytes_text(found.away_bytes), bytes_text(found.device_bytes)
    if found.fits:
        there += " in pieces that are too small"
    if gathered:
        raise UnsupportedError(f"close() needs {needed} for weights that are not whole anywhere, and the device has {there} for them. "
                               "Sharded weights are given back on each rank's device. Save optimizer.sharded_state_dict(), whose masters "
                               "are the weights, and end the process instead")
    if found.away_bytes > found.host_bytes:
        raise HostMemoryError(f"close() needs {needed} for weights that are not whole anywhere; the device has {there} for them, the host "
                              f"{bytes_text(found.host_bytes)}. Save them first, one module after the other (module.state_dict()), and end "
                              "the process instead")


def _on_all(session: Session, what: str, there: bool) -> bool:
    """All ranks give weights back together, or none does. One without room tells the others too."""
    return all(session.ranks.tell_number(what, int(there))) if session.ranks else there
