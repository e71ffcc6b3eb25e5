"""Host memory of a benchmark's row, held to a cap: real processes that hold memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from benchmarks.host_watch import HostWatch

MB = 10**6


def holding(nbytes: int, children: int = 0, shared: bool = False) -> str:
    """A program that holds so much, or whose forked children each do, until it is ended."""
    take = f"held = bytearray({nbytes}); held[::4096] = b'x' * len(held[::4096])"
    if shared:
        take = f"import mmap; held = mmap.mmap(-1, {nbytes}); held.write(b'x' * {nbytes})"
    fork = f"for _ in range({children}):\n    if os.fork() == 0: break\n"
    early, late = (take, "") if shared else ("", take)
    return f"import os, time\n{early}\n{fork if children else ''}{late}\nos.write(1, b'.')\ntime.sleep(60)"


@pytest.fixture
def started() -> Iterator[Callable[[str, int], int]]:
    """Starts a program, waits until so many of its processes are ready, and gives its id."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, ready: int) -> int:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.read(ready) == "." * ready
        return process.pid

    yield start
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(("children", "shared"), [(0, False), (0, True), (2, False)], ids=["private", "shared", "of children"])
def test_memory_of_all_its_processes_counts(children: int, shared: bool, started: Callable[[str, int], int]) -> None:
    """Private pages, shared ones (pinned memory is such) and those of processes it started."""
    pid = started(holding(100 * MB, children, shared), 1 + children)
    watch = HostWatch(1e12)
    assert watch.may_go_on(pid)
    held = 100 * MB * (1 + children)
    assert held < watch.peak_bytes < held + 100 * MB * (1 + children)
    assert watch.why_over() is None
    low = HostWatch(held)
    assert not low.may_go_on(pid)
    assert low.why_over() is not None


def test_pages_that_processes_share_do_not_end_a_row(started: Callable[[str, int], int]) -> None:
    """200 MB that three processes share are 600 MB by count, and go on under a cap of 350."""
    pid = started(holding(200 * MB, children=2, shared=True), 3)
    watch = HostWatch(350 * MB)
    assert watch.may_go_on(pid)
    assert 200 * MB < watch.peak_bytes < 350 * MB
    assert not HostWatch(150 * MB).may_go_on(pid)


def test_a_process_that_has_ended_holds_nothing(started: Callable[[str, int], int]) -> None:
    """A look at it is no error."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    watch = HostWatch(1)
    assert watch.may_go_on(process.pid)
    assert watch.peak_bytes == 0


def test_pinned_memory_that_the_system_does_not_count_is_told_by_the_row() -> None:
    """What a row says it has pinned counts against the cap."""
    watch = HostWatch(64e9)
    assert watch.why_over(pinned_bytes=63e9) is None
    assert "held 65 GB of host memory, the cap is 64 GB" in (watch.why_over(pinned_bytes=65e9) or "")
