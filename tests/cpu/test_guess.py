"""Updates that begin before their gradients' factors are known.

Right and wrong guesses give the bits of waiting.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import FP32_BYTES, GRANULE_PARAMS, SHADOW_APART_BYTES
from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.engine import CommitItem, GuessCounts, RowSpec, RowStates, Stage
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.scalars import UpdateScalars
from hytrain_fx.runtime.states.split_master import whole_states

from .engine_loop import GROUP, assert_same_states, host_states

# Rows of several chunks, of several granules, of one, and one too small for a guess.
SIZES = (4_500_000, 700_000, 262_144, 70_000, 900)
SLOT_BYTES = 3 * (FP32_BYTES * GRANULE_PARAMS + SHADOW_APART_BYTES)  # without amsgrad (csrc/shadow_arena.cpp)
LATE_US = 100_000
CPU = torch.device("cpu")


class ClippedLoop:
    """Host rows whose gradients have a factor that arrives late, and the reference.

    The lane to the host brings the factor.
    """

    def __init__(self, engine: NativeEngine, sizes: tuple[int, ...], dtype: torch.dtype, amsgrad: bool, narrow: bool = False) -> None:
        torch.manual_seed(0)
        self.engine, self.dtype, self.steps = engine, dtype, 0
        self.group = GROUP | {"amsgrad": amsgrad, "moments": "bf16" if narrow else "fp32"}
        self.weights = [torch.randn(size).to(dtype) for size in sizes]
        self.reference = [self._states(weight, halves=False) for weight in self.weights]
        self.states: list[RowStates] = []
        for row, weight in enumerate(self.weights):
            engine.add_row(RowSpec(weight.numel(), row, weight))
            self.states.append(self._states(weight, halves=dtype == torch.bfloat16))
            engine.place_on_host(row, self.states[row])

    def _states(self, weight: torch.Tensor, halves: bool) -> RowStates:
        states = host_states(weight, halves, self.group["moments"] == "bf16")
        if not self.group["amsgrad"]:
            return states
        return replace(states, table=ADAMW, states=(*states.states, torch.zeros_like(states.states[0])))

    def _scalars(self) -> UpdateScalars:
        return AdamScalars.of(self.group, self.steps, decoupled=True, torch_cuda=False)

    def step(self, factor: float, late_us: float = LATE_US, left_out: bool | None = None, infinite: bool = False) -> None:
        """One backward, a commit, and the reference's update.

        The commit's factor takes `late_us` on average.

        `left_out`: whether the device says, as late, that the step does not count; None: it is not
        asked. `infinite`: one value in the middle of each gradient is.
        """
        self.steps += 1
        rows = list(range(len(self.weights)))
        self.engine.wait(rows)
        scalars = self._scalars()
        self.grads = [torch.randn(weight.numel()).to(self.dtype) for weight in self.weights]
        for grad in self.grads if infinite else ():
            grad[grad.numel() // 2] = float("inf")
        for row in reversed(rows):
            self.engine.grad_offload([row], [self.grads[row]])
            self.engine.arm_cpu([row])
            self.engine.arm_reload([row])
            self.engine.release([row])
        self.engine.set_delay(Stage.D2H, late_us)  # gradients are small beside it
        on_device = torch.tensor(factor)
        items = [CommitItem(row, scalars, factors=(on_device,)) for row in rows]
        if left_out is None:
            self.engine.commit(items)
        else:
            self.engine.commit_unless(items, torch.tensor(float(left_out)))
        if left_out:
            self.steps -= 1
        for row in () if left_out else rows:
            state = self.reference[row]
            state.update_(replace(scalars, factors=(factor,)), self.grads[row], None)

    def check(self) -> None:
        """Weights, masters and moments have the reference's bits."""
        rows = range(len(self.weights))
        self.engine.settle(rows)
        for row, weight in enumerate(self.weights):
            assert torch.equal(weight, self.reference[row].master.to(self.dtype)), f"the weight of row {row} differs"
        self.engine.drain(rows)
        for row in rows:
            self.check_states(row)

    def check_states(self, row: int) -> None:
        """The states of an idle row, at home, have the reference's bits."""
        assert_same_states(whole_states(self.states[row], CPU), self.reference[row], f"row {row}")


@contextmanager
def running(
    dtype: torch.dtype, shadow_bytes: int, sizes: tuple[int, ...] = SIZES, amsgrad: bool = False, narrow: bool = False
) -> Iterator[ClippedLoop]:
    engine = NativeEngine(CPU, 3, 40 << 20, 20.0, shadow_bytes=shadow_bytes)
    try:
        yield ClippedLoop(engine, sizes, dtype, amsgrad, narrow)
    finally:
        engine.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    factors=st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.37]), min_size=3, max_size=8),
    slots=st.integers(0, 12),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    late_us=st.sampled_from([0, 300, 3000, 20_000]),
    slow_worker_us=st.sampled_from([0, 0, 500]),
    kept=st.sampled_from(["amsgrad", "fp32", "bf16"]),
)
def test_any_guess_gives_the_bits_of_waiting(
    factors: list[float], slots: int, dtype: torch.dtype, late_us: int, slow_worker_us: int, kept: str
) -> None:
    """Factors stay or change, early or late, with room for all old states, for some or for none."""
    with running(dtype, slots * SLOT_BYTES, (700_000, 300_000, 70_000, 900), kept == "amsgrad", kept == "bf16") as loop:
        loop.engine.set_delay(Stage.CPU_UPDATE, slow_worker_us)
        for factor in factors:
            loop.step(factor, late_us)
        loop.check()


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_constant_factors_are_guessed_and_a_change_is_made_good(dtype: torch.dtype) -> None:
    """After steps with one factor, updates begin before it is known.

    A step with another factor makes them again.
    """
    with running(dtype, 40 * SLOT_BYTES) as loop:
        for _ in range(6):
            loop.step(1.0)
            loop.check()
        calm = loop.engine.guess_counts()
        assert calm.commits >= 2
        assert calm.params > 0
        assert (calm.missed, calm.redone) == (0, 0)
        assert 0 < calm.shadow_bytes <= 40 * SLOT_BYTES
        loop.step(0.5)
        loop.check()
        missed = loop.engine.guess_counts()
        assert (missed.commits, missed.missed) == (calm.commits + 1, 1)
        assert missed.redone == missed.params - calm.params > 0


@pytest.mark.sample(0)
def test_a_factor_that_came_once_is_not_the_next_guess() -> None:
    """Where one step of five is scaled, only that step is guessed wrong.

    A factor that stays is guessed again when it has come twice.
    """
    with running(torch.bfloat16, 40 * SLOT_BYTES) as loop:
        for factor in [1.0] * 6 + [0.4, 1.0, 1.0, 1.0, 1.0, 0.3, 1.0, 1.0]:
            loop.step(factor)
            loop.check()
        assert loop.engine.guess_counts().missed == 2
        for factor in (0.5, 0.5, 0.5, 0.5):
            loop.step(factor)
            loop.check()
        assert loop.engine.guess_counts().missed == 4


def test_states_are_at_home_after_a_failure_too() -> None:
    """drain() brings states back to their own memory, also where the engine has failed meanwhile.

    Updates on right guesses leave states in other memory.
    """
    with running(torch.bfloat16, 40 * SLOT_BYTES) as loop:
        for _ in range(4):
            loop.step(1.0)
        away = []
        for _ in range(2):  # there in one step and back in the next: in one of two every state is at home
            loop.step(1.0)
            loop.engine.wait(range(len(SIZES)))
            pairs = zip(loop.states, loop.reference, strict=True)
            away.append(any(not torch.equal(states.states[0], of.states[0]) for states, of in pairs))
        assert any(away)
        loop.engine.fail_next_update(0)
        loop.engine.grad_offload([0], [loop.grads[0]])
        loop.engine.arm_cpu([0])
        loop.engine.arm_reload([0])
        loop.engine.release([0])
        loop.engine.commit([CommitItem(0, AdamScalars.of(GROUP, 7, decoupled=True, torch_cuda=False))])
        with pytest.raises(EngineError, match="injected failure"):
            loop.engine.drain(range(len(SIZES)))
        for row in range(1, len(SIZES)):
            loop.check_states(row)


@pytest.mark.sample(0)
def test_factors_that_change_all_the_time_are_not_guessed() -> None:
    """Nothing is updated on a guess that would mostly be wrong."""
    with running(torch.bfloat16, 40 * SLOT_BYTES) as loop:
        for number in range(8):
            loop.step(1.0 / (number + 1))
        loop.check()
        assert loop.engine.guess_counts().params == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_go_to_the_device_before_the_factor_has_come(dtype: torch.dtype) -> None:
    """Weights are sent while the factor is on its way.

    Whoever waits for them gets the right factor's weights, also after a wrong guess.
    """
    with running(dtype, 40 * SLOT_BYTES) as loop:
        for factor in (*[1.0] * 6, 0.37, 1.0, 0.37, 1.0):
            loop.step(factor)
            loop.check()
        counts = loop.engine.guess_counts()
        assert 0 < counts.sent <= counts.params
        assert counts.missed > 0


@pytest.mark.sample(0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_step_that_is_left_out_are_sent_back(dtype: torch.dtype) -> None:
    """Weights of a step that is left out are sent back, and whoever waits finds the old ones.

    They were new on the device before it was known that the step does not count.
    """
    with running(dtype, 40 * SLOT_BYTES) as loop:
        for left_out in (*[False] * 6, True, False, True, True, False):
            sent = loop.engine.guess_counts().sent
            loop.step(1.0, left_out=left_out)
            loop.check()
            if left_out:
                assert loop.engine.skipped()
                assert loop.engine.guess_counts().sent > sent


@pytest.mark.sample(0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_updated_before_a_value_that_is_not_finite_is_put_back(dtype: torch.dtype) -> None:
    """On a guess, updates go on up to a value that is not finite, and are put back.

    GradScaler leaves such a step out. States and weights are those of before, every bit.
    """
    with running(dtype, 40 * SLOT_BYTES) as loop:
        for left_out in (*[False] * 6, True, False, True, True, False):
            redone = loop.engine.guess_counts().redone
            loop.step(1.0, left_out=left_out, infinite=left_out)
            loop.check()
            assert loop.engine.skipped() == left_out
            assert (loop.engine.guess_counts().redone > redone) == left_out


def test_a_row_that_sits_out_keeps_its_factors() -> None:
    """A row that sits out keeps its factors: it is scaled by its own step's, not by later ones.

    Its update takes longer than two steps of others.
    """
    engine = NativeEngine(CPU, 1, 40 << 20, 20.0, shadow_bytes=0)
    weights = [torch.ones(1_500_000), torch.ones(300)]  # six tasks, one
    states = [host_states(weight) for weight in weights]
    expected = host_states(weights[0])
    scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)
    for row, weight in enumerate(weights):
        engine.add_row(RowSpec(weight.numel(), 1 - row, weight))  # the small one goes first
        engine.place_on_host(row, states[row])
    grads = [torch.full_like(weight, 1e-4) for weight in weights]

    def step(row: int, factor: float) -> None:
        engine.grad_offload([row], [grads[row]])
        engine.arm_cpu([row])
        engine.arm_reload([row])
        engine.release([row])
        engine.commit([CommitItem(row, scalars, factors=(torch.tensor(factor),))])

    engine.set_delay(Stage.CPU_UPDATE, 10_000)
    step(0, 0.25)
    for _ in range(3):
        engine.wait([1])
        step(1, 1e-3)
    engine.drain([0, 1])
    engine.close()
    adamw_(grads[0], expected.master, expected.states, replace(scalars, factors=(0.25,)))
    assert_same_states(states[0], expected)
    assert torch.equal(weights[0], expected.master)


def test_without_shadow_memory_updates_wait() -> None:
    """With shadow_bytes=0 nothing is guessed."""
    with running(torch.bfloat16, 0) as loop:
        for _ in range(6):
            loop.step(1.0, 2000)
        loop.check()
        assert loop.engine.guess_counts() == GuessCounts()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_memory_to_be_had_updates_wait(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shadow memory that the system refuses is asked for once, and logged.

    Nothing is guessed, and every bit is the reference's.
    """
    with running(dtype, 40 * SLOT_BYTES) as loop:
        asked = []

        def refuse(*args: object, **kwargs: object) -> mmap.mmap:
            asked.append(args)
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", refuse)
        for _ in range(6):
            loop.step(1.0, 2000)
        monkeypatch.undo()
        loop.check()
        assert len(asked) == 1
        assert loop.engine.guess_counts() == GuessCounts()
    assert "shadow_memory" in caplog.text
