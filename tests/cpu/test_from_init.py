"""`from_init`: parameters of a model without memory get the bits of plain initialisation."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError

from .loops import assert_same

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
    "by_other": ByOther, "own_generator": OwnGenerator, "by_values": ByValues, "halved": halved,
    **{name: transformed(name) for name in ("llama", "qwen3", "mixtral", "gpt2", "bert", "vit")},
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers."""
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("kept_bytes", [0, 1000, None])
@pytest.mark.parametrize("name", MODELS)
def test_values_have_the_bits_of_plain_initialisation(name: str, kept_bytes: int | None) -> None:
    """Every parameter and buffer, and the generator afterwards; none has memory after the block.

    With no bytes kept each parameter loses its memory as another one is filled.
    """
    plainly: dict[str, Any] = {} if kept_bytes is None else {"kept_bytes": kept_bytes}
    torch.manual_seed(7)
    expected = everything(MODELS[name]())
    after = torch.rand(4)
    torch.manual_seed(7)
    with hytrain_fx.from_init(**plainly) as loader:
        model = MODELS[name]()
    assert torch.equal(torch.rand(4), after)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    found = {name: value.clone() for name, value in model.named_buffers()}
    before = torch.get_rng_state()
    for name, parameter in reversed(list(model.named_parameters())):  # in any order
        with loader.reading(name, parameter) as values:
            assert (values.dtype, values.stride()) == (expected[name].dtype, expected[name].stride())
            found[name] = values.detach().clone()
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(found, expected)


def test_the_compiled_model_begins_with_them() -> None:
    """Through `compile`, with resident weights and in fp32."""
    torch.manual_seed(3)
    expected = everything(transformer())
    torch.manual_seed(3)
    with hytrain_fx.from_init() as loader:
        model = transformer()
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu", loader=loader, workers=1)
    assert_same({name: value.clone() for name, value in everything(model).items()}, expected)
    hytrain_fx.close(model)


def test_the_default_dtype_is_that_of_the_block() -> None:
    """What was made under one default dtype is made again under it, and the one in force stays."""
    def recorded() -> tuple[nn.Module, Any]:
        with hytrain_fx.from_init() as loader:
            return ByDefault(), loader

    torch.manual_seed(3)
    expected = everything(under(torch.bfloat16, ByDefault))
    torch.manual_seed(3)
    model, loader = under(torch.bfloat16, recorded)
    before = torch.get_default_dtype()
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu", loader=loader, workers=1)
    assert torch.get_default_dtype() == before
    assert_same({name: value.clone() for name, value in everything(model).items()}, expected)
    hytrain_fx.close(model)


def test_another_size_is_an_error() -> None:
    """An operation gives another size as it is run again, by values that nobody saw written."""
    with hytrain_fx.from_init() as loader:
        chosen = torch.zeros(4, dtype=torch.bool)
        ctypes.memset(chosen.data_ptr(), 1, 4)
        model = nn.ParameterList([nn.Parameter(torch.ones(4)[chosen])])
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    with pytest.raises(UnsupportedError, match=r"aten.index.Tensor gave 16 bytes within from_init\(\), and 0 as it was run again"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu", loader=loader)
    assert model[0].is_meta
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == default


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_what_is_written_after_the_block_is_an_error(weights: str) -> None:
    """It would be lost: `nn.init` and `load_state_dict` do nothing on the meta device, unseen."""
    def scaled(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)

    def made() -> tuple[nn.Sequential, Any]:
        with hytrain_fx.from_init() as loader:
            return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16), loader

    values = made()[0].to_empty(device="cpu").state_dict()
    for write in (lambda model: model.apply(scaled), lambda model: model.load_state_dict(values)):
        model, loader = made()
        objects = list(model.parameters())
        with warnings.catch_warnings(action="ignore"):  # torch's, that copying to the meta device does nothing
            write(model)
        with pytest.raises(UnsupportedError, match=r"^0.(weight|bias) was written after from_init\(\) ended"):
            hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu", loader=loader, weights=weights, workers=1)
        assert all(one is other and one.is_meta for one, other in zip(objects, model.parameters(), strict=True))


def test_what_reads_or_freezes_after_the_block_is_none() -> None:
    """Conversions to what they are, `state_dict`, freezing and a failed `compile` write nothing."""
    torch.manual_seed(3)
    expected = everything(nn.Linear(4, 4))
    torch.manual_seed(3)
    with hytrain_fx.from_init() as loader:
        model: Any = nn.Linear(4, 4)
    model.float().to("meta").state_dict()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight])
    with pytest.raises(UnsupportedError, match="no weight of this model can be"):
        hytrain_fx.compile(model, optimizer, device="cpu", loader=loader, weights="streamed", workers=1)
    model, _ = hytrain_fx.compile(model, optimizer, device="cpu", loader=loader, workers=1)
    assert_same({name: value.clone() for name, value in everything(model).items()}, expected)
    hytrain_fx.close(model)


def test_memory_goes_as_others_are_filled() -> None:
    """Of ten layers, with room for two, two have memory at a time; what is read has it again."""
    made = []
    with hytrain_fx.from_init(kept_bytes=2 * 4 * 32 * 32):
        for _ in range(10):
            made.append(nn.Linear(32, 32, bias=False))
        sizes = [layer.weight.untyped_storage().nbytes() for layer in made]
        total = float(made[0].weight.detach().sum())
        again = made[0].weight.untyped_storage().nbytes()
    assert sizes == [0] * 8 + [4096] * 2
    assert again == 4096
    assert total != 0


def test_what_is_held_elsewhere_is_an_error() -> None:
    """As the block ends: memory that an attribute shares, and parameters that share memory."""
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.alias = self.weight.data

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.other = nn.Parameter(self.weight.data)

    kept: list[Any] = []
    for build, message in ((Shares, "held by something besides its model, a buffer"), (Twice, "share memory and are not one object"),
                           (lambda: nn.LSTM(4, 5), "held by something besides its model \\(")):
        with pytest.raises(UnsupportedError, match=message), hytrain_fx.from_init():
            kept.append(build())


def test_the_block_comes_first() -> None:
    """Models of elsewhere, conversions after the block, and `compile` within it are errors."""
    with hytrain_fx.from_init() as loader:
        model = nn.Linear(4, 4)
        with pytest.raises(UnsupportedError, match="was called within"):
            hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu", loader=loader)
    with hytrain_fx.on_meta():
        other = nn.Linear(4, 4)
    for unknown in (other, model.to(torch.bfloat16)):
        with pytest.raises(UnsupportedError, match="was not made within"):
            hytrain_fx.compile(unknown, torch.optim.AdamW(unknown.parameters()), device="cpu", loader=loader)
        assert all(p.is_meta for p in unknown.parameters())
    with pytest.raises(UnsupportedError, match="was entered before"), loader:
        pass
