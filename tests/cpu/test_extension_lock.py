"""The lock of an extension's build is waited for while the build goes on.

When nothing builds any more, an error names it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.file_baton import FileBaton

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.fallback.host_updates import wait_for_build

LONG_AGO_S = 3600.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    return folder


def leave_lock(folder: Path) -> None:
    """Leave a lock as a build that was killed an hour ago."""
    assert FileBaton(str(folder / "lock")).try_acquire()
    (folder / "build.ninja").touch()
    then = time.time() - LONG_AGO_S
    for path in (*folder.glob("*"), folder):
        os.utime(path, (then, then))


def test_without_a_lock_nothing_is_waited_for(folder: Path) -> None:
    """Where there is no lock, or no folder at all, nothing is waited for."""
    wait_for_build("cpu_adam")
    folder.rmdir()
    wait_for_build("cpu_adam")


def test_a_lock_that_a_killed_build_left_is_an_error_that_names_it(folder: Path) -> None:
    """The error says what was found and what to do, before torch would wait without end."""
    leave_lock(folder)
    with pytest.raises(EngineError, match=rf"{folder}/lock says that .* for 36\d\d s.*Remove that file"):
        wait_for_build("cpu_adam")


def test_the_engine_asks_before_it_loads_the_op(folder: Path) -> None:
    """engine="deepspeed" with such a lock raises it instead of hanging."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    leave_lock(folder)
    with pytest.raises(EngineError, match="Remove that file"):
        TorchEngine(torch.device("cpu"), 1 << 20, timeout_s=1.0, adam="deepspeed")


def test_a_build_that_goes_on_is_waited_for(folder: Path) -> None:
    """A lock in the build's folder, as torch names it, is waited for until it is gone."""
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    waiting = threading.Thread(target=wait_for_build, args=("cpu_adam",))
    waiting.start()
    waiting.join(timeout=0.5)
    assert waiting.is_alive()
    baton.release()
    waiting.join(timeout=60.0)
    assert not waiting.is_alive()


def test_the_folder_is_the_one_that_torch_builds_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder is torch's also without TORCH_EXTENSIONS_DIR: one a Python and a CUDA version."""
    from torch.utils import cpp_extension

    from hytrain_fx.runtime.fallback.host_updates import _build_folder

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _build_folder("an_extension") == Path(cpp_extension._get_build_directory("an_extension", verbose=False))
