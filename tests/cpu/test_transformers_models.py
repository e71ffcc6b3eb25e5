"""Shapes of models that transformers builds from a config, without weights and network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hytrain_fx.__main__ import main
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.forecast.models import find_model
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.transformers_model import shape_of_config

transformers = pytest.importorskip("transformers")

BERT = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 64}
LLAMA = {**BERT, "num_key_value_heads": 2}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
           "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "max_source_positions": 32, "max_target_positions": 16,
           "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# by model_type: the config, and what a micro-batch is counted in
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 64}, "tokens"),
    "llama": (LLAMA, "tokens"), "qwen2": (LLAMA, "tokens"), "gemma2": ({**LLAMA, "head_dim": 8}, "tokens"),
    "qwen3_moe": ({**LLAMA, **MOE}, "tokens"), "mixtral": ({**LLAMA, "num_local_experts": 4}, "tokens"),
    "bert": (BERT, "tokens"), "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}, "tokens"),
    "t5": ({"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}, "tokens"),
    "whisper": (WHISPER, "samples"), "vit": (IMAGES, "samples"),
    "convnextv2": ({"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1], "image_size": 32}, "samples"),
    "clip": ({"architectures": ["CLIPModel"], "text_config": BERT, "vision_config": IMAGES, "projection_dim": 16}, "samples"),
}


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family][0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_built_from_its_config(family: str) -> None:
    """Every parameter that is trained is in a unit, and its work was observed.

    The model that is compared is built by transformers on its own.
    """
    config = config_of(family)
    shape = shape_of_config(config, family)
    known = transformers.CONFIG_MAPPING[family].from_dict(config)
    named = {"clip": "CLIPModel", "whisper": "WhisperForConditionalGeneration", "t5": "T5ForConditionalGeneration"}
    kinds = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification")
    automatic = [getattr(transformers, kind) for kind in kinds]
    makers = [getattr(transformers, named[family])] if family in named else [
        kind.from_config for kind in automatic if type(known) in kind._model_mapping]
    with torch.device("meta"):
        model = makers[0](known)
    assert shape.params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.counted == FAMILIES[family][1]
    layers = [unit for unit in shape.units if any(name in unit.name for name in (".layers.", ".h.", ".layer.", ".block.", ".stages."))]
    assert len(layers) > 1
    assert all(unit.matmul_params > 0 for unit in layers)
    assert sum(unit.attention_width for unit in shape.units) > 0 or family in ("mamba", "convnextv2") or shape.counted == "samples"


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_what_runs_is_what_the_closed_form_says(family: str) -> None:
    """Parameters, products and attention observed are those of the family's formula.

    A tied head's product, which belongs to no unit's parameters, is the last unit's.
    """
    observed, formula = shape_of_config(config_of(family), family), read_shape(config_of(family))
    for of in ("params", "matmul_params", "attention_width"):
        assert sum(getattr(u, of) for u in observed.units) == sum(getattr(u, of) for u in formula.units), of
    assert (observed.layers, observed.context) == (formula.layers, formula.context)
    assert observed.units[-1].matmul_params == formula.units[-1].matmul_params


def test_a_token_is_multiplied_by_the_experts_it_goes_to() -> None:
    """Of four experts two work on a token: products are fewer than parameters."""
    layer = next(unit for unit in shape_of_config(config_of("qwen3_moe"), "moe").units if unit.name.endswith("layers.1"))
    attention, router, expert = 2 * 32 * 32 + 2 * 32 * 16, 32 * 4, 3 * 32 * 16
    assert layer.matmul_params == attention + router + 2 * expert
    assert layer.params == attention + router + 4 * expert + 2 * 32 + 2 * 8


def test_work_is_counted_once_where_units_are_nested() -> None:
    """A sample's products are those of all convolutions and matrices of the model, once."""
    shape = shape_of_config(config_of("vit"), "vit")
    tokens, patches = 17, 16
    layer = tokens * (4 * 32 * 32 + 2 * 32 * 64) + 2 * tokens * tokens * 32
    assert sum(unit.matmul_params for unit in shape.units) == patches * 32 * 3 * 8 * 8 + 3 * layer + 32 * 2


def test_the_command_takes_any_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a config of images is reported in samples, one of text in tokens."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("vit")))
    assert main(["report", "--model", str(tmp_path), "--device", "rtx5090", "--tokens", "64"]) == 0
    told = capsys.readouterr().out
    assert "micro-batch of 64 samples, no recomputation" in told
    assert "samples a second" in told
    assert "tokens a second" not in told
    assert find_model(config_of("llama")) == read_shape(config_of("llama"))


def test_what_cannot_be_built_names_the_way_out() -> None:
    """An unknown family, a config that is refused, a model that does not run on fake tensors."""
    with pytest.raises(UnsupportedError, match=r"'no-such' is not known to transformers; package.module:factory"):
        find_model({"model_type": "no-such"})
    with pytest.raises(ConfigError, match=r"not one of model_type 't5'|cannot be built"):
        find_model({"model_type": "t5", "num_heads": "many"})
    audio = {**BERT, "model_type": "wav2vec2", "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    with pytest.raises(ConfigError, match=r"was built, but not run: .* package.module:factory takes any model"):
        find_model(audio)
