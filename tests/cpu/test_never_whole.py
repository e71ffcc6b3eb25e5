"""A model whose weights never fit the device is saved, loaded and closed without them coming there.

What is whole there is counted: the storages of all parameters that are given memory of their own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HostMemoryError
from hytrain_fx.runtime import memory
from hytrain_fx.runtime.native import storage_memory
from hytrain_fx.weights import returning, streamed_weights
from hytrain_fx.weights.returning import new_memory

from .loops import assert_same

OPTIONS: dict[str, Any] = {"workers": 1, "timeout_s": 60.0, "gpu_states": 0.0}
WIDTH = 32


class Net(nn.Module):
    """Matrices, one of them under two names, vectors and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 48, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.tensor(1.0))  # without a dimension
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale * self.gain
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def made() -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return Net().to(torch.bfloat16)


def compiled(how: str) -> tuple[Any, Any]:
    """Resident, or streamed from the meta device."""
    torch._dynamo.reset()
    if how == "resident":
        model: Any = made()
        return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.02), **OPTIONS)
    values = {name: value.clone() for name, value in made().state_dict().items()}
    with hytrain_fx.on_meta():
        model = made()
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.02), weights="streamed", device="cpu",
                              loader=values.__getitem__, **OPTIONS)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Losses of the plain loop."""
    losses = []
    for step in steps:
        loss = model((torch.arange(24).view(3, 8) * (step + 5)) % 48)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Counted:
    """Bytes that parameters have in memory of their own, now and at most.

    settled   what they had when counting began, vectors aside
    """

    def __init__(self, model: Any) -> None:
        session = session_of(model)
        self._of = {id(session.table.parameters[row]): of for row, of in session.states.streamed.items()}
        self._now = {key: of.weight.numel() * 2 for key, of in self._of.items() if of.has_memory}
        self.settled = self.most = sum(self._now.values())

    def put(self, parameter: nn.Parameter) -> None:
        """It has got memory."""
        self._now[id(parameter)] = parameter.untyped_storage().nbytes()
        self.most = max(self.most, sum(self._now.values()))

    def take(self, parameter: nn.Parameter) -> None:
        """It has lost it."""
        self._now.pop(id(parameter), None)


@contextmanager
def counted(model: Any) -> Iterator[Counted]:
    """Within it what weights take on the device is counted."""
    found = Counted(model)

    def put(parameter: nn.Parameter, source: torch.Tensor, begin: int, nbytes: int) -> None:
        storage_memory.put_memory(parameter, source, begin, nbytes)
        found.put(parameter)

    def take(parameter: nn.Parameter) -> None:
        storage_memory.take_memory(parameter)
        found.take(parameter)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_weights, "put_memory", put)
        patch.setattr(streamed_weights, "take_memory", take)
        yield found


def test_state_dict_brings_no_weight_to_the_device() -> None:
    """It gives host copies with the bits of the resident run, also for a layer, and ties stay."""
    model, optimizer = compiled("resident")
    losses = train(model, optimizer, range(3))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    losses += train(model, optimizer, range(3, 5))
    hytrain_fx.close(model)
    model, optimizer = compiled("streamed")
    found = train(model, optimizer, range(3))
    with counted(model) as whole:
        saved = model.state_dict()
        assert saved["words.weight"].data_ptr() == saved["head.weight"].data_ptr()
        assert_same({name: value.clone() for name, value in saved.items()}, expected)
        assert_same(model.layers[1].state_dict(), {name: expected[f"layers.1.{name}"] for name in ("weight", "bias")})
        assert model.state_dict(keep_vars=True)["layers.0.weight"] is model.layers[0].weight
        found += train(model, optimizer, range(3, 5))
        assert (whole.settled, whole.most) == (0, 0)
    assert found == losses
    assert_same(saved, expected)  # a kept one is of its time
    hytrain_fx.close(model)


def test_the_count_sees_a_weight_that_comes() -> None:
    """One that is read has its memory until the next training forward."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    with counted(model) as whole:
        model.layers[0].weight.detach().float().sum()
        assert whole.most == 2 * WIDTH * WIDTH
    hytrain_fx.close(model)


def test_load_state_dict_brings_no_weight_to_the_device() -> None:
    """Model and optimizer go on as the run that was saved."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    saved = {name: value.float() for name, value in model.state_dict().items()}, optimizer.state_dict()
    expected = train(model, optimizer, range(2, 5))
    hytrain_fx.close(model)
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(7, 9))
    with counted(model) as whole:
        assert not any(model.load_state_dict(saved[0]))
        optimizer.load_state_dict(saved[1])
        assert train(model, optimizer, range(2, 5)) == expected
        assert whole.most == 0
    hytrain_fx.close(model)


def test_states_without_masters_bring_no_weight_to_the_device() -> None:
    """The weights become the masters where they rest, with the bits of the resident run."""
    losses = []
    for how in ("resident", "streamed"):
        model, optimizer = compiled(how)
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            del entry["master"]
        with counted(model) as whole:
            optimizer.load_state_dict(saved)
            losses.append(train(model, optimizer, range(2, 5)))
            assert whole.most == 0
        hytrain_fx.close(model)
    assert losses[0] == losses[1]


def test_what_is_written_to_a_saved_weight_is_the_weight() -> None:
    """As in plain torch, until the next training forward: the copy is the loop's own then."""
    ends = []
    for how in ("resident", "streamed"):
        model, optimizer = compiled(how)
        losses = train(model, optimizer, range(2))
        for step, when in enumerate(("dropped", "kept", "read", "trained")):
            saved = model.state_dict()
            if when == "trained":
                saved = {name: value.clone() for name, value in saved.items()} if how == "resident" else saved
                losses += train(model, optimizer, range(10, 11))
            saved["layers.2.weight"].mul_(0.5)
            saved["words.weight"][3].zero_()
            saved["norm.bias"].add_(1)
            float(model.norm.weight.detach().sum())
            if when == "dropped":
                del saved
            if when == "read":
                losses.append(float(model.layers[2].weight.detach().float().sum()))
                losses.append(float(model.state_dict()["head.weight"].float().sum()))
            saved = {}
            losses += train(model, optimizer, range(2 * step, 2 * step + 2))
        ends.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
        hytrain_fx.close(model)
    assert ends[0][0] == ends[1][0]
    assert_same(*(end[1] for end in ends))


def test_a_step_makes_saved_weights_old() -> None:
    """Saved between a backward and its `step()`, and again after it: each time the weights of then.

    What is written to the old ones afterwards is no weight's.
    """
    found = []
    for how in ("resident", "streamed"):
        model, optimizer = compiled(how)
        train(model, optimizer, range(2))
        model(torch.arange(24).view(3, 8)).backward()
        old = model.state_dict()
        saved = [{name: value.clone() for name, value in old.items()}]
        optimizer.step()
        optimizer.zero_grad()
        if how == "streamed":
            with torch.no_grad():
                old["layers.0.weight"].zero_()
        saved.append({name: value.clone() for name, value in model.state_dict().items()})
        assert not torch.equal(saved[0]["layers.0.weight"], saved[1]["layers.0.weight"])
        found.append(saved)
        hytrain_fx.close(model)
    for resident, streamed in zip(*found, strict=True):
        assert_same(resident, streamed)


def test_weights_that_the_loop_has_written_are_saved_so() -> None:
    """Before the write is a master: in memory of the parameter's own."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    with torch.no_grad():
        model.layers[1].weight.add_(1)
        expected = model.layers[1].weight.clone()
    assert torch.equal(model.state_dict()["layers.1.weight"], expected)
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    assert torch.equal(model.state_dict()["layers.1.weight"], expected + 1)
    hytrain_fx.close(model)


def test_a_graph_does_not_read_on_after_load_state_dict() -> None:
    """As in plain torch: the backward finds that its weights were written."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    weight = model.layers[0].weight
    loss = (weight * weight).sum()  # eager code
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    hytrain_fx.close(model)


def test_distributed_checkpoints_bring_no_weight_to_the_device(tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and loads by the same two."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    with counted(model) as whole:
        saved: dict[str, Any] = get_model_state_dict(model)
        expected = {name: value.clone() for name, value in saved.items()}
        save(saved, checkpoint_id=str(tmp_path))
        train(model, optimizer, range(2, 4))
        model.norm.weight.detach().sum()  # a vector that was touched is copied too
        loaded = get_model_state_dict(model)
        load(loaded, checkpoint_id=str(tmp_path))
        set_model_state_dict(model, loaded)
        assert_same({name: value.clone() for name, value in model.state_dict().items()}, expected)
        assert whole.most == 0
    hytrain_fx.close(model)


def test_save_pretrained_brings_no_weight_to_the_device(tmp_path: Path) -> None:
    """A tied model of Hugging Face is saved with one of the two names, and loads again."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    config = transformers.LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, tie_word_embeddings=True)
    torch._dynamo.reset()
    torch.manual_seed(3)
    with hytrain_fx.from_init() as loader:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.02), weights="streamed", device="cpu",
                                          loader=loader, **OPTIONS)
    tokens = torch.arange(12).view(1, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with counted(model) as whole:
        model.save_pretrained(tmp_path)
        assert whole.most == whole.settled
    hytrain_fx.close(model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same({name: p.detach() for name, p in again.named_parameters()}, {name: p.detach() for name, p in model.named_parameters()})


def test_close_leaves_a_model_that_does_not_fit_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, with the weights of the last update, as a plain one; none has come to the device."""
    model, optimizer = compiled("resident")
    losses = train(model, optimizer, range(3))
    hytrain_fx.close(model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = compiled("streamed")
    assert train(model, optimizer, range(3)) == losses
    needed = session_of(model).eager.streamed.returning.away_bytes
    assert needed == 2 * WIDTH * (48 + 4 * WIDTH)
    monkeypatch.setattr(memory, "room_bytes", lambda device, own_bytes: 0)
    with counted(model) as whole, pytest.warns(hytrain_fx.HytrainWarning, match="close\\(\\) has left it on the CPU, whole"):
        hytrain_fx.close(model)
    assert whole.most == 0
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert_same({name: p.detach() for name, p in model.named_parameters()}, expected)
    assert model.head.weight is model.words.weight
    model(torch.arange(8).view(1, 8)).backward()
    del model, optimizer
    gc.collect()


def test_memory_in_pieces_is_found_before_any_weight_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last weight has none, so the whole model is left on the CPU, or close() closes nothing.

    As much is free as all weights take. Without an error the model is on its device again.
    """
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    session, made = session_of(model), 0

    def the_last_has_none(nbytes: int, device: torch.device) -> torch.Tensor:
        nonlocal made
        made += 1
        if made % len(session.states.streamed) == 0:
            raise torch.OutOfMemoryError("in pieces")
        return new_memory(nbytes, device)

    with monkeypatch.context() as patch:
        patch.setattr(returning, "new_memory", the_last_has_none)
        patch.setattr(streamed_weights, "available_host_bytes", lambda: 2000)
        with pytest.raises(HostMemoryError, match=r"the device has .* in pieces that are too small for them, the host"):
            hytrain_fx.close(model)
        assert not any(of.has_memory for of in session.states.streamed.values())
        train(model, optimizer, range(2, 4))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        patch.undo()
        patch.setattr(returning, "new_memory", the_last_has_none)
        made = 0
        with pytest.warns(hytrain_fx.HytrainWarning, match="close\\(\\) has left it on the CPU, whole"):
            hytrain_fx.close(model)
    assert made == 2 * len(session.states.streamed)
    assert_same({name: p.detach() for name, p in model.named_parameters()}, {name: expected[name] for name, _ in model.named_parameters()})


def test_close_says_where_neither_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes nothing: the model trains on, and can be saved."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "room_bytes", lambda device, own_bytes: 1000)
        patch.setattr(streamed_weights, "available_host_bytes", lambda: 2000)
        with pytest.raises(HostMemoryError, match=r"close\(\) needs 11\.3 kB for weights .* Save them first"):
            hytrain_fx.close(model)
    train(model, optimizer, range(2, 3))
    hytrain_fx.close(model)


def test_another_threads_state_dict_has_all_memory_stay() -> None:
    """It may read on while a forward of the loop has parameters in slots. What it reads is true."""
    model, optimizer = compiled("streamed")
    train(model, optimizer, range(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    reader = threading.Thread(target=lambda: found.update({name: value.clone() for name, value in model.state_dict().items()}))
    reader.start()
    reader.join()
    assert_same(found, expected)
    train(model, optimizer, range(2, 3))
    assert all(of.has_memory for of in session_of(model).states.streamed.values())
    hytrain_fx.close(model)


class Mixed(nn.Module):
    """bf16 matrices beside fp32 ones that autocast reads in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(torch.bfloat16) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.narrow, *self.wide):
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def test_fp32_weights_with_bf16_copies_are_saved_whole() -> None:
    """Their own memory is not there between steps; it is filled first."""
    ends = []
    for how in ("resident", "streamed"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Mixed()
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.02), weights=how, **OPTIONS)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        session = session_of(model)
        assert how == "resident" or (len(session.states.streamed) == 2 and len(session.states.copies) == 2)
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
        hytrain_fx.close(model)
    assert_same(*ends)
