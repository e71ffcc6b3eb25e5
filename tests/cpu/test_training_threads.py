"""torch's threads train a share away from the GPU's socket, on made-up hosts and on this one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hytrain_fx
from hytrain_fx.runtime import launch
from hytrain_fx.runtime.topology import LAUNCHING_CORES, Topology, cpus_for
from hytrain_fx.runtime.training_threads import in_team, move_team, training_cpus, workers_beside_training
from hytrain_fx.sharing import loop

from .test_topology import host, topologies


@given(topology=topologies(), workers=st.integers(1, 40))
def test_updates_and_training_never_share_the_gpus_socket(topology: Topology, workers: int) -> None:
    """Training threads have CPUs of their own on other sockets, or no place of their own."""
    found = training_cpus(topology, workers)
    if found is not None:
        nodes = {cpu.number: cpu.node for cpu in topology.cpus}
        assert found
        assert found.isdisjoint(cpus_for(topology, workers))
        assert topology.gpu_node not in {nodes[number] for number in found}


def test_two_sockets_are_shared_out() -> None:
    """By default updates have the GPU's socket and training the other; one socket is for both."""
    two = Topology(host(64, nodes=2, threads=2), gpu_node=1)
    near = workers_beside_training(two)
    assert near == 32
    assert training_cpus(two, near - LAUNCHING_CORES) == frozenset([*range(32), *range(64, 96)])
    assert training_cpus(two, 60) is None, "so many workers take both sockets"
    for one in (Topology(host(16), gpu_node=0), Topology(host(64, nodes=2), gpu_node=None)):
        assert workers_beside_training(one) is None
        assert training_cpus(one, 8) is None


def test_workers_keep_to_the_gpus_socket_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many by default as without a share, on a host of two sockets."""
    two = Topology(host(64, nodes=2), gpu_node=0)
    monkeypatch.setattr(launch, "read_topology", lambda device: two)
    assert launch.default_workers() == 60
    assert launch.default_workers(beside_training=True) == 28


def affinities() -> list[set[int]]:
    """Those of the threads that this thread's parallel kernels run on."""
    found: list[set[int]] = []
    in_team(lambda: found.append(os.sched_getaffinity(0)))
    return found


@pytest.mark.torch_threads(2)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nowhere to move to")
def test_torchs_threads_move() -> None:
    """All threads of the team are on the CPUs they were sent to, and back again."""
    torch.ones(1 << 20).add_(1)  # the team is there
    before = os.sched_getaffinity(0)
    last = {max(before)}
    try:
        move_team(last)
        assert affinities() == [last, last]
    finally:
        move_team(before)
    assert affinities() == [before, before]


@pytest.mark.torch_threads(2)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nowhere to move to")
def test_only_the_cpus_part_is_trained_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread comes back after each part, also from one that it leaves."""
    before = os.sched_getaffinity(0)
    there = frozenset([max(before)])
    monkeypatch.setattr(loop, "training_cpus", lambda topology, workers: there)
    model: Any = torch.nn.Linear(3, 2)
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), cpu_share=0.5, workers=1)
    x = torch.randn(4, 3)
    try:
        assert [os.sched_getaffinity(0) for _ in hytrain_fx.share(x, model)] == [before, set(there)]
        assert os.sched_getaffinity(0) == before
        parts = hytrain_fx.share(x, model)
        next(parts), next(parts)
        assert affinities() == [set(there), set(there)]
        del parts
        assert os.sched_getaffinity(0) == before
    finally:
        move_team(before)
        hytrain_fx.close(model)
