"""The CPU's share, before anything runs: the solved share, the controller, the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx import Config
from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, ShareTimes, best_share
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.cpu_share import CORES, GPUS, shares
from hytrain_fx.sharing.control import ALONE_STEPS, SETTLING_STEPS, TRIAL_STEPS, WINDOW_STEPS, Phase, ShareControl, SharedStep

US = st.floats(0, 1000)
TIMES = st.builds(ShareTimes, st.integers(1, 40), US, US, US, US, US, US, US, US, US)


@given(TIMES)
def test_no_other_share_has_a_shorter_step(times: ShareTimes) -> None:
    """The answer is the best of all shares, or 0 where that gains less than a hundredth."""
    found = best_share(times)
    assert found.without_us == times.step_us(0)
    assert all(found.best_us <= times.step_us(by_cpu) for by_cpu in range(1, times.sequences))
    assert found.by_cpu in (0, found.best)
    assert 0 <= found.by_cpu <= max(0, times.sequences - 1)
    assert (found.by_cpu > 0) == (found.best > 0 and found.best_us <= (1 - LEAST_GAIN) * found.without_us)
    assert found.step_us == times.step_us(found.by_cpu) <= found.without_us


def test_an_idle_cpu_has_the_share_of_its_rate() -> None:
    """Without anything else m / n is v_cpu / (v_cpu + v_device), as far as sequences are whole."""
    device, cpu = 1.0, 7.0  # microseconds a sequence
    found = best_share(ShareTimes(800, device_us=800 * device, cpu_sequence_us=cpu))
    assert found.by_cpu == 100
    assert found.step_us == 700.0
    assert "100 of 800 sequences: 700 us a step instead of 800 us (12.5% less)" in str(found)


@given(TIMES, st.floats(1, 1000))
def test_what_the_cpu_updates_it_does_not_train(times: ShareTimes, more_us: float) -> None:
    """Cores stand once: the longer the updates take, the smaller the best share."""
    busier = ShareTimes(times.sequences, times.device_us, times.cpu_sequence_us + 1.0, update_us=times.update_us + more_us)
    idle = ShareTimes(times.sequences, times.device_us, times.cpu_sequence_us + 1.0, update_us=times.update_us)
    assert best_share(busier).best <= best_share(idle).best


@given(TIMES)
def test_host_memory_is_a_resource_too(times: ShareTimes) -> None:
    """A step is never shorter than the bytes that it moves take."""
    for by_cpu in range(times.sequences):
        moved_us = times.host_us + (times.share_host_us if by_cpu else 0.0) + by_cpu * times.sequence_host_us
        assert times.step_us(by_cpu) >= moved_us


@pytest.mark.parametrize("times", [ShareTimes(0, 1.0, 1.0), ShareTimes(4, -1.0, 1.0), ShareTimes(4, 1.0, float("nan"))])
def test_what_is_no_batch_or_no_time_is_refused(times: ShareTimes) -> None:
    """A batch without sequences, negative times and NaN."""
    with pytest.raises(ConfigError, match="expected"):
        best_share(times)


Machine = Callable[[int, int], SharedStep]


def machine(device_us: float, cpu_us: float, *, begin_us: float = 5.0, join_us: float = 5.0, around_us: float = 10.0) -> Machine:
    """A step of a machine that takes so long a sequence."""

    def step(sequences: int, by_cpu: int) -> SharedStep:
        device = device_us * (sequences - by_cpu)
        some = by_cpu > 0
        made = SharedStep(sequences, by_cpu, device, some * begin_us, cpu_us * by_cpu, some * join_us, 0.0)
        return replace(made, step_us=made.both_us + around_us)

    return step


def run(control: ShareControl, of: Machine, steps: int, sequences: int = 32) -> list[int]:
    """The shares of so many steps."""
    shares = []
    for _ in range(steps):
        shares.append(control.by_cpu(sequences))
        control.saw(of(sequences, shares[-1]))
    return shares


SOLVED_AFTER = 2 * SETTLING_STEPS + ALONE_STEPS + TRIAL_STEPS


@given(device=st.floats(1, 100), cpu=st.floats(1, 3000))
@settings(deadline=None)
def test_the_controller_finds_the_best_share(device: float, cpu: float) -> None:
    """After its trial it has the share that is best on this machine, and keeps it."""
    of, control = machine(device, cpu), ShareControl("auto")
    found = run(control, of, SOLVED_AFTER + 60)
    assert found[:SETTLING_STEPS] == [0] * SETTLING_STEPS
    best = min(range(32), key=lambda by_cpu: of(32, by_cpu).step_us)
    steps_us = [of(32, by_cpu).step_us for by_cpu in found[SOLVED_AFTER:]]
    assert set(found[SOLVED_AFTER:]) <= {0, best}
    assert steps_us[-1] <= of(32, 0).step_us
    assert (found[-1] > 0) == (of(32, best).step_us <= (1 - LEAST_GAIN) * of(32, 0).step_us) or best == 0


def test_where_none_pays_the_numbers_are_said() -> None:
    """A slow CPU: one trial, then 0 for good, with both steps' lengths."""
    control = ShareControl("auto")
    found = run(control, machine(10.0, 2000.0), 60)
    assert max(found) == 1
    assert found[SOLVED_AFTER:] == [0] * (60 - SOLVED_AFTER)
    assert control.phase is Phase.NONE
    assert "with 1 the step would take 2.02 ms instead of 330 us" in control.in_words()


def test_a_machine_that_changes_has_another_share() -> None:
    """A CPU that others take half of gets about half, after two windows and not before."""
    control = ShareControl("auto")
    before = run(control, machine(10.0, 40.0), SOLVED_AFTER + 40)[-1]
    after = run(control, machine(10.0, 80.0), 120)
    settled = 2 * WINDOW_STEPS
    assert set(after[: settled - WINDOW_STEPS]) == {before}, "it moved with the first window"
    best = min(range(32), key=lambda by_cpu: machine(10.0, 80.0)(32, by_cpu).step_us)
    assert after[-1] == best < before


def test_one_slow_step_moves_nothing() -> None:
    """A step in twelve takes ten times as long: medians do not see it."""
    fast, slow = machine(10.0, 40.0), machine(100.0, 400.0)
    control = ShareControl("auto")
    before = run(control, fast, SOLVED_AFTER + 10)[-1]
    for number in range(120):
        control.saw((slow if number % 12 == 0 else fast)(32, control.by_cpu(32)))
    assert control.by_cpu(32) == before
    assert control.moves == 1


@given(every=st.integers(3, 9), first=st.integers(0, 8), small=st.integers(2, 20))
def test_small_last_batches_change_no_share(every: int, first: int, small: int) -> None:
    """An epoch ends with what is left of the data, wherever that falls in a window of steps."""
    of, control = machine(10.0, 40.0), ShareControl("auto")
    best = min(range(32), key=lambda by_cpu: of(32, by_cpu).step_us)
    shares = []
    for step in range(200):
        sequences = small if step % every == first % every else 32
        control.saw(of(sequences, control.by_cpu(sequences)))
        shares.append(control.by_cpu(32))
    assert set(shares[2 * SOLVED_AFTER :]) == {best}
    assert (control.phase, control.moves) == (Phase.SHARING, 1)


def test_batches_too_small_for_a_part_of_the_cpus_end_nothing() -> None:
    """They tell no rate of it: the share is there again once full batches are."""
    control = ShareControl("auto")
    before = run(control, machine(10.0, 40.0), SOLVED_AFTER + 10)[-1]
    assert set(run(control, machine(10.0, 40.0), 60, sequences=2)) == {0}
    assert set(run(control, machine(10.0, 40.0), 60)) == {before}


def test_more_is_not_asked_for_where_no_share_pays() -> None:
    """Steps with the present share are shorter all the same, so that stays."""
    control = ShareControl("auto")
    before = run(control, machine(10.0, 40.0), SOLVED_AFTER + 10)[-1]
    slow = machine(10.0, 10.0, join_us=2000.0)

    def shorter(sequences: int, by_cpu: int) -> SharedStep:
        return replace(slow(sequences, by_cpu), step_us=100.0)

    assert set(run(control, shorter, 60)) == {before}


def test_steps_that_are_not_shorter_end_it() -> None:
    """Where the calculation promises a gain that steps do not show, the share goes back to 0."""
    of = machine(10.0, 40.0)

    def disappointing(sequences: int, by_cpu: int) -> SharedStep:
        made = of(sequences, by_cpu)
        step_us = of(sequences, 0).step_us  # the cores are needed by the loop, say: as long as without
        return SharedStep(sequences, by_cpu, made.device_us, made.begin_us, made.cpu_us, made.join_us, step_us)

    control = ShareControl("auto")
    found = run(control, disappointing, SOLVED_AFTER + 40)
    assert max(found) > 1
    assert found[-1] == 0
    assert "steps were not 1% shorter than the 330 us without it" in control.in_words()


@pytest.mark.parametrize(("wanted", "sequences", "by_cpu"),
                         [(0.25, 8, 2), (0.1, 8, 1), (0.01, 8, 0), (0.9, 8, 7), (0.99, 4, 3), (0.5, 1, 0)])
def test_a_fraction_is_whole_sequences_and_the_device_keeps_one(wanted: float, sequences: int, by_cpu: int) -> None:
    """The nearest number of sequences, at most all but one, whatever was measured."""
    control = ShareControl(wanted)
    assert set(run(control, machine(1.0, 1000.0), 40, sequences)) == {by_cpu}


@pytest.mark.parametrize("wrong", [1, 1.0, -0.1, "half", None, True])
def test_other_values_of_the_option_are_refused(wrong: Any) -> None:
    """Neither all of a batch, nor less than nothing, nor a word."""
    with pytest.raises(ConfigError, match="option cpu_share="):
        Config(cpu_share=wrong)


@pytest.mark.parametrize("other", [{"weights": "streamed"}, {"weights": "sharded"}, {"pipeline": object()}, {"speculate": True}])
def test_what_a_share_is_not_for_is_refused(other: dict[str, Any]) -> None:
    """Weights that are elsewhere, stages of a pipeline, updates before all gradients are there."""
    with pytest.raises(ConfigError, match="cpu_share"):
        Config(cpu_share="auto", **other)
    found = Config(cpu_share=0.5)
    assert (found.speculate, found.autocast_copies) == (False, False)


def test_the_table_says_where_it_pays() -> None:
    """Every class of GPU and CPU with its numbers; an answer is 0 where a hundredth is not gained.

    A larger CPU never does worse, and a GPU of 24 GB gains more than an H200.
    """
    found = shares("llama-3.1b", 131072, sequence=2048, recompute=True)
    assert [(case.gpu, case.cores) for case in found.cases] == [(gpu, cores) for gpu in GPUS for cores in CORES]
    gains = {(case.gpu, case.cores): 1 - case.share.best_us / case.share.without_us for case in found.cases}
    for gpu in GPUS:
        of_gpu = [gains[gpu, cores] for cores in CORES]
        assert of_gpu == sorted(of_gpu)
    assert all(gains["rtx4090", cores] >= gains["h200", cores] for cores in CORES)
    for case in found.cases:
        assert (case.share.by_cpu > 0) == (gains[case.gpu, case.cores] >= LEAST_GAIN)
    clipped = shares("llama-3.1b", 131072, sequence=2048, recompute=True, clips=True)
    assert all(of.share.best_us >= case.share.best_us for of, case in zip(clipped.cases, found.cases, strict=True))
    rows = found.table().rows
    assert len(rows) == (len(GPUS) + 1) * len(CORES)
    assert {row[-1] for row in rows if row[0] == "none"} == {"0"}
    assert {row[-1] for row in rows} > {"0"}, "it pays nowhere, or everywhere"


def test_the_page_has_the_table_of_the_model() -> None:
    """docs/cpu_share.md shows what its command prints."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "cpu_share.md").read_text()
    rows = shares("llama-3.1b", 32768, sequence=2048, recompute=True).table().rows
    for row in rows:
        if row[0] != "none":
            assert f"| {' | '.join((*row[:7], row[8]))} |" in page
