"""Shapes of models built on the meta device, and the measured profile of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hytrain_fx.__main__ import main
from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.loads import Copies, KernelUpdates, together
from hytrain_fx.forecast.machine import measure_machine
from hytrain_fx.forecast.meta_model import shape_of, shape_of_factory
from hytrain_fx.forecast.shapes import read_shape

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}
FACTORIES = """
import torch
from torch import nn

def with_inputs():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(5, 8)

def huge():
    return nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(4)))

def wrong():
    return 3

def needs(argument):
    return argument

constant = 1
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, which is not on the path."""
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("own_factories", None)
    return "own_factories"


def test_work_of_a_llama_is_that_of_its_config() -> None:
    """On fake tensors, a transformers Llama has what its config gives for every unit.

    That is parameters, products and attention.
    """
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}))
        found = shape_of(model, "llama", {"input_ids": torch.zeros(2, 32, dtype=torch.long), "use_cache": False})
    expected = read_shape(LLAMA)
    assert found.params == expected.params
    layers = [u for u in found.units if ".layers." in u.name]
    assert len(layers) == 3
    for unit in layers:
        assert unit.params == expected.units[1].params
        assert unit.matmul_params == expected.units[1].matmul_params
        assert unit.attention_width == expected.units[1].attention_width
        assert unit.output_values == 64
        assert expected.units[1].saved_values < unit.saved_values < 5 * expected.units[1].saved_values
    assert found.units[-1].matmul_params == expected.units[-1].matmul_params
    assert found.context == 32


def test_samples_without_a_sequence() -> None:
    """Each vector is a token: a Linear multiplies by all its weights.

    Its input, which autograd saves, counts once.
    """
    made = shape_of(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), "mlp", torch.zeros(5, 8))
    assert [u.params for u in made.units] == [8 * 16 + 16, 16 * 4 + 4]
    assert [u.matmul_params for u in made.units] == [8 * 16, 16 * 4]
    assert [u.saved_values for u in made.units] == [8, 16]
    assert [u.output_values for u in made.units] == [16, 4]
    assert [u.attention_width for u in made.units] == [0, 0]


def test_without_inputs_weights_count_once_a_token() -> None:
    """Embeddings are looked up, other weights multiplied; frozen parameters are not trained."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 4))
    model[2].requires_grad_(False)
    made = shape_of(model, "guessed")
    assert [(u.params, u.matmul_params) for u in made.units] == [(80, 0), (8 * 16 + 16, 8 * 16)]
    with pytest.raises(ConfigError, match="nothing to train"):
        shape_of(model.requires_grad_(False), "frozen")


def test_a_factory_is_called_on_the_meta_device(factories: str, capsys: pytest.CaptureFixture[str]) -> None:
    """40 G parameters are reported without being allocated; a pair of model and inputs is run."""
    assert shape_of_factory(f"{factories}:huge").params == 4 * (10**10 + 10**5)
    assert shape_of_factory(f"{factories}:with_inputs").units[0].saved_values == 8 + 16  # the ReLU's output counts to the unit before it
    assert main(["report", "--model", f"{factories}:huge", "--device", "h200", "--tokens", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == 4 * (10**10 + 10**5)


@pytest.mark.parametrize(("name", "message"), [
    ("wrong", "returned int"), ("needs", "could not be called"), ("constant", "expected a function"), ("missing", "cannot be had"),
])
def test_what_is_no_factory_is_refused(factories: str, name: str, message: str) -> None:
    """Other values, functions with arguments and missing names are errors that say so."""
    with pytest.raises(ConfigError, match=message):
        shape_of_factory(f"{factories}:{name}")
    with pytest.raises(ConfigError, match="cannot be had"):
        shape_of_factory("no_such_package_here:make")


def test_a_model_that_does_not_run_is_told() -> None:
    """Inputs that do not fit the model are an error that names the way without."""
    with pytest.raises(ConfigError, match="return the model alone"):
        shape_of(nn.Linear(8, 4), "linear", torch.zeros(5, 9))
    with pytest.raises(ConfigError, match="no tensor with a batch"):
        shape_of(nn.Linear(8, 4), "linear", {"flag": True})


def test_a_measured_machine_is_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure is measured and says how.

    The file is read back, and a report is made with it.
    """
    file = tmp_path / "mine.json"
    assert main(["profile", "--seconds", "0.05", "--megabytes", "16", "--workers", "1", "--name", "mine", "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    spec = DeviceSpec.from_json(file.read_text())
    assert spec.name == "mine"
    assert set(spec.sources) == set(spec.figures())
    assert all(source.startswith("measured: ") for source in spec.sources.values())
    assert {"date", "cpu", "cores", "workers", "torch", "python"} <= set(spec.about)
    assert spec.host_memory_gb_per_s is not None
    assert spec.host_memory_gb_per_s * 1e9 >= 28 * spec.cpu_update_params_per_s * (1 - 1e-9)
    assert main(["report", "--model", "llama-1.3b", "--device", str(file), "--host", "cpu-laptop", "--tokens", "512"]) == 0
    told = capsys.readouterr().out
    assert "mine in the host of cpu-laptop" in told
    assert f"date: {spec.about['date']}" in told


def test_bad_measurements_are_refused() -> None:
    """No time, no memory, no workers, or more memory than there is: errors before measuring."""
    for seconds, nbytes, workers in ((0.0, 1 << 24, 1), (0.1, 0, 1), (0.1, 1 << 24, 0)):
        with pytest.raises(ConfigError, match="expected more than 0 s"):
            measure_machine(None, seconds, nbytes, workers)
    with pytest.raises(ConfigError, match="pass a smaller --megabytes"):
        measure_machine(None, 0.1, 1 << 60, 1)


def test_loads_do_what_they_count() -> None:
    """Copies arrive, updates change the states, and rates are the work done in the time.

    An error of a load is the caller's.
    """
    target, source = torch.zeros(1 << 16, dtype=torch.uint8), torch.full((1 << 16,), 7, dtype=torch.uint8)
    (rate,) = together([Copies(target, source)], 0.02)
    assert torch.equal(target, source)
    assert rate.done % (1 << 16) == 0
    assert rate.per_s == pytest.approx(rate.done / rate.seconds)
    updates = KernelUpdates(1000)
    before = updates._states.master.clone()
    assert updates() == 1000
    assert not torch.equal(before, updates._states.master)

    class Broken:
        calls = 0

        def __call__(self) -> float:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("broken load")
            return 1.0

        def finish(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="broken load"):
        together([Broken()], 0.01)
