"""Fp32 masters of bf16 weights on the host, in two halves: the weight and the low 16 bits.

csrc/split_chunk.h describes the format.

The weight that goes to the device is half of the master already, so it rests once, not twice.
Rounding to nearest even hides one bit, which way a tie went; the sign of a state that is never
negative holds it (ir/states.py: `marks_ties`). Finite masters and infinities come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.engine import RowStates

_TIE = 0x8000


def join(high: torch.Tensor, low: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """The masters [n] fp32 of `high` [n] bf16, `low` [n] int16 and the signs of `marked` [n].

    All are on one device.
    """
    tail = low.to(torch.int32) & 0xFFFF
    went_up = (tail > _TIE) | ((tail == _TIE) & torch.signbit(marked))
    return (((high.view(torch.int16).to(torch.int32) - went_up.to(torch.int32)) << 16) | tail).view(torch.float32)


def split(master: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`high`, `low` and the marked state of masters [n] fp32 and a state [n].

    The signs that the state had are lost.
    """
    bits = master.view(torch.int32)
    tail = bits & 0xFFFF
    went_up = (tail == _TIE) & ((bits >> 16) & 1).to(torch.bool)
    return master.to(torch.bfloat16), tail.to(torch.int16), torch.where(went_up, -state.abs(), state.abs())


def is_rounding(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Which elements of a 16-bit weight [n] are the rounding of its master [n] on one device."""
    return master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)


def all_rounded(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether all are, wherever both are: it copies the weight in chunks."""
    chunks = zip(master.split(CHUNK_PARAMS), weight.split(CHUNK_PARAMS), strict=True)
    return all(bool(is_rounding(part, of.to(part.device)).all()) for part, of in chunks)


def whole_states(states: RowStates, device: torch.device) -> RowStates:
    """The states with masters in one piece and no marks.

    They are the same tensors, or copies where masters are in halves.

    device   where to compute; copies stay on the states' device
    """
    if states.low is None:
        return states
    marked = states.marked()
    unmarked = tuple(torch.empty_like(state) if state is marked else state for state in states.states)
    whole = RowStates(states.table, torch.empty_like(marked, dtype=torch.float32), unmarked, place=states.place)
    _join_into(whole, states, device)
    return whole


def halved(states: RowStates, device: torch.device) -> RowStates:
    """The states with a whole master in two halves, in the same memory; computes on `device`."""
    numel, whole = states.master.numel(), replace(states, master=states.master.clone())
    high, low = states.master.view(torch.bfloat16)[:numel], states.master.view(torch.int16)[numel:]
    halves = replace(states, master=high, low=low)
    split_into(halves, whole, device)
    return halves


def copy_states(source: RowStates, target: RowStates, device: torch.device) -> None:
    """Write every state of `source` into `target`, whichever of them has masters in halves.

    Computes on `device`.
    """
    if source.low is not None and target.low is not None:
        for to, half in ((target.master, source.master), (target.low, source.low), (target.marked(), source.marked())):
            to.copy_(half)
    elif source.low is not None:
        _join_into(target, source, device)
    elif target.low is not None:
        split_into(target, source, device)
    else:
        if target.master.data_ptr() != source.master.data_ptr():
            target.master.copy_(source.master)
    in_halves = source.low is not None or target.low is not None
    for number, (to, state) in enumerate(zip(target.states, source.states, strict=True)):
        # else it is written already, with the master
        if not in_halves or number != source.table.tie:
            to.copy_(state)
    if source.own is not None and target.own is not None:
        target.own.take(source.own, target.master.device)


def _join_into(target: RowStates, source: RowStates, device: torch.device) -> None:
    assert source.low is not None
    state, unmarked = source.marked(), target.marked()
    for begin in range(0, source.master.numel(), CHUNK_PARAMS):
        part = slice(begin, begin + CHUNK_PARAMS)
        high, low, marked = (tensor[part].to(device) for tensor in (source.master, source.low, state))
        target.master[part].copy_(join(high, low, marked))
        unmarked[part].copy_(marked.abs())


def split_into(target: RowStates, source: RowStates, device: torch.device) -> None:
    """Write the whole master and the state to be marked of `source` into the halves of `target`.

    The two may share that state.
    """
    assert target.low is not None
    state, to_mark = source.marked(), target.marked()
    for begin in range(0, source.master.numel(), CHUNK_PARAMS):
        part = slice(begin, begin + CHUNK_PARAMS)
        high, low, marked = split(source.master[part].to(device), state[part].to(device))
        target.master[part].copy_(high)
        target.low[part].copy_(low)
        to_mark[part].copy_(marked)


# ---- Fp32 masters from the weights of a model, at the speed of the link ----
#
# A blocking `copy_` of a 16-bit weight on a GPU to an fp32 tensor on the host goes by a fresh
# unpinned tensor of the weight's size, then is converted by the CPU. An asynchronous one is
# converted on the GPU and goes straight to pinned memory; by chunks, the GPU needs one chunk of
# memory for it.


FirstWeight = Callable[[int], torch.Tensor | None]
"""By row: the weight that its master begins with, flat on any device, until the next is asked for.

None: the one on the device."""


def on_the_device(row: int) -> None:
    """Every weight is on the device."""


def load_masters(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write each weight into its master, both flat, on any devices.

    A master that is its weight's own memory is left alone.

    pairs    (master [n] fp32, weight [n] fp32, bf16 or fp16)

    Returns when all are written.
    """
    devices: set[torch.device] = set()
    for master, weight in pairs:
        if master.data_ptr() == weight.data_ptr():
            continue
        for to, source in zip(master.split(CHUNK_PARAMS), weight.split(CHUNK_PARAMS), strict=True):
            to.copy_(source, non_blocking=True)
        devices |= {one.device for one in (master, weight) if one.device.type == "cuda"}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
