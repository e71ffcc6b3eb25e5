"""The queue of the lane to the device is never full.

A thread that is blocked before a full one would hold the launching thread up, too. The device is
one of a native program: it counts what is put on the lane and has not come.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .native_programs import built


def test_small_weights_and_streamed_states_wait_for_places(tmp_path: Path) -> None:
    """Steps of 200 copies take at most the places there are, and nearly all of them.

    First somebody waits for all weights at each commit, then all are sent before.
    """
    program = built("lane_places", tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *taken, places = map(int, done.stdout.split())
    assert all(0.8 * places < of < places for of in taken), taken
