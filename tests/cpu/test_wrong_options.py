"""Options that only model, machine or the installed torch can judge.

Each is one clear error at `compile`, or a warning, or works.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.planning import first_plan, planning

from .loops import plain_loop
from .models import Mlp, mlp
from .test_errors import adamw
from .threads import engine_threads, threads_left

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k above the units": ({"k": 9}, r"k=9: expected .* at most 4"),
    "mode that torch does not know": ({"mode": "nonsense"}, r"mode='nonsense': expected None or one of 'default'.*no-cudagraphs"),
    "mode together with options": ({"mode": "default", "options": {"max_autotune": True}}, "one of the two"),
    "unknown Inductor option": ({"options": {"max_autotun": True}}, "'max_autotun': expected .*did you mean 'max_autotune'"),
    "Inductor option of a wrong type": ({"options": {"max_autotune": "yes"}}, "'max_autotune'='yes': expected a value of type bool"),
    "CUDA graphs by an option": ({"options": {"triton.cudagraphs": True}}, "without CUDA graphs"),
    "dump below a file": ({"dump": Path(__file__) / "folder"}, "dump=.*cannot be written"),
    "dump that is a file": ({"dump": __file__}, "dump=.*cannot be written"),
    "dump with a zero byte": ({"dump": "a\0b"}, "dump=.*cannot be written"),
    "dump where nothing can be made": ({"dump": "/proc/folder"}, "dump=.*cannot be written"),
    "ring that nothing holds": ({"ring_bytes": 1 << 60}, "ring_bytes=1152921504606846976: the device has no room for it"),
    "ring too small": ({"ring_bytes": 1}, r"ring_bytes=1: expected at least \d{5}"),
    "nowhere for the states": ({"gpu_states": 0, "host_memory": 1}, r"host_memory=1 and gpu_states=0.*no plan"),
    "nowhere for a share of the states": ({"gpu_states": 0.5, "host_memory": 2000}, "host_memory=2000 and gpu_states=0.5.*no plan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_compile(name: str) -> None:
    """A ConfigError names the option; no thread is left, and the model then trains plainly."""
    torch._dynamo.reset()
    options, message = REFUSED[name]
    model, batches = mlp()
    optimizer: Any = adamw(model)
    threads = engine_threads()
    with pytest.raises(errors.ConfigError, match=message):
        hytrain_fx.compile(model, optimizer, **options)
    assert threads_left(threads) == []
    assert all(type(p) is nn.Parameter for p in model.parameters())
    plain_loop(1)(model, optimizer, batches)


@pytest.mark.parametrize(("limit", "error"), [({"host_memory": 1000}, errors.ConfigError), ({}, errors.HostMemoryError)])
def test_states_that_device_and_host_together_do_not_hold(
    limit: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gpu_states="auto" the bound is the whole memory of the device.

    The error says how much is left to the host.
    """
    monkeypatch.setattr(planning, "total_bytes", lambda device: 2000.0)
    monkeypatch.setattr(first_plan, "host_budget_bytes", lambda option: 1000 if option is None else option)
    model = Mlp()
    with pytest.raises(error, match=r"no plan fits.*gpu_states='auto' leaves the states of 2 of 4 units"):
        hytrain_fx.compile(model, adamw(model), **limit)


TAKEN: dict[str, dict[str, Any]] = {
    "an option with a dash": {"options": {"max-autotune": False}},
    "mode by name": {"mode": "default"},
    "no options": {"options": None},
    "k of all units": {"k": 4},
    "all states on the device": {"gpu_states": 1.0, "host_memory": 1},
    "no end of waiting": {"timeout_s": float("inf")},
}


@pytest.mark.parametrize("name", TAKEN)
def test_trains(name: str) -> None:
    """Options that look odd and mean something."""
    torch._dynamo.reset()
    model, batches = mlp()
    optimizer: Any
    _, optimizer = hytrain_fx.compile(model, adamw(model), **TAKEN[name])
    plain_loop(2)(model, optimizer, batches)
    hytrain_fx.close(model)


def test_more_workers_than_cores_is_a_warning() -> None:
    """Threads that share cores are slower, not wrong."""
    cores = len(os.sched_getaffinity(0))
    model = Mlp()
    with pytest.warns(errors.HytrainWarning, match=f"workers={cores + 1}: this process may run on {cores} CPUs"):
        hytrain_fx.compile(model, adamw(model), workers=cores + 1)
    hytrain_fx.close(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hytrain_fx.compile(model, adamw(model), workers=cores)
    hytrain_fx.close(model)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def fill_the_disk(folder: Path) -> None:
    """Any write to a file of that name fails as on a full disk."""
    os.symlink("/dev/full", folder / "01.backward.00.annotate_units.before.txt")


@pytest.mark.parametrize("harm", [remove, fill_the_disk])
def test_a_dump_that_cannot_go_on_ends_with_one_warning(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """The training goes on, and later graphs are not tried."""
    torch._dynamo.reset()
    folder = tmp_path / "dump"
    model, batches = mlp()
    optimizer: Any
    _, optimizer = hytrain_fx.compile(model, adamw(model), dump=str(folder))
    assert folder.is_dir()
    harm(folder)
    with pytest.warns(errors.HytrainWarning, match="the dump in .* ends") as caught:
        plain_loop(2)(model, optimizer, batches)
    assert len([warning for warning in caught if "the dump in" in str(warning.message)]) == 1
    hytrain_fx.close(model)


def test_a_dump_may_be_named_by_a_str(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders on the way are made, and the texts are there after a step.

    That also holds where the script has gone to another folder meanwhile.
    """
    torch._dynamo.reset()
    folder = tmp_path / "some" / "folder"
    model, batches = mlp()
    optimizer: Any
    monkeypatch.chdir(tmp_path)
    _, optimizer = hytrain_fx.compile(model, adamw(model), dump="some/folder")
    monkeypatch.chdir("/")
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.close(model)
    assert sorted(path.name for path in folder.glob("*.after.txt"))[0] == "00.forward.00.annotate_units.after.txt"
