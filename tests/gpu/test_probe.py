"""Rates measured on a GPU, and what measuring leaves.

Also what a forked child has of states in pinned memory.
"""

from __future__ import annotations

import os

import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.probe import full_duplex_us_per_byte


def test_both_directions_have_a_rate_of_the_link() -> None:
    """With both directions busy each moves between 0.1 and 1000 GB/s.

    So the figures are of copies, in microseconds per byte.
    """
    for us_per_byte in full_duplex_us_per_byte(torch.device("cuda")):
        assert 0.1 < 1e-3 / us_per_byte < 1000


def test_a_probe_of_the_update_keeps_no_device_memory() -> None:
    """However often the update is timed: what it allocated is free again."""
    model = torch.nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, engine="native", replan_every=0)
    session = session_of(model)
    allocated = []
    for _ in range(4):
        model(torch.randn(2, 2048, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.probe_device_update_us_per_param()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    hytrain_fx.close(model)
    assert len(set(allocated[1:])) == 1, allocated


def test_a_forked_child_is_told_that_it_has_no_states() -> None:
    """Pinned slabs are not in it: `state_dict()` there is an error that says so, and no crash."""
    model = torch.nn.Linear(512, 512, device="cuda")
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, engine="native")
    model(torch.randn(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        try:
            optimizer.state_dict()
        except EngineError as error:
            os._exit(0 if "Read the states in the parent" in str(error) else 3)
        except BaseException:
            os._exit(4)
        os._exit(5)
    status = os.waitpid(child, 0)[1]
    assert len(optimizer.state_dict()["state"]) == 2
    hytrain_fx.close(model)
    assert os.waitstatus_to_exitcode(status) == 0
