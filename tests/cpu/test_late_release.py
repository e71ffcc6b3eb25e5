"""Streamed rows that may be updated late hold up no others.

The compute stream is a queue of a native program: in Python it is the caller.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import SOURCES

NATIVE = Path(__file__).resolve().parents[1] / "native"


def test_a_row_that_is_released_last_holds_up_no_other(tmp_path: Path) -> None:
    """States of such a row come when nothing else can, not first.

    Updates run in the order in which their states are sent.
    """
    library, program = build.library(SOURCES), tmp_path / "late_release"
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC")]
    subprocess.run([build.find_compiler(), *flags, "-O1", f"-I{build.CSRC}", f"-I{NATIVE}", str(NATIVE / "late_release.cpp"), str(library),
                    f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in time\n"
