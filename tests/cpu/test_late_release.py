"""Rows that may be updated, or overwritten, late hold up no others.

The compute stream is a queue of a native program: in Python it is the caller.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .native_programs import built


def test_a_row_that_is_released_last_holds_up_no_other(tmp_path: Path) -> None:
    """States of such a row come when nothing else can, not first.

    Updates run in the order in which their states are sent.
    """
    done = subprocess.run([built("late_release", tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in time\n"


def test_a_weight_that_is_released_last_holds_up_no_other(tmp_path: Path) -> None:
    """Six matrices go to the device while a backward still makes what stays there, norms after it.

    When it ends is learnt from the steps before, of which the first waits for its gradients.
    """
    done = subprocess.run([built("late_end", tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before = list(map(int, done.stdout.split()))
    assert sum(of_step == 6 for of_step in before[2:]) >= 4, before
