"""The estimate before any allocation is what is then allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.config import Moments
from hytrain_fx.forecast.memory import footprint
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.ir.plan import Piece, Placement
from hytrain_fx.ir.states import ADAMW, ADAMW_DEFAULT, MOMENTS, StateTable
from hytrain_fx.runtime.engine import Engine, RowSpec, RowStates
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.states.memory_estimate import MemoryEstimate, RowSize, estimate_memory, staging_bytes
from hytrain_fx.runtime.states.slabs import padded_bytes
from hytrain_fx.runtime.states.store import StateStore

from .loops import whole_pieces

DTYPES = {4: torch.float32, 2: torch.bfloat16}
Rows = list[tuple[RowSize, Placement]]

rows_strategy = st.lists(
    st.tuples(
        st.builds(RowSize, st.integers(1, 4000), st.sampled_from(sorted(DTYPES)), st.sampled_from([ADAMW_DEFAULT, ADAMW])),
        st.sampled_from(Placement),
    ),
    min_size=1,
    max_size=8,
)


class NoEngine:
    """Takes states and does nothing with them."""

    workers = 1

    splits_masters = True

    def place_on_host(self, row: int, states: RowStates) -> None: ...
    def place_on_device(self, row: int, states: RowStates) -> None: ...
    def place_streamed(self, row: int, states: RowStates) -> None: ...


def store_of(rows: Rows) -> StateStore:
    weights = [torch.ones(row.numel, dtype=DTYPES[row.itemsize]) for row, _ in rows]
    units = [number // 3 for number in range(len(rows))]
    return StateStore(weights, units, [row.table for row, _ in rows], cast(Engine, NoEngine()))


def estimate_of(rows: Rows, **options: Any) -> MemoryEstimate:
    return estimate_memory([row for row, _ in rows], [place for _, place in rows], **({"ring_bytes": 0, "pinned": True} | options))


@given(rows=rows_strategy)
def test_it_is_what_the_store_of_states_counts(rows: Rows) -> None:
    """Host bytes of rows on the CPU and of streamed rows, device bytes of the rest, to the byte.

    All states count as if they were on the device, wherever they are.
    """
    store, estimate = store_of(rows), estimate_of(rows)
    of = {place: [row for row, (_, at) in enumerate(rows) if at is place] for place in Placement}
    assert estimate.host_states_bytes + estimate.host_slots_bytes == store.host_bytes(of[Placement.CPU])
    assert estimate.host_streamed_bytes == store.host_bytes(of[Placement.STREAM], Placement.STREAM)
    assert estimate.device_states_bytes == store.device_bytes(of[Placement.GPU])
    assert estimate.all_states_bytes == estimate_of([(row, Placement.GPU) for row, _ in rows]).device_states_bytes


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_new_weights_that_have_memory_of_their_own_count(dtype: torch.dtype, splits: bool) -> None:
    """Gradients stay in their slots, so a new 16-bit weight has memory of its own.

    Only a weight that is half of its master has none.
    """
    engine = NoEngine()
    engine.splits_masters = splits
    store = StateStore([torch.ones(100, dtype=dtype)], [0], [ADAMW_DEFAULT], cast(Engine, engine))
    apart = dtype == torch.float16 or not splits
    out_bytes = store.form_of(Piece(0, 0, 100)).out_bytes
    assert out_bytes == (padded_bytes(200) if apart else 0)
    estimate = estimate_memory([RowSize(100, 2, out_bytes=out_bytes)], [Placement.CPU], ring_bytes=0, pinned=True)
    assert estimate.host_bytes == store.host_bytes([0])
    store.allocate(whole_pieces([100], [Placement.CPU]), None)
    out, slot = store[0].out, store[0].slot
    assert slot is not None
    assert (out is not None) == apart
    assert out is None or (out.dtype == dtype and out.numel() == 100 and out.data_ptr() >= slot.data_ptr() + slot.nbytes)
    store.move(whole_pieces([100], [Placement.STREAM]), None)
    assert store[0].slot is None
    assert store[0].out is None


@settings(deadline=None, max_examples=30)
@given(rows=rows_strategy)
def test_it_is_what_is_allocated(rows: Rows) -> None:
    """The tensors of every row, padded as slabs pad them, add up to the estimate.

    A state that is the weight itself counts once.
    """
    store, estimate = store_of(rows), estimate_of(rows)
    store.allocate(whole_pieces([size.numel for size, _ in rows], [place for _, place in rows]), None)
    host = device = 0
    for row, (size, place) in enumerate(rows):
        states = store[row]
        tensors = [states.master, *states.states, states.slot]
        found = [tensor for tensor in tensors if tensor is not None]
        if states.low is not None:
            assert states.low.data_ptr() == states.master.data_ptr() + states.master.nbytes, "the halves of a master stand together"
            found[0] = states.master.new_empty(size.numel, dtype=torch.float32)
        if place is Placement.GPU:
            device += sum(tensor.nbytes for tensor in found[size.itemsize == 4 :])
        else:
            host += sum(padded_bytes(tensor.nbytes) for tensor in found)
    assert (host, device) == (estimate.host_bytes, estimate.device_states_bytes)


def test_a_parameter_takes_14_bytes_on_the_host_and_12_streamed() -> None:
    """16-bit parameters: states and slot, or states alone."""
    size = RowSize(1 << 20, 2)
    assert estimate_of([(size, Placement.CPU)]).host_bytes == 14 << 20
    assert estimate_of([(size, Placement.STREAM)]).host_bytes == 12 << 20
    assert estimate_of([(size, Placement.GPU)]).device_bytes == (2 + 2 + 12) << 20


def test_tiers_add_up() -> None:
    """Totals are all of the device and all of the host.

    Pinned is all of the host for a GPU, and nothing for the CPU.
    """
    rows: Rows = [(RowSize(640, 2), place) for place in Placement]
    estimate = estimate_of(rows, ring_bytes=1000)
    staging = 6 * 3 * 640 * 4
    assert estimate.device_bytes == 3 * 1280 + 3 * 640 * 4 + 2 * 1280 + 1000 + staging
    assert estimate.pinned_bytes == estimate.host_bytes == 2 * 3 * 640 * 4 + 1280
    assert estimate_of(rows, pinned=False).pinned_bytes == 0


@pytest.mark.parametrize("table", [ADAMW_DEFAULT, ADAMW], ids=["", "amsgrad"])
@pytest.mark.parametrize("numel", [100, 5000])
def test_staging_is_what_the_engine_takes(numel: int, table: StateTable) -> None:
    """The native engine's own area for a streamed row, to the byte; none without one."""
    assert staging_bytes([]) == 0
    engine = NativeEngine(torch.device("cpu"), 1, 1 << 20, 20.0)
    try:
        engine.add_row(RowSpec(numel, 0, torch.ones(numel)))
        engine.place_streamed(0, RowStates(table, torch.zeros(numel), tuple(torch.zeros(numel) for _ in table.states)))
        assert engine._staging is not None
        assert engine._staging.nbytes == staging_bytes([RowSize(numel, 4, table)])
    finally:
        engine.close()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("k", "streamed"), [(0, 0), (0, 26), (5, 7), (26, 0)])
def test_a_report_has_the_same_bytes(moments: Moments, autocast: bool, k: int, streamed: int) -> None:
    """What a report says of a Llama of 1.3 G parameters is what the runtime estimates, to the byte.

    The first k units rest on the device, the last `streamed` ones visit it, the CPU updates the
    others.
    """
    shape = replace(read_shape("llama-1.3b"), moments=moments, autocast=autocast)
    sizes, n = [u.params for u in shape.units], len(shape.units)
    table = ADAMW.under({MOMENTS: moments})
    places = k * [Placement.GPU] + (n - k - streamed) * [Placement.CPU] + streamed * [Placement.STREAM]
    rows: Rows = [(RowSize(numel, 2, table, copied=autocast), place) for numel, place in zip(sizes, places, strict=True)]
    told, estimate = footprint(shape, 16, k, streamed_params=sum(sizes[n - streamed :])), estimate_of(rows)
    assert told.weights_bytes == estimate.weights_bytes
    assert told.gpu_states_bytes == estimate.device_states_bytes + estimate.staging_bytes
    assert told.host_states_bytes == estimate.host_states_bytes + estimate.host_streamed_bytes
    assert told.host_slots_bytes == estimate.host_slots_bytes
    assert told.host_bytes == estimate.pinned_bytes


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_report_moves_the_same_bytes(moments: Moments) -> None:
    """Updates of bf16 parameters move what the store of states says, over link and host memory."""
    rows: Rows = [(RowSize(numel, 2, ADAMW.under({MOMENTS: moments})), Placement.CPU) for numel in (640, 1280)]
    assert store_of(rows).traffic(range(2)) == replace(read_shape("llama-1.3b"), moments=moments).traffic
