"""Host memory as a resource: bytes by way of updating, and bandwidth.

The bandwidth is in the bound of the step and in the simulator.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.host_memory import cpu_bytes, streamed_bytes, traffic_bytes
from hytrain_fx.cost_model.planner import plan, prefix_plan
from hytrain_fx.cost_model.play import Running
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.cost_model.windows import windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import TaskKind
from tests.null.profiles import profile_of, streaming_profiles, uniform, unit

PLENTY_GB_PER_S = 1e12
DISCIPLINE = Discipline(chunk_params=100, staging_params=100)
BANDWIDTHS = st.floats(0.01, 100)
SHARES = st.floats(0, 1)


def with_bandwidth(profile: Profile, gb_per_s: float | None) -> Profile:
    return replace(profile, host_memory_gb_per_s=gb_per_s)


def mixed_plan(profile: Profile, k: int, share: float) -> Plan:
    return prefix_plan(profile.units, min(k, len(profile.units)), source="test", reason=lambda _: "", share=share)


@pytest.mark.parametrize(("width", "by_cpu", "streamed"), [(2, 30, 20), (4, 36, 24)])
def test_bytes_of_an_update(width: int, by_cpu: int, streamed: int) -> None:
    """An update by the CPU moves 30 bytes a 16-bit parameter and 36 an fp32 one, with its copies.

    A streamed update moves 20 and 24.
    """
    u = replace(unit(0, params=10), grad_bytes=10 * width)
    assert cpu_bytes(u) == 10 * by_cpu
    assert streamed_bytes(u) == 10 * streamed
    assert u.stream_bytes == 10 * streamed / 2
    assert all(traffic_bytes(u, kind) == 0 for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.GPU_UPDATE))


def test_pieces_slow_each_other_as_measured() -> None:
    """Three pieces that alone would take 191, 49.7 and 49.7 of 215 GB/s share it as measured.

    The rates are those that 14 threads of AdamW beside copies had there.
    """
    running = Running(215e3)
    for piece, bytes_per_us in enumerate((191e3, 49.7e3, 49.7e3)):  # an update by the CPU, copies both ways
        running.start(piece, 1000.0, 1000.0 * bytes_per_us, 0.0)
    end_us, ended = running.until_next_end(0.0)
    assert len(ended) == 3
    assert 6.83 * 1000.0 / end_us == pytest.approx(4.97, rel=0.03)  # G parameters/s
    assert 49.7 * 1000.0 / end_us == pytest.approx(37.7, rel=0.03)  # GB/s


def test_pieces_take_their_own_time_where_memory_suffices() -> None:
    """A piece that joins slows another down only from then on.

    What does not touch host memory is not slowed.
    """
    running = Running(100.0)
    slow, late, device = 0, 1, 2
    running.start(slow, 10.0, 1000.0, 0.0)
    running.start(device, 10.0, 0.0, 0.0)
    assert running.until_next_end(0.0) == (10.0, [slow, device])
    running.start(slow, 10.0, 1000.0, 10.0)
    running.start(device, 5.0, 0.0, 10.0)
    now_us, _ = running.until_next_end(10.0)
    running.start(late, 10.0, 1000.0, now_us)
    for expected_us, piece in ((25.0, slow), (30.0, late)):
        now_us, ended = running.until_next_end(now_us)
        assert now_us == pytest.approx(expected_us)
        assert ended == [piece]


@given(profile=streaming_profiles(), k=st.integers(0, 8), share=SHARES)
@settings(deadline=None)
def test_plenty_is_as_unknown(profile: Profile, k: int, share: float) -> None:
    """With more bandwidth than anything wants, a schedule is as if none were known.

    The solved step takes no longer: more shares are tried.
    """
    plenty = with_bandwidth(profile, PLENTY_GB_PER_S)
    p = mixed_plan(profile, k, share)
    before, now = simulate(profile, p, DISCIPLINE), simulate(plenty, p, DISCIPLINE)
    assert now.makespan_us == pytest.approx(before.makespan_us)
    solved, unknown = (plan(of, stream="auto", discipline=DISCIPLINE) for of in (plenty, profile))
    assert solved.predicted["step_us"] <= unknown.predicted["step_us"] * (1 + 1e-9)
    assert solved.predicted["host_memory_idle_share"] > 0.99
    assert "host_memory_idle_share" not in unknown.predicted
    assert "host_memory_gb_per_s" not in unknown.inputs


@given(profile=streaming_profiles(), k=st.integers(0, 8), share=SHARES, gb_per_s=BANDWIDTHS, more=st.floats(1, 10))
@settings(deadline=None)
def test_a_larger_bandwidth_is_never_slower(profile: Profile, k: int, share: float, gb_per_s: float, more: float) -> None:
    """The bound of the step falls with bandwidth.

    No bound is below the one of a profile that does not know its bandwidth.
    """
    k = min(k, len(profile.units))
    exposed_us = [windows_of(with_bandwidth(profile, rate), guard=1.0, chunk_params=100, updates_in_backward=True)
                  .streaming(share).exposed_us(k) for rate in (gb_per_s, more * gb_per_s, None)]
    assert exposed_us == sorted(exposed_us, reverse=True)


@given(n=st.integers(1, 8), cpu=st.floats(10, 100), gb_per_s=st.floats(0.1, 5), more=st.floats(1, 10), k=st.integers(0, 8))
@settings(deadline=None)
def test_a_larger_bandwidth_is_never_simulated_slower(n: int, cpu: float, gb_per_s: float, more: float, k: int) -> None:
    """On equal layers the simulated step falls with bandwidth too, up to one chunk.

    That is one chunk in its three stages.
    """
    profile = uniform(n, cpu=cpu)
    p = mixed_plan(profile, k, 0.0)
    slow, fast = (simulate(with_bandwidth(profile, rate), p, DISCIPLINE).makespan_us for rate in (gb_per_s, more * gb_per_s))
    assert fast <= slow + 0.1 * (cpu + 2.0)


@given(profile=streaming_profiles(), k=st.integers(0, 8), share=SHARES, gb_per_s=BANDWIDTHS)
@settings(deadline=None)
def test_no_step_moves_more_than_the_memory_gives(profile: Profile, k: int, share: float, gb_per_s: float) -> None:
    """A simulated step takes at least its bytes over the bandwidth.

    These are the bytes of CPU updates and of loaded states.
    """
    p = mixed_plan(profile, k, share)
    moved = sum(row.numel / profile.units[row.unit].params * (
        cpu_bytes(profile.units[row.unit]) if row.placement is Placement.CPU else profile.units[row.unit].stream_bytes)
        for row in p.rows if row.placement is not Placement.GPU)
    timed = all(min(u.cpu_update_us, u.d2h_us, u.h2d_us) > 0 for u in profile.units)  # what takes no time moves nothing
    assert not timed or simulate(with_bandwidth(profile, gb_per_s), p, DISCIPLINE).makespan_us >= moved / (1e3 * gb_per_s) * (1 - 1e-6)


def test_where_memory_binds_it_is_named() -> None:
    """Where updates that the CPU would hide wait for memory, the plan says so.

    It puts units on the device, and tells the bandwidth.
    """
    profile = with_bandwidth(uniform(10, forward=10.0, backward=20.0, cpu=5.0), 0.5)  # 30 kB a unit, 60 us
    p = plan(profile, discipline=DISCIPLINE)
    assert p.k > plan(with_bandwidth(profile, None), discipline=DISCIPLINE).k
    assert "reads and writes of host memory of units" in p.rows[0].reason
    assert p.inputs["host_memory_gb_per_s"] == 0.5
    everything_on_host = plan(profile, k=0, discipline=DISCIPLINE)
    assert everything_on_host.predicted["host_memory_idle_share"] < 0.2


def test_streaming_gains_what_it_saves_in_bytes() -> None:
    """Bound by memory alone, streaming all cuts the exposed time to 20/30 of streaming nothing."""
    profile = with_bandwidth(profile_of([unit(0, cpu=0.1, stream=0.1, forward=1e-3, backward=1e-3)]), 0.01)
    windows = windows_of(profile, guard=1.0, chunk_params=100, updates_in_backward=True)
    assert windows.streaming(1.0).exposed_us(0) / windows.exposed_us(0) == pytest.approx(20 / 30)


@pytest.mark.parametrize("gb_per_s", [0.0, -1.0, float("nan")])
def test_no_bandwidth_is_an_error(gb_per_s: float) -> None:
    """A bandwidth of 0, below 0 or not a number is refused.

    A profile with a bandwidth survives JSON, and an older one has none.
    """
    profile = uniform(2)
    with pytest.raises(PlanError, match="host memory bandwidth"):
        with_bandwidth(profile, gb_per_s)
    assert Profile.from_json(with_bandwidth(profile, 215.0).to_json()).host_memory_gb_per_s == 215.0
    assert Profile.from_json(profile.to_json().replace('"host_memory_gb_per_s": null', '"steps": 0')).host_memory_gb_per_s is None
