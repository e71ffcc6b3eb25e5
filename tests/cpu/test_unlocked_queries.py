"""Events are queried without the engine's lock.

The device, whose answers are late, is one of a native program.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import SOURCES

NATIVE = Path(__file__).resolve().parents[1] / "native"


@pytest.mark.sample(0)
def test_no_call_of_the_engine_waits_for_a_question_to_the_driver(tmp_path: Path) -> None:
    """A launching thread gets the engine's lock while the uploader waits for the driver's answer.

    That answer is about an event.
    """
    program = tmp_path / "unlocked_queries"
    sources = [str(build.CSRC / source) for source in SOURCES if source != "cpu_device.cpp"]
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC")]
    subprocess.run([build.find_compiler(), *flags, "-O0", f"-I{build.CSRC}", f"-I{NATIVE}", str(NATIVE / "unlocked_queries.cpp"), *sources,
                    "-ldl", "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unlocked\n"
