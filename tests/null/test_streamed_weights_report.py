"""Offline reports with weights on the host: bytes, tokens from which they are free, other ways."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.__main__ import main
from hytrain_fx.config import Weights
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.capacity import fits
from hytrain_fx.forecast.memory import activation_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import Report, case_of, report
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, OURS, SYSTEMS
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Plan

SHAPE = read_shape("llama-3.1b")
STREAMED = replace(SHAPE, weights="streamed")
H200 = find_device("h200")
N = len(SHAPE.units)


@functools.cache
def reported(weights: Weights, tokens: int = 16384) -> Report:
    return report(SHAPE, H200, tokens, sequence=2048, weights=weights, sweep=False)


@given(k=st.integers(0, N), tokens=st.integers(1, 1 << 15))
@settings(deadline=None)
def test_the_device_has_slots_for_what_the_cpu_updates(k: int, tokens: int) -> None:
    """The first k units' weights, and of each size as many slots as units can be there at once.

    Nothing else changes, and nothing on the host.
    """
    resident, streamed = (footprint(shape, tokens, k) for shape in (SHAPE, STREAMED))
    sizes = [2 * u.params for u in SHAPE.units[k:]]
    slots = sum(size * min(sizes.count(size), UNITS_AHEAD + 1) for size in set(sizes))
    assert streamed == replace(resident, weights_bytes=slots + sum(2 * u.params for u in SHAPE.units[:k]))


@given(gpu_gb=st.integers(8, 80), tokens=st.sampled_from([1024, 8192]))
@settings(deadline=None)
def test_the_budget_counts_weights_that_come_back(gpu_gb: int, tokens: int) -> None:
    """As many units as it holds with states and weights fit the device, and one more does not."""
    device = replace(H200, memory_bytes=gpu_gb * 10**9)
    budget = states_budget_bytes(STREAMED, device, tokens)
    per_param = STREAMED.state_bytes_per_param + 2
    k = max(k for k in range(N + 1) if per_param * sum(u.params for u in SHAPE.units[:k]) <= budget)
    assert k == 0 or footprint(STREAMED, tokens, k).device_bytes <= 0.95 * device.memory_bytes
    assert k == N or footprint(STREAMED, tokens, k + 1).device_bytes > 0.95 * device.memory_bytes


def test_the_largest_model_is_the_hosts() -> None:
    """With weights on the device a small GPU binds first."""
    kept = activation_bytes(SHAPE, 2048, recompute=True)
    small = replace(H200, memory_bytes=8 * 10**9)
    resident, streamed = (largest_params(small, kept, streamed=of) for of in (False, True))
    assert streamed["host"] == pytest.approx(0.85 * small.host_memory_bytes / 14)
    assert resident["host"] == pytest.approx((0.95 * small.memory_bytes - kept) / 2)
    assert resident["host"] < streamed["host"] / 2
    assert streamed["device"] == resident["device"]


def test_by_machine_no_model_is_larger_with_weights_on_the_device() -> None:
    """And each size that is named fits, with one layer more it does not."""
    found = reported("streamed").streamed
    assert found is not None
    assert all((of.streamed_params or 0) >= (of.resident_params or 0) for of in found.machines)
    assert any((of.streamed_params or 0) > 2 * (of.resident_params or 1) for of in found.machines)
    of = next(of for of in found.machines if (of.gpu_gb, of.host_gb) == (24, 256))
    device = replace(H200, memory_bytes=24 * 10**9, host_memory_bytes=256 * 10**9)
    layers = next(count for count in range(1, 400) if STREAMED.with_layers(count).params == of.streamed_params)
    assert fits("host", STREAMED.with_layers(layers), device, 16384, recompute=True)
    assert not fits("host", STREAMED.with_layers(layers + 1), device, 16384, recompute=True)


def test_tokens_from_which_streaming_is_free() -> None:
    """2 bytes over the link against 2 FLOPs, 4 FLOPs; 32 bytes of host memory against 6.

    There the step is within 1% of the one with weights on the device, far below it is not.
    """
    found = reported("streamed").streamed
    assert found is not None
    flops, link, memory = H200.achieved_flops, H200.h2d_bytes_per_s, 1e9 * (H200.host_memory_gb_per_s or 0.0)
    assert found.free_from_tokens == pytest.approx({
        "fetches of the forward": 2 / link * flops / 2, "fetches of the backward": 2 / link * flops / 4,
        "all that moves in the host's memory": 32 / memory * flops / 6})
    assert 10_000 < max(found.free_from_tokens.values()) < 16_000
    for of in found.by_tokens:
        if of.tokens >= 16384:
            assert of.streamed_us <= 1.01 * of.resident_us
        assert of.streamed_us >= of.resident_us * (1 - 1e-9) >= of.compute_us * (1 - 1e-9)
    assert found.by_tokens[0].tokens == 4096
    assert found.by_tokens[0].fetch_stall_us > 10 * found.by_tokens[-1].fetch_stall_us


def test_others_keep_their_weights_on_the_device() -> None:
    """Only this library's ways fetch; with all states on the device it does not either."""
    streamed, resident = reported("streamed"), reported("resident")
    theirs = {system.name for system in SYSTEMS if not system.is_ours} | {"all on the device"}
    for row, before in zip(streamed.rows, resident.rows, strict=True):
        if row.system in theirs:
            assert (row.step_us, row.k, row.memory) == (before.step_us, before.k, before.memory)
    assert streamed.plan.predicted["fetch_us"] > 0
    assert "fetch_us" not in resident.plan.predicted


def test_ways_for_a_model_that_is_larger_than_the_gpu() -> None:
    """On 24 GB a 7 G model fits with weights on the host alone, activations recomputed."""
    device = replace(H200, memory_bytes=24 * 10**9)
    made = report(read_shape("llama-7b"), device, 16384, sequence=2048, weights="streamed", sweep=False)
    assert made.streamed is not None
    way = {of.system: of for of in made.streamed.ways}
    assert len(way) == len(made.streamed.ways) == 7
    ours = way["this library, weights on the host, all updates by the CPU, activations recomputed"]
    assert ours.fits
    assert not way["this library, weights on the GPU, all updates by the CPU, activations recomputed"].fits
    assert not way["this library, weights on the host, all updates by the CPU"].fits
    infinity = way["ZeRO-Infinity, weights and states on the CPU"]
    assert infinity.host_bytes == 20 * made.params > ours.host_bytes == 14 * made.params


def test_the_report_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """In Markdown and JSON; a report of weights on the device has nothing of it."""
    text = markdown(reported("streamed"))
    for part in ("Step by where weights rest", "Ways to train a model larger than the GPU", "arXiv:2604.05091", "Largest model by machine",
                 "free from about 13 k tokens"):
        assert part in text
    assert "host of 64 GB" not in markdown(reported("resident"))
    assert "streamed" not in json.loads(reported("resident").to_json())
    assert json.loads(reported("streamed").to_json())["streamed"]["by_tokens"][0]["tokens"] == 4096
    asked = ["plan", "--model", "llama-3.1b", "--device", "h200", "--tokens", "16384", "--weights", "streamed", "--json"]
    assert main(asked) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert any('weights="streamed"' in note for note in plan.notes)
    assert plan.rows == case_of("llama-3.1b", "h200", 16384, weights="streamed").plan_of(OUR_SYSTEM).rows
    assert reported("streamed").ours.system == OURS


def test_what_does_not_rest_on_the_host_is_refused() -> None:
    """Fp32 weights under autocast, and weights of several ranks."""
    with pytest.raises(ConfigError, match="fp32 under autocast"):
        report(SHAPE, H200, 4096, weights="streamed", autocast=True)
    with pytest.raises(ConfigError, match="on 2 GPUs"):
        report(SHAPE, H200, 4096, weights="streamed", ranks=Ranks(2))


def test_weights_are_streamed_where_they_do_not_fit_beside_the_activations() -> None:
    """With "auto": on 10 GB, and on 80 GB not. Under autocast and with ranks they stay."""
    small, large = (replace(H200, memory_bytes=gb * 10**9) for gb in (10, 80))
    assert case_of(SHAPE, small, 8192, sequence=2048, recompute=True, weights="auto").shape.weights == "streamed"
    assert case_of(SHAPE, large, 8192, sequence=2048, recompute=True, weights="auto").shape.weights == "resident"
    assert case_of(SHAPE, small, 8192, sequence=2048, recompute=True, weights="auto", autocast=True).shape.weights == "resident"
    assert case_of(SHAPE, small, 8192, sequence=2048, recompute=True, weights="auto", ranks=Ranks(2, 1)).shape.weights == "resident"
