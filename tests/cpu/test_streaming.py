"""Streamed rows on the bare engine, on CPU lanes.

States visit the device chunk by chunk and come home with the reference's bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS
from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import CommitItem, RowSpec, Stage
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.states.split_master import copy_states, whole_states

from .engine_loop import GROUP, EngineLoop, assert_same_states, device_states, host_states

CPU = torch.device("cpu")
SIZES = (300_000, 17, 1_000_003, 4096)
SCALARS = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)


@contextmanager
def running(workers: int = 2) -> Iterator[NativeEngine]:
    engine = NativeEngine(torch.device("cpu"), workers, 40 << 20, 20.0)
    try:
        yield engine
    finally:
        engine.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=6),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 1500), max_size=3),
    steps=st.integers(1, 4),
    places=st.lists(st.sampled_from("cgs"), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    halves=st.booleans(),
    sends_weight=st.booleans(),
    narrow=st.booleans(),
)
def test_any_mixture_of_placements_gives_the_same_bits(
    sizes: list[int], delays: dict[Stage, int], steps: int, places: list[str], dtype: torch.dtype, halves: bool,
    sends_weight: bool, narrow: bool,
) -> None:
    """Weights are the reference's, for rows on the CPU, on the device and streamed.

    Masters are whole or in halves, moments fp32 or bf16, and any stage is slow.
    """
    rows = range(len(sizes))
    on_device, streamed = (frozenset(r for r in rows if places[r] == letter) for letter in "gs")
    with running() as engine:
        loop = EngineLoop(engine, tuple(sizes), dtype, on_device, streamed, halves, narrow, sends_weight)
        for stage, mean_us in delays.items():
            engine.set_delay(stage, mean_us)
        for _ in range(steps):
            loop.step()
        loop.check()


def test_staging_slots_are_reused_only_when_their_states_are_home() -> None:
    """With more chunks than slots and a slow way home, moments and masters are the reference's.

    They are compared on the host after every step.
    """
    with running() as engine:
        loop = EngineLoop(engine, (9 * CHUNK_PARAMS // 2, 2 * CHUNK_PARAMS + 5, 3), torch.bfloat16, streamed=frozenset({0, 1, 2}))
        engine.set_delay(Stage.STREAM_OUT, 3_000)
        for _ in range(2):
            loop.step()
        loop.check()
        for row, reference in enumerate(loop.reference):
            states = engine._states[row]
            assert_same_states(states, reference, f"row {row}")


def test_drain_waits_for_the_states_of_a_row_whose_weight_was_waited_for() -> None:
    """wait() needs the new weight only; the states are at rest after drain()."""
    with running() as engine:
        loop = EngineLoop(engine, (500_000,), torch.bfloat16, streamed=frozenset({0}))
        engine.set_delay(Stage.STREAM_OUT, 50_000)
        loop.step()
        engine.wait([0])
        engine.drain([0])
        assert torch.equal(engine._states[0].states[0], loop.reference[0].states[0])


def test_a_weight_may_be_written_once_it_was_waited_for() -> None:
    """Its way home has ended, also where the update was seen to be done in a recorded step."""
    with running(1) as engine:
        loop = EngineLoop(engine, (4096,), torch.bfloat16, streamed=frozenset({0}), halves=True, sends_weight=True)
        engine.record(True)
        engine.set_delay(Stage.STREAM_OUT, 100_000)
        for _ in range(2):
            loop.step()
            while not any(record.stage is Stage.GPU_UPDATE for record in engine.take_records()):
                time.sleep(0.001)
            engine.wait([0])
            weight = loop.weights[0].clone()
            loop.weights[0].fill_(7.0)
            engine.drain([0])
            loop.weights[0].copy_(weight)
            assert_same_states(whole_states(loop.states[0], torch.device("cpu")), loop.reference[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rest_of_a_step_is_put_on_the_lane_at_once(dtype: torch.dtype) -> None:
    """Streamed updates are not waited for.

    There are more of them than staging slots, and their way home is slow. Still all are on their
    way as soon as somebody waits.
    """
    hosted, streamed = 160, 18
    with running() as engine:
        loop = EngineLoop(engine, (17,) * hosted + (100_000,) * streamed, dtype, streamed=frozenset(range(hosted, hosted + streamed)))
        engine.set_delay(Stage.STREAM_OUT, 15_000)
        for _ in range(3):
            loop.step()
        assert engine.finish_times().at_once >= 100_000 * (streamed - STAGING_SLOTS)
        loop.check()


def test_amsgrad_keeps_its_maximum() -> None:
    """The fourth array travels too."""
    with running() as engine:
        weight = torch.randn(70_000)
        states = host_states(weight)
        states = replace(states, table=ADAMW, slot=None, states=(*states.states, torch.full((70_000,), 0.5)))
        engine.add_row(RowSpec(70_000, 0, weight))
        engine.place_streamed(0, states)
        scalars = AdamScalars.of({**GROUP, "amsgrad": True}, 1, decoupled=True, torch_cuda=False)
        grad = torch.randn(70_000) * 10
        engine.commit([CommitItem(0, scalars, grad=grad, at_end=True)])
        engine.drain([0])
        _, second, largest = states.states
        assert torch.equal(largest, second.clamp(min=0.5))


def test_the_lowest_unit_goes_first() -> None:
    """Of rows whose gradients are there, units are streamed in forward order.

    The order of their numbers in the table does not matter.
    """
    with running() as engine:
        loop = EngineLoop(engine, (CHUNK_PARAMS,) * 9, torch.bfloat16, streamed=frozenset(range(9)))
        for row in range(9):
            engine.set_unit(row, (row * 4 + 3) % 9)
        engine.record(True)
        loop.step()
        loop.check()
        order = [(row * 4 + 3) % 9 for row in (r.row for r in engine.take_records() if r.stage is Stage.STREAM_IN)]
        assert order == sorted(order)


def test_a_commit_without_a_gradient_is_refused_before_anything_changes() -> None:
    """No update may read a gradient that is missing; the commit's other rows stay as they were."""
    with running() as engine:
        loop = EngineLoop(engine, (300, 300), torch.float32, on_device=frozenset({0}), streamed=frozenset({1}))
        before = [weight.clone() for weight in loop.weights]
        with pytest.raises(EngineError, match=r"row 1 .*without its gradient"):
            engine.commit([CommitItem(0, SCALARS, grad=torch.ones(300), at_end=True), CommitItem(1, SCALARS)])
        engine.drain([0, 1])
        assert all(torch.equal(a, b) for a, b in zip(before, loop.weights, strict=True))


@pytest.mark.parametrize(("halves", "sends_weight"), [(False, False), (True, False), (True, True)])
def test_rows_change_their_place_between_steps(halves: bool, sends_weight: bool) -> None:
    """Streamed, on the device, on the CPU, in turn, with the states copied: bits are the same."""
    with running() as engine:
        loop = EngineLoop(engine, SIZES, torch.bfloat16, streamed=frozenset(range(4)), halves=halves, sends_weight=sends_weight)
        for place in ("device", "cpu", "streamed", "cpu"):
            loop.step()
            loop.check()
            for row in range(4):
                old = whole_states(engine._states[row], CPU)
                new = device_states(loop.weights[row]) if place == "device" else host_states(loop.weights[row], halves)
                copy_states(old, new, CPU)
                loop.states[row] = new
                if place == "device":
                    engine.place_on_device(row, new)
                elif place == "cpu":
                    engine.place_on_host(row, new)
                else:
                    engine.place_streamed(row, replace(new, slot=None))
            rows = frozenset(range(4))
            loop.on_device, loop.streamed = rows if place == "device" else frozenset(), rows if place == "streamed" else frozenset()


def test_the_torch_engine_says_that_it_does_not_stream() -> None:
    """Asking for it is an error that names the engine that does."""
    engine = TorchEngine(torch.device("cpu"), 40 << 20, 20.0)
    try:
        assert not engine.can_stream
        weight = torch.randn(10)
        engine.add_row(RowSpec(10, 0, weight))
        with pytest.raises(EngineError, match="native"):
            engine.place_streamed(0, replace(host_states(weight), slot=None))
    finally:
        engine.close()
