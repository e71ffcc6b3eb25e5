"""The lock of an extension that torch.utils.cpp_extension builds at first use.

The building process makes a file named `lock` and takes it away at the end; every other one waits until it is gone. A build that was
killed leaves the file, and torch then waits for it without end and without a word.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from hytrain_fx.errors import EngineError

STILL_S = 600.0  # nothing is written for minutes while one source compiles on a busy machine
_POLL_S = 0.2


def wait_for_build(extension: str) -> None:
    """Returns when no other process builds `extension`.

    Raises EngineError naming the lock where nothing in the build's folder has changed for STILL_S seconds.
    """
    folder = _build_folder(extension)
    lock = folder / "lock"
    while lock.exists():
        unchanged_s = time.time() - _last_change_s(folder)
        if unchanged_s > STILL_S:
            raise EngineError(
                f"{lock} says that another process builds {extension}, but nothing there has changed for {unchanged_s:.0f} s: "
                "a build that was killed leaves it behind. Remove that file if no build runs, or use engine='native' or 'torch'"
            )
        time.sleep(_POLL_S)


def _build_folder(extension: str) -> Path:
    """Where torch.utils.cpp_extension builds it."""
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return Path(os.environ["TORCH_EXTENSIONS_DIR"]) / extension
    from torch.utils.cpp_extension import get_default_build_root  # not above: half a second, for those who need it only

    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    built_for = next((name + version.replace(".", "") for name, version in versions.items() if version is not None), "cpu")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{built_for}" / extension


def _last_change_s(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # the build goes on, and took it away
            return time.time()
    return max(times)
