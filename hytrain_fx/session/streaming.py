"""`weights="streamed"`, `"sharded"` and `"sharded_host"`: what they need, and their beginning."""

from __future__ import annotations

from hytrain_fx.config import Config
from hytrain_fx.errors import EngineError, UnsupportedError
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.native.storage_memory import can_put
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.resources import Resources
from hytrain_fx.weights.streamed_weights import StreamedWeights


def stream_weights(
    streamed: StreamedWeights, states: StateStore, engine: Engine, resources: Resources, ranks: Ranks | None, planning: Planning,
    config: Config,
) -> None:  # fmt: skip
    """Have the weights of a model that was just compiled rest elsewhere, where that is wanted.

    Raises UnsupportedError, and changes nothing, where no weight of it can be, or where what it
    takes is not there; RankError where ranks have loaded others.
    """
    weights = config.weights
    if not streamed.wanted:
        return
    if config.streamed and ranks:
        raise UnsupportedError('weights="streamed" with several ranks: that is for one process; use weights="sharded" or "resident", or '
                               "process_group=False where this process trains on its own")
    if config.shards and not ranks:
        raise UnsupportedError(f'weights="{weights}" on one process: shards are of several ranks (process_group=); use weights="streamed" '
                               'or "resident"')
    if config.on_host and not states.may_halve:
        raise UnsupportedError(f'weights="{weights}" with this optimizer: none of its states has signs to spare, so its bf16 weights are '
                               'not half of their fp32 masters on the host; that is for AdamW and Adam, use weights='
                               f'"{"sharded" if config.shards else "resident"}"')
    if not engine.splits_masters:
        raise UnsupportedError(f'weights="{weights}" with the {engine.name} engine: that is for the native engine alone; install a C++ '
                               'compiler (g++ or clang++), or use weights="resident"')
    if not streamed.may_be_any():
        raise UnsupportedError(f'weights="{weights}": no weight of this model can be; expected matrices in bf16 '
                               "(model.to(torch.bfloat16)), each with memory of its own. fp32 weights stay on the device; autocast may "
                               "have copies of them there")
    try:
        can_put()
    except EngineError as error:
        raise UnsupportedError(f'weights="{weights}" compiles a few lines with torch\'s headers, which failed: {error}') from error
    streamed.rest_on_host(config.on_host)
    streamed.choose()
    streamed.begin_away(resources.first_rows)
    if ranks:
        ranks.require_alike("the weights that loaders give", resources.first_told)
    resources.streamed = streamed
    planning.units.window = streamed
