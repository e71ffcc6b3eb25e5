"""Thirteen families of models train with the plain model's bits under every sort of plan.

What they are captured into is counted on the way: graphs, breaks, units, waits and inserted nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import hytrain_fx
from benchmarks.counts import Counts, Units, counts_of, counts_table, units_of_large
from benchmarks.families import FAMILIES, SMALL, batches, blocks, build, family_of
from benchmarks.models import loss_of, trained
from hytrain_fx.capture.units import LARGEST_SHARE, SMALLEST_LIMIT

from .loops import HYPER, HandAdam, assert_same, weights

pytest.importorskip("transformers")

CPU = torch.device("cpu")
PLANS: dict[str, dict[str, Any]] = {
    "host": {"gpu_states": 0.0, "stream": 0.0},
    "device": {"gpu_states": 1.0},
    "streamed": {"k": 0, "stream": 1.0},
    "mixed": {"k": 1, "stream": 0.5},
    "solved": {},
}
STEPS = 4
NODES_A_UNIT = 6  # offload, three kinds of update, release, wait
# The sample has one family for each plan: the first, third, sixth, eighth and eleventh, whose
# compile is short.
ORDER = ("dlrm", "gpt2", "gnn", "vit", "moe", "lstm", "bert", "dit", "convnext", "mamba", "qwen2", "t5", "whisper")


@dataclass(frozen=True)
class Trained:
    """What four steps of a family's small model leave."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    counts: Counts | None


def train(name: str, plan: str | None) -> Trained:
    """Train it under a plan; with None compiled by torch alone, with the reference's optimizer."""
    torch._dynamo.reset()
    model: Any = build(name + SMALL, CPU, torch.float32)
    optimizer: Any
    if plan is None:
        optimizer = HandAdam(trained(model), **HYPER)
        model.compile(options={"layout_optimization": False})  # ours keeps layouts too, and convolutions of others may have other bits
    else:
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(trained(model), **HYPER), engine="native", **PLANS[plan])
    size, losses = family_of(name + SMALL)[1], list[float]()
    data = batches(name + SMALL, size.batch, size.length, CPU, torch.float32)
    torch.manual_seed(1)  # of dropout

    def step() -> None:
        loss = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(STEPS - 1):
        step()
    counts = None
    if plan is None:
        step()
    else:
        counts = counts_of(model, step)
    found = Trained(losses, weights(model), counts)
    if plan is not None:
        hytrain_fx.close(model)
    return found


@cache
def plain(name: str) -> Trained:
    """The reference, once for all plans."""
    return train(name, None)


@pytest.mark.sample(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ORDER)
def test_a_family_trains_with_the_plain_models_bits(name: str, plan: str) -> None:
    """Four steps, dropout where the model has it.

    There is one forward graph and one backward graph. Only GPT-2 may have more of them, because
    transformers warns in the middle of its forward. Every unit is waited for once a step, and has
    at most one node of each kind.
    """
    found, expected = train(name, plan), plain(name)
    assert found.losses == expected.losses
    assert_same(found.weights, expected.weights)
    counts = found.counts
    assert counts is not None
    assert counts.params <= 200_000
    assert counts.graphs == 2 * (1 + len(counts.breaks))
    assert all(name == "gpt2" and "modeling_gpt2.py" in place for place in counts.breaks)
    assert counts.units.count == counts.waits
    assert counts.inserted <= NODES_A_UNIT * counts.units.count + counts.graphs


def test_every_family_is_trained() -> None:
    """The order has all of them."""
    assert sorted(ORDER) == sorted(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_the_large_model_can_be_drawn(name: str) -> None:
    """The config says all that a batch needs, such as the size of the vocabulary."""
    _, of = family_of(name)
    batch = next(batches(name, 1, of.length, CPU, torch.bfloat16))
    assert batch
    assert all(tensor.numel() for tensor in batch.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_large_size_has_the_parameters_that_it_says(name: str) -> None:
    """From half a billion to three. Blocks are found, and so are units.

    A unit is a small part of the model, or one large tensor.
    """
    family, large = family_of(name)
    with torch.device("meta"):
        model = family.make(large.config)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert params / 1e9 == pytest.approx(large.params_g, abs=0.01)
    assert 0.5e9 <= params <= 3.2e9
    assert blocks(name, model)
    units = units_of_large(name)
    assert units.count >= 8
    numels = [parameter.numel() for parameter in trained(model)]
    assert units.largest * sum(numels) <= 1.001 * max(SMALLEST_LIMIT, LARGEST_SHARE * sum(numels), *numels)


def test_the_table_of_counts_names_each_break() -> None:
    """A line for each family, with where torch.compile ended its graphs."""
    text = counts_table({"gpt2": (Counts(1000, 4, ("model.py:7 in forward: a | b",), Units(5, 0.45), 6, 30), Units(50, 0.05))})
    line = r"| gpt2 | 1000 | 4 | 1 | 5 | 45% | 6 | 6.0 | 50 | 5.0% | model.py:7 in forward: a \| b |"
    assert text.splitlines()[-1] == line
