"""`python -m benchmarks bytes`: the bytes are the cost model's, the table says what they take."""

from __future__ import annotations

import pytest

from benchmarks.bytes import KINDS, cases_of, parts_of, parts_table, rows_table, traffic_of
from benchmarks.limit import Rates, limit_of, seconds_of_mix
from hytrain_fx.ir.limits import HALF_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_add_up_to_what_the_cost_model_moves(kind: str) -> None:
    """By the CPU with both copies, and streamed in and out: 30 and 20 bytes, 22 and 12 in bf16."""
    traffic, parts = traffic_of(kind), parts_of(kind)
    assert sum(of.by_cpu for of in parts) == traffic.updated_bytes(1, HALF_BYTES) + 2 * HALF_BYTES == {"fp32": 30, "bf16": 22}[kind]
    assert sum(of.streamed for of in parts) == 2 * traffic.streamed_bytes(1, HALF_BYTES) == {"fp32": 20, "bf16": 12}[kind]
    assert f"**sum, moments in {kind}** | **{sum(of.by_cpu for of in parts)}**" in parts_table()


def test_a_row_says_how_far_it_is_from_its_bound() -> None:
    """A run at the machine's rate of memory is at the bound of its own mix."""
    rates, params, streamed = Rates(200e9, 50e9, 40e9), 3e9, 0.25
    memory_s, link_s = seconds_of_mix(params, streamed, rates, traffic_of("bf16"))
    assert [memory_s, link_s] == pytest.approx([params * 19.5 / 200e9, params * 3.0 / 40e9])
    rows = {"floor": {"step_s": 0.1}, "bf16": {"step_s": memory_s, "params": params, "plan": {"share": {"stream": streamed}}}, "fp32": None}
    line = rows_table(rows, rates).splitlines()[-1]
    bound = limit_of(0.1, params, rates, traffic_of("bf16"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["bf16", f"{memory_s:.4f}", f"{memory_s / 0.1:.3f}"]
    assert cells[3:6] == [f"{bound.step_s:.4f}", bound.binds, f"{memory_s / bound.step_s:.3f}"]
    assert cells[8:] == ["1.000", "58.5", "200", "100 %"]
    assert rows_table(rows, None).splitlines()[-1].count("| - ") == 6


def test_each_kind_of_moments_is_a_case() -> None:
    """With every state on the host."""
    cases = cases_of("tiny", 1, 32)
    assert list(cases) == ["floor", "fp32", "bf16"]
    assert cases["bf16"].options == ("gpu_states=0.0", "moments=bf16")
