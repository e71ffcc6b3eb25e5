"""Gradients averaged over the ranks, as the nodes of the backward graphs take them.

    a vector (norm, bias)    the mean, on every rank
    what is larger           each rank gets its shard of the mean, flat

What eager code makes autograd adds at any time, so it is averaged when the backward ends. Where
that cannot be told from what was averaged before, the step is refused: training on with one rank's
own would part the ranks unnoticed. A gradient that has the same bits on every rank is its own mean.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import RankError, UnsupportedError
from hytrain_fx.gradients.rows import require_strided
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.turns import Rows, turns
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.runtime.ranks import Packed, Ranks
from hytrain_fx.runtime.side_stream import SideStream
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function

_DONE: Final = ("the end",)  # what a rank tells that has run all graphs of a backward
_ORDERS_KEPT: Final = 256  # a loop that drops layers at random has a graph for each choice


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
        self._backwards = 0
        self._orders: dict[tuple[int, ...], tuple[Rows, ...]] = {}  # by what each rank has told of its graph
        self._order: deque[Rows] = deque()  # turns of the running graph that have not come
        self._turn_of: dict[Rows, Rows] = {}  # by node
        self._to_come = Counter[Rows]()  # by turn: nodes of this rank that have not run
        self._ready: dict[Rows, dict[tuple[int, ...], Packed]] = {}
        self._kept: dict[Rows, dict[int, torch.Tensor]] = {}  # by turn and row, where that is not one node
        self._averaged: set[int] = set()  # rows whose `.grad` has come from here
        self._of_eager_code: set[int] = set()  # those of them that eager code has made, in one backward
        self._since_step: set[int] = set()  # those of them that have come since the last step
        self._zeroed: set[int] = set()  # those of them that zero_grad() has made zeros
        self._stepped: dict[int, weakref.ref[torch.Tensor]] = {}  # by row: real tensors that the last step has found in `.grad`
        self._broken_off: str | None = None  # what ended a backward in the middle

    def next_backward(self) -> None:
        """A backward begins.

        Raises RankError where the last one of this rank was broken off.
        """
        if self._broken_off is not None:
            raise RankError(f"a backward of this rank was broken off ({self._broken_off}), and the other ranks wait for the rest of its "
                            "gradients: what comes next would be added to those. End all ranks, and start them from a checkpoint")
        self._backwards += 1

    def begin(self, nodes: Sequence[Rows]) -> bool:
        """A backward graph begins, whose nodes make gradients of these rows.

        Gives whether the nodes of all ranks are the same, in the same order.

        Turns come in the order that rank 0 had when such graphs first ran on the ranks: another
        graph of the same nodes, for a batch of another size, may have them in another order.

        Raises RankError where another rank is not in this backward.
        """
        digests = self._ranks.tell(f"backward {self._backwards}", tuple(map(str, nodes)) or _DONE)
        if digests not in self._orders:
            if len(self._orders) == _ORDERS_KEPT:
                self._orders.clear()  # on all ranks at once: they get the same digests
            self._orders[digests] = turns(self._ranks.of_all("the gradients that a backward makes", tuple(nodes)))
        order = self._orders[digests]
        self._order, self._ready, self._kept = deque(order), {}, {}
        turn_of_row = {row: turn for turn in order for row in turn}
        self._turn_of = {node: turn_of_row[node[0]] for node in nodes}
        self._to_come = Counter(self._turn_of.values())
        return len(set(digests)) == 1

    def all_done(self) -> bool:
        """Whether all ranks have ended the backward.

        Otherwise another graph of it begins on another rank, and this rank adds zeros. Raises
        RankError as `begin` does.
        """
        self.begin(())
        done = not self._order
        if done:
            self._ranks.all_have_compiled()  # this backward: none waits for another to compile
        return done

    def pack(self, rows: Rows, grads: Sequence[torch.Tensor]) -> None:
        """Get the gradients of one node ready, which die after this call.

        Raises UnsupportedError for a sparse gradient.
        """
        turn = self._turn_of[rows]
        self._to_come[turn] -= 1
        with without_torch_function():
            if turn == rows:
                self._ready[turn] = self._pack(rows, grads)
            else:
                self._kept.setdefault(turn, {}).update((row, grad.clone()) for row, grad in zip(rows, grads, strict=True))

    def due(self) -> Iterator[Rows]:
        """The rows that are ready and whose turn it is."""
        while self._order and not self._to_come[self._order[0]]:
            yield self._order.popleft()

    def is_of_node(self, turn: Rows) -> bool:
        """Whether these are the rows of one node of this rank's graph."""
        return self._turn_of.get(turn) == turn

    def holds(self, node: Rows) -> bool:
        """Whether the gradients of this node, which has run, are taken later."""
        turn = self._turn_of.get(node)
        return turn is not None and (turn != node or turn in self._ready)

    @contextmanager
    def taken(self, turn: Rows) -> Iterator[list[torch.Tensor]]:
        """Around what takes the gradients of these rows, averaged.

        Both are done beside the backward, on a stream of their own.

        Raises RankError.
        """
        packed = self._ready.pop(turn, None) or self._pack_with_zeros(turn)
        self._averaged.update(turn)
        self._since_step.update(turn)
        self._zeroed.difference_update(turn)
        with self.side.beside(reads=[of.bucket for of in packed.values()]):
            sent = self._ranks.send(packed.values(), TaskKind.REDUCE_SCATTER, turn[0])
            parts = {i: part for places, of in zip(packed, sent, strict=True) for i, part in zip(places, of, strict=True)}
            yield [parts[i] for i in range(len(turn))]

    def _pack_with_zeros(self, turn: Rows) -> dict[tuple[int, ...], Packed]:
        """Of rows that this rank may have no gradient of."""
        with torch.no_grad(), without_torch_function():
            own = self._kept.pop(turn, {})
            return self._pack(turn, [own[row] if row in own else torch.zeros_like(self._table.parameters[row].detach()) for row in turn])

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
        if row in self._averaged and row not in self._zeroed:
            self._of_eager_code.discard(row)
            return False
        self._of_eager_code.add(row)
        return True

    def broken_off(self, error: BaseException) -> None:
        """A graph that has begun ends in an error."""
        self._broken_off = f"{type(error).__name__}: {error}"

    def begins(self, row: int) -> None:
        """Autograd is about to add to the row's `.grad`. Where that is None, it was dropped."""
        with without_torch_function():
            if get_grad(self._table.parameters[row]) is None:
                self._averaged.discard(row)
                self._since_step.discard(row)

    def dropped(self) -> None:
        """Nobody has a gradient."""
        for rows in (self._averaged, self._of_eager_code, self._since_step, self._zeroed):
            rows.clear()

    def zeroed(self) -> None:
        """Every gradient has become zeros, on all ranks."""
        grads = self._grads()
        self._averaged.update(grads)
        self._zeroed.update(grads)
        self._note(grads)

    def require_all(self, eager: AbstractSet[int]) -> None:
        """Before a step. `eager`: rows that code outside the graphs has given a part.

        Raises UnsupportedError for a gradient that is not averaged, unless all ranks have the same,
        and RankError.
        """
        grads = self._grads()
        mixed = eager - self._of_eager_code
        alone = [row for row, grad in grads.items() if row in mixed or not self._is_averaged(row, grad)]
        if alone and not self._are_alike(alone, grads):
            raise UnsupportedError(
                f"the gradient of {self._table.names[alone[0]]} (and of {len(alone) - 1} more) was made outside captured graphs and is "
                "this rank's own: with several ranks such a gradient is averaged where one backward makes a step, and no graph "
                "makes a part of it. Let torch.compile capture the code (TORCH_LOGS=graph_breaks tells what it does not), or "
                "average gradients yourself with process_group=False"
            )
        self._averaged.update(alone)
        self._zeroed.difference_update(alone)
        self._note(grads)

    def _grads(self) -> dict[int, torch.Tensor]:
        """By row: `.grad` where there is one."""
        with without_torch_function():
            return {row: grad for row, grad in enumerate(map(get_grad, self._table.parameters)) if grad is not None}

    def _note(self, grads: Mapping[int, torch.Tensor]) -> None:
        """From now on these count as averaged, and what backwards make.

        Stand-ins need no note: the loop cannot make one.
        """
        self._since_step.clear()
        self._stepped = {row: weakref.ref(grad) for row, grad in grads.items() if type(grad) is not GradStandIn}

    def _is_averaged(self, row: int, grad: torch.Tensor) -> bool:
        """A backward has made it since the last step, or that step has found it already."""
        if row in self._since_step:
            return True
        is_of_step = type(grad) is GradStandIn or (row in self._stepped and self._stepped[row]() is grad)
        return row in self._averaged and is_of_step

    def _are_alike(self, rows: Sequence[int], grads: Mapping[int, torch.Tensor]) -> bool:
        """Whether all ranks have the same bits: torch's `get_state_dict` assigns zeros.

        Raises RankError.
        """
        with torch.no_grad():
            found = tuple(f"{self._table.names[row]} {self._bits(grads[row])}" for row in rows)
        return len(set(self._ranks.tell("gradients that no backward has averaged", found))) == 1

    def _bits(self, grad: torch.Tensor) -> str:
        """Those of a gradient, in short. One in a slot is not read: it counts as this rank's."""
        real: torch.Tensor | None = grad
        if isinstance(grad, GradStandIn):
            real = grad.grad_state.copy_out() if grad.zeroed else grad.materialized
        if real is None or real.layout != torch.strided:
            return f"of rank {self._ranks.rank}"
        if not real.any():
            return "zeros"
        host = real.cpu().contiguous()
        return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.nbytes)).hexdigest()
