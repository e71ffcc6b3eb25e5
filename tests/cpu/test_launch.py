"""How much device memory passes gradients on, and how many workers there are."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.config import Config, EngineName
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.memory import ring_bytes
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.ir.limits import CHUNK_PARAMS, TRANSIT_BYTES
from hytrain_fx.runtime import launch, launch_queue
from hytrain_fx.runtime.launch import STAGING_BYTES, default_workers, ring_bytes_for
from hytrain_fx.runtime.topology import LogicalCpu, Topology
from hytrain_fx.torch_private.pipelining import Stage

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parameter(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Without memory."""
    return torch.empty(numel, dtype=dtype, device="meta")


@given(sizes=st.lists(st.tuples(st.integers(1, 1 << 31), st.sampled_from(DTYPES)), min_size=1, max_size=20))
def test_ring_and_staging_take_no_more_than_640_mb(sizes: list[tuple[int, torch.dtype]]) -> None:
    """For any model; and two pieces of one chunk fit, so that any gradient passes."""
    parameters = [parameter(*size) for size in sizes]
    chunk = max(min(p.numel(), CHUNK_PARAMS) * p.element_size() for p in parameters)
    for streams, staging in ((True, STAGING_BYTES), (False, 0)):
        ring = ring_bytes_for(parameters, Config(), streams)
        assert ring + staging <= 640_000_000
        assert ring // 2 >= chunk


def test_where_nothing_is_streamed_the_ring_has_it_all() -> None:
    """The staging area's share is lent to the ring until states are streamed."""
    parameters = [parameter(1 << 30, torch.bfloat16)]
    assert ring_bytes_for(parameters, Config(), streams=False) == TRANSIT_BYTES == 640_000_000
    assert ring_bytes_for(parameters, Config(), streams=True) == TRANSIT_BYTES - STAGING_BYTES


def test_a_small_model_takes_a_small_ring() -> None:
    """Twice all its gradients, beside the least that two pieces need."""
    assert ring_bytes_for([parameter(1000, torch.float32)] * 3, Config(), streams=False) <= 3 * 2 * 4000 + (64 << 10)


def test_offline_reports_count_the_ring_that_is_taken() -> None:
    """The cost model does not import the runtime; both have the same figure."""
    for streams in (False, True):
        assert ring_bytes_for([parameter(1 << 30, torch.bfloat16)], Config(), streams) == ring_bytes(read_shape("llama-3.1b"), streams)


@pytest.mark.parametrize(("said", "places"), [(None, 1020), ("", 1020), ("4x", 4080), ("0.5x", 510), ("8x", 1020), ("much", 1020)])
def test_the_queues_length_is_what_the_driver_was_asked_for(said: str | None, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver does not know leaves the usual length."""
    monkeypatch.delenv(launch_queue.VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(launch_queue.VARIABLE, said)
    assert launch_queue.places() == places


def test_a_wanted_ring_is_taken_down_to_the_least_that_works() -> None:
    """The option holds above the default's limit; below the least, an error says what is needed."""
    parameters = [parameter(1 << 30, torch.bfloat16)]
    for streams in (False, True):
        assert ring_bytes_for(parameters, Config(ring_bytes=5 << 30), streams) == 5 << 30
        least = 2 * CHUNK_PARAMS * 4 + (64 << 10)
        assert ring_bytes_for(parameters, Config(ring_bytes=least), streams) == least
        with pytest.raises(ConfigError, match=f"at least {least}"):
            ring_bytes_for(parameters, Config(ring_bytes=least - 1), streams)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 12), (2, 6), (8, 1)])
def test_workers_are_the_rank_s_physical_cores_less_the_launching_ones(ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores with two threads each; at least one worker."""
    cpus = tuple(LogicalCpu(number, number % 16, 0) for number in range(32))
    monkeypatch.setattr(launch, "read_topology", lambda device: Topology(cpus, ranks=ranks))
    assert default_workers() == workers


def test_stages_of_one_rank_share_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an engine. The option counts for one of them."""
    monkeypatch.setattr(launch, "default_workers", lambda device, beside_training=False: 5)
    for here, workers, expected in ((1, None, 5), (2, None, 2), (8, None, 1), (2, 3, 3)):
        stage = Stage(0, 8, 4, "ScheduleInterleaved1F1B", here=here)
        with warnings.catch_warnings():  # more workers than this machine has CPUs
            warnings.simplefilter("ignore")
            engine = launch.make_engine(Config(pipeline=stage, workers=workers), [torch.zeros(10)])
        assert engine.workers == expected
        engine.close()


def test_without_a_readable_topology_the_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose sysfs tells nothing."""
    monkeypatch.setattr(launch, "read_topology", lambda device: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_workers() == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: no other socket to be made up")
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_an_engine_s_threads_run_on_the_gpu_s_socket(kind: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run there if it has enough cores; the launching thread stays where it was."""
    here, *elsewhere = sorted(os.sched_getaffinity(0))
    near = [here, *range(100_000, 100_004)]  # the system ignores those that are not there
    cpus = tuple(LogicalCpu(number, number, int(number in near)) for number in (*near, *elsewhere))
    monkeypatch.setattr(launch, "read_topology", lambda device: Topology(cpus, gpu_node=1))
    before, own = set(os.listdir("/proc/self/task")), os.sched_getaffinity(0)
    engine = launch.make_engine(Config(engine=kind, workers=2), [torch.zeros(10)])
    of_engine = set(os.listdir("/proc/self/task")) - before
    assert len(of_engine) >= 4
    assert {frozenset(os.sched_getaffinity(int(thread))) for thread in of_engine} == {frozenset({here})}
    assert os.sched_getaffinity(0) == own
    engine.close()
