"""Units of parameters, from the module tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.capture.units import group_units, unit_of_rows
from hytrain_fx.errors import UnsupportedError
from tests.cpu import models
from tests.cpu.loops import plain_loop

SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}


def unit_names(model: nn.Module) -> list[str]:
    """The names of the units of all parameters."""
    return [unit.name for unit in group_units(model, [name for name, _ in model.named_parameters()])]


def test_plain_attributes_and_sequentials() -> None:
    """A Linear of a Sequential is a unit, and so is a Linear outside of one."""
    assert unit_names(models.Mlp()) == ["first", "body.0", "body.2", "last"]


def test_blocks_in_nested_sequentials() -> None:
    """A residual block in nested Sequentials is one unit; what is outside is its own module's."""
    nested = nn.Sequential(models.Cnn(), nn.Sequential(nn.Sequential(models.ConvBlock(2)), nn.Linear(2, 2)))
    assert unit_names(models.Cnn()) == ["stem", "layer1.0", "layer1.1", "head"]
    assert unit_names(nested) == ["0", "1.0.0", "1.1"]


def test_transformers_have_a_unit_for_each_layer() -> None:
    """Llama, GPT-2, BERT and ViT group into embeddings, a unit for each layer, and the rest."""
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=11, num_key_value_heads=2, **SMALL))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_layer=2, n_embd=8, n_head=2, n_positions=8))
    bert = BertModel(BertConfig(vocab_size=11, **SMALL))
    vit = ViTModel(ViTConfig(image_size=8, patch_size=4, **SMALL))
    assert unit_names(llama) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    assert unit_names(gpt2) == ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert [name for name in unit_names(bert) if "layer" in name] == ["encoder.layer.0", "encoder.layer.1"]
    assert len([name for name in unit_names(vit) if "layer" in name and "norm" not in name]) == 2


def test_a_tied_parameter_counts_once() -> None:
    """The head of a tied model has no unit of its own."""
    assert unit_names(models.Gpt()) == ["wte", "h.0", "h.1", "ln_f"]


def test_a_parameter_of_the_model_itself() -> None:
    """A parameter that the model owns directly is in the unit with the empty name."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    assert unit_names(model) == [""]


class _Stage(nn.Module):
    """Layers that a module calls which is a container's child, like ConvNeXt's stages."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))


def test_a_large_unit_is_split_into_its_large_children() -> None:
    """Where a layer holds too much, its large parts are units. Small parts stay together."""
    model = nn.Sequential(_Stage(2, 4), _Stage(40, 16), _Stage(1, 64))
    names = [name for name, _ in model.named_parameters()]
    assert [unit.name for unit in group_units(model, names)] == ["0", "1", "2"]
    units = group_units(model, names, smallest_limit=600)
    layers = [f"1.layers.{number}" for number in range(40)]
    assert [unit.name for unit in units] == ["0", "1", *layers, "2", "2.layers.0.0.weight", "2.layers.0.1.weight"]
    assert [names[row] for row in units[-3].rows] == ["2.scale", "2.layers.0.0.bias", "2.layers.0.1.bias"]


def test_an_unknown_name_is_refused() -> None:
    """A name that the model does not have is an error that says it."""
    with pytest.raises(UnsupportedError, match=r"'body\.9\.weight' is no parameter"):
        group_units(models.Mlp(), ["body.9.weight"])
    with pytest.raises(UnsupportedError, match=r"'first\.scale' is no parameter"):
        group_units(models.Mlp(), ["first.scale"])


@settings(max_examples=40, deadline=None)
@given(shape=st.recursive(st.just(None), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=8), keep=st.integers(0, 2**16),
       limit=st.integers(0, 8))
def test_every_row_is_in_exactly_one_unit(shape: object, keep: int, limit: int) -> None:
    """For any tree and any managed parameters, units partition the rows.

    They are numbered in row order.
    """
    model = nn.Sequential(_tree(shape))
    names = [name for i, (name, _) in enumerate(model.named_parameters()) if keep >> i & 1]
    units = group_units(model, names, smallest_limit=limit)
    assert len({unit.name for unit in units}) == len(units)
    assert sorted(row for unit in units for row in unit.rows) == list(range(len(names)))
    assert [unit.number for unit in units] == list(range(len(units)))
    assert sorted(units, key=lambda unit: unit.rows[0]) == list(units)
    assert set(unit_of_rows(units)) == set(range(len(names)))


def _tree(shape: object) -> nn.Module:
    return nn.Sequential(*map(_tree, shape)) if isinstance(shape, list) else nn.Linear(1, 1)


def test_every_layer_of_a_gpt_is_a_unit_in_forward_order() -> None:
    """The plan speaks of layers in forward order, whatever order they were registered in."""
    torch._dynamo.reset()
    model: Any
    model, batches = models.gpt(layers=3)
    blocks = model.h
    del model.h
    model.h = blocks  # registered last
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()))
    plain_loop(2)(model, optimizer, batches)
    names = [unit.name for unit in session_of(model).planning.units()]
    assert names == ["wte", "h.0", "h.1", "h.2", "ln_f"]
    hytrain_fx.close(model)
