"""The engine beside a second thread, and a forward between backward and step.

The compute stream is a queue of a native program.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hytrain_fx.runtime.native import build

from .native_programs import built


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/second_thread.cpp, built."""
    return built("second_thread", tmp_path_factory.mktemp("native"))


def _run(program: Path, what: str) -> None:
    done = subprocess.run([program, what], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_forward_waits_for_a_weight_that_another_thread_has_drained(program: Path) -> None:
    """The other thread still waits for the copy: the row is at rest, its new weight not there."""
    _run(program, "drain")


def test_another_thread_may_drain_beside_commits_with_guessed_factors(program: Path) -> None:
    """No row hangs, and masters and moments have the bits of the steps in order."""
    _run(program, "commits")


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_forward_between_backward_and_step_reads_the_old_weight(program: Path, place: str) -> None:
    """Also where the device comes to it only after step() was called."""
    _run(program, place)


@pytest.mark.parametrize(("first", "second", "ends"), [("kEngine", "kEvent", 0), ("kEvent", "kEngine", 1), ("kQueue", "kQueue", 1)])
def test_the_engines_locks_taken_in_another_order_end_a_checked_build(first: str, second: str, ends: int, tmp_path: Path) -> None:
    """The table is csrc/locks.h; scripts/race_check builds with the check."""
    source, program = tmp_path / "order.cpp", tmp_path / "order"
    source.write_text(f"""
        #define HYTRAIN_FX_CHECK_LOCKS
        #include "locks.h"
        using namespace hytrain_fx;
        int main() {{
          OrderedMutex<LockOrder::{first}> first;
          OrderedMutex<LockOrder::{second}> second;
          std::lock_guard a(first);
          std::lock_guard b(second);
        }}
    """)
    subprocess.run([build.find_compiler(), "-std=c++17", "-pthread", f"-I{build.CSRC}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(ends)
    assert ("lock order" in done.stderr) == bool(ends)
