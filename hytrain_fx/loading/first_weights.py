"""Weights that go from their source to where they rest, and are never whole on the device.

That is their masters on the host, or with sharded weights this rank's shard.

    lend            before the session: a parameter has memory that all of these share, so that it
                    has a form, and no values
    (called)        its master, or shard, is made: the source is read, once
    settle          it is to be whole on the device: it gets memory of its own, and the weight
    (streamed)      its memory goes, as of any streamed weight (weights/streamed_weights.py)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

import torch
from torch import nn

from hytrain_fx.loading.meta_tensors import Awaited
from hytrain_fx.loading.source import Form, TensorSource, require_form
from hytrain_fx.runtime.native.storage_memory import put_memory
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.torch_private.tensors import without_torch_function

_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
_ODD: Final = -0x40A7B892E31B1A47  # as a signed number; spreads each bit to those above it
_DIGESTED_AT_ONCE: Final = 1 << 22  # words


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
                values = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu").copy_(values)
            self._tell(awaited.name, values, parameter.device)
            return flat_memory(values)

    def settle(self, parameter: nn.Parameter) -> None:
        """It is not streamed after all: it has its weight in memory of its own on the device."""
        awaited, meta = self._of.pop(id(parameter))
        put_memory(parameter, torch.empty(parameter.nbytes, dtype=torch.uint8, device=parameter.device), 0, parameter.nbytes)
        with without_torch_function():
            read_into(parameter.detach(), awaited, meta, self._source)
            if self._compares:
                assert awaited.name is not None
                self._tell(awaited.name, parameter.detach(), parameter.device)

    @property
    def told(self) -> tuple[str, ...]:
        """What was read, each with a digest of its bits, where ranks compare them."""
        return tuple(self._told)

    def _tell(self, name: str, values: torch.Tensor, device: torch.device) -> None:
        if self._compares:
            self._told.append(f"{name} with the digest {digest(flat_memory(values), device):016x}")

    def done(self) -> None:
        """All masters are made: what was read is let go of."""
        self._open.close()
        self._of.clear()
        self._lent = None


def digest(flat: torch.Tensor, device: torch.device) -> int:
    """A number of 64 bits that says which bits these are, and in which order.

    flat     1-dim and contiguous, on any device
    device   where it is computed: a hash on the host takes a second for each GB

    It is for mistakes, not against intent: the sum of the words, and of each by its number, modulo
    2**64. A word has 8 bytes where those divide the tensor's, else 4, 2 or 1. Its bits are spread
    first: an even number takes a highest bit away, which is a weight's sign.
    """
    word = next(dtype for dtype in _WORDS if flat.nbytes % dtype.itemsize == 0)
    begins_within = flat.storage_offset() * flat.itemsize % word.itemsize
    words = (flat.clone() if begins_within else flat).view(word)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for begin in range(0, len(words), _DIGESTED_AT_ONCE):
        part = words[begin : begin + _DIGESTED_AT_ONCE].to(device, torch.int64)
        part = _halves_mixed(_halves_mixed(part) * _ODD)
        numbers = torch.arange(begin + 1, begin + 1 + len(part), device=device)
        sums += torch.stack([part.sum(), (part * numbers).sum()])
    plain, numbered = map(int, sums.tolist())
    return (plain * 0x9E3779B97F4A7C15 + numbered) % (1 << 64)


def _halves_mixed(words: torch.Tensor) -> torch.Tensor:
    return words ^ (words >> 32 & 0xFFFFFFFF)
