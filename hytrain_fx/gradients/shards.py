"""Gradients of which each rank has its shard of the mean: what must be asked of all ranks.

A norm, whether any value is infinite, and the whole gradient for whoever reads `.grad`. Every rank
must ask the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.rows import like_parameter
from hytrain_fx.runtime.ranks import Packed, Ranks
from hytrain_fx.runtime.shard_layout import ShardLayouts
from hytrain_fx.runtime.states.pieces import flat_memory


class GradientShards:
    """The sharded gradients of one session. `row in shards`: whether that parameter's is one.

    weights_first   called before gradients go from rank to rank: by then every rank has gathered
                    the last step's weights, so that collectives have one order
    """

    def __init__(self, ranks: Ranks, table: ParameterTable) -> None:
        self.weights_first: Callable[[], None] = _nothing
        self._ranks = ranks
        self._table = table
        self._layouts = ShardLayouts(table.shards)

    def __contains__(self, row: object) -> bool:
        return row in self._table.shards

    def mean(self, rows: tuple[int, ...], grads: Sequence[torch.Tensor]) -> Packed:
        """This rank's shards of the mean of these gradients, which are of one dtype."""
        names, parameters = self._table.names, self._table.parameters
        wholes = [flat_memory(like_parameter(grad, parameters[row], copy=False)) for row, grad in zip(rows, grads, strict=True)]
        return self._ranks.mean_shards(wholes, self._layouts[rows], names[rows[0]])

    def part(self, row: int, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's shard of a whole gradient."""
        shard = self._table.shards[row]
        return flat_memory(like_parameter(whole, self._table.parameters[row], copy=False))[shard.begin : shard.end].clone()

    def whole(self, row: int, part: torch.Tensor) -> torch.Tensor:
        """The whole gradient, of every rank's shard.

        Raises RankError where another rank does not ask for it.
        """
        shard, name = self._table.shards[row], self._table.names[row]
        self.weights_first()
        self._ranks.require_alike("gradients that the loop reads", (name,))
        gradient = torch.empty_like(self._table.parameters[row].detach())
        flat = flat_memory(gradient)
        flat[shard.begin : shard.end] = part
        self._ranks.gather([flat], self._layouts[(row,)], f"the gradient of {name}").send()
        return gradient

    def norms(self, of_shards: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Norms of whole gradients (0-dim fp32) from those of this rank's shards.

        The norm of the shards' norms, taken in fp64: so it does not depend on how many are asked
        for at once. Raises RankError.
        """
        self.weights_first()
        self._ranks.require_alike("norms of gradients that the loop asks for", (f"{len(of_shards)} of order {order}",))
        of_ranks = self._ranks.of_each(torch.stack(list(of_shards)), "the norms of gradients")
        return list(torch.linalg.vector_norm(of_ranks, order, dim=0, dtype=torch.float64).float().unbind())

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """The largest of every rank's number, 0-dim. NaN is larger than any. Raises RankError."""
        self.weights_first()
        return self._ranks.of_each(own.reshape(1), "whether gradients are finite").amax()


def _nothing() -> None:
    return None
