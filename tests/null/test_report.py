"""The offline report and its memory figures."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import ConfigError, PlanError
from hytrain_fx.forecast.device import MOST_TOKENS, DeviceSpec
from hytrain_fx.forecast.memory import activation_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.report import Report, case_of, report
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, OURS, SYSTEMS, Case, Row, System
from hytrain_fx.forecast.tables import FIGURE_WORDS
from hytrain_fx.forecast.verdict import verdict
from hytrain_fx.ir.figures import bytes_text, count_text, time_text
from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS
from hytrain_fx.ir.plan import validate
from hytrain_fx.ir.profile import Profile

SHAPE = read_shape("llama-7b")
H200 = find_device("h200")


@functools.cache
def of_7b(*, sequence: int | None = None, budget_bytes: int | None = None) -> Report:
    """The report of 7 G parameters and 8192 tokens, without a sweep."""
    return report("llama-7b", "h200", 8192, sequence=sequence, budget_bytes=budget_bytes, sweep=False)


@functools.cache
def of_10b() -> Report:
    """The report of 10 G parameters, with a sweep."""
    return report("llama-10b", "h200", 8192, sequence=2048)


def row_of(system: System, case: Case) -> Row:
    """The row of one system in a report of the case, which has those of all."""
    return case.row_of(system, case.plan_of(system))


def test_a_sweep_stays_below_the_most_tokens() -> None:
    """A report of as many tokens as one may ask for has a sweep of fewer ones."""
    r = report("llama-1.3b", "h200", MOST_TOKENS, sequence=4096)
    tokens = [point.tokens for point in r.sweep.tokens]
    assert len(tokens) > 1
    assert max(tokens) <= MOST_TOKENS


def test_systems_keep_their_order() -> None:
    """For 7 G parameters and 8k tokens each system is at least as fast as the one before it.

    No overlap is slowest, then come CoTrain, HyTrainDNN, windows and streaming.
    """
    r = of_7b(sequence=2048)
    steps = [row.step_us for row in r.rows[:6]]
    assert [row.system for row in r.rows] == [system.name for system in SYSTEMS]
    assert steps == sorted(steps, reverse=True)
    assert all(row.step_us >= r.compute_us for row in r.rows)
    case = case_of("llama-7b", "h200", 8192, sequence=2048)
    assert [row_of(SYSTEMS[4], case), row_of(OUR_SYSTEM, case)] == [r.rows[4], r.ours]
    validate(r.plan, SHAPE.units)


def test_markdown_and_json_carry_the_same_figures() -> None:
    """The text names every system, unit and note; the JSON holds the unrounded figures."""
    r = of_10b()
    text, raw = markdown(r), json.loads(r.to_json())
    assert all(f"| {system.name} |" in text for system in SYSTEMS)
    assert all(f"- {row.unit} {row.unit_name}: {row.reason}" in text for row in r.plan.rows)
    assert any(f"\n{row.system}: {note}" in text for row in r.rows for note in row.notes)
    assert all(f"| {FIGURE_WORDS[name]} | " in text and source in text for name, source in r.device.sources.items())
    assert raw["rows"][5]["step_us"] == r.rows[5].step_us
    assert raw["plan"]["k"] == r.plan.k == r.rows[5].k
    assert raw["params"] == r.params == read_shape("llama-10b").params
    assert raw["sweep"]["tokens"][0]["steps_us"] == r.sweep.tokens[0].steps_us
    assert DeviceSpec.from_json(json.dumps(raw["device"])) == r.device
    assert Profile.from_json(json.dumps(raw["profile"])) == r.profile


def test_what_does_not_fit_is_shown_as_such() -> None:
    """10 G parameters fit neither on the device alone nor with all states on that host.

    Split between both they fit.
    """
    fits = {row.system: row.fits for row in of_10b().rows}
    assert not fits["all on the device"]
    assert not fits["ZeRO-Offload, no overlap"]
    assert fits["windows, waits per layer"]
    assert fits["windows, states streamed too"]


def test_the_report_begins_with_its_verdict() -> None:
    """Five lines after the title, with the figures of the report in words and units."""
    r = report("llama-3.1b", "rtx4090", 8192, recompute=True, sweep=False)
    lines, everything = verdict(r), r.rows[-1]
    assert markdown(r).splitlines()[2:8] == [*(f"- {line}" for line in lines), ""]
    memory = r.ours.memory
    assert lines[0] == (f"It fits: our plan takes {bytes_text(memory.device_bytes)} of 25.8 GB on the GPU and "
                        f"{bytes_text(memory.host_bytes)} of 137 GB on the host.")
    assert f"on the GPU it does not fit: it would take {bytes_text(everything.memory.device_bytes)} on the GPU, of which 24.5" in lines[1]
    assert f"{time_text(everything.step_us)} a step" in lines[1]
    assert lines[2].startswith(f"Our plan: {time_text(r.ours.step_us)} a step, {count_text(1e6 * 8192 / r.ours.step_us)} tokens a second")
    assert f"The states of {r.ours.k} of 28 units" in lines[2]
    assert lines[3] == "What binds: the GPU's forward and backward. All updates are hidden."
    assert lines[4].startswith("Change first: nothing")


def test_the_verdict_names_what_binds_and_what_to_change() -> None:
    """Slow updates by the CPU bind. The best change of the program is named, then the machine's.

    Where the host is too small, more of it is the first change that makes the model fit.
    """
    slow = replace(H200, cpu_update_params_per_s=0.5e9, memory_bytes=40 * 10**9, d2h_bytes_per_s=3e9, h2d_bytes_per_s=3e9)
    r = report("llama-3.1b", slow, 8192, sequence=2048, sweep=False)
    assert verdict(r)[3].startswith("What binds: updates by the CPU, busy for ")
    assert f"The GPU waits {time_text(r.ours.stall_us)}" in verdict(r)[3]
    gains = {change.words: change.gain for change in r.changes if change.fits}
    assert max(gains, key=gains.__getitem__) == "twice the memory on the GPU"
    assert verdict(r)[4] == (f"Change first: recomputed activations ({gains['recomputed activations']:+.0%} tokens a second); "
                             f"on the machine: twice the memory on the GPU ({max(gains.values()):+.0%} tokens a second).")
    assert gains["a host twice as fast (cores and memory bandwidth)"] > 0.3
    small = report("llama-1.3b", replace(H200, host_memory_bytes=12 * 10**9), 8192, budget_bytes=0, sweep=False)
    assert verdict(small)[0].startswith("It does not fit: our plan takes ")
    assert verdict(small)[4].startswith("Change first: twice the host memory (then it fits, at ")
    assert verdict(report("llama-70b", "h100", 8192, sweep=False))[4].startswith("Change first: no single change")


def test_a_change_is_our_plan_for_the_changed_case() -> None:
    """What a change is said to take is what a report of the changed case says, within 3%."""
    r = of_7b(sequence=2048)
    steps = {change.words: change.step_us for change in r.changes}
    twice = replace(H200, cpu_update_params_per_s=2 * H200.cpu_update_params_per_s, host_memory_gb_per_s=430)
    for words, other in (("twice the tokens in a micro-batch", case_of(SHAPE, H200, 16384, sequence=2048)),
                         ("recomputed activations", case_of(SHAPE, H200, 8192, sequence=2048, recompute=True)),
                         ("a host twice as fast (cores and memory bandwidth)", case_of(SHAPE, twice, 8192, sequence=2048))):
        assert steps[words] == pytest.approx(row_of(OUR_SYSTEM, other).step_us, rel=0.03)


def test_tokens_that_hide_all_updates() -> None:
    """From the stated micro-batch on, equal layers hardly stall.

    They stall only for what the first and last of them cannot hide.
    """
    r = of_7b()
    tokens = int(1.1 * r.hidden_from_tokens["waits per layer"])
    assert tokens == pytest.approx(1.1 * 525e12 / 5.9e9 / 6, rel=1e-3)
    few, enough = (row_of(SYSTEMS[4], case_of(SHAPE, H200, n, budget_bytes=0)) for n in (tokens // 4, tokens))
    assert enough.stall_us < 0.1 * enough.step_us
    assert few.stall_us > 0.5 * few.step_us


def test_budget_is_obeyed() -> None:
    """With no device memory for states the solved systems keep k=0."""
    r = of_7b(budget_bytes=0)
    assert [row.k for row in r.rows] == [0, 0, 0, 0, 0, 0, 0, len(SHAPE.units)]
    assert r.rows[5].stream_share > 0.25  # the budget bounds resident states; streamed ones only pass through
    with pytest.raises(PlanError, match="budget of -1"):
        report(SHAPE, H200, 8192, budget_bytes=-1)
    with pytest.raises(ConfigError, match="no-such-model"):
        report("no-such-model", H200, 8192)


@given(k=st.integers(0, 34), tokens=st.integers(1, 1 << 15), recompute=st.booleans(), share=st.floats(0, 1))
@settings(deadline=None)
def test_every_state_rests_in_one_tier(k: int, tokens: int, recompute: bool, share: float) -> None:
    """12 bytes of states a parameter rest on one side or the other.

    On the device there are 2 bytes of weights whatever k is. A streamed parameter has no slot on
    the host and its gradient on the device; the staging slots come on top.
    """
    m = footprint(SHAPE, tokens, k, recompute)
    streamed = int(share * sum(u.params for u in SHAPE.units[k:]))
    with_streams = footprint(SHAPE, tokens, k, recompute, streamed)
    assert m.host_slots_bytes - with_streams.host_slots_bytes == 2 * streamed
    assert with_streams.host_states_bytes == m.host_states_bytes
    assert with_streams.gpu_states_bytes - m.gpu_states_bytes == (12 * STAGING_SLOTS * CHUNK_PARAMS if streamed else 0)
    assert m.gpu_states_bytes + m.host_states_bytes == 12 * SHAPE.params
    assert m.weights_bytes == 2 * SHAPE.params
    assert m.gradients_bytes <= 2 * SHAPE.params + 640_000_000
    assert m.activations_bytes <= activation_bytes(SHAPE, tokens, recompute)
    assert activation_bytes(SHAPE, tokens, True) < activation_bytes(SHAPE, tokens, False)


@given(tokens=st.integers(1, 1 << 14), memory=st.integers(10**9, 10**12))
@settings(deadline=None)
def test_the_budget_fits_the_device(tokens: int, memory: int) -> None:
    """As many units as the budget holds never overfill a device that holds the rest."""
    device = replace(H200, memory_bytes=memory, host_memory_bytes=10**13)
    budget = states_budget_bytes(SHAPE, device, tokens)
    k = max(k for k in range(len(SHAPE.units) + 1) if 12 * sum(u.params for u in SHAPE.units[:k]) <= budget)
    assert k == 0 or footprint(SHAPE, tokens, k).fits(device)


def test_gradients_come_as_activations_go() -> None:
    """With many tokens the device is fullest where the backward begins, with few where it ends.

    It never holds all activations and all gradients at once.
    """
    n = len(SHAPE.units)
    many, few = footprint(SHAPE, 32768, n), footprint(SHAPE, 16, n)
    assert many.gradients_bytes == 2 * SHAPE.units[-1].params
    assert many.activations_bytes == activation_bytes(SHAPE, 32768)
    assert few.gradients_bytes == 2 * SHAPE.params
    assert few.activations_bytes < 0.1 * activation_bytes(SHAPE, 16)


@pytest.mark.parametrize(("k", "streamed", "device_gb"), [(0, 0.29, 29.9), (7, 0.28, 39.2), (28, 0.0, 66.7)])
def test_memory_of_the_measured_model(k: int, streamed: float, device_gb: float) -> None:
    """3.14 G parameters and 8192 tokens on the H200: device peaks within 2% of measured ones."""
    shape = read_shape("llama-3.1b")
    on_host = sum(u.params for u in shape.units[k:])
    assert footprint(shape, 8192, k, streamed_params=int(streamed * on_host)).device_bytes / 1e9 == pytest.approx(device_gb, rel=0.02)


def test_idle_shares_are_those_of_the_schedule() -> None:
    """Each resource is idle for a share of the step.

    All on the device leaves host and link idle; the chosen plan uses both.
    """
    r = of_7b(budget_bytes=0)
    assert all(0 <= share <= 1 for row in r.rows for share in row.idle_shares.values())
    assert set(r.ours.idle_shares) == {"gpu", "cpu", "d2h", "h2d", "host_memory"}
    assert r.rows[-1].idle_shares == {"gpu": pytest.approx(0, abs=1e-9), "cpu": 1, "d2h": 1, "h2d": 1, "host_memory": 1}
    assert r.ours.idle_shares["host_memory"] < 0.1
    unknown = report(SHAPE, replace(H200, host_memory_gb_per_s=None), 8192, sweep=False)
    assert "host_memory" not in unknown.ours.idle_shares


def test_interleaving_after_the_backward() -> None:
    """In Deep Optimizer States nothing is updated while the device computes.

    So the step is longer than ours, and shorter than without overlap.
    """
    rows = {row.system: row for row in of_7b(budget_bytes=0).rows}
    after = rows["Deep Optimizer States, after the backward"]
    assert rows[OURS].step_us < after.step_us < rows["ZeRO-Offload, no overlap"].step_us
    assert after.stream_share > 0.2


def test_without_a_sweep_there_are_no_points() -> None:
    """The sweep has the report's own case among its points, predicted within 3% of it.

    It can be left out.
    """
    r = report(SHAPE, H200, 8192, sequence=2048)
    for points in (r.sweep.tokens, r.sweep.sizes):
        (own,) = [p for p in points if (p.tokens, p.params) == (8192, SHAPE.params)]
        assert own.steps_us == pytest.approx({row.system: row.step_us for row in r.rows}, rel=0.03)
        assert own.fits == {row.system: row.fits for row in r.rows}
    assert [p.tokens for p in r.sweep.tokens] == [2048, 4096, 8192, 16384, 32768]
    assert [p.layers for p in r.sweep.sizes] == [8, 16, 32, 64, 128]
    assert not of_7b().sweep.tokens


def test_largest_models() -> None:
    """Split states hold the most.

    That is the host's share, and another in what the weights leave of the device.
    """
    sizes = largest_params(H200, 10_000_000_000)
    assert sizes["split"] > max(sizes["host"], sizes["device"])
    assert sizes["host"] == pytest.approx(0.85 * 128 * 2**30 / 14)
    assert 2 * sizes["host"] + 16 * (sizes["split"] - sizes["host"]) == pytest.approx(0.95 * H200.memory_bytes - 1e10)
    assert largest_params(H200, 10**13) == {"device": 0.0, "host": 0.0, "split": 0.0}


@pytest.mark.parametrize(("text", "expected"), [
    (time_text(0.5), "0.5 us"), (time_text(12_345), "12.3 ms"), (time_text(1.234e6), "1.23 s"), (time_text(-2000), "-2 ms"),
    (bytes_text(512), "512 B"), (bytes_text(14e9), "14 GB"), (count_text(6.738e9), "6.74 G"), (count_text(34), "34"),
])
def test_figures_as_text(text: str, expected: str) -> None:
    """A figure has three digits and the unit that keeps it between 1 and 1000."""
    assert text == expected


def test_autocast_keeps_fp32_gradients_where_they_stay() -> None:
    """Fp32 weights under autocast have 16 bits on the device, as 16-bit weights have.

    Slots, and gradients that stay there, have 2 bytes more.
    """
    cast, n = replace(SHAPE, autocast=True), len(SHAPE.units)
    by_cpu, resident = footprint(cast, 16, 0), footprint(cast, 16, n)
    assert by_cpu.weights_bytes == footprint(SHAPE, 16, 0).weights_bytes
    assert by_cpu.host_bytes == 16 * SHAPE.params
    assert by_cpu.device_bytes == footprint(SHAPE, 16, 0).device_bytes
    assert resident.gradients_bytes == 2 * footprint(SHAPE, 16, n).gradients_bytes
    assert report(SHAPE, H200, 8192, sweep=False, autocast=True).largest_params["host"] == pytest.approx(
        of_7b().largest_params["host"] * 14 / 16)
