"""Host memory of a row's process and of all that it started, held to a cap.

Counted is memory that the system cannot take back: private pages, and shared ones without a file on
a disk. Pinned memory is one of the two. Mapped files, libraries among them, are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

from hytrain_fx.forecast.bench.process import NO_MEMORY

PROC = Path("/proc")
_COUNTED = ("RssAnon:", "RssShmem:")  # of `status`: a page that two processes share counts in both
_SHARED_OUT = ("Pss_Anon:", "Pss_Shmem:")  # of `smaps_rollup`: half in each; it walks all pages


class HostWatch:
    """Looks at a process and those that it started, and says when they hold more than the cap.

    peak_bytes   the most that a look has found. Pages that forked processes share may be counted in
                 each of them, but never where that decides about the cap
    """

    def __init__(self, cap_bytes: float) -> None:
        self.peak_bytes = 0
        self._cap_bytes = cap_bytes
        self._shared_bytes: dict[frozenset[int], int] = {}  # counted more than once, by the processes that share it

    def may_go_on(self, pid: int) -> bool:
        """Whether they hold no more than the cap. A process that has ended holds nothing."""
        pids = frozenset(_tree(pid))
        held = _sum(pids, "status", _COUNTED)
        if held - self._shared_bytes.get(pids, 0) > self._cap_bytes and (exact := _sum(pids, "smaps_rollup", _SHARED_OUT)):
            self._shared_bytes[pids] = max(held - exact, 0)
        held -= self._shared_bytes.get(pids, 0)
        self.peak_bytes = max(self.peak_bytes, held)
        return held <= self._cap_bytes

    def why_over(self, pinned_bytes: float = 0.0) -> str | None:
        """The error of a row that went above the cap, None where it did not.

        Some drivers do not count pinned memory to the process: `pinned_bytes` is what the row says.
        """
        held = max(self.peak_bytes, pinned_bytes)
        if held <= self._cap_bytes:
            return None
        return f"{NO_MEMORY}its processes held {held / 1e9:.3g} GB of host memory, the cap is {self._cap_bytes / 1e9:g} GB"


def _tree(pid: int) -> Iterable[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def _sum(pids: Iterable[int], file: str, names: tuple[str, ...]) -> int:
    """Bytes of these lines, which are in kB, in a file of each process's folder under /proc."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines = (PROC / str(pid) / file).read_text().splitlines()
            found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(names))
    return found
