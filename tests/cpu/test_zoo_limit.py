"""The limit of a step: the bytes that updates move at the rates that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.limit import Rates, limit_of
from hytrain_fx.forecast.named_devices import find_device

RATES = Rates(memory=200e9, to_device=50e9, to_host=40e9)
rates = st.builds(Rates, *[st.floats(1e8, 1e13)] * 3)
seconds, params = st.floats(0.0, 100.0), st.floats(0.0, 1e13)


def test_the_mix_of_a_machine_keeps_memory_and_link_equally_long() -> None:
    """30 or 20 bytes of memory, 2 or 10 over the slower way of the link: they meet at 40%."""
    found = limit_of(0.1, 1e9, RATES)
    assert found.streamed == pytest.approx((30 / 200 - 2 / 40) / (10 / 200 + 8 / 40)) == pytest.approx(0.4)
    assert found.memory_s == pytest.approx(26 / 200)
    assert found.link_s == pytest.approx(5.2 / 40)
    assert found.step_s == pytest.approx(0.13)
    assert found.binds == "memory and link"


def test_the_floor_is_the_limit_where_updates_take_less() -> None:
    """A tenth of the parameters take a tenth of 0.13 s, less than forward and backward."""
    found = limit_of(0.1, 1e8, RATES)
    assert (found.step_s, found.binds) == (0.1, "floor")


@pytest.mark.parametrize(("to_host", "streamed", "step_s", "binds"), [(1e15, 1.0, 0.1, "memory"), (2e9, 0.0, 1.0, "link")])
def test_a_fast_link_streams_all_and_a_slow_one_nothing(to_host: float, streamed: float, step_s: float, binds: str) -> None:
    """20 bytes at 200 GB/s where the link is free; 2 bytes at 2 GB/s where it is slow."""
    found = limit_of(0.0, 1e9, Rates(200e9, 1e15, to_host))
    assert (found.streamed, found.binds) == (streamed, binds)
    assert found.step_s == pytest.approx(step_s)


def test_rates_are_those_of_a_measured_machine() -> None:
    """A machine whose host memory's bandwidth is not known has none, so no limit either."""
    device = replace(find_device("h200"), host_memory_gb_per_s=180.0)
    assert Rates.of(device) == Rates(180e9, device.h2d_bytes_per_s, device.d2h_bytes_per_s)
    assert Rates.of(replace(device, host_memory_gb_per_s=None)) is None


@given(seconds, params, params, rates)
def test_a_limit_is_never_under_the_floor_and_grows_with_the_parameters(floor_s: float, few: float, more: float, at: Rates) -> None:
    """It is at least forward and backward, and more parameters never take less."""
    few, more = sorted((few, more))
    assert floor_s <= limit_of(floor_s, few, at).step_s <= limit_of(floor_s, more, at).step_s


@given(params, rates, st.floats(0.0, 1.0))
def test_no_other_share_streamed_is_faster(count: float, at: Rates, share: float) -> None:
    """Whatever share is streamed, the larger term takes at least the limit."""
    memory_s = count * (30 - 10 * share) / at.memory
    link_s = count * (2 + 8 * share) / min(at.to_device, at.to_host)
    assert max(memory_s, link_s) >= (1 - 1e-9) * limit_of(0.0, count, at).step_s
