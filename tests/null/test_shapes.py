"""Units and parameter counts read from model configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.forecast.shapes import read_shape, registered_configs

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50, "vocab_size": 100}
BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
        "vocab_size": 100, "max_position_embeddings": 512, "type_vocab_size": 2}


# Counted from the models that transformers 5.23 makes of these configs.
@pytest.mark.parametrize(("config", "params"), [
    (LLAMA, 105_408), ({**LLAMA, "tie_word_embeddings": True}, 99_008),
    ({**LLAMA, "attention_bias": True, "mlp_bias": True}, 106_752), ({**LLAMA, "model_type": "mistral"}, 105_408),
    ({**LLAMA, "model_type": "qwen2"}, 105_792), ({**LLAMA, "model_type": "qwen3", "head_dim": 32}, 142_464),
    (GPT2, 159_680), ({**GPT2, "tie_word_embeddings": False}, 166_080),
    (BERT, 131_844), ({**BERT, "tie_word_embeddings": False}, 138_344),
])
def test_parameters_are_counted_exactly(config: dict[str, Any], params: int) -> None:
    """The shape has as many parameters as the model transformers builds from the same config."""
    assert read_shape(config).params == params


def test_units_of_a_model() -> None:
    """Units are the embedding, each layer and the head, in forward order; layers are alike."""
    shape = read_shape(LLAMA)
    assert [u.name for u in shape.units] == ["embedding", "layer.0", "layer.1", "layer.2", "head"]
    assert [u.index for u in shape.units] == list(range(5))
    assert len({u.params for u in shape.units[1:4]}) == 1
    assert [u.attention_width for u in shape.units] == [0, 64, 64, 64, 0]


def test_tied_projection_is_the_embeddings() -> None:
    """A tied output projection adds no parameters to the head, but its matrix product."""
    free, tied = read_shape(LLAMA), read_shape({**LLAMA, "tie_word_embeddings": True})
    assert tied.units[0].params == free.units[0].params == 6400
    assert (free.units[-1].params, tied.units[-1].params) == (6464, 64)
    assert tied.units[-1].matmul_params == free.units[-1].matmul_params == 6400


@pytest.mark.parametrize(("name", "billions"), [("llama-1.3b", 1.345), ("llama-3.1b", 3.141), ("llama-7b", 6.738), ("llama-10b", 9.977),
                                                ("llama-70b", 68.98)])
def test_registered_sizes(name: str, billions: float) -> None:
    """A registered shape has the size its name says."""
    assert read_shape(name).params / 1e9 == pytest.approx(billions, rel=1e-3)
    assert read_shape(name).name == name
    assert name in registered_configs()


def test_files_and_folders(tmp_path: Path) -> None:
    """A config.json is read by its path or by its folder, which then names the model."""
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_shape(folder) == read_shape(folder / "config.json")
    assert read_shape(folder).name == "small-llama"


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    """An unknown name, a broken file, a missing key, another family, experts: errors say which."""
    with pytest.raises(ConfigError, match="neither a file 'llama-8t' nor a shape"):
        read_shape("llama-8t")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="is not a model's"):
        read_shape(broken)
    with pytest.raises(ConfigError, match="no key 'vocab_size'"):
        read_shape({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    with pytest.raises(UnsupportedError, match="model_type 't5'"):
        read_shape({"model_type": "t5", "d_model": 64})
    with pytest.raises(UnsupportedError, match="num_local_experts=8"):
        read_shape({**LLAMA, "num_local_experts": 8})
