"""The rows that one node names and their gradients.

Are they alike, where do they go, what are their norms and their order of memory.

A row here is a parameter. The gradient of one that is cut stays on the device until `step()`.

What is fixed of them is read once; each run of a node compares whole lists, in C.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.tensors import property_reader, without_torch_function

_foreach_norm: Final = private_function("_foreach_norm")
_dtype_of: Final = property_reader("dtype")
_layout_of: Final = property_reader("layout")
_stride_of: Final = torch.Tensor.stride


@dataclass(frozen=True, slots=True)
class Part:
    """Those rows of a node whose gradients go the same way.

    Their positions, and what stands there.
    """

    positions: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    homes: tuple[torch.Tensor, ...] = ()  # ParameterTable's: the form of what is updated here

    def __bool__(self) -> bool:
        return bool(self.positions)

    def only(self, i: int) -> Part:
        """Of these rows the one at place `i`."""
        return Part((self.positions[i],), (self.rows[i],), (self.parameters[i],), (self.homes[i],))

    def of(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Theirs among all of the node's."""
        return [grads[i] for i in self.positions]


@dataclass(slots=True)
class RowGroup:
    """The rows that a node names: what is fixed of them, and where the plan in force has them.

    on_device  also of streamed rows, and of parameters that are cut
    pieces     the rows of the engine that stand for these rows
    """

    rows: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    homes: tuple[torch.Tensor, ...]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    layouts: list[torch.layout]
    on_host: Part = Part()
    on_device: Part = Part()
    pieces: Sequence[int] = ()
    _arrangement: int = -1  # of the states, for which these were made
    _here: RowGroup | None = None
    # Strides that gradients have come with, and which of these are of another order of memory.
    _seen: tuple[list[tuple[int, ...]], tuple[int, ...]] = ([], ())

    @classmethod
    def of(cls, rows: tuple[int, ...], table: ParameterTable, copied: Container[int] = ()) -> RowGroup:
        """`copied`: rows whose gradients come in bf16."""
        parameters, homes = tuple(table.parameters[row] for row in rows), tuple(table.homes[row] for row in rows)
        with without_torch_function():
            layouts = [torch.strided] * len(rows)
            dtypes = [torch.bfloat16 if row in copied else home.dtype for row, home in zip(rows, homes, strict=True)]
            return cls(rows, parameters, homes, [home.stride() for home in homes], dtypes, layouts)

    def place(self, states: StateStore) -> None:
        """Note where the rows are now."""
        if self._arrangement == states.arrangement:
            return
        self._arrangement = states.arrangement
        leaves = list(map(states.gradient_leaves, self.rows))
        self.on_host = self.part([i for i, goes in enumerate(leaves) if goes])
        self.on_device = self.part([i for i, goes in enumerate(leaves) if not goes])
        self.pieces = states.pieces.rows(self.rows)

    def all_on_device(self) -> RowGroup:
        """The same rows, all of whose gradients stay on the device. It is never placed."""
        if self._here is None:
            self._here = replace(self, on_host=Part(), on_device=self.part(range(len(self.rows))))
        return self._here

    def part(self, positions: Sequence[int]) -> Part:
        """The rows at these positions."""
        rows, parameters, homes = self.rows, self.parameters, self.homes
        at = tuple(positions)
        return Part(at, tuple(rows[i] for i in at), tuple(parameters[i] for i in at), tuple(homes[i] for i in at))

    def fits(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients have the parameters' order of memory and the graphs' dtypes."""
        return self._in_another_order(grads) == ()

    def laid_out(self, grads: Sequence[torch.Tensor]) -> tuple[bool, Sequence[torch.Tensor]]:
        """Whether gradients fit once those in another order of memory are copied, and all of them.

        Those of rows on the host are copied: flat ranges of them leave. All stay as they are where
        one is sparse, or of another shape or dtype.
        """
        places = self._in_another_order(grads)
        if places is None:
            return False, grads
        leaving = [i for i in places if i in self.on_host.positions]  # others are copied in any case
        if not leaving:
            return True, grads
        given = list(grads)
        for i in leaving:
            given[i] = torch.empty_like(self.homes[i], dtype=grads[i].dtype, device=grads[i].device).copy_(grads[i])
        return True, given

    def _in_another_order(self, grads: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """Which of them are; None where one is sparse, or of another shape or dtype."""
        if list(map(_layout_of, grads)) != self.layouts:
            return None
        strides, dtypes = form_of_each(grads)
        if dtypes != self.dtypes:
            return None
        if strides == self.strides:
            return ()
        if strides == self._seen[0]:
            return self._seen[1]
        if any(grad.shape != home.shape for grad, home in zip(grads, self.homes, strict=True)):
            return None
        places = tuple(i for i, pair in enumerate(zip(grads, self.homes, strict=True)) if not _same_order(*pair))
        self._seen = strides, places
        return places


class RowGroups:
    """The groups of one session, made when they are first asked for.

    copied   rows whose gradients come in bf16
    """

    def __init__(self, table: ParameterTable, copied: Container[int] = ()) -> None:
        self._table = table
        self._copied = copied
        self._made: dict[tuple[int, ...], RowGroup] = {}

    def __getitem__(self, rows: Sequence[int]) -> RowGroup:
        key = tuple(rows)
        group = self._made.get(key)
        if group is None:
            group = self._made[key] = RowGroup.of(key, self._table, self._copied)
        return group

    def forget(self) -> None:
        """Rows have got copies."""
        self._made.clear()


def form_of_each(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    """Strides and dtypes. A sparse tensor has no strides: RuntimeError."""
    return list(map(_stride_of, tensors)), list(map(_dtype_of, tensors))


def in_same_order(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether flat ranges of each tensor and the other of its shape agree, in dtype too."""
    (strides, dtypes), (other_strides, other_dtypes) = form_of_each(tensors), form_of_each(others)
    return dtypes == other_dtypes and (strides == other_strides or all(map(_same_order, tensors, others)))


def _same_order(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Two of one shape. The stride of a dimension with one element says nothing."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or one == another for size, one, another in strides)


def norm_of_each(
    grads: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], order: float, foreach: bool
) -> Sequence[torch.Tensor]:
    """The norm of each gradient (0-dim) in its parameter's dtype.

    It has the bits that torch gives it alone.

    parameters   or their homes
    """
    if list(map(_dtype_of, grads)) != list(map(_dtype_of, parameters)):
        wide = (grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=True))  # one at a time: they take memory
        return [_foreach_norm([grad], order)[0] if foreach else torch.linalg.vector_norm(grad, order) for grad in wide]
    if not foreach:
        return [torch.linalg.vector_norm(grad, order) for grad in grads]
    if len(set(map(_dtype_of, grads))) == 1:
        norms: Sequence[torch.Tensor] = _foreach_norm(list(grads), order)
        return norms
    return [_foreach_norm([grad], order)[0] for grad in grads]  # a list of several dtypes would go to another kernel


def norm_of_shard(shard: torch.Tensor, order: float) -> torch.Tensor:
    """Of what is part of a gradient: in fp32, since the whole's is rounded once.

    That of an empty shard changes no norm that it goes into.
    """
    if not shard.numel():
        return shard.new_full((), 0.0 if order >= 0 else torch.inf, dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(shard, order, dtype=torch.float32)
    return norm


def like_parameter(grad: torch.Tensor, parameter: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """`grad` in the order of memory of a parameter or a home: flat ranges of both agree then."""
    if not copy and grad.stride() == parameter.stride() and grad.dtype == parameter.dtype:
        return grad
    return torch.empty_like(parameter.detach(), device=grad.device).copy_(grad)


def require_strided(grad: torch.Tensor, name: str) -> None:
    """Raises UnsupportedError for a sparse gradient. `name`: the parameter's."""
    if grad.layout != torch.strided:
        raise UnsupportedError(f"the gradient of {name} is sparse ({grad.layout}); torch's Adam and AdamW refuse it too: "
                               "make the embedding with sparse=False")
