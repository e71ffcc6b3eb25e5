"""`from_init`: parameters of a model without memory get the bits of plain initialisation."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError

from .initialised_models import MODELS, ByDefault, everything, transformer, under
from .loops import assert_same


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


@pytest.mark.parametrize("around", ["autocast", "default device"])
def test_what_is_in_force_as_values_are_read_changes_none(around: str) -> None:
    """Neither autocast nor a default device reaches the operations that are run again."""
    def product() -> nn.ParameterList:
        return nn.ParameterList([nn.Parameter(torch.rand(6, 6) @ torch.rand(6, 6))])

    torch.manual_seed(3)
    expected = everything(product())
    torch.manual_seed(3)
    with hytrain_fx.from_init() as loader:
        model = product()
    within: Any = torch.autocast("cpu", torch.bfloat16) if around == "autocast" else torch.device("meta")
    with within, loader.reading("0", model[0]) as values:
        found = {"0": values}
    assert_same(found, expected)


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
def test_what_is_written_after_the_block_is_an_error(weights: Any) -> None:
    """It would be lost: `nn.init` and `load_state_dict` do nothing on the meta device, unseen."""
    def scaled(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)

    def initialised(model: nn.Module) -> object:
        return model.apply(scaled)

    def loaded(model: nn.Module) -> object:
        return model.load_state_dict(values)

    def made() -> tuple[nn.Sequential, Any]:
        with hytrain_fx.from_init() as loader:
            return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(torch.bfloat16), loader

    values = made()[0].to_empty(device="cpu").state_dict()
    for write in (initialised, loaded):
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


def test_what_numpy_only_reads_is_not_kept() -> None:
    """A parameter that NumPy has seen is run again, as others: its values are not kept for it."""
    with hytrain_fx.from_init() as loader:
        model = nn.Linear(512, 512, bias=False)
        assert float(model.weight.detach().numpy().max()) > 0
    assert held_bytes(loader) == 0
    with hytrain_fx.from_init() as loader:
        model = nn.Linear(512, 512, bias=False)
        model.weight.detach().numpy()[0] = 1
    assert held_bytes(loader) == model.weight.nbytes


def test_what_numpy_writes_to_empty_memory_is_kept() -> None:
    """Zeros too, which new memory has by chance: so large a piece comes from the kernel, zeroed."""
    with hytrain_fx.from_init() as loader:
        model = nn.ParameterList([nn.Parameter(torch.empty(10 << 20))])
        model[0].detach().numpy()[:] = 0
    assert held_bytes(loader) == model[0].nbytes


def held_bytes(loader: Any) -> int:
    """Of tensors with values that the loader holds."""
    return sum(tensor.nbytes for noted in loader._noted for tensor in noted.args if isinstance(tensor, torch.Tensor))


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
