"""Events are queried without the engine's lock.

The device, whose answers are late, is one of a native program.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .native_programs import built


def test_no_call_of_the_engine_waits_for_a_question_to_the_driver(tmp_path: Path) -> None:
    """A launching thread gets the engine's lock while the uploader waits for the driver's answer.

    That answer is about an event.
    """
    program = built("unlocked_queries", tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unlocked\n"
