"""Gives a tensor's storage other memory: what shares the storage, views too, reads it there.

    put_memory(weight, slot, begin, nbytes)     a part of `slot`, which stays alive as long
    take_memory(weight)                         none

Built with torch's headers at first use, like op_reads.py. It is c10's own interface: a storage asks
nobody, and has no event. Who has launched work that reads the old memory waits for it.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.op_reads import storage_of, torch_build


def put_memory(tensor: torch.Tensor, source: torch.Tensor, begin: int, nbytes: int) -> None:
    """The storage of `tensor` is `nbytes` of the storage of `source` from now on.

    begin    byte of it

    Raises EngineError where the storage may not be resized, or where the part is not in `source`.
    """
    room = source.untyped_storage().nbytes()
    if not 0 <= begin <= begin + nbytes <= room:
        raise EngineError(f"internal: {nbytes} bytes from byte {begin} were asked for of {room}")
    _put(tensor, storage_of(source), begin, nbytes)


def take_memory(tensor: torch.Tensor) -> None:
    """The storage of `tensor` has no memory from now on. Raises EngineError as `put_memory`."""
    _put(tensor, None, 0, 0)


def can_put() -> None:
    """Build the library where it is not there. Raises EngineError where it cannot be built."""
    _library()


def _put(tensor: torch.Tensor, source: int | None, begin: int, nbytes: int) -> None:
    if not _library().hytrain_fx_put_memory(storage_of(tensor), source, begin, nbytes):
        raise EngineError("internal: torch does not let this storage be given other memory")


@functools.cache
def _library() -> ctypes.CDLL:
    flags, link = torch_build("-lc10")
    library = build.load(("storage_memory.cpp",), flags=flags, link=link)
    library.hytrain_fx_put_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return library
