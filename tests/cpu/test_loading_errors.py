"""What does not fit together is an error before anything of the model is changed."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import ConfigError, UnsupportedError

save_file = pytest.importorskip("safetensors.torch").save_file

OPTIONS: dict[str, Any] = {"workers": 1, "timeout_s": 60.0}
Change = Callable[[dict[str, torch.Tensor]], object]


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))


def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    with hytrain_fx.on_meta():
        model = build()
    return model, torch.optim.AdamW(model.parameters())


def refused(message: str, loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, kind: type[Exception] = UnsupportedError,
            **options: Any) -> None:
    """`compile` raises it, and model and optimizer are as they were."""
    before = [(p, p.is_meta, p.device) for p in (*model.parameters(), *model.buffers())]
    given = {"device": "cpu", "loader": loader} | options
    with pytest.raises(kind, match=message):
        hytrain_fx.compile(model, optimizer, **given, **OPTIONS)
    after = [(p, p.is_meta, p.device) for p in (*model.parameters(), *model.buffers())]
    assert all(one[0] is other[0] and one[1:] == other[1:] for one, other in zip(before, after, strict=True))


def test_a_model_without_values_needs_a_loader() -> None:
    """The error says how to hand one over."""
    refused(r"5 tensor\(s\) of the model are on the meta device, without values \(0.weight, ...\); hand over where they come from",
            None, *made(), device=None)


CHANGES: dict[str, tuple[Change, str]] = {
    "missing": (lambda values: values.pop("2.weight"), r"1 missing \(2.weight\)"),
    "unexpected": (lambda values: values.update(more=torch.ones(2)), r"1 unexpected \(more\)"),
    "both": (lambda values: values.update(more=values.pop("0.bias")), r"1 missing \(0.bias\) and 1 unexpected \(more\)"),
    "buffer": (lambda values: values.pop("1.running_mean"), r"1 missing \(1.running_mean\)"),
    "shape": (lambda values: values.update({"0.bias": torch.ones(7)}), r"0.bias has shape \(7,\) in .*; the model's has \(8,\)"),
    "integers": (lambda values: values.update({"0.bias": torch.ones(8, dtype=torch.int8)}), r"0.bias is torch.int8 in .*; the model's is"),
    "8 bits": (lambda values: values.update({"0.bias": torch.ones(8).to(torch.float8_e4m3fn)}), "0.bias is torch.float8_e4m3fn"),
    "floats": (lambda values: values.update({"1.num_batches_tracked": torch.tensor(1.0)}), "1.num_batches_tracked is torch.float32"),
}


@pytest.mark.parametrize("how", ["safetensors", "torch"])
@pytest.mark.parametrize("change", CHANGES)
def test_files_of_another_model(change: str, how: str, tmp_path: Path) -> None:
    """Names, shapes and dtypes are compared before a value is read."""
    values = {name: value.clone() for name, value in build().state_dict().items()}
    CHANGES[change][0](values)
    if how == "torch":
        torch.save(values, tmp_path / "file")
        loader = hytrain_fx.from_torch(tmp_path / "file")
    else:
        save_file(values, tmp_path / "file")
        loader = hytrain_fx.from_safetensors(tmp_path / "file")
    loader.reading = lambda *_: pytest.fail("a value was read")  # type: ignore[method-assign]
    refused(CHANGES[change][1], loader, *made())


@pytest.mark.parametrize(("gives", "message"), [
    (None, "gave a NoneType for 0.weight; expected a tensor with values"),
    (torch.empty(8, 4, device="meta"), "gave a tensor on the meta device for 0.weight"),
    (torch.ones(4, 8), r"0.weight has shape \(4, 8\) in loader <lambda>"),
    (torch.ones(8, 4, dtype=torch.int64), "0.weight is torch.int64"),
])
@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_functions_that_give_something_else(gives: object, message: str, weights: str) -> None:
    """It is seen as it comes, for weights that are streamed too."""
    model, _ = made()
    model.to(torch.bfloat16)
    values = build().state_dict()
    loader = lambda name: gives if name == "0.weight" else values[name]  # noqa: E731  # its name is in the message
    refused(message, loader, model, torch.optim.AdamW(model.parameters()), weights=weights)


def test_paths_that_hold_no_tensors(tmp_path: Path) -> None:
    """Nothing there, files that are something else, and indices that do not fit their files."""
    values = build().state_dict()
    (tmp_path / "text").write_text("no tensors at all")
    torch.save([1, 2], tmp_path / "list")
    torch.save({"a": torch.ones(2), "lr": 0.1}, tmp_path / "mixed")
    save_file({"a": values["0.bias"]}, tmp_path / "a.safetensors")
    save_file({"a": values["0.bias"]}, tmp_path / "b.safetensors")

    def index(name: str, content: object) -> Path:
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    gone = index("gone.json", {"weight_map": {"a": "a.safetensors", "b": "c.safetensors"}})
    lacking = index("lacking.json", {"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}})
    twice = index("twice.json", {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})
    st, pt = hytrain_fx.from_safetensors, hytrain_fx.from_torch
    for make, path, message in [
        (st, tmp_path / "none", "is no .safetensors file, and no folder with"), (st, tmp_path, "and no folder with model.safetensors"),
        (st, tmp_path / "text", "cannot be read as a .safetensors file"), (pt, tmp_path / "text", "cannot be read as a file of torch.save"),
        (pt, tmp_path / "list", "it holds a list; expected tensors by name"), (pt, tmp_path / "mixed", "'lr' is a float"),
        (st, index("other.json", {"a": 1}), "is no index: expected a weight_map"), (st, index("map.json", [1]), "is no index"),
        (st, gone, r"names 1 file\(s\) that are not beside it, c.safetensors"), (st, lacking, r"lists 1 tensor\(s\) that its files do not"),
        (st, twice, "a is in a.safetensors and in b.safetensors"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            make(path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnsupportedError, match="pip install safetensors"):
        hytrain_fx.from_safetensors(tmp_path)


def test_options_that_do_not_fit() -> None:
    """`device` and `loader` go together, with a model that has no values."""
    for device, loader, message in [(None, torch.ones, "device=None"), ("mars", torch.ones, "device='mars'"), ("cpu", 3, "loader=3"),
                                    ("meta", torch.ones, "device='meta'"), ("cpu", None, "device='cpu'")]:
        refused(message, loader, *made(), kind=ConfigError, device=device)
    model = build()
    refused("loader is for a model on the meta device", torch.ones, model, torch.optim.AdamW(model.parameters()))


class Rotary(nn.Module):
    """Has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)


class Attribute(nn.Module):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.table = torch.arange(4.0)


@pytest.mark.parametrize(("kind", "message"), [(Rotary, "inv_freq is on the meta device and not in state_dict"),
                                               (Attribute, "table is a tensor on the meta device and no parameter or buffer")])
def test_values_that_nothing_gives(kind: type[nn.Module], message: str) -> None:
    """Under torch.device("meta") they have none; the error leads to `on_meta`, where they have."""
    with torch.device("meta"):
        model = kind()
    refused(message + r".*Make the model inside hytrain_fx.on_meta\(\)", torch.ones, model, torch.optim.AdamW(model.parameters()))
    with hytrain_fx.on_meta():
        model = kind()
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(model.inv_freq if isinstance(model, Rotary) else model.table, torch.arange(4.0))  # type: ignore[arg-type]
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu",
                                  loader={"last.weight": torch.ones(4, 4), "last.bias": torch.ones(4)}.__getitem__, **OPTIONS)
    hytrain_fx.close(model)


def test_parameters_that_cannot_be_given_values() -> None:
    """Hooks, states of the optimizer, and weak references."""
    model, optimizer = made()
    first, last = model.get_parameter("0.weight"), model.get_parameter("2.weight")
    handle = first.register_hook(lambda grad: grad)
    refused("0.weight has hooks and no values yet", torch.ones, model, optimizer)
    handle.remove()
    optimizer.state[first]["step"] = torch.tensor(1.0)
    refused("the optimizer has states, and the model has no values yet", torch.ones, model, optimizer)
    optimizer.state.clear()
    values = build().state_dict()
    held = weakref.ref(last)
    refused("2.weight cannot be given values in place", values.__getitem__, model, optimizer)
    del held
    gc.collect()
    model, optimizer = hytrain_fx.compile(model, optimizer, device="cpu", loader=values.__getitem__, **OPTIONS)
    hytrain_fx.close(model)
