"""Reports for several GPUs and machines, beside what two GPUs were measured to take."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.planner import plan
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import NETWORK_BYTES_PER_S, DeviceSpec, analytic_profile
from hytrain_fx.forecast.memory import bucket_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.forecast.named_devices import find_device, known_devices
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.peers import Passed, passed_us, peers_of
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.report import Report, report
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, OURS, SYSTEMS, ZERO_OFFLOAD, Case

SHAPE = read_shape("llama-3.1b")
H200 = find_device("h200")
COUNTS = st.integers(1, 16)
TWO = Ranks(2)


def two_gpus(floor_s: float | None = None) -> DeviceSpec:
    """The measured machine: two H200 with NVLink, 32 cores, 182 GB/s with both ranks busy.

    floor_s   what forward and backward were measured to take there; None = the H200's own rate
    """
    spec = replace(H200.in_machine_of(TWO), host_memory_gb_per_s=182)
    took_us = case(spec).profile.forward_us + case(spec).profile.backward_us
    return spec if floor_s is None else replace(spec, achieved_flops=spec.achieved_flops * took_us / 1e6 / floor_s)


def case(device: DeviceSpec, ranks: Ranks = TWO, tokens: int = 8192) -> Case:
    return Case.of(SHAPE, device, tokens, 2048, False, None, ranks)


@functools.cache
def on_two_gpus(floor_s: float | None = None) -> Report:
    """The report of the measured machine."""
    return report(SHAPE, two_gpus(floor_s), 8192, sequence=2048, ranks=TWO, sweep=False)


def steps_s(made: Report) -> dict[str, float]:
    return {peer.system: peer.step_us / 1e6 for peer in made.peers}


# ---- Measured ----


def test_the_order_of_the_measured_ways() -> None:
    """From the rates of a named H200 and the measured bandwidth alone.

    Ours with every state on the host is faster than FSDP2 with offload, that than ZeRO-3 with
    offload; ours solved takes at most 3% more than DDP with AdamW.
    """
    found = steps_s(on_two_gpus())
    order = ("FSDP2", "this library, every state on the host", "FSDP2, CPU offload", "ZeRO-3, CPU offload")
    assert [found[name] for name in order] == sorted(found[name] for name in order)
    assert found["this library, plan solved"] <= 1.03 * found["DDP, AdamW on every GPU"]


@pytest.mark.parametrize(("system", "least_s", "most_s", "tolerance"), [
    ("DDP, AdamW on every GPU", 0.369, 0.397, 0.05), ("FSDP2", 0.326, 0.326, 0.10), ("FSDP2, CPU offload", 0.883, 0.883, 0.05),
    ("this library, plan solved", 0.371, 0.371, 0.10),
])
def test_steps_of_two_gpus(system: str, least_s: float, most_s: float, tolerance: float) -> None:
    """Steps are within a stated share of what was measured, with the floor measured there.

    The floor is DDP's forward and backward, 0.333 s. FSDP2 was faster than that floor. ZeRO-3's own
    kernels and waits are not in the model: it was measured at 2.08 s, and only its place holds.
    """
    found = steps_s(on_two_gpus(0.333))[system]
    assert least_s * (1 - tolerance) <= found <= most_s * (1 + tolerance)


@pytest.mark.parametrize("floor_s", [None, 0.333, 0.353])
def test_all_states_on_the_host_as_measured(floor_s: float | None) -> None:
    """With the measured share, 41% streamed, the step is within 5% of the measured 0.46 to 0.50 s.

    The GPU's memory is within 3% of the measured 30 GB.
    """
    profile = case(two_gpus(floor_s)).profile
    made = plan(profile, k=0, stream=0.41)
    assert 0.95 * 0.46 <= made.predicted["step_us"] / 1e6 <= 1.05 * 0.50
    taken = footprint(SHAPE, 8192, 0, streamed_params=int(0.41 * profile.params), ranks=TWO)
    assert taken.device_bytes / 1e9 == pytest.approx(30, rel=0.03)


PAGE = Path(__file__).parents[2] / "docs" / "several_gpus.md"


def rows_after(words: str) -> dict[str, list[str]]:
    """The cells of a table of the page by the first of each row."""
    lines = PAGE.read_text().split(words)[1].split("\n|---")[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_the_calculated_rows_of_the_page() -> None:
    """They are what the report's ways to train are calculated to take, for each number of GPUs."""
    columns = [on_two_gpus().peers]
    for ranks in (Ranks(4), Ranks(8), Ranks(8, 8)):
        device = replace(H200.in_machine_of(ranks), host_memory_gb_per_s=182)
        of = case(device, ranks)
        rows = [of.row_of(system, of.plan_of(system)) for system in SYSTEMS if system.name in (OURS, ZERO_OFFLOAD)]
        columns.append(peers_of(of, rows))
    assert rows_after("All figures of this table are calculated") == {
        same[0].system: [f"{p.step_us / 1e6:.3f}, {p.device_bytes / 1e9:.1f} + {p.host_bytes / 1e9:.1f}" for p in same]
        for same in zip(*columns, strict=True)}


def test_the_measured_rows_of_the_page() -> None:
    """What is calculated stands there, with the H200's rate and the floor's.

    Steps measured with causal attention are within 4.5% of it, in its order.
    """
    rows = rows_after("Beside it stands")
    found: dict[str, list[str]] = {name: [] for name in rows}
    for made in (on_two_gpus(), on_two_gpus(0.333)):
        step_s = {**steps_s(made), "DDP, forward and backward alone": made.compute_us / 1e6,
                  "ours, every state on the host, 41% streamed": plan(made.profile, k=0, stream=0.41).predicted["step_us"] / 1e6}
        step_s["ours, solved"] = step_s["this library, plan solved"]
        for name, cells in found.items():
            cells.append(f"{step_s[name]:.3f}")
    assert len(rows) == 7
    assert {name: cells[1:3] for name, cells in rows.items()} == found
    causal = {name: (float(cells[3]), float(cells[1])) for name, cells in rows.items() if cells[3] != "-"}
    assert len(causal) == 4
    assert all(abs(measured / calculated - 1) <= 0.045 for measured, calculated in causal.values())
    assert sorted(causal, key=lambda name: causal[name][0]) == sorted(causal, key=lambda name: causal[name][1])


# ---- What a rank keeps and moves ----


@given(k=st.integers(0, 28), gpus=COUNTS, nodes=COUNTS, share=st.floats(0, 1))
@settings(deadline=None)
def test_more_ranks_never_raise_a_ranks_states(k: int, gpus: int, nodes: int, share: float) -> None:
    """Each GPU has no more states with more ranks, and each host no more with more machines.

    A host's ranks have all states once: GPUs beside each other add nothing to it but padding.
    """
    def taken(ranks: Ranks) -> tuple[int, int]:
        streamed = int(share * sum(ranks.shard(u.params) for u in SHAPE.units[k:]))
        m = footprint(SHAPE, 8192, k, streamed_params=streamed, ranks=ranks)
        return m.gpu_states_bytes, m.host_states_bytes

    own, padding = taken(Ranks(gpus, nodes)), 12 * 64 * 32 * len(SHAPE.units)
    assert taken(Ranks(gpus + 1, nodes))[0] <= own[0]
    assert taken(Ranks(gpus, nodes + 1)) <= own
    assert own[1] == pytest.approx(taken(Ranks(1, nodes))[1], abs=padding)


@given(gpus=COUNTS, nodes=COUNTS)
@settings(deadline=None)
def test_what_a_rank_moves(gpus: int, nodes: int) -> None:
    """Copies and updates are of a shard, cores and bandwidth of a host are shared by its ranks.

    A collective moves the other ranks' parts of 2 bytes a parameter; forward and backward are
    whole.
    """
    ranks = Ranks(gpus, nodes)
    spec = H200.in_machine_of(ranks)
    one, rank = (analytic_profile(SHAPE, spec, 8192, ranks=of) for of in (ONE_RANK, ranks))
    n = ranks.count
    assert (rank.forward_us, rank.backward_us) == (one.forward_us, one.backward_us)
    for name in ("d2h_us", "h2d_us", "gpu_update_us"):
        assert getattr(rank, name) == pytest.approx(getattr(one, name) / n, rel=1e-3)
    assert rank.cpu_update_us == pytest.approx(one.cpu_update_us / nodes, rel=1e-3)
    assert (rank.node_ranks, rank.host_memory_gb_per_s) == (gpus, H200.host_memory_gb_per_s)
    sent_bytes = 2 * SHAPE.params * (n - 1) / n
    within_us = 1e6 * sent_bytes / 450e9 if gpus > 1 else 0.0
    between_us = 1e6 * sent_bytes / gpus / NETWORK_BYTES_PER_S if nodes > 1 else 0.0
    for name in ("reduce_scatter_us", "all_gather_us"):
        assert sum(getattr(u, name) for u in rank.units) == pytest.approx(max(within_us, between_us))


@given(gpus=COUNTS, nodes=COUNTS, tokens=st.sampled_from([2048, 8192]))
@settings(deadline=None, max_examples=8)
def test_with_endless_rates_a_step_is_the_floor(gpus: int, nodes: int, tokens: int) -> None:
    """Nothing is left but forward and backward where links, cores and memories are endless.

    With finite ones no step is shorter.
    """
    names = ("d2h_bytes_per_s", "h2d_bytes_per_s", "cpu_update_params_per_s", "gpu_update_params_per_s", "host_memory_gb_per_s",
             "gpu_link_bytes_per_s", "network_bytes_per_s")
    ranks = Ranks(gpus, nodes)
    spec = H200.in_machine_of(ranks)
    sources = {**spec.sources, **dict.fromkeys(names, "given: no end to it")}
    endless = replace(spec, sources=sources, **dict.fromkeys(names, 1e25))  # type: ignore[arg-type]
    for device in (endless, spec):
        of = replace(case(device, ranks, tokens), coarse=True)
        step_us = of.plan_of(OUR_SYSTEM).predicted["step_us"]
        floor_us = of.profile.forward_us + of.profile.backward_us
        assert step_us >= floor_us * (1 - 1e-9)
        assert device is spec or step_us == pytest.approx(floor_us, rel=1e-6)


def test_one_rank_is_as_without_ranks() -> None:
    """A report of one GPU has no peers and no collectives; the device stays the same object."""
    plain, one = report(SHAPE, H200, 8192, sweep=False), report(SHAPE, H200, 8192, sweep=False, ranks=Ranks(1, 1))
    assert plain == one
    assert H200.in_machine_of(ONE_RANK) is H200
    assert (plain.peers, plain.machine) == ((), "h200")
    assert "collectives" not in plain.ours.idle_shares
    assert "collectives" not in markdown(plain)
    assert bucket_bytes(SHAPE, ONE_RANK) == 0


@given(gpus=COUNTS, nodes=COUNTS, memory=st.integers(20 * 10**9, 10**12))
@settings(deadline=None, max_examples=25)
def test_a_ranks_budget_fits_its_gpu(gpus: int, nodes: int, memory: int) -> None:
    """As many units as the budget holds never overfill the GPU."""
    ranks, device = Ranks(gpus, nodes), replace(H200, memory_bytes=memory, host_memory_bytes=10**13)
    budget = states_budget_bytes(SHAPE, device, 4096, ranks=ranks)
    k = max(k for k in range(len(SHAPE.units) + 1) if 12 * sum(ranks.shard(u.params) for u in SHAPE.units[:k]) <= budget)
    assert k == 0 or footprint(SHAPE, 4096, k, ranks=ranks).fits(device)


def test_largest_models_of_ranks() -> None:
    """On the GPU there are 2 bytes of weights and a rank's part of 14; hosts add up."""
    sizes = largest_params(H200, 10**10, ranks=Ranks(2, 3))
    assert sizes["device"] == pytest.approx((0.95 * H200.memory_bytes - 1e10) / (2 + 14 / 6))
    assert sizes["host"] == pytest.approx(min(3 * 0.85 * H200.host_memory_bytes / 14, (0.95 * H200.memory_bytes - 1e10) / 2))


# ---- Machines ----


def test_a_host_of_fewer_gpus_is_enlarged() -> None:
    """Cores and memory grow, the memory's bandwidth does not, and each source says so.

    A host described for as many GPUs, or for any number, is taken as it is.
    """
    eight = H200.in_machine_of(Ranks(8))
    assert eight.host_memory_bytes == 8 * H200.host_memory_bytes
    assert eight.cpu_update_params_per_s == pytest.approx(8 * H200.cpu_update_params_per_s)
    assert eight.host_memory_gb_per_s == H200.host_memory_gb_per_s
    assert all("8 times that of a host of 1" in eight.sources[name] for name in ("host_memory_bytes", "cpu_update_params_per_s"))
    assert "as it is for a host of 8 GPUs" in eight.sources["host_memory_gb_per_s"]
    assert eight.in_machine_of(Ranks(4)) == eight
    assert replace(H200, host_gpus=None).in_machine_of(Ranks(8)).host_memory_bytes == H200.host_memory_bytes
    with pytest.raises(ConfigError, match="host_gpus=0"):
        replace(H200, host_gpus=0)


def test_links_that_are_not_known_are_assumed_openly() -> None:
    """A card without a link of its own has its link to the host; between machines 50 GB/s."""
    card = find_device("rtx4090")
    assert card.gpu_link_bytes_per_s is None
    used = card.in_machine_of(Ranks(2, 2))
    assert (used.gpu_link_bytes_per_s, used.network_bytes_per_s) == (card.d2h_bytes_per_s, 50e9)
    assert all(used.sources[name].startswith("estimated: ") for name in ("gpu_link_bytes_per_s", "network_bytes_per_s"))
    assert DeviceSpec.from_json(used.to_json()) == used
    links = {name: (spec.gpu_link_bytes_per_s or 0) / 1e9 for name, spec in known_devices().items()}
    assert {name: links[name] for name in ("h200", "h100", "a100-80", "v100", "l40s")} == {
        "h200": 450, "h100": 450, "a100-80": 300, "v100": 150, "l40s": 0}


@pytest.mark.parametrize(("gpus", "nodes", "skew"), [(0, 1, 1.0), (1, 0, 1.0), (-1, 1, 1.0), (2, 1, 0.5), (2, 1, math.inf), (1, 1, 1.5)])
def test_what_is_no_number_of_ranks_is_refused(gpus: int, nodes: int, skew: float) -> None:
    """At least one GPU of one machine, and a slowest rank only among several."""
    with pytest.raises(ConfigError, match="expected"):
        Ranks(gpus, nodes, skew)


# ---- The report ----


def test_the_report_of_several_machines() -> None:
    """Title, tokens of all ranks, ways to train, memory by GPU and host, and the sweep."""
    ranks = Ranks(2, 2)
    r = report("llama-1.3b", "h100", 4096, ranks=ranks)
    text = markdown(r)
    assert text.startswith("# llama-1.3b on h100, 4 GPUs of 2 machines\n")
    assert f"{1e6 * 4 * 4096 / r.ours.step_us / 1e3:.0f} k tokens a second" in text
    assert all(f"| {peer.system} | " in text for peer in r.peers)
    assert "## Ways to train on 4 GPUs of 2 machines" in text
    assert "with all states of its 2 ranks" in text
    assert "collectives" in r.ours.idle_shares
    assert r.peers[0].step_us == r.ours.step_us
    assert {point.tokens for point in r.sweep.tokens} >= {4096}
    assert r.hidden_from_tokens["waits per layer, all streamed"] <= r.hidden_from_tokens["waits per layer"]
    assert any(change.words == "links between the GPUs twice as fast" for change in r.changes)
    with pytest.raises(ConfigError, match="autocast on 2 GPUs"):
        report("llama-1.3b", "h100", 4096, ranks=TWO, autocast=True)


def test_a_slower_rank_holds_all_up() -> None:
    """With one rank 10% slower the step is 7 to 12% longer for every way."""
    alike, skewed = (report(SHAPE.with_layers(10), H200, 8192, ranks=Ranks(4, 1, skew), sweep=False) for skew in (1.0, 1.1))
    for name in ("this library, plan solved", "DDP, AdamW on every GPU", "FSDP2"):
        assert 1.07 <= steps_s(skewed)[name] / steps_s(alike)[name] <= 1.12
    assert skewed.ours.step_us >= 1.1 * skewed.compute_us
    assert next(row for row in skewed.rows if row.system == OURS).step_us == skewed.ours.step_us


# ---- Passes on paper ----


@given(units=st.lists(st.tuples(*[st.floats(0, 50)] * 5), min_size=1, max_size=8))
def test_a_pass_is_as_long_as_its_lanes_and_no_longer_than_their_sum(units: list[tuple[float, ...]]) -> None:
    """It takes no less than computing or any lane does, and no more than all in a row."""
    made = passed_us(Passed(*unit) for unit in units)
    lanes = [sum(lane) for lane in zip(*units, strict=True)]
    assert made >= max(lanes[0], lanes[1], lanes[2] + lanes[3], lanes[4]) - 1e-6
    assert made <= sum(lanes) + 1e-6


def test_passes_in_closed_form() -> None:
    """Gathers that are shorter than computing are hidden, except the first. Longer ones are not."""
    assert passed_us([Passed(10.0)] * 3) == 30.0
    assert passed_us([Passed(10.0, gather_us=4.0)] * 3) == 34.0
    assert passed_us([Passed(10.0, gather_us=15.0)] * 3) == 3 * 15.0 + 10.0
    assert passed_us([Passed(10.0, reduce_us=4.0)] * 3) == 34.0
    assert passed_us([Passed(10.0, in_us=2.0, gather_us=3.0, reduce_us=4.0, out_us=5.0)]) == 24.0
