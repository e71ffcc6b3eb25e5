"""Faults at every place of a loop on the GPU.

The driver refuses memory, pages are not pinned, engine calls fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError, HytrainWarning
from hytrain_fx.runtime.native import build, cuda_module

from ..cpu.fault_loop import FaultLoop, assert_compile_undone, assert_whole_or_undone
from .feed_forward import ADAMW, batches, deterministic, loss_of
from .feed_forward import build as net

__all__ = ["deterministic"]  # the fixture, for this file too


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def loop(request: pytest.FixtureRequest, deterministic: None) -> Iterator[FaultLoop]:
    made = FaultLoop(request.param, "cuda")
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["device memory", "host memory", "engine call"])
def test_a_fault_leaves_the_step_whole_or_undone(kind: str, loop: FaultLoop) -> None:
    """At every place the error names its cause, the step is whole or undone, training goes on.

    Weights, states and counts are those before the step or after it.
    """
    assert_whole_or_undone(kind, loop)


@pytest.mark.parametrize("kind", ["device memory", "host memory", "engine call", "thread"])
def test_a_compile_that_meets_a_fault_leaves_a_plain_model(kind: str) -> None:
    """At every place in compile() the error names its cause, and a second try trains.

    Model and optimizer are plain, and no thread is left.
    """
    assert_compile_undone(kind, "native", "cuda")


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No kernel of the device is loaded in this process or kept on its disk.

    Gives the folder of the cubins.
    """
    for library in build.cache_dir().glob("*.so"):  # the host's part is built
        (tmp_path / library.name).symlink_to(library)
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))
    _forget_kernels()
    yield tmp_path
    _forget_kernels()


def _forget_kernels() -> None:
    cuda_module.function.cache_clear()
    cuda_module._module.cache_clear()


@pytest.mark.parametrize("fault", ["source", "disk"])
def test_a_kernel_that_cannot_be_built_is_an_error_or_the_torch_engine(fault: str, unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If NVRTC refuses, or there is no room for the cubin, engine="native" says so.

    "auto" warns and trains. Once the cause is gone, all is well.
    """
    model: Any = net(torch.float32)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        if fault == "source":
            broken.setattr(cuda_module, "OPTIONS", ("--std=c++17", "--no-such-option"))
        else:
            broken.setattr(os, "replace", full)
        cause = {"source": "NVRTC failed", "disk": "No space left"}[fault]
        with pytest.raises(EngineError, match=cause):
            hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), engine="native")
        with pytest.warns(HytrainWarning, match=cause):
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    for name in ("torch", "native"):
        if name == "native":
            hytrain_fx.close(model)
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), engine=name)
        assert session_of(model).engine.name == name
        loss_of(model, next(batches())).backward()
        optimizer.step()
        optimizer.zero_grad()
    hytrain_fx.close(model)
    assert list(unbuilt.glob("*.cubin"))
