"""The GPU's queue of launches is made longer, if that is still possible.

It is left alone where somebody has said how long it is to be.
"""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from hytrain_fx.runtime import launch_queue

BEGUN, NOT_INITIALIZED = 0, 3


def driver_that_returns(monkeypatch: pytest.MonkeyPatch, result: int | None) -> list[str]:
    """A driver whose calls return `result`; None: there is no driver.

    Gives the names of the libraries that are asked for.
    """
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        if result is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDeviceGetCount=lambda _: result)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return asked


@pytest.mark.parametrize(("result", "before", "after"), [
    (NOT_INITIALIZED, None, "4x"),
    (BEGUN, None, None),  # too late: the driver has read it
    (None, None, None),
    (NOT_INITIALIZED, "2x", "2x"),
    (NOT_INITIALIZED, "", ""),
])
def test_the_variable_is_set_once_and_in_time(monkeypatch: pytest.MonkeyPatch, result: int | None, before: str | None,
                                              after: str | None) -> None:
    """What the user has set stays.

    The environment stays too, where CUDA has begun or is not there.
    """
    asked = driver_that_returns(monkeypatch, result)
    monkeypatch.delenv(launch_queue.VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(launch_queue.VARIABLE, before)
    launch_queue.ask_for_long_queue()
    assert os.environ.get(launch_queue.VARIABLE) == after
    assert launch_queue.length_asked_for() == (after or None)
    assert asked == ([] if before is not None else ["libcuda.so.1"])
    monkeypatch.delenv(launch_queue.VARIABLE, raising=False)
