"""Programs of tests/native, built against the engine's library."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.libraries import SOURCES

NATIVE: Final = Path(__file__).resolve().parents[1] / "native"


def built(name: str, folder: Path) -> Path:
    """tests/native/NAME.cpp as a program in this folder.

    A `make_cpu_device` of its own takes the place of the library's: the program's names are seen.
    """
    library, program = build.library(SOURCES), folder / name
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC")]
    subprocess.run([build.find_compiler(), *flags, "-O1", f"-I{build.CSRC}", f"-I{NATIVE}", str(NATIVE / f"{name}.cpp"), str(library),
                    "-rdynamic", f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    return program
