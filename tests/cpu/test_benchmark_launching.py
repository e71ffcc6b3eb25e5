"""`steps --launching`: what holds up the threads that launch."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import hytrain_fx
from benchmarks.launching import STEPS, launching, nodes, switches
from hytrain_fx.api import session_of

from .models import Mlp


def _thread(folder: Path, number: int, name: str, voluntary: int, taken: int, moved: int | None) -> None:
    own = folder / str(number)
    own.mkdir()
    (own / "comm").write_text(f"{name}\n")
    (own / "status").write_text(f"Name:\t{name}\nvoluntary_ctxt_switches:\t{voluntary}\nnonvoluntary_ctxt_switches:\t{taken}\n")
    if moved is not None:
        (own / "sched").write_text(f"python3 ({number}, #threads: 4)\nse.nr_migrations                   :   {moved}\n")


def test_the_loops_and_autograds_threads_are_counted(tmp_path: Path) -> None:
    """Autograd's are summed, all others left out; what the system does not tell is not there."""
    _thread(tmp_path, os.getpid(), "python3", 5, 7, 2)
    _thread(tmp_path, 10**7, "pt_autograd_0", 1, 2, 3)
    _thread(tmp_path, 10**7 + 1, "pt_autograd_1", 10, 20, None)
    _thread(tmp_path, 10**7 + 2, "python3", 100, 100, 100)
    assert switches(tmp_path) == Counter({
        ("main", "gave_up_core"): 5, ("main", "taken_off_core"): 7, ("main", "changed_core"): 2,
        ("autograd", "gave_up_core"): 11, ("autograd", "taken_off_core"): 22, ("autograd", "changed_core"): 3})
    assert not switches(tmp_path / "absent")


def test_steps_in_a_row_and_after_a_drain_and_their_calls() -> None:
    """Drains come before each step of one kind alone; calls are counted for one step."""
    steps, drains = [0], [0]
    weight = torch.ones(4, 4)

    def step() -> None:
        steps[0] += 1
        for _ in range(3):
            torch.mm(weight, weight)

    def finish() -> None:
        drains[0] += 1

    found = launching(step, finish, lambda: 1e-3 * min(steps[0], 2))
    assert steps[0] == 2 * STEPS + 3
    assert drains[0] == 1 + STEPS + 3 + 1
    assert found["in_a_row"]["launching_ms"] == found["each_after_a_drain"]["launching_ms"] == 2.0
    assert found["calls"]["aten::mm"]["a_step"] == 3.0
    assert launching(step, finish, lambda: None)["in_a_row"]["launching_ms"] is None


def test_nodes_are_timed_in_every_step_and_left_as_they_were() -> None:
    """Each is counted as often as it ran; the engine has a part of its time."""
    model, batch = Mlp(), torch.randn(5, 6)
    optimizer: Any
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)

    def step() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    session = session_of(model)
    before = session.nodes.runs.copy()
    found = nodes(step, session.drain, model)
    ran = session.nodes.runs - before
    assert {name: of["a_step"] for name, of in found.items()} == {"wait": 4.0, "offload_and_step": 4.0, "release": 3.0, "backward_end": 1.0}
    assert ran["backward_end"] == STEPS
    assert all(0 < of["engine_us"] < of["us_each"] for of in found.values())
    assert not set(found) & (set(vars(session.nodes)) | set(vars(session.engine)))
    hytrain_fx.close(model)
