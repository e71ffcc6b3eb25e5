"""Offline reports with weights in shards of several GPUs, on them or on their host."""

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
from hytrain_fx.cost_model.planner import predict
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.capacity import fits
from hytrain_fx.forecast.memory import activation_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import Report, case_of, report
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.sharded_weights import PLACES, sharded_weights
from hytrain_fx.forecast.systems import OUR_SYSTEM, SYSTEMS
from hytrain_fx.forecast.tables import sharded_tables
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Placement, Plan

WHOLE = read_shape("llama-3.1b")
SHAPE = WHOLE.with_layers(10)
H100 = find_device("h100")
N = len(SHAPE.units)
PAGE = Path(__file__).parents[2] / "docs" / "streamed_weights.md"


@functools.cache
def reported(weights: Weights, gpus: int = 2) -> Report:
    return report(SHAPE, H100, 8192, sequence=2048, weights=weights, sweep=False, ranks=Ranks(gpus))


@given(k=st.integers(0, N), share=st.floats(0, 1), gpus=st.integers(2, 16), weights=st.sampled_from(["sharded", "sharded_host"]))
@settings(deadline=None)
def test_a_gpu_has_its_shards_and_slots(k: int, share: float, gpus: int, weights: Weights) -> None:
    """Slots for whole units as far as they come ahead, and one unit that is on its way.

    On the host are the shards that the CPU updates. Nothing else changes.
    """
    ranks = Ranks(gpus)
    shards = [ranks.shard(u.params) for u in SHAPE.units]
    streamed = int(share * sum(shards[k:]))
    whole, found = (footprint(replace(SHAPE, weights=of), 8192, k, False, streamed, ranks) for of in ("resident", weights))
    sizes = [2 * u.params for u in SHAPE.units]
    slots = sum(size * min(sizes.count(size), UNITS_AHEAD + 1) for size in set(sizes)) + max(sizes)
    there = sum(shards) if weights == "sharded" else sum(shards[:k]) + streamed
    assert found == replace(whole, weights_bytes=2 * there + slots)


@given(gpu_gb=st.integers(16, 80), gpus=st.integers(2, 8), weights=st.sampled_from(["sharded", "sharded_host"]))
@settings(deadline=None, max_examples=30)
def test_the_budget_fits_the_gpu(gpu_gb: int, gpus: int, weights: Weights) -> None:
    """As many units as it holds, with the shards that come back with their states."""
    shape, ranks = replace(SHAPE, weights=weights), Ranks(gpus)
    device = replace(H100, memory_bytes=gpu_gb * 10**9, host_memory_bytes=10**13)
    budget = states_budget_bytes(shape, device, 4096, ranks=ranks)
    per_param = shape.state_bytes_per_param + (2 if weights == "sharded_host" else 0)
    k = max(k for k in range(N + 1) if per_param * sum(ranks.shard(u.params) for u in SHAPE.units[:k]) <= budget)
    assert k == 0 or footprint(shape, 4096, k, ranks=ranks).fits(device)


@pytest.mark.parametrize("weights", ["sharded", "sharded_host"])
def test_steps_with_shards_gather_twice_and_take_no_less(weights: Weights) -> None:
    """Every unit is gathered in each pass, of shards on the host each rank fetches its part first.

    With the same placement no step is shorter than with whole weights.
    """
    case, whole = reported(weights).plan, reported("resident").plan
    assert case.predicted["gather_us"] > 0
    assert "gather_us" not in whole.predicted
    shards, resident = (case_of(SHAPE, H100, 8192, sequence=2048, ranks=Ranks(2), weights=of) for of in (weights, "resident"))
    profile = shards.profile
    at_0 = shards.plan_at(OUR_SYSTEM, 0)
    assert at_0.predicted["gather_us"] == pytest.approx(2 * sum(u.gather_us for u in profile.units))
    fetch_us = 1e6 * SHAPE.params / H100.h2d_bytes_per_s if weights == "sharded_host" else 0.0  # half of 2 bytes a parameter
    assert sum(u.fetch_us for u in profile.units) == pytest.approx(fetch_us)
    assert at_0.predicted["fetch_us"] >= 2 * fetch_us  # more where it shares the host's memory
    assert at_0.predicted["step_us"] >= resident.plan_at(OUR_SYSTEM, 0).predicted["step_us"] * (1 - 1e-9)
    on_device = Plan.from_json(json.dumps(json.loads(at_0.to_json()) | {"k": N, "rows": [
        row | {"placement": Placement.GPU} for row in json.loads(at_0.to_json())["rows"]]}))
    assert predict(profile, on_device)["fetch_us"] == 0.0


def test_largest_models_with_shards() -> None:
    """On the device there are 2 bytes a parameter less, but for this rank's part of them."""
    kept, ranks = activation_bytes(SHAPE, 2048, recompute=True), Ranks(4)
    small = replace(H100, memory_bytes=16 * 10**9, host_memory_bytes=10**13)
    free = 0.95 * small.memory_bytes - kept
    whole, shards, on_host = (largest_params(small, kept, ranks=ranks, streamed=host, sharded=shard)
                              for host, shard in ((False, False), (False, True), (True, True)))
    assert (whole["host"], shards["host"]) == pytest.approx((free / 2, free / (2 / 4)))
    assert on_host["host"] == pytest.approx(0.85 * 10**13 / 14)
    assert shards["device"] == on_host["device"] == pytest.approx(free / (16 / 4))


def test_by_machine_each_size_that_is_named_fits() -> None:
    """With one layer more it does not. None is smaller in shards, or with these on the host."""
    found = reported("sharded").sharded
    assert found is not None
    for of in found.machines:
        whole, shards, on_host = (size or 0 for size in of.params.values())
        assert shards <= on_host
        assert whole <= shards or of.gpu_gb == 8  # slots of whole units are more than a small model has
    of = next(of for of in found.machines if (of.gpu_gb, of.host_gb) == (24, 512))
    device = replace(H100, memory_bytes=24 * 10**9, host_memory_bytes=512 * 10**9)
    for place in PLACES:
        shape, params = replace(SHAPE, weights=place), of.params[place]
        layers = next(count for count in range(1, 400) if shape.with_layers(count).params == params)
        assert fits("host", shape.with_layers(layers), device, 8192, True, Ranks(2))
        assert not fits("host", shape.with_layers(layers + 1), device, 8192, True, Ranks(2))


def test_the_report_has_rows_of_shards_beside_whole_weights() -> None:
    """In every report of several GPUs, whichever weights it is of: the same figures."""
    made = {weights: reported(weights) for weights in ("resident", "sharded")}
    peers = {weights: {p.system: (p.step_us, p.device_bytes, p.host_bytes, p.most_params) for p in of.peers}
             for weights, of in made.items()}
    assert peers["resident"] == peers["sharded"]
    ours = [name for name in peers["resident"] if name.startswith("this library")]
    assert [name.split(", ")[1] for name in ours[2:]] == 2 * ["weights in shards"] + 2 * ["shards on the host"]
    step = {name: of[0] for name, of in peers["resident"].items()}
    memory = {name: of[1] for name, of in peers["resident"].items()}
    for what in ("plan solved", "every state on the host"):
        assert step[f"this library, weights in shards, {what}"] >= step[f"this library, {what}"] * (1 - 1e-9)
        assert memory[f"this library, weights in shards, {what}"] < memory[f"this library, {what}"]
    text = markdown(made["sharded"])
    assert "Step by where weights rest on 2 GPUs" in text
    assert "Largest model by machine, 2 GPUs" in text
    assert "Step by where weights rest" not in markdown(made["resident"])
    assert "sharded" not in json.loads(made["resident"].to_json())
    assert json.loads(made["sharded"].to_json())["sharded"]["by_tokens"][0]["tokens"] == 2048
    theirs = {system.name for system in SYSTEMS if not system.is_ours}
    for row, before in zip(made["sharded"].rows, made["resident"].rows, strict=True):
        assert row.system not in theirs or (row.step_us, row.memory) == (before.step_us, before.memory)


def test_gathers_are_free_from_few_tokens() -> None:
    """By the bytes of the other ranks' shards over the link, against 2 FLOPs and against 4.

    There a step with all updates by the CPU is within 2% of one with whole weights.
    """
    found = sharded_weights(case_of(WHOLE, H100, 8192, sequence=2048, ranks=Ranks(2), weights="sharded"))
    link = H100.gpu_link_bytes_per_s or 0.0
    forward = 2 / 2 / link * H100.achieved_flops / 2  # half of 2 bytes a parameter
    assert found.free_from_tokens == pytest.approx({"gathers of the forward": forward, "gathers of the backward": forward / 2})
    for of in found.by_tokens:
        assert of.resident_us <= of.sharded_us * (1 + 1e-9)
        assert of.sharded_us <= of.sharded_host_us * 1.01
        assert of.tokens < 4 * forward or of.sharded_us <= 1.02 * of.resident_us


def test_the_tables_of_the_page() -> None:
    """They are what the command above them gives."""
    made = report("llama-7b", H100, 8192, sequence=2048, recompute=True, ranks=Ranks(4), weights="sharded", sweep=False)
    assert made.sharded is not None
    text = PAGE.read_text()
    assert "report --model llama-7b --device h100 --tokens 8192 --sequence 2048 --recompute --gpus 4 --weights sharded\n" in text
    for table in sharded_tables(made, made.sharded):
        for row in table.rows:
            assert f"| {' | '.join(row)} |\n" in text


def test_shards_are_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU is refused, fp32 under autocast too. A plan says what it was made for."""
    with pytest.raises(ConfigError, match='weights="sharded_host" on one GPU'):
        case_of(SHAPE, H100, 4096, weights="sharded_host")
    with pytest.raises(ConfigError, match="autocast on 2 GPUs"):
        case_of(SHAPE, H100, 4096, weights="sharded", ranks=Ranks(2), autocast=True)
    asked = ["plan", "--model", "llama-3.1b", "--device", "h100", "--tokens", "8192", "--gpus", "2", "--weights", "sharded_host", "--json"]
    assert main(asked) == 0
    assert any('weights="sharded_host"' in note for note in Plan.from_json(capsys.readouterr().out).notes)
