"""Weights that rest on the host, on a GPU: bits of resident weights, and memory of the slots."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from benchmarks import llama
from hytrain_fx.api import session_of
from hytrain_fx.config import Weights
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.session.weights_choice import choice_of, with_weights_chosen
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from ..cpu.test_graph_order import recorded, require_layers_in_turn
from .feed_forward import ADAMW, STEPS, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def train(model: Any, optimizer: Any, *, clip: float | None, parts: int = 1) -> list[float]:
    """Some steps of the plain loop, with micro-batches, then an evaluation."""
    losses, data = [], batches()
    for _ in range(STEPS):
        for _ in range(parts):
            loss = loss_of(model, next(data))
            loss.backward()
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(model, next(data)).item())
    return losses


def run(weights: Weights, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch._dynamo.reset()
    model = build(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), weights=weights, k=0, stream=0.0)
    losses = train(model, optimizer, **options)
    if weights == "streamed":
        slots = session_of(model).nodes.fetched
        assert slots.bytes_fetched > 0
        assert slots.slot_bytes > 0
        hytrain_fx.explain(model)
    hytrain_fx.close(model)
    found = [p.detach().clone() for p in model.parameters()]
    del model, optimizer
    gc.collect()
    return losses, found


@pytest.mark.parametrize("nan", [False, True], ids=["slots keep what they have", "slots are NaN once read"])
@pytest.mark.parametrize("options", [{"clip": None}, {"clip": 0.1}, {"clip": 0.1, "parts": 2}], ids=str)
def test_streamed_weights_have_the_bits_of_resident_ones(options: dict[str, Any], nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms and weights, with copies that run beside the kernels."""
    if nan:
        monkeypatch.setenv(NAN_VARIABLE, "1")
    losses, expected = run("resident", **options)
    found_losses, found = run("streamed", **options)
    assert found_losses == losses
    assert all(map(torch.equal, found, expected))


def run_llama(weights: Weights) -> list[torch.Tensor]:
    """Weights after a few steps of a model that recomputes activations."""
    torch._dynamo.reset()
    on_gpu = torch.device("cuda")
    model: Any = llama.build("125m", 128, on_gpu, checkpointing=True)
    data = llama.batches("125m", 1, 128, on_gpu)
    with recorded("fetch", "offload_and_step") as ran:
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), weights=weights, k=0, stream=0.0)
        for _ in range(STEPS):
            loss = model(**next(data)).loss
            ran.clear()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if weights == "streamed":
        require_layers_in_turn(ran, session_of(model).table.names, 12)
    hytrain_fx.close(model)
    return [p.detach().clone() for p in model.parameters()]


def test_layers_that_recompute_have_the_bits_of_resident_weights() -> None:
    """Each layer's weights come once the gradients of the layer behind it have left."""
    resident = run_llama("resident")
    assert all(map(torch.equal, run_llama("streamed"), resident))


WIDTH, LAYERS = 1024, 16


def deep() -> Any:
    """Layers of 2 MiB each."""
    torch._dynamo.reset()
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to("cuda", torch.bfloat16)


def test_saving_and_loading_bring_no_weight_to_the_device() -> None:
    """state_dict() gives copies on the host, and load_state_dict() writes to the weights' homes."""
    model = deep()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), weights="streamed", k=0)
    for _ in range(2):
        model(torch.randn(32, WIDTH, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saved = model.state_dict()
    model.load_state_dict({name: value + 1 for name, value in saved.items()})
    again = model.state_dict()
    assert {value.device.type for value in again.values()} == {"cpu"}
    assert all(torch.equal(again[name], value + 1) for name, value in saved.items())
    assert torch.cuda.max_memory_allocated() - before < WIDTH * WIDTH  # half a matrix
    hytrain_fx.close(model)
    assert all(torch.equal(p.detach().cpu(), again[name]) for name, p in model.named_parameters())


def test_where_weights_rest_follows_what_the_process_may_have() -> None:
    """With "auto": on the device, and away where the process is held to little of it."""
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters())
    weights_bytes = sum(p.nbytes for p in model.parameters())

    def place() -> str:
        choice = choice_of(with_weights_chosen(model, optimizer, hytrain_fx.Config(weights="auto")))
        assert choice is not None
        assert choice.needs.weights_bytes == weights_bytes
        return choice.place

    assert place() == "resident"
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + weights_bytes / 4) / total)
    try:
        assert place() == "streamed"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_device_has_slots_for_three_layers() -> None:
    """Of a deep model the device keeps no matrix from step to step, and few in slots."""
    width, layers = WIDTH, LAYERS
    model = deep()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), weights="streamed")
    for _ in range(3):
        model(torch.randn(32, width, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = hytrain_fx.explain(model).memory
    assert memory.weights_bytes == 2 * width * layers  # the biases
    assert memory.weight_slots_bytes == (UNITS_AHEAD + 1) * 2 * width * width
    hytrain_fx.close(model)
