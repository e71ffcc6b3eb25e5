"""Offline reports with moments in bf16: bytes, times, and what stays as with fp32 ones."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.config import Moments
from hytrain_fx.cost_model.budget import Budget
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.host_memory import cpu_bytes, streamed_bytes
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.forecast.capacity import capacities
from hytrain_fx.forecast.device import analytic_profile
from hytrain_fx.forecast.memory import activation_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.page import markdown
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.report import Report, case_of, report
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, SYSTEMS, Case
from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import TIMES

SHAPE = read_shape("llama-3.1b")
NARROW = replace(SHAPE, moments="bf16")
H100, H200 = find_device("h100"), find_device("h200")
PEERS = ("ZeRO-Offload, no overlap", "CoTrain k, one barrier", "HyTrainDNN k, one barrier", "Deep Optimizer States, after the backward")
HOSTED = "this library, every state on the host"


@functools.cache
def reported(moments: Moments, ranks: Ranks = ONE_RANK, budget_bytes: int | None = None) -> Report:
    return report(SHAPE, H100, 8192, sequence=2048, moments=moments, ranks=ranks, budget_bytes=budget_bytes,
                  sweep=ranks is ONE_RANK and budget_bytes is None)


# ---- Bytes ----


@given(k=st.integers(0, 28), tokens=st.integers(1, 1 << 15), share=st.floats(0, 1), gpus=st.integers(1, 3))
@settings(deadline=None)
def test_states_take_8_bytes_on_either_side(k: int, tokens: int, share: float, gpus: int) -> None:
    """4 bytes a parameter less wherever its states rest.

    Weights, gradients, activations, slots and the staging slots are as large as with fp32 moments.
    """
    ranks = Ranks(gpus)
    on_device, on_host = (sum(ranks.shard(u.params) for u in units) for units in (SHAPE.units[:k], SHAPE.units[k:]))
    streamed = int(share * on_host)
    wide, narrow = (footprint(shape, tokens, k, False, streamed, ranks) for shape in (SHAPE, NARROW))
    staging_bytes = 12 * STAGING_SLOTS * CHUNK_PARAMS if streamed else 0
    assert narrow == replace(wide, gpu_states_bytes=8 * on_device + staging_bytes, host_states_bytes=8 * on_host * gpus)


@given(tokens=st.integers(1, 1 << 14), memory=st.integers(10**9, 10**12))
@settings(deadline=None)
def test_the_budget_fits_the_device(tokens: int, memory: int) -> None:
    """As many units as the budget holds at 8 bytes never overfill a device, and one more would."""
    device = replace(H200, memory_bytes=memory, host_memory_bytes=10**13)
    budget, n = states_budget_bytes(NARROW, device, tokens), len(NARROW.units)
    k = max(k for k in range(n + 1) if 8 * sum(u.params for u in NARROW.units[:k]) <= budget)
    assert k == 0 or footprint(NARROW, tokens, k).fits(device)
    assert k == n or not footprint(NARROW, tokens, k + 1).fits(device)


def test_more_fits() -> None:
    """A full host holds 14/10 of the parameters, a full device 16/12; every way more layers."""
    wide, narrow = largest_params(H200, 10**10), largest_params(H200, 10**10, state_bytes=8)
    assert narrow["device"] == pytest.approx(wide["device"] * 16 / 12)
    small = replace(H200, host_memory_bytes=10**10)
    assert largest_params(small, 0, state_bytes=8)["host"] == pytest.approx(largest_params(small, 0)["host"] * 14 / 10)
    for fp32, bf16 in zip(*(capacities(shape, H200, 8192, 2048, False) for shape in (SHAPE, NARROW)), strict=True):
        assert bf16.way == fp32.way
        assert (bf16.layers or 0) > (fp32.layers or 0) > 0
        assert bf16.tokens >= fp32.tokens > 0
    assert reported("bf16").largest_params == largest_params(H100, activation_bytes(SHAPE, 8192), state_bytes=8)


def test_a_plan_that_streams_leaves_room_for_staging_slots_of_fp32() -> None:
    """k is at most what fits beside slots of 12 bytes a parameter, where one more fits beside 8."""
    device = replace(H100, memory_bytes=36_500_000_000, host_memory_bytes=10**13, cpu_update_params_per_s=3e9, host_memory_gb_per_s=None)
    case = replace(Case.of(NARROW, device, 8192, 2048, False, None), coarse=True)
    made = case.plan_of(OUR_SYSTEM)
    share, discipline = made.inputs["stream_share"], Discipline(chunk_params=case.chunk_params)
    assert share > 0
    most = [Budget(case.budget_bytes, None, 8, 8, staged_bytes=of).most_units(case.profile, share, discipline) for of in (12, 8)]
    assert most[0] < most[1]
    assert made.k <= most[0]


# ---- Times ----


def test_fewer_bytes_move_and_rates_stay() -> None:
    """An update by the CPU moves 22 bytes a parameter instead of 30, a streamed one 12 and not 20.

    Streaming takes 6/10 of the time on the link. Times of updates, of gradients and of weights are
    those with fp32 moments.
    """
    wide, narrow = (analytic_profile(shape, H100, 8192) for shape in (SHAPE, NARROW))
    for u, v in zip(wide.units, narrow.units, strict=True):
        assert (cpu_bytes(u), streamed_bytes(u)) == (30 * u.params, 20 * u.params)
        assert (cpu_bytes(v), streamed_bytes(v)) == (22 * u.params, 12 * u.params)
        assert v.stream_in_us == pytest.approx(0.6 * u.stream_in_us)
        assert v.stream_out_us == pytest.approx(0.6 * u.stream_out_us)
        assert all(getattr(u, name) == getattr(v, name) for name in TIMES)


@pytest.mark.parametrize(("moments", "step_s", "pinned_gb"), [("fp32", 0.460, 42.0), ("bf16", 0.361, 28.8)])
def test_steps_and_host_memory_as_measured(moments: Moments, step_s: float, pinned_gb: float) -> None:
    """Every state on the host, Llama of 3.14 G parameters, 4 x 2048 tokens, one H100 with 16 cores.

    Steps within 10% of what was measured, pinned memory within 1%.
    """
    ours = reported(moments, budget_bytes=0).ours
    assert ours.step_us / 1e6 == pytest.approx(step_s, rel=0.1)
    assert ours.memory.host_bytes / 1e9 == pytest.approx(pinned_gb, rel=0.01)


def test_fewer_tokens_hide_all_updates() -> None:
    """Where host memory binds, offloading is free from a smaller micro-batch on: 22 bytes to 30."""
    slow = replace(H100, host_memory_gb_per_s=100)
    wide, narrow = (report(SHAPE, slow, 8192, moments=moments, sweep=False).hidden_from_tokens for moments in ("fp32", "bf16"))
    assert set(wide) == set(narrow)
    assert all(narrow[name] == pytest.approx(wide[name] * 22 / 30) for name in wide)


# ---- Others keep fp32 ones ----


def test_other_systems_are_as_with_fp32_moments() -> None:
    """So are ZeRO-Offload, CoTrain, HyTrainDNN's barrier and Deep Optimizer States.

    That is in the table and in the sweep. All others take fewer bytes.
    """
    assert tuple(system.name for system in SYSTEMS if not system.is_ours) == PEERS
    wide, narrow = reported("fp32"), reported("bf16")
    for fp32, bf16 in zip(wide.rows, narrow.rows, strict=True):
        assert (fp32 == bf16) == (fp32.system in PEERS)
        states = [m.gpu_states_bytes + m.host_states_bytes for m in (fp32.memory, bf16.memory)]
        assert fp32.system in PEERS or states[1] < 0.75 * states[0]
    for points in zip((*wide.sweep.tokens, *wide.sweep.sizes), (*narrow.sweep.tokens, *narrow.sweep.sizes), strict=True):
        assert all(points[0].steps_us[name] == points[1].steps_us[name] for name in PEERS)
    assert [p.device_bytes > q.device_bytes for p, q in zip(wide.sweep.ks, narrow.sweep.ks, strict=True)] == [False] + 28 * [True]


def test_other_ways_on_several_gpus_are_as_with_fp32_moments() -> None:
    """DDP, FSDP2, ZeRO and the pipeline; this library's ways take less of the hosts."""
    shallow = SHAPE.with_layers(4)
    wide, narrow = (report(shallow, H100, 8192, sequence=2048, moments=moments, ranks=Ranks(2), budget_bytes=0, sweep=False).peers
                    for moments in ("fp32", "bf16"))
    for fp32, bf16 in zip(wide, narrow, strict=True):
        assert (fp32 == bf16) == (not fp32.system.startswith("this library"))
    hosted = [next(peer for peer in peers if peer.system == HOSTED) for peers in (wide, narrow)]
    assert hosted[1].host_bytes < 0.75 * hosted[0].host_bytes
    assert hosted[1].most_params > hosted[0].most_params


# ---- What is said ----


def test_text_and_json_name_the_moments() -> None:
    """Title, headline, tables, plan and JSON say bf16; of fp32 moments nothing is said."""
    narrow, wide = reported("bf16"), reported("fp32")
    text, raw = markdown(narrow), json.loads(narrow.to_json())
    assert text.startswith("# llama-3.1b, moments in bf16 on h100\n")
    assert "no recomputation, moments in bf16 (8 bytes of master and states a parameter instead of 12), " in text
    assert f"In fp32 stay: {'; '.join(PEERS)}." in text
    assert "where cores bind, not memory, updates may take longer" in text
    assert raw["moments"] == "bf16"
    assert raw["plan"]["inputs"]["state_bytes_per_param"] == 8
    assert {unit["traffic"]["bytes_per_param"] for unit in raw["profile"]["units"]} == {8}
    assert "moments" not in markdown(wide)
    assert "moments" not in wide.to_json()


@pytest.mark.parametrize("ranks", [ONE_RANK, Ranks(2)])
def test_a_saved_plan_says_which_moments_it_was_made_for(ranks: Ranks) -> None:
    """A note of the plan, which `explain` shows also where the plan was loaded."""
    narrow, wide = (case_of(SHAPE, H100, 8192, sequence=2048, moments=of, ranks=ranks).plan_of(OUR_SYSTEM) for of in ("bf16", "fp32"))
    made = Plan.from_json(narrow.to_json())
    (note,) = [note for note in made.notes if "moments" in note]
    assert note.startswith('made for compile(..., moments="bf16"): 8 bytes of master and states a parameter. With fp32 moments they are 12')
    assert not [note for note in wide.notes if "moments" in note]


def test_other_moments_are_refused() -> None:
    """What kernels do not know is an error that names it."""
    with pytest.raises(UnsupportedError, match="'fp8': expected"):
        report(SHAPE, H100, 8192, moments=cast(Moments, "fp8"), sweep=False)
