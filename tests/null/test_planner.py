"""Plans: which units go to the device, why, and what is predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.pieces import pieces_of
from hytrain_fx.cost_model.planner import Rule, Stream, plan, predict, prefix_plan
from hytrain_fx.cost_model.rules import compare
from hytrain_fx.cost_model.windows import windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.explain.plan.text import headline
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.profile import Profile
from tests.null.profiles import profile_of, profiles, streaming_profiles, uniform, unit

RULES: tuple[Rule, ...] = ("seed", "cotrain", "windowed")


@given(profile=profiles(), rule=st.sampled_from(RULES), budget=st.one_of(st.none(), st.integers(0, 100_000)))
@settings(deadline=None)
def test_every_plan_fits_model_and_budget(profile: Profile, rule: Rule, budget: int | None) -> None:
    """A plan tiles every unit, keeps the device's budget, and gives each unit a reason."""
    p = plan(profile, rule=rule, budget_bytes=budget)
    validate(p, profile.units)
    assert budget is None or p.predicted["gpu_states_bytes"] <= budget
    assert all(row.reason.startswith("on the device" if row.placement == Placement.GPU else "on the CPU") for row in p.rows)
    assert Plan.from_json(p.to_json()) == p


@given(profile=streaming_profiles(), budget=st.integers(0, 100_000), stream=st.sampled_from([0.0, 0.4, "auto"]))
@settings(deadline=None)
def test_a_bound_on_resident_states_is_filled_with_parameters(profile: Profile, budget: int, stream: Stream) -> None:
    """Beside whole units, the next unit's largest parameters that fit are on the device.

    They stay within the bound, and are there only where that is faster.
    """
    p = plan(profile, budget_bytes=budget, stream=stream, budget_counts_streamed=False)
    validate(p, profile.units)
    assert p.predicted["gpu_states_bytes"] <= budget + 1e-6
    on_device = {row.unit for row in p.rows if row.placement == Placement.GPU}
    assert on_device <= set(range(p.k + 1)), "of no later unit"
    if p.k in on_device:
        whole = prefix_plan(profile.units, p.k, source="windowed", reason=lambda unit: "", share=p.inputs["stream_share"],
                            streamed_reason=lambda unit: "")
        assert p.predicted["step_us"] < predict(profile, whole)["step_us"]
        left = budget - p.predicted["gpu_states_bytes"]
        assert all(12 * row.numel > left for row in pieces_of(p, profile.units[p.k]) if row.placement != Placement.GPU), "no more fits"
    free = plan(profile, budget_bytes=budget)
    assert free.k == plan(profile, budget_bytes=budget, budget_counts_streamed=False).k
    assert {row.unit for row in free.rows if row.placement == Placement.GPU} == set(range(free.k)), "free memory is not filled to the brim"


def test_a_headline_tells_of_a_unit_that_is_partly_on_the_device() -> None:
    """k counts whole units; what the next one has on the device stands beside it."""
    profile = profile_of([replace(unit(i, cpu=1000.0), param_numels=(700, 200, 100)) for i in range(3)])
    made = plan(profile, budget_bytes=12 * 1800, budget_counts_streamed=False)
    assert headline(made).startswith("plan: k = 1 of 3 units (the first k and 80% of the next are updated on the device)")
    assert "k=1 leaves some free" in made.shares(1)[0].reason
    assert headline(plan(profile, budget_bytes=12 * 1000)).startswith("plan: k = 1 of 3 units (the first k are updated on the device)")


@given(profile=profiles())
@example(profile=profile_of([unit(i, params=1, forward=1.0, backward=1.0, cpu=0.0, gpu=float(i == 1), d2h=0.0, h2d=5.0 * (i == 2))
                             for i in range(3)]))  # all k expose 1 us
@settings(deadline=None)
def test_windowed_is_the_best_prefix_of_its_closed_form(profile: Profile) -> None:
    """The windowed k exposes least of all k, and is the smallest such k."""
    windows = windows_of(profile, guard=1.0, chunk_params=100, updates_in_backward=True)
    exposed = [windows.exposed_us(k) for k in range(len(profile.units) + 1)]
    p = plan(profile, rule="windowed", guard=1.0, discipline=Discipline(chunk_params=100))
    assert p.k == exposed.index(min(exposed))


@given(profile=profiles())
def test_overruns_fall_with_k(profile: Profile) -> None:
    """With more units on the device, the worst overrun does not grow."""
    windows = windows_of(profile, guard=1.0, chunk_params=100, updates_in_backward=True)
    rows = [windows.tightest(k) for k in range(windows.n)]
    overruns = [row.overrun_us for row in rows if row is not None]
    assert overruns == sorted(overruns, reverse=True)
    assert windows.tightest(windows.n) is None


@given(n=st.integers(1, 12), cpu=st.floats(1, 120), guard=st.floats(1.0, 1.5), more=st.floats(0, 0.5), rule=st.sampled_from(RULES))
@settings(deadline=None)
def test_k_grows_with_the_guard(n: int, cpu: float, guard: float, more: float, rule: Rule) -> None:
    """A larger guard on CPU times never puts fewer equal units on the device."""
    profile = uniform(n, cpu=cpu)
    k, larger = (plan(profile, rule=rule, guard=g).k for g in (guard, guard + more))
    assert k <= larger


@pytest.mark.parametrize("rule", RULES)
def test_the_guard_counts(rule: Rule) -> None:
    """Planning with CPU times half as long again puts more units on the device.

    A note says how times were taken.
    """
    profile = uniform(20, forward=10.0, backward=20.0, cpu=60.0)
    exact, guarded = plan(profile, rule=rule, guard=1.0), plan(profile, rule=rule, guard=1.5)
    assert guarded.k > exact.k
    assert not exact.notes
    assert guarded.notes == ("solved with CPU update times 1.5 times as long as measured",)


def test_first_unit_goes_to_the_device_where_the_seed_sees_no_need() -> None:
    """With a long backward the balance gives k=0, the windows give k=1.

    Nothing hides the update of the unit whose gradient is last.
    """
    profile = uniform(10, forward=50.0, backward=100.0, cpu=40.0, gpu=1.0)
    seed, windowed = plan(profile, rule="seed"), plan(profile, rule="windowed")
    assert (seed.k, windowed.k) == (0, 1)
    assert windowed.predicted["step_us"] < seed.predicted["step_us"]
    assert any("gives k=0" in note for note in seed.notes)


def test_windowed_needs_fewer_units_than_the_seed_when_the_forward_hides_updates() -> None:
    """The next forward hides updates too, so windows put fewer units on the device.

    The step takes no longer.
    """
    profile = uniform(24, forward=10.0, backward=20.0, cpu=45.0, gpu=1.0)
    seed, cotrain, windowed = (plan(profile, rule=rule, discipline=Discipline(chunk_params=20)) for rule in RULES)
    assert cotrain.k < windowed.k < seed.k
    assert windowed.predicted["step_us"] < seed.predicted["step_us"] < cotrain.predicted["step_us"]


def test_memory_caps_k_and_says_so() -> None:
    """Where 3 of 12 units fit, k is 3, a note and the capped units' reasons say so with figures."""
    p = plan(uniform(12, cpu=100.0), rule="seed", budget_bytes=12 * 3500)
    assert p.k == 3
    assert p.notes[0].startswith("capped by memory: 3 of 12 units fit, k=")
    assert "12 kB" in p.rows[3].reason
    assert "3 units fill it" in p.rows[3].reason


def test_host_memory_raises_k_or_fails() -> None:
    """A host that holds 4 of 10 units gives k >= 6.

    If the device does not hold the other 6, no plan fits.
    """
    profile = uniform(10, cpu=1.0)
    p = plan(profile, host_budget_bytes=4 * 14_000)
    assert p.k == 6
    assert p.predicted["host_bytes"] == 4 * 14_000
    assert p.notes[0].startswith("raised by host memory: it holds 4 of 10 units")
    with pytest.raises(PlanError, match="no plan fits the memory"):
        plan(profile, host_budget_bytes=4 * 14_000, budget_bytes=5 * 12_000)


def test_given_k_is_taken() -> None:
    """A given k is used unchanged, and named as the source and as every unit's reason."""
    p = plan(uniform(5), k=2)
    assert (p.k, p.source) == (2, "fixed k")
    assert [row.placement for row in p.rows] == [Placement.GPU] * 2 + [Placement.CPU] * 3
    assert {row.reason for row in p.rows} == {"on the device: k=2 was given", "on the CPU: k=2 was given"}


def test_cotrain_is_the_seeds_rule_with_an_alpha_of_one() -> None:
    """Where the device updates as slowly as the CPU, both rules give the same k.

    Where it is faster, the seed's rule gives more.
    """
    profile = uniform(10, backward=5.0, cpu=30.0, gpu=1.0)
    slow_device = uniform(10, backward=5.0, cpu=30.0, gpu=30.0)
    assert plan(slow_device, rule="seed").inputs["alpha"] == pytest.approx(1.0)
    assert plan(slow_device, rule="seed", guard=1.0).k == plan(profile, rule="cotrain", guard=1.0).k
    assert plan(profile, rule="seed").k > plan(profile, rule="cotrain").k


def test_slow_device_updates() -> None:
    """With alpha >= 1 a plan is still made, and a note says that the device updates no faster."""
    p = plan(uniform(6, cpu=30.0, gpu=60.0), rule="seed")
    assert any("no faster than the CPU" in note for note in p.notes)
    assert 0 <= p.k < 6


@given(profile=profiles(), k=st.integers(0, 8))
@settings(deadline=None)
def test_predictions_are_those_of_the_plan(profile: Profile, k: int) -> None:
    """Step = compute + device updates + stalls; states are counted on exactly one side."""
    p = predict(profile, prefix_plan(profile.units, min(k, len(profile.units)), source="test", reason=lambda _: ""))
    assert p["step_us"] == pytest.approx(p["compute_us"] + p["gpu_update_us"] + p["stall_us"])
    on_host = (12 * profile.params - p["gpu_states_bytes"]) / 12
    assert p["host_bytes"] == pytest.approx(14 * on_host)
    assert p["gpu_idle_share"] == pytest.approx(p["stall_us"] / p["step_us"], abs=1e-9)


@given(profile=profiles(max_units=5))
@settings(deadline=None)
def test_compare_gives_all_plans(profile: Profile) -> None:
    """The comparison holds the three rules and both ends, in that order."""
    plans = compare(profile)
    assert list(plans) == [*RULES, "k=0", "k=n"]
    assert plans["k=0"].k == 0
    assert plans["k=n"].k == len(profile.units)


def test_inputs_name_what_was_used() -> None:
    """The inputs hold the equation's terms, the guard and the budget; unknown ones are absent."""
    inputs = plan(replace(uniform(4), tokens=512, steps=5), budget_bytes=10**6).inputs
    assert (inputs["t_bwd_us"], inputs["t_upd_cpu_us"], inputs["budget_bytes"], inputs["tokens"]) == (80.0, 120.0, 1e6, 512.0)
    assert "tokens" not in plan(uniform(4)).inputs
    assert "alpha" not in plan(profile_of([unit(0, cpu=0.0)])).inputs


@pytest.mark.parametrize(("options", "message"), [
    ({"rule": "best"}, "rule='best'"), ({"k": 7}, r"k=7, expected 0\.\.4"), ({"k": -1}, "k=-1"), ({"guard": 0.9}, "guard=0.9"),
    ({"budget_bytes": -5}, "budget of -5"),
])
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    """An unknown rule, a k the model lacks, a guard below 1 or a negative budget are errors."""
    with pytest.raises(PlanError, match=message):
        plan(uniform(4), **options)  # type: ignore[arg-type]  # wrong on purpose
