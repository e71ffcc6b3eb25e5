"""Several forwards and backwards for one step: gradients add up as in plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.utils import clip_grad_norm_

from hytrain_fx.runtime.engine import Stage

from .loops import Loop, Twins, compare, plain_loop
from .models import Batches, mlp


@pytest.fixture(scope="module", params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))
    for stage in (Stage.D2H, Stage.GPU_UPDATE):
        made.session.engine.set_delay(stage, 500)
    yield made
    made.close()


def grads(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def accumulating(lengths: list[int], clip: bool = False, read: bool = False) -> Loop:
    """Steps of several backwards each."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found = []
        at = 0
        for length in lengths:
            for _ in range(length):
                loss = model(*batches[at % 3]) / length
                loss.backward()
                found.append(float(loss.detach()))
                at += 1
            if read:
                found += [float(g.sum()) for g in grads(model)]
            if clip:
                found.append(float(clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    return loop


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), clip=st.booleans(), read=st.booleans())
def test_accumulation_of_any_and_changing_length(twins: Twins, lengths: list[int], clip: bool, read: bool) -> None:
    """Several backwards before a step add up to plain torch's bits, with and without a clip."""
    twins.agree(accumulating(lengths, clip, read))


def test_two_forwards_before_one_backward(twins: Twins) -> None:
    """A loss of two model calls, and two losses whose backwards come after both forwards."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            first, second = model(*batches[0]), model(*batches[1])
            losses += [float(first.detach()), float(second.detach())]
            if step % 2:
                (first + 2 * second).backward()
            else:
                second.backward()
                first.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    twins.agree(loop)


def retaining(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(*batches[step])
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("k", [0, 2])
def test_two_backwards_through_one_graph(k: int) -> None:
    """retain_graph=True: the second backward adds its gradient again.

    torch.compile allows it with donated buffers off.

    The cache of graphs does not know of that switch (torch 2.13): off too, or a graph that donates
    its buffers is found there.
    """
    with functorch_config.patch(donated_buffer=False), inductor_config.patch(fx_graph_cache=False):
        compare(mlp, retaining, k=k)


def test_a_refused_second_backward_leaves_training_whole(twins: Twins) -> None:
    """Training goes on exactly after a refused second backward and zero_grad().

    With donated buffers torch.compile refuses retain_graph=True.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        with pytest.raises(RuntimeError, match="donated"):
            model(*batches[0]).backward(retain_graph=True)
        optimizer.zero_grad()
        return losses + plain_loop(2)(model, optimizer, batches)

    twins.agree(loop)
