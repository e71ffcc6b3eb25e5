"""Which of some tensors an operator of eager code is about to read or write, told before it runs.

    watch = OperatorReads(on_read)        built with torch's headers at first use: 5 s
    watch.add([storage, ...])             addresses of storages (`storage_of`)
    watch.again()                         those that were told too, next time
    watch.begin()                         this thread's operators are looked at: 0.3 us each
    module(x)                             on_read(storage, False) for each, before its first reader
    weight.mul_(2)                        on_read(storage, True), before the first that writes it
    watch.end()

Views of a tensor have its storage, so they are seen too, and so are lists and what an
autograd.Function is given. A reader that is no operator is not: a raw pointer (`data_ptr()`), and
what pickle copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hytrain_fx.runtime.native import build


class OperatorReads:
    """The reads of watched storages by operators of the threads that it is on in.

    `on_read` is called with the address of a storage, and whether it is written: once for each, and
    again for a storage that is read on another CUDA stream than the last time. Not while another
    call of it runs. What it raises is kept, for `raise_failed`: torch would drop it.

    Raises EngineError where the library cannot be built.
    """

    def __init__(self, on_read: Callable[[int, bool], None]) -> None:
        self._library = _library()
        failed: list[BaseException] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # where torch.compile runs a model in parts, it would trace this
        def told(storage: int, written: int) -> None:
            try:
                on_read(storage, bool(written))
            except BaseException as error:
                failed.append(error)

        self._failed = failed
        self._told = _ON_READ(told)  # kept as long as C++ may call it
        self._watch = ctypes.c_void_p(self._library.hytrain_fx_watch_make(self._told))

    def __del__(self) -> None:
        if hasattr(self, "_watch"):
            self._library.hytrain_fx_watch_free(self._watch)

    def add(self, storages: Sequence[int]) -> None:
        """Watch these too. Only in a thread that it is on in, or while it is on in none."""
        self._library.hytrain_fx_watch_add(self._watch, (ctypes.c_void_p * len(storages))(*storages), len(storages))

    def again(self) -> None:
        """Tell of all again. Where `add` may be called."""
        self._library.hytrain_fx_watch_again(self._watch)

    def clear(self) -> None:
        """Watch none. Where `add` may be called, and in `on_read`."""
        self._library.hytrain_fx_watch_clear(self._watch)

    def begin(self) -> None:
        """On in this thread, once more."""
        self._library.hytrain_fx_watch_on(self._watch)

    def end(self) -> bool:
        """Off in this thread; whether it was on."""
        return bool(self._library.hytrain_fx_watch_off(self._watch))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Off meanwhile, where it is on."""
        if not self.end():
            yield
            return
        try:
            yield
        finally:
            self.begin()

    def raise_failed(self) -> None:
        """Raise what `on_read` has raised since the last call."""
        if self._failed:
            first = self._failed[0]
            self._failed.clear()
            raise first


def storage_of(tensor: torch.Tensor) -> int:
    """The address by which a tensor's storage is watched."""
    return int(tensor.untyped_storage()._cdata)


_ON_READ = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


def torch_build(*libraries: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What compiles and what links C++ that includes torch's headers, against these of its own."""
    torch_folder = Path(torch.__file__).parent
    headers = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include")
    flags = (
        "-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-DTORCH_VERSION=\"{torch.__version__}\"",
        *(part for folder in headers for part in ("-isystem", str(folder))))
    return flags, (f"-L{torch_folder / 'lib'}", *libraries)


@functools.cache
def _library() -> ctypes.CDLL:
    flags, link = torch_build("-ltorch_cpu", "-lc10")
    library = build.load(("op_reads.cpp",), flags=flags, link=link)
    library.hytrain_fx_watch_make.restype = ctypes.c_void_p
    library.hytrain_fx_watch_make.argtypes = [_ON_READ]
    for name in ("free", "again", "clear", "on", "off"):
        getattr(library, f"hytrain_fx_watch_{name}").argtypes = [ctypes.c_void_p]
    library.hytrain_fx_watch_add.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64]
    return library
