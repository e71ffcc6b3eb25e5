"""`explain` says where attention gets a mask that depends on positions alone."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

import hytrain_fx
from benchmarks import llama
from hytrain_fx.api import session_of


class Attention(nn.Module):
    """One layer of it, with a mask that is made of what `mask` says."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.project = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        query, key, value = (of.unflatten(-1, (2, 8)).transpose(1, 2) for of in self.project(x).chunk(3, -1))
        at = torch.arange(8)
        causal = at[:, None] >= at
        masks: Mapping[str, torch.Tensor | None] = {
            "causal": causal, "window": causal & (at[:, None] - at < 3), "padding": causal & real[:, None, None], "trained": self.bias,
            "random": torch.rand(8, 8) < 0.9, "none": None,
        }
        return scaled_dot_product_attention(query, key, value, attn_mask=masks[self.mask], is_causal=self.mask == "none").sum()


@pytest.mark.parametrize(("mask", "calls"), [("causal", 1), ("window", 1), ("padding", 0), ("random", 0), ("trained", 0), ("none", 0)])
def test_a_mask_that_no_input_has_a_part_in_is_named(mask: str, calls: int) -> None:
    """Padding is of the batch, a bias is a weight, a random one a dropout: none can be left out."""
    model = Attention(mask)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)).backward()
    optimizer.step()
    explained = hytrain_fx.explain(model)
    assert [graph.masks_of_positions for graph in session_of(model).capture.graphs] == [calls, 0]
    assert ("attention gets a mask" in explained.details()) == bool(calls)
    assert bool(json.loads(explained.to_json())["attention"]) == bool(calls)
    hytrain_fx.close(model)


def test_a_model_of_transformers_gets_none_under_another_name() -> None:
    """What docs/slow.md says to write; another model keeps its masks."""
    found = dict[str, str | None]()
    for attention in ("sdpa", llama.attention(f"tiny{llama.CAUSAL}")):
        net = LlamaForCausalLM(LlamaConfig(**llama.shape_of("tiny"), use_cache=False))
        net.set_attn_implementation(attention)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters()))
        tokens = torch.randint(0, 512, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        found[attention] = hytrain_fx.explain(model).attention
        hytrain_fx.close(model)
    assert found["sdpa_causal"] is None
    assert found["sdpa"]
    assert "(2 calls in one forward graph)" in found["sdpa"]
