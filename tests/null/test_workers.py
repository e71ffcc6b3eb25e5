"""More cores make no predicted step longer: plans are solved for several numbers of workers."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.__main__ import main
from hytrain_fx.config import Weights
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import case_of, report
from hytrain_fx.forecast.shapes import ModelShape, read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case
from hytrain_fx.forecast.workers import UPDATES_PER_WORKER, filling_workers, least_step_us, memory_beside, workers_of_rank
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE
from hytrain_fx.ir.profile import Profile, UnitProfile

H200 = find_device("h200")
LLAMA = read_shape("llama-7b")
PLACES: tuple[Weights, ...] = ("resident", "streamed", "sharded_host")
ENOUGH = 1 / (1 - LEAST_GAIN_SHARE)
MANY = 1000
WORKERS = (1, 2, 5, 11, 12, 13, 17, 28, 124)  # of one rank


def with_host(workers: int, gpus: int = 1, memory_gb_per_s: float = 215.0) -> DeviceSpec:
    """The H200 in a host of so many workers for each of its GPUs; all else is the same."""
    return replace(H200, workers=workers * gpus, cpu_update_params_per_s=UPDATES_PER_WORKER * workers * gpus, host_gpus=gpus,
                   host_memory_bytes=10**13, host_memory_gb_per_s=memory_gb_per_s)


def of(
    shape: ModelShape, workers: int, weights: Weights, *, tokens: int = 8192, budget_bytes: int | None = None,
    memory_gb_per_s: float = 215.0,
) -> Case:  # fmt: skip
    """`memory_gb_per_s`: of workers that fill it; fewer are given less."""
    gpus = 4 if weights == "sharded_host" else 1

    def with_memory(count: int, gb_per_s: float) -> Case:
        return case_of(shape, with_host(count, gpus, gb_per_s), tokens, sequence=min(tokens, 2048), recompute=True, weights=weights,
                       budget_bytes=budget_bytes, ranks=Ranks(gpus))

    many = with_memory(MANY, memory_gb_per_s).profile
    given = memory_beside(many, workers / filling_workers(many, MANY))
    assert given is not None
    return with_memory(workers, given)


@functools.cache
def large(name: str, workers: int, weights: Weights = "resident", budget_bytes: int | None = None) -> Case:
    """A case that several tests ask for. Its plan is solved once."""
    return of(read_shape(name), workers, weights, budget_bytes=budget_bytes)


def step_us(case: Case) -> float:
    return case.plan_of(OUR_SYSTEM).predicted["step_us"]


def with_all_us(case: Case) -> float:
    """The step of our plan with all workers, nothing else tried."""
    solved = plan(case.profile, stream="auto", budget_bytes=case.budget_bytes, discipline=case._discipline(OUR_SYSTEM),
                  budget_counts_streamed=case.given_bytes is None, **case._state_bytes)
    return solved.predicted["step_us"]


@settings(deadline=None, max_examples=4)
@given(weights=st.sampled_from(PLACES), layers=st.integers(2, 6), tokens=st.sampled_from([1024, 4096, 16384]), on_host=st.booleans(),
       memory_gb_per_s=st.floats(60, 400))
def test_more_workers_make_no_step_longer(weights: Weights, layers: int, tokens: int, on_host: bool, memory_gb_per_s: float) -> None:
    """By no more than the 1% that fewer workers must gain to be taken, wherever weights rest."""
    shape, least_us = LLAMA.with_layers(layers), float("inf")
    for workers in WORKERS:
        now_us = step_us(of(shape, workers, weights, tokens=tokens, budget_bytes=0 if on_host else None, memory_gb_per_s=memory_gb_per_s))
        assert now_us <= ENOUGH * least_us * (1 + 1e-9)
        least_us = min(least_us, now_us)


LARGE = [*(("llama-7b", (14, 28, 112), weights) for weights in PLACES), ("llama-30b", (14, 112), "streamed")]


@pytest.mark.parametrize(("name", "workers", "weights"), LARGE)
def test_more_workers_make_no_step_of_a_large_model_longer(name: str, workers: tuple[int, ...], weights: Weights) -> None:
    """7 G and 30 G parameters, from a host of 14 workers for a GPU to one of 112."""
    steps_us = [step_us(large(name, count, weights)) for count in workers]
    assert all(after <= ENOUGH * min(steps_us[:i]) for i, after in enumerate(steps_us) if i)


def test_all_of_many_workers_would_take_what_copies_need() -> None:
    """Streamed weights come later then. The plan says how many it takes, and what all take."""
    case = large("llama-7b", 112, "streamed")
    made, with_all = case.plan_of(OUR_SYSTEM), with_all_us(case)
    assert with_all > 1.2 * step_us(large("llama-7b", 14, "streamed"))
    assert with_all > 1.2 * made.predicted["step_us"]
    used = int(made.inputs["workers"])
    assert used <= filling_workers(case.profile, 112) < 112
    (note,) = [note for note in made.notes if "workers" in note]
    assert note.startswith(f"predicted with {used} of 112 workers, compile(..., workers={used}): ")
    row = case.row_of(OUR_SYSTEM, made)
    assert row.workers == used
    assert note in row.notes


@pytest.mark.parametrize("workers", [12, 14])
@pytest.mark.parametrize(("model", "budget_bytes"), [("llama-3.1b", None), ("llama-3.1b", 0), ("llama-7b", None)])
def test_on_the_measured_hosts_predictions_are_those_with_all_workers(model: str, budget_bytes: int | None, workers: int) -> None:
    """16 cores with 12 or 14 workers, resident weights: within 3%, and never longer."""
    case = large(model, workers, budget_bytes=budget_bytes)
    assert 0.97 <= step_us(case) / with_all_us(case) <= 1.0


def test_fewer_workers_leave_copies_less_than_the_memory_has() -> None:
    """Measured on the H200's host, with copies both ways that take 99 GB/s alone: within 4%."""
    us = 10**9 / 49.7e3  # 10 bytes of each parameter
    unit = UnitProfile(0, "layer", 10**8, 2 * 10**8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, stream_in_us=us, stream_out_us=us)
    for all_gb, measured in ((199.0, {14: 199.0, 11: 186.0, 9: 177.0}), (215.0, {14: 215.0, 12: 211.0, 8: 176.0, 0: 99.0})):
        profile = Profile((unit,), "an H200", "its host", host_memory_gb_per_s=all_gb)
        for workers, seen in measured.items():
            assert memory_beside(profile, workers / 14) == pytest.approx(seen, rel=0.04)
    assert memory_beside(replace(profile, host_memory_gb_per_s=80.0), 0.5) == 80.0, "copies fill it alone"
    assert memory_beside(replace(profile, host_memory_gb_per_s=None), 0.5) is None


@settings(deadline=None, max_examples=25)
@given(workers=st.integers(1, 60), layers=st.integers(1, 6), k=st.integers(0, 8), stream=st.floats(0, 1), weights=st.sampled_from(PLACES))
def test_no_plan_is_shorter_than_the_bound(workers: int, layers: int, k: int, stream: float, weights: Weights) -> None:
    """So a number of workers whose bound is too long need not be played."""
    case = of(LLAMA.with_layers(layers), workers, weights, tokens=2048)
    k = min(k, layers + 2)
    made = plan(case.profile, k=k, stream=stream, discipline=case._discipline(OUR_SYSTEM))
    assert made.predicted["step_us"] >= least_step_us(case.profile) * (1 - 1e-9)
    unstreamed = plan(case.profile, k=k, discipline=case._discipline(OUR_SYSTEM))
    assert unstreamed.predicted["step_us"] >= least_step_us(case.profile, k) * (1 - 1e-9) >= least_step_us(case.profile) * (1 - 2e-9)


def test_workers_are_told_or_estimated() -> None:
    """The H200's host has the 14 that were measured; unknown ones are counted by its rate.

    Several GPUs have as many times as many, each its part.
    """
    assert H200.workers == 14
    assert workers_of_rank(replace(H200, workers=None, cpu_update_params_per_s=10 * UPDATES_PER_WORKER), Ranks()) == 10
    assert workers_of_rank(find_device("cpu-laptop"), Ranks()) == 3
    assert H200.in_machine_of(Ranks(4)).workers == 56
    assert workers_of_rank(H200.in_machine_of(Ranks(4)), Ranks(4)) == 14
    assert DeviceSpec.from_json(H200.to_json()) == H200
    with pytest.raises(ConfigError, match="workers=0"):
        replace(H200, workers=0)


def test_reports_and_plans_say_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table of steps, and among what a plan was solved from; a file may name them."""
    text = markdown(report(LLAMA, with_host(112), 8192, sequence=2048, recompute=True, weights="streamed", sweep=False))
    assert "| fits | CPU workers |" in text
    assert " of 112 workers, compile(..., workers=" in text
    file = tmp_path / "many.json"
    file.write_text(with_host(112).to_json())
    assert main(["plan", "--model", "llama-7b", "--device", str(file), "--tokens", "8192", "--weights", "streamed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"]["workers"] <= 20
