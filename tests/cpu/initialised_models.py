"""Models that fill their parameters in many ways, for test_from_init.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

Build = Callable[[], Any]


class Odd(nn.Module):
    """Parameters that are made and filled in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.shared.weight  # tied
        self.ready = nn.Parameter(torch.randn(4, 6))  # has values when it is registered
        self.scale = nn.Parameter(torch.ones(6))
        orthogonal = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(orthogonal)
        self.before = orthogonal
        self.after = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(self.after)
        self.cut = nn.Parameter(torch.empty(8, 8))
        nn.init.trunc_normal_(self.cut, std=0.02)
        with torch.no_grad():
            self.cut[2:4].fill_(0.5)
            self.cut.t()[0].normal_()
            self.cut.data.mul_(2)
            self.scale.copy_(torch.rand(6))  # from values that are dropped
            self.scale.add_(self.shared.weight.sum(0))  # from another parameter
        self.register_buffer("table", torch.rand(5), persistent=False)
        self.empty = nn.Embedding(9, 6, padding_idx=3)
        self.normed = nn.BatchNorm2d(3)
        self.many = nn.MultiheadAttention(6, 2)
        self.sparse = nn.Parameter(torch.empty(10, 10))
        self.like = nn.Parameter(torch.empty(3, 3))
        with torch.no_grad():
            self.like.copy_(torch.randn_like(self.like) + torch.zeros_like(self.like))
            self.sparse.bernoulli_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing is asked of it here."""
        return x


class Item(nn.Module):
    """Reads a value of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        nn.init.normal_(self.weight)
        self.largest = float(self.weight.detach().abs().max())
        with torch.no_grad():
            self.weight.mul_(self.largest)


class FromWeight(nn.Module):
    """Has a buffer that is computed from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        sums = torch.zeros(3)
        self.register_buffer("sums", sums)
        torch.sum(self.weight.detach(), 0, out=sums)


class ByOther(nn.Module):
    """Fills a parameter by another reference than the module's, after it was registered."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(3, 3))
        self.weight = weight
        nn.init.normal_(weight)


class OwnGenerator(nn.Module):
    """Draws with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        with torch.no_grad():
            self.weight.normal_(generator=torch.Generator().manual_seed(1))


class ByValues(nn.Module):
    """Draws as many numbers as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        with torch.no_grad():
            self.weight.copy_(torch.poisson(self.weight))


class ByDefault(nn.Module):
    """Leaves dtypes to the default."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(8))
        self.drawn = nn.Parameter(torch.randn(8, 8) * 0.02)
        self.full = nn.Parameter(torch.full((4,), 0.3))
        self.eye = nn.Parameter(torch.eye(4))
        self.steps = nn.Parameter(torch.linspace(0, 1, 5))
        self.divided = nn.Parameter(torch.arange(6) / 7)  # integers become floats of the default
        self.layer = nn.Linear(4, 4)


def under(default: torch.dtype, build: Build) -> Any:
    """What it gives under that default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


class ByNumpy(nn.Module):
    """NumPy has memory of tensors too, and writes to it between operations."""

    def __init__(self) -> None:
        super().__init__()
        values = np.zeros(4, dtype=np.float32)
        shared = torch.from_numpy(values)
        self.sums = nn.Parameter(torch.zeros(4))
        values[:] = 1  # before it is first asked for
        with torch.no_grad():
            self.sums.add_(shared)
            values[:] = 3
            self.sums.add_(shared)
            shared.mul_(2)  # written by both
            values[:] = 3  # what it was when it was last asked for
            self.sums.add_(shared)
            shared.mul_(2)
            self.sums.add_(shared)
            values[2:] += 1
            self.sums.add_(shared)
            self.sums.add_(shared)
        self.filled = nn.Parameter(torch.empty(4))
        self.filled.detach().numpy()[:] = np.arange(4)  # and nothing is done to it afterwards
        self.partly = nn.Parameter(torch.ones(4))
        self.partly.detach().numpy()[1] = 7
        with torch.no_grad():
            self.partly.mul_(2)
            self.partly.detach().numpy()[2] = 9
            rows = torch.zeros(2, 4)
            rows.numpy()[1] = 5
            self.partly.add_(rows.sum(0))
        self.wrapped = nn.Parameter(torch.from_numpy(np.arange(4, dtype=np.float32)))  # no operation is given it
        self.given = nn.Parameter(torch.empty(4))
        self.given.data = torch.from_numpy(np.arange(4, dtype=np.float32))
        own = np.ones(4, dtype=np.float32)
        self.own = nn.Parameter(torch.from_numpy(own))
        own[0] = 2
        self.read = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.read)
        largest = float(self.read.detach().numpy().max())  # only read
        self.empty = nn.Parameter(torch.from_numpy(np.zeros((0, 4), dtype=np.float32)))
        self.last = nn.Parameter(torch.full((4,), largest))
        nn.init.normal_(self.last, std=abs(largest))


def halved() -> nn.Module:
    """Another default meanwhile, as Hugging Face has it; then reads what was made under it."""
    model: ByDefault = under(torch.bfloat16, ByDefault)
    with torch.no_grad():
        model.ones.mul_(3)
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2), nn.Bilinear(3, 4, 5))


def transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32)


def transformed(name: str) -> Build:
    """A class of Hugging Face's, small."""
    def build() -> Any:
        transformers = pytest.importorskip("transformers")
        tiny = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        if name == "gpt2":
            config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        elif name == "bert":
            config = transformers.BertConfig(**tiny)
        elif name == "vit":
            tiny.pop("vocab_size")
            config = transformers.ViTConfig(**tiny, image_size=8, patch_size=4)
        else:
            kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config, "mixtral": transformers.MixtralConfig}[name]
            config = kind(**tiny, num_key_value_heads=2, head_dim=8)
        auto = transformers.AutoModel if name in ("vit", "bert") else transformers.AutoModelForCausalLM
        return auto.from_config(config, dtype=torch.bfloat16)

    return build


MODELS: dict[str, Build] = {
    "odd": Odd, "convolutions": convolutions, "transformer": transformer, "bf16": lambda: transformer().to(torch.bfloat16),
    "fp64": lambda: Odd().double(), "item": Item, "from_weight": FromWeight,
    "by_other": ByOther, "own_generator": OwnGenerator, "by_values": ByValues, "halved": halved, "by_numpy": ByNumpy,
    **{name: transformed(name) for name in ("llama", "qwen3", "mixtral", "gpt2", "bert", "vit")},
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers."""
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
