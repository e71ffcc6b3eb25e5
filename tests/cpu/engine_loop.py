"""A training loop on the bare engine: every bit is checked against `RowStates.update_`.

Gradients come from a generator, weights are on the "device".
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from hytrain_fx.ir.states import ADAMW, ADAMW_DEFAULT, StateTable
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.engine import CommitItem, Engine, RowSpec, RowStates
from hytrain_fx.runtime.rounding import RoundingPlace, parameter_key
from hytrain_fx.runtime.states.split_master import split, whole_states

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


NARROW = ADAMW.under({"moments": "bf16"})


def host_states(weight: torch.Tensor, halves: bool = False, narrow: bool = False) -> RowStates:
    """States of a row on the host, whose master equals the weight.

    With `halves`, for bf16, the master is in two halves. With `narrow`, moments are bf16.
    """
    master = weight.float().flatten().clone()
    slot = torch.zeros(weight.numel(), dtype=weight.dtype)
    states = RowStates(*_table_and_states(master, narrow), slot, place=_place(weight))
    if not halves:
        return states if weight.dtype == torch.float32 else replace(states, out=torch.zeros_like(slot))
    high, low, marked = split(master, states.marked())
    return replace(states, master=high, low=low, states=(states.states[0], marked))


def _table_and_states(master: torch.Tensor, narrow: bool) -> tuple[StateTable, torch.Tensor, tuple[torch.Tensor, ...]]:
    dtype = torch.bfloat16 if narrow else torch.float32
    return NARROW if narrow else ADAMW_DEFAULT, master, tuple(torch.zeros_like(master, dtype=dtype) for _ in range(2))


def _place(weight: torch.Tensor) -> RoundingPlace:
    """As of a piece of some parameter; rows of different sizes have different ones."""
    return RoundingPlace(parameter_key(weight.numel()), (1 << 32) - 100)


def device_states(weight: torch.Tensor, narrow: bool = False) -> RowStates:
    """States of a row on the device; an fp32 weight is its own master."""
    master = weight.flatten() if weight.dtype == torch.float32 else weight.float().flatten()
    return RowStates(*_table_and_states(master, narrow), place=_place(weight))


def assert_same_states(found: RowStates, expected: RowStates, of: str = "a row") -> None:
    """Masters, in one piece, and states have the same bits."""
    assert torch.equal(found.master, expected.master), f"the master of {of} differs"
    for name, state in expected.named().items():
        assert torch.equal(found.named()[name], state), f"{name} of {of} differs"


@dataclass
class EngineLoop:
    """Rows with weights on the engine's device, and the reference's master weights and moments."""

    engine: Engine
    sizes: tuple[int, ...]
    dtype: torch.dtype
    on_device: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    halves: bool = False
    narrow: bool = False  # moments
    pinned: bool = True
    sends_weight: bool = False  # streamed rows, in halves: the weight goes home in each step
    states: list[RowStates] = field(default_factory=list)  # those on the host rest there; device rows have others
    weights: list[torch.Tensor] = field(default_factory=list)
    reference: list[RowStates] = field(default_factory=list)
    step_count: int = 0
    grads: dict[int, torch.Tensor] = field(default_factory=dict)  # of the last step
    launching_s: float = 0.0  # that the launching of each row on the host takes longer

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        for row, size in enumerate(self.sizes):
            weight = torch.randn(size).to(self.dtype)
            self.weights.append(weight)
            self.reference.append(host_states(weight, narrow=self.narrow))
            states = host_states(weight, self.halves and self.dtype == torch.bfloat16, self.narrow)
            self.states.append(replace(states, pinned=self.pinned))
            self.engine.add_row(RowSpec(size, row, weight))
            if self.sends_weight:
                self.engine.send_weight(row, True)
            if row in self.on_device:
                self.engine.place_on_device(row, device_states(weight, self.narrow))
            elif row in self.streamed:
                self.engine.place_streamed(row, replace(self.states[row], slot=None))
            else:
                self.engine.place_on_host(row, self.states[row])

    def step(self) -> None:
        """One backward in reverse order and one commit."""
        self.step_count += 1
        rows = list(range(len(self.sizes)))
        self.engine.wait(rows)
        group = {**GROUP, "moments": "bf16"} if self.narrow else GROUP
        scalars = AdamScalars.of(group, self.step_count, decoupled=True, torch_cuda=False)
        hosted = [row for row in rows if row not in self.on_device | self.streamed]
        grads = {row: torch.randn(self.sizes[row]).to(self.dtype) for row in rows}
        for row in rows:  # now: after the commit the next wait() is not long in coming
            state = self.reference[row]
            state.update_(scalars, grads[row], None)
        for row in reversed(hosted):
            buffer = grads[row].clone()
            self.engine.grad_offload([row], [buffer])
            buffer.fill_(float("nan"))  # its memory is somebody else's at once
            self.engine.arm_cpu([row])
            self.engine.arm_reload([row])
            time.sleep(self.launching_s)
            self.engine.release([row])
        self.engine.arm_gpu(rows)
        items = [CommitItem(row, scalars) for row in hosted]
        items += [CommitItem(row, scalars, grad=grads[row], at_end=True) for row in rows if row not in hosted]
        self.engine.commit(items)
        self.grads = grads

    def bring_weight_home(self, row: int) -> None:
        """Copy the weight's half of a drained row's master home, where only the device has it."""
        if row in self.streamed and not self.sends_weight and self.states[row].low is not None:
            self.states[row].master.copy_(self.weights[row])

    def check(self) -> None:
        """Every weight has the reference's bits."""
        self.engine.drain(range(len(self.sizes)))
        for row, (weight, state) in enumerate(zip(self.weights, self.reference, strict=True)):
            assert torch.equal(weight, state.master.to(self.dtype)), f"row {row} differs"
            if row not in self.on_device:
                self.bring_weight_home(row)
                found = whole_states(self.states[row], torch.device("cpu"))
                assert_same_states(found, state, f"row {row}")
