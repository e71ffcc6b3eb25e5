"""torch.distributed.checkpoint and safetensors restore weights and states bit for bit.

Tied weights and masters come back too, also when saved in mid-update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import hytrain_fx
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, Twins, assert_same, plain_loop, weights
from .models import Batches
from .saved import through_a_file

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(self.wte(tokens[:, :-1])))).flatten(0, 1), tokens[:, 1:].flatten())


def tied(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batches]:
    return Tied().to(dtype), [(torch.randint(0, 11, (2, 6)),) for _ in range(3)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    """States on both sides, every update and copy late."""
    made = Twins(lambda: tied(request.param), k=1, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))  # the plan is put in force in forward order at the second forward
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 2000)
    yield made
    made.close()


def trained(twins: Twins, steps: int = 2) -> tuple[Any, Any]:
    """Put back to the start and trained; the last updates are still running."""
    twins.restart()
    plain_loop(steps)(twins.ours, twins.optimizer, twins.batches)
    return twins.ours, twins.optimizer


def goes_on(twins: Twins) -> dict[str, torch.Tensor]:
    plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    return weights(twins.ours)


def test_reading_states_for_distributed_checkpoint_is_no_step(twins: Twins) -> None:
    """get_state_dict does not change weights, moments or step counts.

    It has names where state_dict has numbers.
    """
    model, optimizer = trained(twins)
    before, packed = weights(model), optimizer.state_dict()
    saved_weights, saved = get_state_dict(model, optimizer)
    assert_same(weights(model), before)
    torch.testing.assert_close(optimizer.state_dict(), packed, rtol=0, atol=0)
    assert saved_weights.keys() == before.keys()
    for number, (name, _) in enumerate(model.named_parameters()):
        torch.testing.assert_close(saved["state"][name], packed["state"][number], rtol=0, atol=0)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_distributed_checkpoint_resumes_bit_for_bit(twins: Twins, flat: bool, tmp_path: Path) -> None:
    """After loading into a fresh state, two more steps give the bits of never having stopped.

    The run trains on between saving and loading.
    """
    options = FLAT if flat else None
    model, optimizer = trained(twins)
    saved, states = get_state_dict(model, optimizer, options=options)
    save({"model": saved, "optimizer": states}, checkpoint_id=tmp_path)
    expected = goes_on(twins)

    twins.restart()  # no states, as after a restart of the process: torch makes some by a step with lr 0
    saved, states = get_state_dict(model, optimizer, options=options)
    load({"model": saved, "optimizer": states}, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=states, options=options)
    assert_same(goes_on(twins), expected)


def test_a_distributed_checkpoint_of_plain_torch_loads_here() -> None:
    """In fp32 torch's AdamW loads what ours has saved, and ours loads what torch's has saved.

    States and their names are the same.
    """
    torch.manual_seed(0)
    (plain, batches), (ours, _) = tied(), tied()
    torch._dynamo.reset()
    theirs = torch.optim.AdamW(plain.parameters(), foreach=False, **HYPER)
    plain_loop(3)(plain, theirs, batches)
    _, optimizer = hytrain_fx.compile(ours, torch.optim.AdamW(ours.parameters(), **HYPER), k=1)
    plain_loop(1)(ours, optimizer, batches)
    set_model_state_dict(ours, get_model_state_dict(plain))
    set_optimizer_state_dict(ours, optimizer, get_optimizer_state_dict(plain, theirs))
    assert_same(weights(ours), weights(plain))
    torch.testing.assert_close(optimizer.state_dict()["state"], theirs.state_dict()["state"], rtol=0, atol=0)

    plain_loop(1)(ours, optimizer, batches)
    set_optimizer_state_dict(plain, theirs, get_optimizer_state_dict(ours, optimizer))
    torch.testing.assert_close(theirs.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    hytrain_fx.close(ours)


def test_safetensors_resumes_bit_for_bit(twins: Twins, tmp_path: Path) -> None:
    """save_model of tied weights and save_file of the states restore every bit.

    The states are flat, as distributed checkpoint makes them.
    """
    model, optimizer = trained(twins)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
    tensors = {name: value for name, value in flat.items() if torch.is_tensor(value)}
    others = {name: value for name, value in flat.items() if name not in tensors}
    safetensors.save_file(tensors, str(tmp_path / "optimizer.safetensors"))
    assert {name.rsplit(".", 1)[1] for name in tensors} >= {"step", "exp_avg", "exp_avg_sq"}
    expected = goes_on(twins)

    twins.restart()
    missing, unexpected = safetensors.load_model(model, str(tmp_path / "model.safetensors"))
    assert (missing, unexpected) == (set(), [])
    found = safetensors.load_file(str(tmp_path / "optimizer.safetensors"))
    set_optimizer_state_dict(model, optimizer, {**found, **others}, options=FLAT)
    assert model.head.weight is model.wte.weight
    assert_same(goes_on(twins), expected)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    stop=st.integers(0, 3),
    where=st.sampled_from(["after forward", "after backward", "after step", "after zero_grad"]),
    astray=st.integers(0, 2),
    weights_first=st.booleans(),
)
def test_a_checkpoint_of_any_moment_resumes_bit_for_bit(twins: Twins, stop: int, where: str, astray: int, weights_first: bool) -> None:
    """A checkpoint of any point of any step resumes as if training had never stopped.

    It is saved with updates in flight, and loaded after other steps.
    """
    whole = 5
    model, optimizer = trained(twins, whole)
    expected = weights(model)
    _, optimizer = trained(twins, stop)
    saved: Any = None

    def moment(here: str) -> None:
        nonlocal saved
        if here == where:
            saved = through_a_file(model.state_dict(), optimizer.state_dict())

    loss = model(*twins.batches[stop % 3])
    moment("after forward")
    loss.backward()
    moment("after backward")
    optimizer.step()
    moment("after step")
    optimizer.zero_grad()
    moment("after zero_grad")
    plain_loop(astray)(model, optimizer, twins.batches)
    calls = [lambda: model.load_state_dict(saved[0]), lambda: optimizer.load_state_dict(saved[1])]
    for call in calls if weights_first else reversed(calls):
        call()
    done = stop + (where in ("after step", "after zero_grad"))
    for step in range(done, whole):
        plain_loop(1)(model, optimizer, [twins.batches[step % 3]])
    assert_same(weights(model), expected)
