"""Each engine alone, on CPU lanes, with every stage delayed in turn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import DroppedNodeError, EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.engine import CommitItem, Engine, RowSpec, Stage, TaskRecord
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.fallback.lanes import CpuLanes
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.states.slabs import HostSlab, slab_bytes

from .engine_loop import GROUP, EngineLoop, assert_same_states, device_states, host_states

SIZES = (300_000, 17, 1_000_003, 4096)


MakeEngine = Callable[..., AbstractContextManager[Engine]]


@contextmanager
def running(kind: str, ring_bytes: int = 40 << 20, workers: int = 2, timeout_s: float = 20.0) -> Iterator[Engine]:
    """An engine of this kind. `workers` is the native one's; the other has one."""
    engine: Engine
    if kind == "native":
        engine = NativeEngine(torch.device("cpu"), workers, ring_bytes, timeout_s)
    else:
        engine = TorchEngine(torch.device("cpu"), ring_bytes, timeout_s)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["native", "torch"], scope="module")
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """Starts an engine of either kind."""
    return partial(running, request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_weights_go_to_the_memory_set_last(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    """After set_weight() of an idle row, new weights go there, with the reference's bits.

    The old memory does not change.
    """
    with make_engine() as engine:
        loop = EngineLoop(engine, SIZES, dtype)
        loop.step()
        engine.drain(range(len(SIZES)))
        left, loop.weights[2] = loop.weights[2], loop.weights[2].clone()
        engine.set_weight(2, loop.weights[2])
        before = left.clone()
        loop.step()
        loop.check()
        assert torch.equal(left, before)


@pytest.mark.sample(16)
@pytest.mark.parametrize("stage", list(Stage), ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_slow_stage_does_not_change_a_bit(make_engine: MakeEngine, stage: Stage, dtype: torch.dtype) -> None:
    """Whichever stage is slow, rows on either side: the bits are the reference's."""
    with make_engine() as engine:
        loop = EngineLoop(engine, SIZES, dtype, on_device=frozenset({0}))
        engine.set_delay(stage, 2_000)
        for _ in range(3):
            loop.step()
        loop.check()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=5),
    delays=st.dictionaries(st.sampled_from(list(Stage)), st.integers(0, 1500), max_size=3),
    steps=st.integers(1, 4),
    workers=st.integers(1, 3),
    on_device=st.sets(st.integers(0, 4)),
)
def test_any_order_of_events_gives_the_same_bits(
    make_engine: MakeEngine, sizes: list[int], delays: dict[Stage, int], steps: int, workers: int, on_device: set[int]
) -> None:
    """Sizes, delays, worker counts and placements do not change a bit."""
    with make_engine(workers=workers) as engine:
        loop = EngineLoop(engine, tuple(sizes), torch.bfloat16, on_device=frozenset(r for r in on_device if r < len(sizes)))
        for stage, mean_us in delays.items():
            engine.set_delay(stage, mean_us)
        for _ in range(steps):
            loop.step()
        loop.check()


def test_a_small_ring_is_reused_without_loss(make_engine: MakeEngine) -> None:
    """Gradients of several times the ring pass through it unharmed while copies out of it are slow.

    The first row has two chunks, and two chunks fit.
    """
    with make_engine(ring_bytes=2 * CHUNK_PARAMS * 2 + (64 << 10)) as engine:
        loop = EngineLoop(engine, (CHUNK_PARAMS + 100_000, 900_000, CHUNK_PARAMS), torch.bfloat16)
        engine.set_delay(Stage.D2H, 3_000)
        for _ in range(2):
            loop.step()
        loop.check()


def test_the_ring_changes_its_size_between_steps(make_engine: MakeEngine) -> None:
    """The ring may grow and shrink between steps: every bit is the reference's.

    Copies out of it are slow. A dropped gradient has left the old memory before that is freed.
    """
    small, large = 2 * CHUNK_PARAMS * 2 + (64 << 10), 40 << 20
    with make_engine(ring_bytes=small) as engine:
        loop = EngineLoop(engine, (2 * CHUNK_PARAMS + 100_000, 900_000), torch.bfloat16)
        engine.set_delay(Stage.D2H, 10_000)
        for ring_bytes in (large, small, large):
            loop.step()
            engine.drain([0, 1])
            dropped = torch.randn(900_000).to(torch.bfloat16)
            engine.grad_offload([1], [dropped])
            engine.discard([1])
            engine.set_transit(ring_bytes, streams=False)
            slot = loop.states[1].slot
            assert slot is not None
            assert engine.name != "native" or torch.equal(slot, dropped)
            loop.check()


def test_gradients_that_stay_on_the_device_outlive_their_buffers(make_engine: MakeEngine) -> None:
    """Copies of gradients outlive their buffers, for every size and dtype.

    Empty and odd sizes and a view into the middle of a buffer are among them.
    """
    with make_engine() as engine:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = [torch.randn(shape).to(dtype) for shape in [(0,), (1,), (3, 5), (70_000,), ()]] + [torch.randn(9).to(dtype)[1:]]
            buffers, kept = [value.clone() for value in values], [torch.empty_like(value) for value in values]
            engine.keep_grads(kept, buffers)
            for buffer in buffers:
                buffer.zero_()
            assert all(map(torch.equal, kept, values))


def test_weights_reach_the_device_lowest_unit_first(make_engine: MakeEngine) -> None:
    """Of updates that wait together, the first layer's weight is sent first: it is due first."""
    with make_engine(workers=1) as engine:
        loop = EngineLoop(engine, (4096,) * 6, torch.float32)
        engine.record(True)
        engine.set_delay(Stage.CPU_UPDATE, 50_000)
        loop.step()
        engine.drain(range(6))
        sent = [r.row for r in sorted(engine.take_records(), key=lambda r: r.begin_us) if r.stage is Stage.H2D]
        # The first to be taken up may be any that had landed; from then on it goes by unit.
        assert sorted(sent[1:]) == sent[1:]


def test_updated_weights_leave_lowest_unit_first(make_engine: MakeEngine) -> None:
    """Of new weights that wait for the link, the first layer's is sent first.

    The order of their updates does not matter.
    """
    rows = range(6)
    with make_engine(workers=1) as engine:
        EngineLoop(engine, (64,) * len(rows), torch.float32)
        engine.record(True)
        scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
        engine.set_delay(Stage.LANDING, 20_000)  # of one gradient after the other, the last layer's first
        engine.set_delay(Stage.ISSUE, 200_000)
        for row in reversed(rows):
            engine.grad_offload([row], [torch.ones(64)])
        engine.arm_cpu(rows)
        engine.arm_reload(rows)
        engine.commit([CommitItem(row, scalars, at_end=True) for row in rows])
        records: list[TaskRecord] = []
        while sum(r.stage is Stage.H2D for r in records) < len(rows):
            records += engine.take_records()
            time.sleep(1e-3)
        records.sort(key=lambda r: r.begin_us)
        assert [r.row for r in records if r.stage is Stage.CPU_UPDATE] == [5, 4, 3, 2, 1, 0]
        assert [r.row for r in records if r.stage is Stage.H2D] == [5, 0, 1, 2, 3, 4]
        engine.drain(rows)


def test_a_failed_worker_raises_with_its_cause_at_the_next_wait(make_engine: MakeEngine) -> None:
    """The error names the row; later calls raise too instead of training on."""
    with make_engine() as engine:
        loop = EngineLoop(engine, SIZES, torch.float32)
        engine.fail_next_update(2)
        loop.step()
        with pytest.raises(EngineError, match="row 2"):
            engine.wait(range(4))
        with pytest.raises(EngineError, match="row 2"):
            engine.grad_offload([0], [torch.zeros(SIZES[0])])


def test_a_wait_that_cannot_end_is_an_error(make_engine: MakeEngine) -> None:
    """A weight that does not leave in time runs into the time-out, which says how far it came."""
    with make_engine(timeout_s=0.1) as engine:
        loop = EngineLoop(engine, (10,), torch.float32)
        scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
        engine.set_delay(Stage.ISSUE, 500_000)
        engine.grad_offload([0], [torch.ones(10)])
        engine.arm_cpu([0])
        engine.arm_reload([0])
        engine.commit([CommitItem(0, scalars)])
        with pytest.raises(EngineError, match="0 of 1 chunks"):
            engine.wait([0])
        assert loop.step_count == 0


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, float("inf")])
def test_a_time_out_may_be_longer_than_any_clock(make_engine: MakeEngine, timeout_s: float) -> None:
    """With a time-out that ends later than clocks count, waits do not end at once.

    They last until what they wait for has come.
    """
    with make_engine(timeout_s=timeout_s) as engine:
        loop = EngineLoop(engine, SIZES, torch.float32, on_device=frozenset({0}))
        engine.set_delay(Stage.H2D, 5_000)
        engine.set_delay(Stage.CPU_UPDATE, 5_000)
        for _ in range(3):
            loop.step()
        loop.check()


@pytest.mark.parametrize("row", [0, 1], ids=["host", "device"])
def test_updates_keep_denormals_though_the_thread_that_compiles_flushes_them(make_engine: MakeEngine, row: int) -> None:
    """The engine's threads set their own float mode, so the bits are the reference's.

    Threads begin with the settings of the thread that starts them.
    """
    torch.set_flush_denormal(True)
    try:
        with make_engine() as engine:
            torch.set_flush_denormal(False)  # only the engine's threads could flush now
            loop = EngineLoop(engine, (300, 300), torch.float32, on_device=frozenset({1}))
            rested = [loop.states[0], device_states(loop.weights[1])]
            engine.place_on_device(1, rested[1])
            scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
            grads = [torch.full((300,), 1e-20) for _ in range(2)]
            engine.grad_offload([0], grads[:1])
            engine.arm_cpu([0])
            engine.arm_reload([0])
            engine.arm_gpu([1])
            engine.release([0, 1])
            engine.commit([CommitItem(0, scalars), CommitItem(1, scalars, grad=grads[1])])
            engine.drain([0, 1])
            expected = loop.reference[row]
            adamw_(grads[row], expected.master, expected.states, scalars)
            assert 0 < float(expected.states[1][0]) < torch.finfo(torch.float32).tiny
            assert_same_states(rested[row], expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("left_out", "missing"), [("arm_cpu", "cpu_step"), ("arm_reload", "reload")])
def test_a_node_that_did_not_run_is_named_at_the_commit(make_engine: MakeEngine, left_out: str, missing: str) -> None:
    """An offloaded row whose step or reload node was dropped is refused, and not left untrained."""
    with make_engine() as engine:
        EngineLoop(engine, (10,), torch.float32)
        engine.grad_offload([0], [torch.ones(10)])
        for name in ("arm_cpu", "arm_reload"):
            if name != left_out:
                getattr(engine, name)([0])
        scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
        with pytest.raises(DroppedNodeError, match=missing):
            engine.commit([CommitItem(0, scalars)])


@pytest.mark.parametrize("place", ["host", "device", "streamed"])
def test_amsgrad_without_its_state_is_an_error_and_nothing_is_updated(make_engine: MakeEngine, place: str) -> None:
    """An update would read a maximum where there is no memory; an early one is not begun."""
    amsgrad = AdamScalars.of({**GROUP, "amsgrad": True}, 1, decoupled=True, torch_cuda=False)
    with make_engine() as engine:
        if not isinstance(engine, NativeEngine):
            pytest.skip("the engine in torch has the error from the update")
        row, none = frozenset([0]), frozenset[int]()
        on_device, streamed = row if place == "device" else none, row if place == "streamed" else none
        loop = EngineLoop(engine, (10,), torch.float32, on_device, streamed)
        before = loop.weights[0].clone()
        if place == "host":
            engine.grad_offload([0], [torch.ones(10)])
            engine.arm_cpu([0])
            engine.arm_reload([0])
            engine.commit_early((0,), amsgrad, 1)
        with pytest.raises(EngineError, match="row 0 is committed with amsgrad and has no state for it"):
            engine.commit([CommitItem(0, amsgrad, None if place == "host" else torch.ones(10), at_end=True)])
        assert torch.equal(loop.weights[0], before)


def test_a_second_gradient_before_the_wait_is_refused(make_engine: MakeEngine) -> None:
    """A gradient for a row whose last weight nobody waited for means a dropped wait node."""
    with make_engine() as engine:
        loop = EngineLoop(engine, (10,), torch.float32)
        loop.step()
        with pytest.raises(EngineError, match="wait node"):
            engine.grad_offload([0], [torch.ones(10)])


def test_close_stops_every_thread(make_engine: MakeEngine) -> None:
    """After close no thread of the engine is left, and a call says that the engine is closed."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    with make_engine() as warm:  # torch's own threads come with the first update, and stay
        EngineLoop(warm, (10,), torch.float32).step()
    before, python_threads = threads(), threading.active_count()
    with make_engine(workers=3) as engine:
        loop = EngineLoop(engine, SIZES, torch.float32)
        loop.step()
        loop.check()
        of_engine = threads() - before
        assert len(of_engine) >= 7  # four lanes, lander, reloader, and a worker or three
    assert threading.active_count() == python_threads
    deadline_s = time.monotonic() + 10
    while threads() & of_engine and time.monotonic() < deadline_s:  # a joined Python thread has a few instructions left
        time.sleep(1e-3)
    assert not threads() & of_engine
    with pytest.raises(EngineError, match="closed"):
        engine.wait([0])


def test_a_row_is_moved_only_when_its_discarded_gradient_has_landed(make_engine: MakeEngine) -> None:
    """After a row has been placed elsewhere its old slot may be freed.

    No copy is on its way to it.
    """
    with make_engine() as engine:
        loop = EngineLoop(engine, (300_000,), torch.bfloat16)
        slot = torch.zeros(300_000, dtype=torch.bfloat16)
        engine.place_on_host(0, replace(host_states(loop.weights[0]), slot=slot))
        engine.set_delay(Stage.D2H, 50_000)
        engine.grad_offload([0], [torch.ones(300_000, dtype=torch.bfloat16)])
        engine.discard([0])
        engine.place_on_device(0, device_states(loop.weights[0]))
        landed = slot.clone()
        engine.set_delay(Stage.D2H, 0)
        time.sleep(0.2)
        assert torch.equal(slot, landed)


@pytest.mark.parametrize("apart", [False, True], ids=["slots in one slab", "slots apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_many_rows_come_back_in_one_fetch(make_engine: MakeEngine, dtype: torch.dtype, apart: bool) -> None:
    """Each gradient comes back to its place in the given memory, with the offloaded bits.

    Memory after that does not change.

    The copies to the host are late: `fetch` returns before they have landed.
    """
    with make_engine() as engine:
        loop = EngineLoop(engine, SIZES, dtype)
        slab = HostSlab(sum(slab_bytes(size, dtype) for size in SIZES))
        for row, states in enumerate(loop.states if not apart else ()):
            engine.place_on_host(row, replace(states, slot=slab.take(SIZES[row], dtype)))
        engine.set_delay(Stage.D2H, 2_000)
        grads = [torch.randn(size).to(dtype) for size in SIZES]
        engine.grad_offload([2, 3], grads[2:])
        engine.grad_offload([0, 1], grads[:2])
        rows = [0, 1, 3, 2]
        begins = [sum(slab_bytes(SIZES[before], dtype) for before in rows[:at]) // dtype.itemsize for at in range(len(rows))]
        needed = begins[-1] + SIZES[rows[-1]]
        memory = torch.full((needed + 100,), 7.0, dtype=dtype)
        engine.fetched(engine.fetch(rows, memory[:needed]))
        for row, begin in zip(rows, begins, strict=True):
            assert torch.equal(memory[begin : begin + SIZES[row]], grads[row]), f"row {row}"
        assert (memory[needed:] == 7).all()


def test_fetches_are_waited_for_in_any_order_and_once(make_engine: MakeEngine) -> None:
    """Fetches are waited for in any order, each once; two may be on their way.

    An unknown or used number is an error, and so is too little memory.
    """
    with make_engine() as engine:
        EngineLoop(engine, SIZES, torch.float32)
        grads = [torch.randn(size) for size in SIZES]
        engine.grad_offload(range(len(SIZES)), grads)
        outs = [torch.zeros(size) for size in SIZES]
        numbers = [engine.fetch([row], out) for row, out in enumerate(outs)]
        for row in reversed(range(len(SIZES))):
            engine.fetched(numbers[row])
            assert torch.equal(outs[row], grads[row])
        with pytest.raises(EngineError, match="never begun"):
            engine.fetched(numbers[0])
        with pytest.raises(EngineError, match="fit"):
            engine.fetch([0, 1], torch.zeros(SIZES[0]))


def test_a_gradient_stays_in_its_slot_until_the_next_one(make_engine: MakeEngine) -> None:
    """A commit, the update and a drop leave a gradient in its slot.

    A row that was placed elsewhere has none.
    """
    with make_engine() as engine:
        loop = EngineLoop(engine, SIZES, torch.bfloat16)
        rows = range(len(SIZES))
        with pytest.raises(EngineError, match="row 1 has no gradient"):
            engine.fetch([1], torch.zeros(SIZES[1]))
        for stage in (Stage.CPU_UPDATE, Stage.LANDING):
            engine.set_delay(stage, 1000)
        loop.step()
        grads = loop.grads
        outs = [torch.zeros(size, dtype=torch.bfloat16) for size in SIZES]
        for row, out in enumerate(outs):
            engine.fetched(engine.fetch([row], out))
        engine.drain(rows)
        engine.discard([0])
        for row, out in enumerate(outs):
            assert torch.equal(out, grads[row])
            engine.fetched(engine.fetch([row], out.zero_()))
            assert torch.equal(out, grads[row])
        engine.place_on_host(1, loop.states[1])
        with pytest.raises(EngineError, match="row 1 has no gradient"):
            engine.fetch([1], torch.zeros(SIZES[1]))


def test_factors_of_a_commit_are_not_those_of_the_next(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits in a row, of a row each: each update has the factor of its own.

    Copies to the host are slow, so the second commit comes before the first one's factor.
    """
    monkeypatch.setattr(CpuLanes, "host_floats", lambda self, count: torch.full((count,), 7.0))  # what memory holds before the copy
    with make_engine() as engine:
        loop = EngineLoop(engine, (64, 64), torch.float32)
        engine.set_delay(Stage.D2H, 3000)
        for row, factor in enumerate((0.5, 0.25)):
            grad = torch.randn(64)
            scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
            loop.reference[row].update_(replace(scalars, factors=(factor,)), grad, None)
            engine.grad_offload([row], [grad])
            for arm in (engine.arm_cpu, engine.arm_reload, engine.release):
                arm([row])
            engine.commit([CommitItem(row, scalars, factors=(torch.tensor(factor),))])
        engine.drain([0, 1])
        for row in range(2):
            assert_same_states(loop.states[row], loop.reference[row])


def test_a_row_is_moved_only_when_its_gradient_has_left_the_slot(make_engine: MakeEngine) -> None:
    """After a row has been placed elsewhere its old slot may be written to.

    That holds though nobody has waited for the fetch of what it held.
    """
    size = 20_000_000
    with make_engine() as engine:
        loop = EngineLoop(engine, (size,), torch.bfloat16)
        slot = torch.zeros(size, dtype=torch.bfloat16)
        engine.place_on_host(0, replace(loop.states[0], slot=slot))
        engine.grad_offload([0], [torch.ones(size, dtype=torch.bfloat16)])
        out, elsewhere = torch.zeros(size, dtype=torch.bfloat16), device_states(loop.weights[0])
        number = engine.fetch([0], out)
        engine.discard([0])
        engine.place_on_device(0, elsewhere)
        slot[size // 2 :] = 2.0
        engine.fetched(number)
        assert int((out == 1).sum()) == size


def test_the_dropped_gradient_of_an_earlier_place_updates_nothing(make_engine: MakeEngine) -> None:
    """A row moved to the device is updated there once, from its own gradient.

    It moves before the landing of a dropped gradient is noted.
    """
    with make_engine() as engine:
        loop = EngineLoop(engine, (5_000,), torch.float32)
        engine.set_delay(Stage.LANDING, 20_000)
        engine.grad_offload([0], [torch.ones(5_000)])
        engine.arm_cpu([0])
        engine.arm_reload([0])
        engine.discard([0])
        kept = loop.states[0].master.clone()
        engine.place_on_device(0, device_states(loop.weights[0]))
        loop.on_device = frozenset({0})
        loop.step()
        time.sleep(0.1)  # the landing is noted while the update on the device counts as in flight
        loop.check()
        assert torch.equal(loop.states[0].master, kept), "the states of the earlier place were written"


def test_rows_released_with_those_of_other_units_do_not_hold_their_unit_back() -> None:
    """A unit's large weights that are released early are one launch on the device.

    What the end of the backward releases is another launch, after all of them. Each of its rows is
    told to have taken its part of that launch's time.
    """
    with running("native") as engine:
        loop = EngineLoop(engine, (70_000, 300, 80_000, 300), torch.bfloat16, on_device=frozenset(range(4)))
        for row in range(4):
            engine.set_unit(row, row // 2)
        engine.record(True)
        grads = [torch.randn(size).to(torch.bfloat16) for size in loop.sizes]
        scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
        for rows in ([2], [0], [1, 3]):
            engine.release(rows)
        engine.arm_gpu(range(4))
        engine.commit([CommitItem(row, scalars, grad=grads[row]) for row in range(4)])
        for row, state in enumerate(loop.reference):
            adamw_(grads[row], state.master, state.states, scalars)
        loop.check()
        records = [record for record in engine.take_records() if record.stage is Stage.GPU_UPDATE]
        assert [record.row for record in records] == [2, 0, 1, 3]
        first, second = records[2:]
        assert first.end_us == second.begin_us
        assert first.end_us - first.begin_us == pytest.approx(second.end_us - second.begin_us, abs=0.01)


def test_large_rows_released_together_are_updated_lowest_unit_first() -> None:
    """Large rows released together are updated lowest unit first.

    All are due in the next forward, and each launch can be waited for by itself.
    """
    with running("native") as engine:
        weights = [torch.zeros(size, dtype=torch.bfloat16) for size in (17 << 20, 17 << 20, 300)]
        for row, weight in enumerate(weights):
            engine.add_row(RowSpec(weight.numel(), row, weight))
            engine.place_on_device(row, device_states(weight))
        engine.record(True)
        grads = [torch.ones_like(weight) for weight in weights]
        scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
        engine.release([0, 1, 2])
        engine.arm_gpu(range(3))
        engine.commit([CommitItem(row, scalars, grad=grads[row]) for row in (2, 1, 0)])
        engine.drain(range(3))
        assert [record.row for record in engine.take_records() if record.stage is Stage.GPU_UPDATE] == [0, 1, 2]


def test_workers_left_out_of_early_updates_end_those_of_the_last_step() -> None:
    """While the device waits for them. Else half of the workers would hold it up."""
    with running("native", workers=4) as engine:
        loop = EngineLoop(engine, (200_000, 16_000_000), torch.float32)
        for _ in range(2):
            loop.step()
            engine.drain([0, 1])
        engine.record(True)
        engine.set_delay(Stage.CPU_UPDATE, 20_000)
        loop.step()
        engine.wait([0])  # by the next forward; row 1 is still to be updated
        device = threading.Thread(target=engine.wait, args=([1],))
        device.start()
        time.sleep(0.01)
        engine.grad_offload([0], [torch.randn(200_000)])
        engine.arm_cpu([0])
        engine.arm_reload([0])
        engine.release([0])
        begin_us = 1e6 * time.perf_counter()
        engine.commit_early((0,), AdamScalars.of(GROUP, loop.step_count + 1, decoupled=True, torch_cuda=False), 2)
        device.join()
        engine.set_delay(Stage.CPU_UPDATE, 0)
        updates = [record for record in engine.take_records() if record.stage is Stage.CPU_UPDATE and record.row == 1]
        last = max(updates, key=lambda record: record.end_us)  # a worker's granules are one record: it may have begun before
        assert last.end_us > begin_us
        assert last.workers == 4
        engine.discard([0])
