"""Models on the meta device train as if they had been loaded whole: every bit, every place."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.loading.loaded import _Loading
from hytrain_fx.loading.meta_tensors import Awaited
from hytrain_fx.loading.source import AskedSource
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from .loops import assert_same, weights
from .models import gpt
from .test_placements import plan_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

OPTIONS: dict[str, Any] = {"workers": 1, "timeout_s": 60.0}
STEPS = 5
Build = Callable[[], Any]


@pytest.fixture(autouse=True, scope="module")
def nan_slots() -> Iterator[None]:
    """A slot is NaN once its weights have been read: who reads late trains on NaN."""
    os.environ[NAN_VARIABLE] = "1"
    yield
    del os.environ[NAN_VARIABLE]


def config_of(tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied)


def llama(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Any:
    """A Llama as Hugging Face makes it."""
    return transformers.AutoModelForCausalLM.from_config(config_of(tied), dtype=dtype)


def on_meta(build: Build) -> Any:
    """The same without values."""
    with hytrain_fx.on_meta():
        return build()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """A Llama in several files, in bf16 and in fp32."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(5)
        found[dtype] = tmp_path_factory.mktemp("files")
        llama(dtype).save_pretrained(found[dtype], max_shard_size="20KB")
        assert len(list(found[dtype].glob("*.safetensors"))) > 2
    return found


def train(model: Any, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """What a loop of some steps leaves: losses, weights, states."""
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = list(model.parameters())
    model, ours = hytrain_fx.compile(model, optimizer, **OPTIONS, **options)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    streamed = list(session_of(model).states.streamed)
    away = [row for row, of in session_of(model).states.streamed.items() if not of.has_memory]
    losses = []
    for step in range(steps):
        tokens = (torch.arange(18).view(2, 9) * (step + 3)) % 96
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(float(loss.detach()))
    found = {"losses": torch.tensor(losses), **weights(model)}
    for number, state in ours.state_dict()["state"].items():
        found |= {f"{number}.{key}": value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    hytrain_fx.close(model)
    found |= {f"closed.{name}": p.detach().clone() for name, p in model.named_parameters()}
    return found | {"streamed": torch.tensor(len(streamed)), "away": torch.tensor(len(away))}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All but where weights were."""
    assert len(expected["losses"].unique()) == STEPS  # the weights moved
    assert_same(*({name: value for name, value in of.items() if name not in ("streamed", "away")} for of in (found, expected)))


@pytest.fixture(scope="module")
def loaded_whole(folders: dict[torch.dtype, Path]) -> Callable[[torch.dtype, str], dict[str, Any]]:
    """What the loop leaves of a bf16 model that `from_pretrained` loads, once for each case.

    Asked for by the files' dtype and the moments.
    """
    @functools.cache
    def trained(file: torch.dtype, moments: str) -> dict[str, Any]:
        return train(transformers.AutoModelForCausalLM.from_pretrained(folders[file], dtype=torch.bfloat16), moments=moments)

    return trained


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", ["streamed", "resident"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("file", [torch.bfloat16, torch.float32])
def test_a_llama_from_its_files_has_the_bits_of_one_that_was_loaded_whole(
    how: str, moments: str, file: torch.dtype, folders: dict[torch.dtype, Path],
    loaded_whole: Callable[[torch.dtype, str], dict[str, Any]],
) -> None:  # fmt: skip
    """bf16 weights from files in bf16 and in fp32, streamed or resident, both kinds of moments.

    The other one is `from_pretrained`'s, with resident weights. Streamed weights had no memory of
    their own when `compile` returned.
    """
    expected = loaded_whole(file, moments)
    found = train(on_meta(llama), weights=how, moments=moments, device="cpu", loader=hytrain_fx.from_safetensors(folders[file]))
    same(found, expected)
    assert found["away"] == found["streamed"] == (16 if how == "streamed" else 0)


def test_an_fp32_model_is_loaded_too(folders: dict[torch.dtype, Path]) -> None:
    """Its weights stay on the device, and begin with the bits of the file."""
    expected = train(transformers.AutoModelForCausalLM.from_pretrained(folders[torch.float32], dtype=torch.float32))
    found = train(on_meta(lambda: llama(torch.float32)), device="cpu", loader=hytrain_fx.from_safetensors(folders[torch.float32]))
    same(found, expected)


def test_tied_weights_are_loaded_once(tmp_path: Path) -> None:
    """The file has one of the two names, and the model has one parameter."""
    torch.manual_seed(1)
    llama(tied=True).save_pretrained(tmp_path)
    expected = train(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    model = on_meta(lambda: llama(tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    same(train(model, weights="streamed", device="cpu", loader=hytrain_fx.from_safetensors(tmp_path)), expected)


@pytest.fixture(scope="module")
def made_whole() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The first weights of a model, and what the loop leaves of it."""
    torch.manual_seed(2)
    plain = llama()
    return weights(plain), train(plain)


@pytest.mark.parametrize("how", ["one", "index", "function"])
def test_files_of_torch_and_functions(how: str, made_whole: tuple[dict[str, torch.Tensor], dict[str, Any]], tmp_path: Path) -> None:
    """A file of torch.save, several with an index, and a function that is asked once for each."""
    values, expected = made_whole
    asked: list[str] = []
    loader: Any
    if how == "function":
        def loader(name: str) -> torch.Tensor:
            asked.append(name)
            return values[name]
    elif how == "one":
        torch.save(values, tmp_path / "weights.pt")
        loader = hytrain_fx.from_torch(tmp_path / "weights.pt")
    else:
        names = sorted(values)
        parts = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, of in parts.items():
            torch.save({name: values[name] for name in of}, tmp_path / file)
        listed = {name: file for file, of in parts.items() for name in of}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        loader = hytrain_fx.from_torch(tmp_path)
    same(train(on_meta(llama), weights="streamed", device="cpu", loader=loader), expected)
    assert how != "function" or sorted(asked) == sorted(values)


@pytest.mark.parametrize("placement", [Placement.GPU, Placement.STREAM])
def test_states_that_are_not_on_the_cpu_get_their_weights(placement: Placement) -> None:
    """With a plan that has some states elsewhere, those weights are whole on the device."""
    def build() -> nn.Module:
        return gpt(layers=3, width=16)[0].to(torch.bfloat16)

    batches = gpt(layers=3, width=16)[1]
    plain = build()
    values = weights(plain)
    hytrain_fx.compile(plain, torch.optim.AdamW(plain.parameters()), **OPTIONS)
    plan = plan_of(session_of(plain), [placement, Placement.CPU, Placement.CPU])
    hytrain_fx.close(plain)

    def run(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, ours = hytrain_fx.compile(model, optimizer, plan=plan, **OPTIONS, **options)
        assert {of.placement for of in session_of(model).states.placed} == {placement, Placement.CPU}
        assert not options or 0 < len(session_of(model).states.streamed) < 12
        for step in range(3):
            model(*batches[step % len(batches)]).backward()
            ours.step()
            ours.zero_grad()
        found = weights(model)
        hytrain_fx.close(model)
        return found

    expected = run(plain)
    assert_same(run(on_meta(build), weights="streamed", device="cpu", loader=values.__getitem__), expected)


def test_checkpoints_go_on_from_a_loaded_model(folders: dict[torch.dtype, Path]) -> None:
    """State dicts of a streamed run, loaded into another one, go on as the run itself."""
    def steps(model: Any, optimizer: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 3):
            tokens = (torch.arange(18).view(2, 9) * (step + 3)) % 96
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def compiled() -> tuple[Any, Any]:
        torch._dynamo.reset()
        model = on_meta(llama)
        return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), weights="streamed", device="cpu",
                                  loader=hytrain_fx.from_safetensors(folders[torch.bfloat16]), **OPTIONS)

    model, optimizer = compiled()
    steps(model, optimizer, 0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    expected = steps(model, optimizer, 3)
    assert "streamed weights: 16 of 21 rest on the host" in hytrain_fx.explain(model).details()
    hytrain_fx.close(model)
    model, optimizer = compiled()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert steps(model, optimizer, 3) == expected
    hytrain_fx.close(model)


def test_a_refused_compile_leaves_the_model_on_the_meta_device() -> None:
    """Whatever was loaded by then: parameters, buffers, the optimizer's groups are as before."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)

    def broken(name: str) -> torch.Tensor:
        if name == "last.bias":
            raise OSError("the disk is gone")
        return torch.zeros(8, 8) if name.endswith("weight") and not name.startswith("norm") else torch.zeros(8)

    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    objects = [*model.parameters(), *model.buffers()]
    options = [dict(group, params=None) for group in optimizer.param_groups]
    for how in ("streamed", "resident"):
        with pytest.raises((OSError, UnsupportedError)):
            hytrain_fx.compile(model, optimizer, weights=how, moments="bf16", device="cpu", loader=broken, **OPTIONS)
        assert all(one is other and one.is_meta for one, other in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
        assert [dict(group, params=None) for group in optimizer.param_groups] == options


def test_buffers_of_files_are_loaded_and_others_stay(tmp_path: Path) -> None:
    """A persistent buffer has the file's values, and one that is not saved the module's own."""
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.register_buffer("table", torch.arange(8.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(self.norm(x) + self.table).square().mean())

    from safetensors.torch import save_file
    values = {name: torch.full_like(value, 2) for name, value in Model().state_dict().items()}
    save_file(values, tmp_path / "one.safetensors")
    model = on_meta(Model)
    buffers = dict(model.named_buffers())
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu",
                                          loader=hytrain_fx.from_safetensors(tmp_path / "one.safetensors"), **OPTIONS)
    assert_same(weights(model), values)
    assert model.table is buffers["table"]
    model(torch.randn(4, 8)).backward()
    optimizer.step()
    assert int(model.norm.num_batches_tracked) == 3
    hytrain_fx.close(model)


class Expanded(nn.Module):
    """Has buffers whose elements are all one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(1, 1).expand(8, 8), persistent=False)
        self.register_buffer("scale", torch.ones(1).expand(8))


def test_an_expanded_buffer_goes_to_the_device_as_with_to() -> None:
    """Its values are not written one by one, which torch refuses; undoing gives the first one."""
    model = on_meta(Expanded)
    mask = model.mask
    assert isinstance(mask, torch.Tensor)
    loading = _Loading(model, None, AskedSource(lambda name: torch.ones(1)), torch.device("cpu"), wait=False, ranks=1)
    loading._give_buffer(Awaited(mask, None, ((model, "mask"),)))
    assert torch.equal(torch.as_tensor(model.mask), mask)
    loading.undo()
    assert model.mask is mask


def test_an_expanded_buffer_is_loaded(tmp_path: Path) -> None:
    """Its values in a file need not be one, and get memory of their own."""
    values = {name: torch.randn(value.shape) for name, value in Expanded().state_dict().items()}
    torch.save(values, tmp_path / "one.pt")
    model = on_meta(Expanded)
    model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), device="cpu",
                                  loader=hytrain_fx.from_torch(tmp_path / "one.pt"), **OPTIONS)
    assert_same(weights(model), values)
    hytrain_fx.close(model)
