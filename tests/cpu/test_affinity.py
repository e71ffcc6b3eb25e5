"""Which CPUs the engine's threads may use where OpenMP has bound the compiling thread to one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hytrain_fx.runtime.affinity import allowed_cpus, threads_on

ROOT = Path(__file__).parents[2]
BINDINGS = (
    {"OMP_PROC_BIND": "true"},
    {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"},
    {"GOMP_CPU_AFFINITY": " ".join(map(str, sorted(os.sched_getaffinity(0))))},
)
several_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing to be bound to")


@pytest.mark.sample(1)
@several_cpus
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: " ".join(binding))
def test_engine_threads_run_on_all_cpus_though_the_launching_thread_is_bound(binding: dict[str, str], engine: str) -> None:
    """The engine's threads run on all CPUs of the process, though the launching thread is bound.

    That thread stays where it was bound, and all CPUs' cores are counted.
    """
    cpus = sorted(os.sched_getaffinity(0))
    run(f"""
        torch.ones(10_000_000).add(1).sum()  # some runtimes bind at the first parallel loop
        bound = os.sched_getaffinity(0)
        assert bound < set({cpus}), "the OpenMP runtime has not bound the launching thread"
        net = torch.nn.Linear(64, 64)
        before = set(os.listdir("/proc/self/task"))
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters()), k=0, workers=2, engine="{engine}")
        of_engine = set(os.listdir("/proc/self/task")) - before
        assert len(of_engine) >= 3
        assert {{frozenset(os.sched_getaffinity(int(thread))) for thread in of_engine}} == {{frozenset({cpus})}}, of_engine
        assert os.sched_getaffinity(0) == bound
        topology = read_topology(torch.device("cpu"))
        assert topology is None or [cpu.number for cpu in topology.cpus] == {cpus}
        hytrain_fx.close(model)
    """, binding)


@several_cpus
def test_a_thread_that_the_loop_has_bound_stays_there() -> None:
    """Without an OpenMP runtime that binds, the calling thread's CPUs are what the user allowed.

    The user does so by taskset, a launcher or sched_setaffinity.
    """
    one = min(os.sched_getaffinity(0))
    run(f"""
        torch.ones(10_000_000).add(1).sum()
        os.sched_setaffinity(0, {{{one}}})
        assert allowed_cpus() == {{{one}}}
    """, {})


@several_cpus
def test_threads_are_started_elsewhere_and_the_caller_stays() -> None:
    """Inside `threads_on` the CPUs are the given ones, afterwards the earlier ones.

    Where the given CPUs cannot be had, nothing changes.
    """
    before = os.sched_getaffinity(0)
    with threads_on({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with threads_on({100_000}):
        assert os.sched_getaffinity(0) == before
    assert allowed_cpus() == before


def run(code: str, variables: dict[str, str]) -> None:
    start = """
import os, torch, hytrain_fx
from hytrain_fx.runtime.affinity import allowed_cpus
from hytrain_fx.runtime.topology import read_topology
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
