"""Which CPUs this process may run on, and starting threads there.

A thread may have another affinity than its process. An OpenMP runtime that binds threads
(`OMP_PROC_BIND`, `OMP_PLACES`, `GOMP_CPU_AFFINITY`) also binds the launching thread, to one core,
and every thread that it starts inherits that. The runtime's places are what was allowed before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_OPENMP = ("gomp", "iomp", "libomp")  # in the names of GCC's, Intel's and LLVM's runtimes


def allowed_cpus() -> frozenset[int]:
    """Logical CPUs that this process may run on.

    They are the calling thread's, or all places where OpenMP has bound it to one of them.
    """
    own = frozenset(os.sched_getaffinity(0))
    places = _places()
    return places if own < places else own


@contextlib.contextmanager
def threads_on(cpus: Collection[int]) -> Iterator[None]:
    """Threads and processes started within may run on these CPUs.

    What the calling thread is bound to does not matter.
    """
    before = os.sched_getaffinity(0)
    if set(cpus) == set(before):
        yield
        return
    # a container may forbid it; then they run where the caller does
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _places() -> frozenset[int]:
    """The CPUs of all places of the OpenMP runtimes in this process that bind threads.

    Empty where none does.
    """
    found: set[int] = set()
    for path in openmp_runtimes():
        with contextlib.suppress(OSError, AttributeError):  # not a runtime after all, or an old one
            found |= _places_of(ctypes.CDLL(path))
    return frozenset(found)


def _places_of(runtime: ctypes.CDLL) -> set[int]:
    if runtime.omp_get_proc_bind() == 0:
        return set()
    found: set[int] = set()
    for place in range(runtime.omp_get_num_places()):
        numbers = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
        runtime.omp_get_place_proc_ids(place, numbers)
        found.update(numbers)
    return found


def openmp_runtimes() -> set[str]:
    """Paths of those that are loaded."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/" in line}
    except OSError:
        return set()
    return {path for path in paths if any(name in Path(path).name for name in _OPENMP)}
