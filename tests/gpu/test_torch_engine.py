"""The torch engine on CUDA streams has the reference's bits while any stream is late.

Memory that is reused on the way is included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from hytrain_fx.ir.states import ADAMW_DEFAULT
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.engine import CommitItem, RowSpec, RowStates, Stage
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.fallback.lanes import Lane
from hytrain_fx.runtime.states.slabs import HostSlab

from ..cpu.engine_loop import GROUP, device_states

DEVICE = torch.device("cuda", 0)
SIZES = (300_000, 17, 5_000_003, 4096)  # one of two chunks
STAGING_BYTES = 2 << 20  # less than most gradients: their memory is reused at once
STEPS = 4
SPIN_CYCLES = 40_000_000  # about 20 ms
LAST_FACTOR = 0.75
Factor = TypeVar("Factor", float, torch.Tensor)
LATE = ("nothing", "compute before", "compute after", *(lane.name for lane in Lane))


@dataclass
class Row:
    """A weight on the device beside the reference's states there."""

    weight: torch.Tensor
    reference: RowStates
    slab: HostSlab | None


def scalars_of(step: int, factors: tuple[float, ...] = ()) -> AdamScalars:
    return AdamScalars.of(GROUP, step, decoupled=True, torch_cuda=True, factors=factors)


def make_row(engine: TorchEngine, number: int, size: int, dtype: torch.dtype, on_device: bool) -> Row:
    weight = torch.randn(size, device=DEVICE).to(dtype)
    engine.add_row(RowSpec(size, number, weight))
    reference = device_states(weight.clone())
    if on_device:
        engine.place_on_device(number, device_states(weight))
        return Row(weight, reference, None)
    slab = HostSlab(5 * (4 * size + 64))
    slab.pin(DEVICE)
    master, *states = (slab.take(size, torch.float32) for _ in range(ADAMW_DEFAULT.tensors))
    master.copy_(weight)
    out = None if dtype == torch.float32 else slab.take(size, dtype)
    engine.place_on_host(number, RowStates(ADAMW_DEFAULT, master, tuple(states), slab.take(size, dtype), out=out))
    return Row(weight, reference, slab)


@pytest.fixture
def engine() -> Iterator[TorchEngine]:
    made = TorchEngine(DEVICE, STAGING_BYTES, timeout_s=30.0)
    yield made
    made.close()


def factors_of(step: int, last: Factor) -> tuple[float | Factor, ...]:
    """The factors of this step's gradients."""
    return () if step < 2 else (0.5, last)


def spin(engine: TorchEngine, late: str, now: str) -> None:
    """Keep a stream busy where it is the one that is to be late."""
    if late == now:
        torch.cuda._sleep(SPIN_CYCLES)
    elif now == "lanes" and late in Lane.__members__:
        engine._lanes.run(Lane[late], lambda: torch.cuda._sleep(SPIN_CYCLES))


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_late_stream_does_not_change_a_bit(engine: TorchEngine, dtype: torch.dtype, late: str) -> None:
    """Gradients are overwritten at once, weights are read again before their release.

    Still every bit is the reference's. Nothing in the loop makes the host wait for the device.
    Weights are released after their gradient is made in one step, before it in the next. Only some
    steps have factors: those hold all updates back until the backward has ended.
    """
    torch.manual_seed(0)
    rows = [make_row(engine, number, size, dtype, on_device=number == 3) for number, size in enumerate(SIZES)]
    grads = [[torch.randn(size, device=DEVICE).to(dtype) for size in SIZES] for _ in range(STEPS)]
    read: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # by step and row: the weight after the wait and before the release
    torch.cuda.synchronize()
    for step in range(STEPS):
        first, again, items, factor = [], [], [], torch.zeros((), device=DEVICE)
        for number, row in enumerate(rows):
            engine.wait([number])
            first.append(row.weight.clone())
        spin(engine, late, "lanes")
        spin(engine, late, "compute before")
        for number, row in reversed(list(enumerate(rows))):
            if step % 2:
                again.append(row.weight.clone())
                engine.release([number])
                spin(engine, late, "compute after")
            grad = grads[step][number].clone()
            if row.slab is not None:
                engine.grad_offload([number], [grad])
                grad.fill_(float("nan"))  # its memory is somebody else's at once
                engine.arm_cpu([number])
                engine.arm_reload([number])
                items.append(CommitItem(number, scalars_of(step + 1), factors=factors_of(step, factor)))
            else:
                engine.arm_gpu([number])
                items.append(CommitItem(number, scalars_of(step + 1), grad=grad))
            if step % 2 == 0:
                spin(engine, late, "compute after")
                again.append(row.weight.clone())
                engine.release([number])
        read.append(list(zip(first, reversed(again), strict=True)))
        spin(engine, late, "lanes")
        spin(engine, late, "compute before")
        factor.fill_(LAST_FACTOR)  # as a norm that is known at the end of the backward
        engine.commit(items)
    engine.drain(range(len(rows)))
    torch.cuda.synchronize()
    for number, row in enumerate(rows):
        state = row.reference
        for step in range(STEPS):
            for found in read[step][number]:
                assert torch.equal(found, state.master.to(dtype)), f"row {number}, step {step}: read too early, or overwritten while in use"
            scalars = scalars_of(step + 1, factors_of(step, LAST_FACTOR) if row.slab is not None else ())
            adamw_(grads[step][number], state.master, state.states, scalars)
        assert torch.equal(row.weight, state.master.to(dtype)), f"row {number} differs"


def test_a_gradient_can_be_brought_back(engine: TorchEngine) -> None:
    """`fetch` brings back what was offloaded, also when the copy to the host is late."""
    make_row(engine, 0, 5_000_003, torch.bfloat16, on_device=False)
    grad = torch.randn(5_000_003, device=DEVICE).to(torch.bfloat16)
    out = torch.zeros_like(grad)
    torch.cuda.synchronize()
    engine._lanes.run(Lane.D2H, lambda: torch.cuda._sleep(10 * SPIN_CYCLES))
    engine.grad_offload([0], [grad])
    engine.fetched(engine.fetch([0], out))
    assert torch.equal(out, grad)


def test_the_launching_thread_is_not_blocked(engine: TorchEngine) -> None:
    """Offloading, committing and arming return while the gradient is still being computed.

    Staging stays within its limit.
    """
    sizes = (2 << 20,) * 20
    rows = [make_row(engine, number, size, torch.float32, on_device=False) for number, size in enumerate(sizes)]
    torch.cuda.synchronize()
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(10 * SPIN_CYCLES)
    computed = torch.cuda.Event()
    computed.record()
    grad = torch.ones(2 << 20, device=DEVICE)
    for number in reversed(range(len(rows))):
        engine.grad_offload([number], [grad])
        engine.arm_cpu([number])
        engine.arm_reload([number])
        engine.release([number])
    engine.commit([CommitItem(number, scalars_of(1)) for number in range(len(rows))])
    assert not computed.query(), "the host waited for the device"
    assert torch.cuda.max_memory_allocated() - held_bytes <= grad.nbytes + max(STAGING_BYTES, grad.nbytes) + (2 << 20)
    engine.drain(range(len(rows)))


def test_stages_are_timed_on_the_host_s_clock(engine: TorchEngine) -> None:
    """Copy out, update and copy in of a row follow one another on one clock, to within 50 us."""
    make_row(engine, 0, 4 << 20, torch.bfloat16, on_device=False)
    engine.record(True)
    engine.grad_offload([0], [torch.ones(4 << 20, device=DEVICE, dtype=torch.bfloat16)])
    engine.arm_cpu([0])
    engine.arm_reload([0])
    engine.release([0])
    engine.commit([CommitItem(0, scalars_of(1))])
    engine.drain([0])
    records = engine.take_records()
    out, back = (next(r for r in records if r.stage is stage) for stage in (Stage.D2H, Stage.H2D))
    updates = [r for r in records if r.stage is Stage.CPU_UPDATE]
    assert out.end_us - 50 <= min(r.begin_us for r in updates)
    assert max(r.end_us for r in updates) - 50 <= back.begin_us <= back.end_us
