"""Weights that go from their source to where they rest, and are never whole on the device.

That is their masters on the host, or with sharded weights this rank's shard.

    lend            before the session: a parameter has memory that all of these share, so that it
                    has a form, and no values
    (called)        its master, or shard, is made: the source is read, once
    settle          it is to be whole on the device: it gets memory of its own, and the weight
    (streamed)      its memory goes, as of any streamed weight (weights/streamed_weights.py)
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hytrain_fx.loading.meta_tensors import Awaited
from hytrain_fx.loading.source import Form, TensorSource, require_form
from hytrain_fx.runtime.native.storage_memory import put_memory
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.torch_private.tensors import without_torch_function


def read_into(target: torch.Tensor, awaited: Awaited, meta: torch.Tensor, source: TensorSource) -> None:
    """Write the values of a tensor into `target`. Raises UnsupportedError where they do not fit."""
    assert awaited.name is not None
    with source.reading(awaited.name, meta) as values, torch.no_grad():
        require_form(awaited.name, Form(tuple(values.shape), values.dtype), target, source.described)
        target.copy_(values)


class FirstWeights:
    """The weights of one model that are to be streamed or sharded, until they are where they rest.

    compares   several ranks each read them: `told` has a digest of each then
    """

    def __init__(self, source: TensorSource, *, compares: bool = False) -> None:
        self._source = source
        self._compares = compares
        self._told: list[str] = []
        self._of: dict[int, tuple[Awaited, torch.Tensor]] = {}  # by id of a parameter: with what it was on the meta device
        self._lent: torch.Tensor | None = None
        self._open = ExitStack()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._of

    def lend(self, parameter: nn.Parameter, awaited: Awaited, meta: torch.Tensor, most_bytes: int) -> None:
        """Have it share the memory of all these, for `most_bytes`. Raises EngineError."""
        if self._lent is None:
            self._lent = torch.empty(most_bytes, dtype=torch.uint8, device=parameter.device)
        put_memory(parameter, self._lent, 0, parameter.nbytes)
        self._of[id(parameter)] = awaited, meta

    def __call__(self, parameter: nn.Parameter) -> torch.Tensor:
        """Its values in its dtype, flat, in the order of its memory, until the next is asked for.

        Raises UnsupportedError where they do not fit, and what the source raises.
        """
        self._open.close()
        awaited, meta = self._of[id(parameter)]
        assert awaited.name is not None
        values = self._open.enter_context(self._source.reading(awaited.name, meta))
        require_form(awaited.name, Form(tuple(values.shape), values.dtype), meta, self._source.described)
        with without_torch_function(), torch.no_grad():
            if values.dtype != meta.dtype or values.stride() != meta.stride():
                values = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).copy_(values)
            self._tell(awaited.name, values)
            return flat_memory(values)

    def settle(self, parameter: nn.Parameter) -> None:
        """It is not streamed after all: it has its weight in memory of its own on the device."""
        awaited, meta = self._of.pop(id(parameter))
        put_memory(parameter, torch.empty(parameter.nbytes, dtype=torch.uint8, device=parameter.device), 0, parameter.nbytes)
        with without_torch_function():
            read_into(parameter.detach(), awaited, meta, self._source)
            if self._compares:
                assert awaited.name is not None
                self._tell(awaited.name, parameter.detach())

    @property
    def told(self) -> tuple[str, ...]:
        """What was read, each with a digest of its bits, where ranks compare them."""
        return tuple(self._told)

    def _tell(self, name: str, values: torch.Tensor) -> None:
        if self._compares:
            memory: Any = flat_memory(values).view(torch.uint8).cpu().numpy()
            self._told.append(f"{name} with the digest {hashlib.sha256(memory).hexdigest()[:16]}")

    def done(self) -> None:
        """All masters are made: what was read is let go of."""
        self._open.close()
        self._of.clear()
        self._lent = None
