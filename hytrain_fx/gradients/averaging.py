"""Gradients averaged over the ranks, as the nodes of the backward graphs take them.

    a vector (norm, bias)    the mean, on every rank
    what is larger           each rank gets its shard of the mean, flat

What eager code makes autograd adds at any time, so it is averaged when the backward ends. Where
that cannot be told from what was averaged before, the step is refused: training on with one rank's
own would part the ranks unnoticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import RankError, UnsupportedError
from hytrain_fx.gradients.rows import require_strided
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.ir.collective import CollectiveKind
from hytrain_fx.runtime.ranks import Packed, Ranks
from hytrain_fx.runtime.side_stream import SideStream
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function

_Calls = tuple[tuple[int, ...], ...]


class AveragedGradients:
    """Averages for one session.

    shards   what has to do with gradients that come in shards
    side     where gradients go from rank to rank
    """

    def __init__(self, ranks: Ranks, table: ParameterTable) -> None:
        self.shards = GradientShards(ranks, table)
        self.side = SideStream(table.device)
        self._ranks = ranks
        self._table = table
        # by what backward graphs make, as far as it was compared: the order on all ranks
        self._orders: dict[frozenset[tuple[int, ...]], _Calls] = {}
        self._order: deque[tuple[int, ...]] = deque()  # nodes of the running graph that have not been taken
        self._ready: dict[tuple[int, ...], tuple[tuple[int, ...], dict[tuple[int, ...], Packed]]] = {}
        self._averaged: set[int] = set()  # rows whose `.grad` has come from here
        self._of_eager_code: set[int] = set()  # those of them that eager code has made, in one backward
        self._sent = 0  # nodes of the running graph whose gradients have gone from rank to rank
        self._broken_off: str | None = None  # what ended a backward in the middle

    def begin(self, calls: _Calls) -> None:
        """A backward graph begins, whose nodes take the gradients of these rows.

        Their turns come in the order that rank 0 had when such nodes first ran: another graph of
        them, for a batch of another size, may have them in another order.

        Raises RankError where another rank's is different, or where this rank's last one was broken
        off: the others wait for the rest of it.
        """
        if self._broken_off is not None:
            raise RankError(f"a backward of this rank was broken off ({self._broken_off}), and the other ranks wait for the rest of its "
                            "gradients: what comes next would be added to those. End all ranks, and start them from a checkpoint")
        self._sent = 0
        key, names = frozenset(calls), self._table.names
        if key not in self._orders:
            made = [f"that of {names[row]}, with that of {names[rows[0]]}" for rows in sorted(calls) for row in rows]
            self._ranks.require_alike("the gradients that a backward makes", made)
            self._orders[key] = self._ranks.of_first("the order of gradients", calls)
        self._order, self._ready = deque(self._orders[key]), {}

    def pack(self, call: tuple[int, ...], rows: tuple[int, ...], grads: Sequence[torch.Tensor]) -> None:
        """Get the gradients of one node ready, which die after this call.

        call   the rows that the node names
        rows   those of them that have a gradient here

        Raises UnsupportedError for a sparse gradient.
        """
        with without_torch_function():
            self._ready[call] = rows, self._pack(rows, grads)

    def due(self) -> Iterator[tuple[int, ...]]:
        """The nodes that are ready and whose turn it is."""
        while self._order and self._order[0] in self._ready:
            yield self._order.popleft()

    def holds(self, call: tuple[int, ...]) -> bool:
        """Whether a node is ready and its turn has not come."""
        return call in self._ready

    @contextmanager
    def taken(self, call: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], list[torch.Tensor]]]:
        """Around what takes the gradients of one node, averaged: its rows, and they.

        Both are done beside the backward, on a stream of their own.

        Raises RankError.
        """
        rows, packed = self._ready.pop(call)
        self._averaged.update(rows)
        self._sent += 1
        with self.side.beside(reads=[of.bucket for of in packed.values()]):
            sent = self._ranks.send(packed.values(), CollectiveKind.REDUCE_SCATTER, call[0])
            parts = {i: part for places, of in zip(packed, sent, strict=True) for i, part in zip(places, of, strict=True)}
            yield rows, [parts[i] for i in range(len(rows))]

    def _pack(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> dict[tuple[int, ...], Packed]:
        """By positions: what goes from rank to rank together."""
        table, packed = self._table, dict[tuple[int, ...], Packed]()
        for row, grad in zip(rows, grads, strict=True):
            require_strided(grad, table.names[row])
        kinds = [(row in self.shards, grad.dtype) for row, grad in zip(rows, grads, strict=True)]
        for kind in dict.fromkeys(kinds):
            places = tuple(i for i, of in enumerate(kinds) if of == kind)
            alike, parts = tuple(rows[i] for i in places), [grads[i] for i in places]
            if kind[0]:
                packed[places] = self.shards.mean(alike, parts)
            else:
                packed[places] = self._ranks.mean(parts, [table.parameters[row].detach() for row in alike], table.names[alike[0]])
        return packed

    def may_take_eager(self, row: int) -> bool:
        """Whether the `.grad` that eager code has just made is of the running backward alone.

        Then it can be averaged. To one that was averaged, autograd has added this rank's own.
        """
        if row in self._averaged:
            self._of_eager_code.discard(row)
            return False
        self._of_eager_code.add(row)
        return True

    def broken_off(self, error: BaseException) -> None:
        """The running graph ends in an error."""
        if self._sent:
            self._broken_off = f"{type(error).__name__}: {error}"

    def dropped(self) -> None:
        """Nobody has a gradient."""
        self._averaged.clear()
        self._of_eager_code.clear()

    def require_all(self, eager: AbstractSet[int]) -> None:
        """Before a step. `eager`: rows that code outside the graphs has given a part.

        Raises UnsupportedError for a gradient that is not averaged.
        """
        with without_torch_function():
            mixed = eager - self._of_eager_code
            alone = [row for row, parameter in enumerate(self._table.parameters)
                     if get_grad(parameter) is not None and (row in mixed or row not in self._averaged)]
        if alone:
            raise UnsupportedError(
                f"the gradient of {self._table.names[alone[0]]} (and of {len(alone) - 1} more) was made outside captured graphs and is "
                "this rank's own: with several ranks such a gradient is averaged where one backward makes a step, and no graph "
                "makes a part of it. Let torch.compile capture the code (TORCH_LOGS=graph_breaks tells what it does not), or "
                "average gradients yourself with process_group=False"
            )
