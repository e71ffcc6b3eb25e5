"""Masters in two halves on a GPU: a visit to the device keeps the CPU kernel's bits.

That holds for what it leaves there and for what it brings home.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import CommitItem, RowSpec, RowStates
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.states.split_master import split, whole_states

from ..cpu.adamw_operands import FINITE_KINDS, GROUP, different_bits, kernel_, operands

DEVICE = torch.device("cuda", 0)
LOWS = (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF, None)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "cpu"])
@pytest.mark.parametrize("kind", FINITE_KINDS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_an_update_in_halves_has_the_bits_of_whole_masters(streamed: bool, kind: str, amsgrad: bool) -> None:
    """Weight, master and moments after three steps have the bits of whole masters.

    Ties and their neighbours occur, lengths with and without a tail, and one off 16 bytes.
    """
    scalars = AdamScalars.of(GROUP | {"amsgrad": amsgrad}, 5, decoupled=True, torch_cuda=True)
    engine = NativeEngine(DEVICE, 2, 40 << 20, 20.0)
    try:
        for row, low in enumerate(LOWS):
            n = 40_960 + row * 1237
            whole = operands(n, row, kind, torch.bfloat16, torch.bfloat16)
            whole = replace(whole, v=whole.v.abs(), vmax=torch.zeros(n) if amsgrad else None)
            if low is not None:
                whole.master.copy_(((whole.master.view(torch.int32) & ~0xFFFF) | low).view(torch.float32))
            high, tail, marked = split(whole.master, whole.v)
            start = [pinned(state.clone()) for state in replace(whole, v=marked).states]
            table = ADAMW.under({"amsgrad": amsgrad})
            states = RowStates(table, pinned(high), tuple(start), pinned(torch.zeros_like(high)), pinned(tail))
            weight = high.to(DEVICE)
            engine.add_row(RowSpec(n, row, weight))
            if streamed:
                engine.place_streamed(row, replace(states, slot=None))
            else:
                engine.place_on_host(row, states)
            for step in range(3):
                whole.grad.copy_(operands(n, 100 * step + row, kind, torch.bfloat16, torch.bfloat16).grad)
                grad = whole.grad.to(DEVICE)
                kernel_(whole, scalars)
                if not streamed:
                    engine.grad_offload([row], [grad])
                    engine.arm_cpu([row])
                    engine.arm_reload([row])
                    engine.release([row])
                engine.send_weight(row, step == 2)  # it is home after the last step
                engine.commit([CommitItem(row, scalars, grad if streamed else None, at_end=True)])
                engine.drain([row])
            found = whole_states(states, DEVICE)
            assert whole.out is not None
            assert different_bits(weight.cpu(), whole.out) == 0
            assert different_bits(states.master, whole.out) == 0
            assert different_bits(found.master, whole.master) == 0
            for state, expected in zip(found.states, whole.states, strict=True):
                assert different_bits(state, expected) == 0
    finally:
        engine.close()
