"""One parameter's step of any optimizer, traced or op by op.

It has the bits of the optimizer itself, or is refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MASTER_ALONE
from hytrain_fx.runtime.any_optimizer.rule import UpdateRule
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.own_states import OwnStates

from .optimizers import EVERY, OP_BY_OP, TRACED, Around, GlobalNorm, Noisy, NormCounter, Packing, Sharp, make

SHAPES = ((4, 3), (2, 6))
NAMES = ("first", "second")


class Beside:
    """An optimizer on its parameters, and its rule on rows that begin like them."""

    def __init__(self, name: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.optimizer = make(name, self.parameters, **options)
        self.twin = make(name, self.parameters, **options)  # whose groups and attributes the rule reads and sets
        self.rule = UpdateRule(self.twin, self.parameters, NAMES)
        self.group = self.twin.param_groups[0]
        entries = [copy.deepcopy(self.optimizer.state.get(p)) for p in self.parameters]
        self.rows = [RowStates(MASTER_ALONE, p.detach().clone().flatten(), own=OwnStates(entry))
                     for p, entry in zip(self.parameters, entries, strict=True)]

    def step(self, **options: Any) -> None:
        """One step of both, with these options from now on."""
        for group in (self.optimizer.param_groups[0], self.group):
            group.update(options)
        grads = [torch.randn(shape) for shape in SHAPES]
        steps = self.rule.steps([self.group], dict(enumerate(self.rows)))
        for row, (p, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            p.grad = grad
            steps[row](self.rows[row], grad.clone().flatten(), (), None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """The same weights, states and options, bit for bit."""
        for p, row in zip(self.parameters, self.rows, strict=True):
            assert torch.equal(row.master.view(p.shape), p.detach())
            assert row.own is not None
            assert_same_entry(row.own.entry or {}, self.optimizer.state.get(p, {}))
        ours, plain = ({k: v for k, v in g.items() if k != "params"} for g in (self.group, self.optimizer.param_groups[0]))
        assert ours == plain
        assert getattr(self.twin, "warm_up", None) == getattr(self.optimizer, "warm_up", None)


def assert_same_entry(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names with the same bits and dtypes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("name", EVERY)
def test_steps_have_the_optimizers_own_bits(name: str) -> None:
    """Eight steps under a changing learning rate leave what the optimizer itself leaves.

    That is weights, states and group options.
    """
    beside = Beside(name)
    for step in range(8):
        beside.step(lr=0.1 / (step + 1))
        beside.check()


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 0.95), st.floats(0, 0.5), st.booleans(), st.booleans(), st.lists(st.floats(1e-4, 0.5), min_size=2, max_size=4))
def test_any_options_of_sgd(momentum: float, decay: float, nesterov: bool, maximize: bool, rates: list[float]) -> None:
    """Whatever the options, the bits agree, also where momentum and rate change between steps."""
    beside = Beside("SGD", momentum=momentum, weight_decay=decay, nesterov=nesterov and momentum > 0, maximize=maximize)
    for rate in rates:
        beside.step(lr=rate, momentum=momentum * (1 - rate))
        beside.check()


@pytest.mark.parametrize("name", TRACED)
def test_graphs_serve_every_step(name: str) -> None:
    """A new rate and a new step count need no new graph.

    Two kinds of rows have at most six graphs after eight steps (RAdam has three forms).
    """
    beside = Beside(name)
    for step in range(8):
        beside.step(lr=0.1 / (step + 1))
    (note,) = beside.rule.notes
    assert "is traced" in note
    assert int(note.split("traced: ")[1].split()[0]) <= 6


@pytest.mark.parametrize("name", OP_BY_OP)
def test_what_cannot_be_traced_is_said(name: str) -> None:
    """The note names the optimizer, a parameter and the reason."""
    beside = Beside(name)
    beside.step()
    (note,) = beside.rule.notes
    assert note.startswith(f"{name} cannot be traced for 2 parameters (first, ...), its own step runs op by op: ")


def test_16_bit_rows_step_their_masters() -> None:
    """The gradient is multiplied by its factors in its own dtype, then the fp32 master steps.

    The weight is the rounded master.
    """
    weight = nn.Parameter(torch.randn(4, 3).bfloat16())
    rule = UpdateRule(make("SGD nesterov", [weight]), [weight], ["w"])
    master = nn.Parameter(weight.detach().float())
    plain = make("SGD nesterov", [master])
    states = RowStates(MASTER_ALONE, master.detach().clone().flatten(), own=OwnStates())
    for _ in range(3):
        grad = torch.randn(4, 3).bfloat16()
        slot = grad.clone().flatten()
        rule.step_of(0, states)(states, slot, (0.3, 1.7), slot)
        master.grad = ((grad.float() * 0.3).bfloat16().float() * 1.7).bfloat16().float()
        plain.step()
        assert torch.equal(states.master.view(4, 3), master.detach())
        assert torch.equal(slot.view(4, 3), master.detach().bfloat16())


def test_the_gradient_is_not_kept() -> None:
    """A state that is the gradient itself is copied: others use that memory after the step."""
    beside = Beside("GroupCounter")
    (step, _) = beside.rule.steps([beside.group], dict(enumerate(beside.rows))).values()
    grad = torch.ones(12)
    step(beside.rows[0], grad, (), None)
    grad.zero_()
    own = beside.rows[0].own
    assert own is not None
    assert own.entry is not None
    assert bool((own.entry["last"] == 1).all())


def test_bytes_of_states_are_known_before_any_step() -> None:
    """States are factored (4 + 3 fp32 for 4 x 3), of the parameter's shape, or absent."""
    assert Beside("Adafactor").rule.table(0).own_bytes == 4 * (4 + 3)
    assert Beside("SGD nesterov").rule.table(0).own_bytes == 4 * 12
    assert Beside("SGD").rule.table(0).own_bytes == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "LBFGS needs all parameters at once"),
        (GlobalNorm, "GlobalNorm.step.. needs all parameters at once: stepping small tensors one by one gave other weights"),
        (Noisy, "Noisy.step.. draws random numbers"),
        (NormCounter, "NormCounter.step.. sets 'count' on itself or in its group, and cannot be traced"),
        (Sharp, "Sharp.step.. failed on small parameters, called without a closure"),
        (Around, "Around keeps a Parameter in its attribute 'held'"),
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
    ],
)
def test_what_cannot_be_stepped_one_by_one_is_refused(kind: Any, why: str) -> None:
    """The error says what was found, and no random number of the training is drawn."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer, before = kind(parameters), torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=why):
        UpdateRule(optimizer, parameters, NAMES)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", EVERY)
def test_large_parameters_are_taken_by_every_rule(name: str) -> None:
    """They are tried too, also by classes that begin with state."""
    parameters = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(5, 4))]
    assert UpdateRule(make(name, parameters), parameters, NAMES).table(0).own_bytes >= 0


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (8, 8, 8, 8)])
def test_states_in_tensors_of_another_class_are_refused(shape: tuple[int, ...]) -> None:
    """Also where small parameters have plain ones, as with quantized states."""
    small, large = nn.Parameter(torch.randn(63, 65)), nn.Parameter(torch.randn(shape))
    UpdateRule(Packing([small]), [small], ["small"])
    with pytest.raises(UnsupportedError, match="Packing keeps states of large parameters as Block"):
        UpdateRule(Packing([small, large]), [small, large], ["small", "large"])
