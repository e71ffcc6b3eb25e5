"""The zoo: thirteen families of models, each at two sizes, from configs alone.

    small    a few thousand to 200 thousand parameters: trains on a CPU in seconds, for bits
    large    0.6 to 3.1 G parameters: trains in bf16 on one GPU of 80 GB, for time

A size is named `gpt2`, or `gpt2.small`. Weights and batches are random, and the same for every row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import plain_models
from benchmarks.case import CannotRun, require

Batch = dict[str, torch.Tensor]
Config = dict[str, Any]
SMALL = ".small"


@dataclass(frozen=True)
class Draws:
    """Random tensors of one batch; `length` is what the size says."""

    generator: torch.Generator
    dtype: torch.dtype
    batch: int
    length: int

    def whole(self, below: int, *shape: int) -> torch.Tensor:
        """Whole numbers from 1 on: 0 pads, and padding is not learned."""
        return torch.randint(1, below, shape, generator=self.generator, device=self.generator.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the model's dtype."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.dtype)

    def text(self, config: Config) -> Batch:
        """Tokens that are their own labels."""
        tokens = self.whole(config["vocab_size"], self.batch, self.length)
        return {"input_ids": tokens, "labels": tokens}

    def images(self, classes: int) -> Batch:
        """Images of `length` by `length` with labels."""
        return {"pixel_values": self.normal(self.batch, 3, self.length, self.length), "labels": self.whole(classes, self.batch)}


@dataclass(frozen=True)
class Size:
    """One size of a family.

    batch, length    samples in a step, and what is long about a sample: see `Family.length`
    params_g         parameters, in 10^9, about
    activations_gb   what forward and backward take of the GPU beside weights and gradients, about
    """

    config: Config
    batch: int
    length: int
    params_g: float = 0.0
    activations_gb: float = 0.0


@dataclass(frozen=True)
class Family:
    """One kind of model.

    kind     what it stands for
    length   what `Size.length` counts
    make     the model of a config, on the device that is torch's default
    draw     one batch for a config
    blocks   names, as a regular expression, of the modules that a compile block by block takes
    """

    kind: str
    length: str
    make: Callable[[Config], nn.Module]
    draw: Callable[[Draws, Config], Batch]
    blocks: str
    small: Size
    large: Size

    def size(self, small: bool) -> Size:
        """One of the two."""
        return self.small if small else self.large


def _of_transformers(name: str, task: str) -> Callable[[Config], nn.Module]:
    """Makes the model of a config, by the names of its classes without `Config` and with `task`."""

    def make(config: Config) -> nn.Module:
        of = require("transformers", "transformers", "the model")
        model: nn.Module = getattr(of, name + task)(getattr(of, name + "Config")(**config))
        return model

    return make


def _plain(model: Callable[..., nn.Module]) -> Callable[[Config], nn.Module]:
    return lambda config: model(**config)


def _speech(draws: Draws, config: Config) -> Batch:
    sound = draws.normal(draws.batch, config["num_mel_bins"], 2 * config["max_source_positions"])
    return {"input_features": sound, "labels": draws.whole(config["vocab_size"], draws.batch, draws.length)}


def _noised(draws: Draws, config: Config) -> Batch:
    shape = (draws.batch, 4, config["side"], config["side"])
    return {"latents": draws.normal(*shape), "noise": draws.normal(*shape), "times": 1000 * draws.normal(draws.batch).sigmoid(),
            "classes": draws.whole(config.get("classes", 1000), draws.batch)}


def _clicks(draws: Draws, config: Config) -> Batch:
    indices = draws.whole(config["rows"], config["tables"], draws.batch, draws.length)
    return {"numbers": draws.normal(draws.batch, 13), "indices": indices, "clicked": (draws.normal(draws.batch) > 0).to(draws.dtype)}


def _graph(draws: Draws, config: Config) -> Batch:
    nodes = draws.batch * draws.length
    return {"features": draws.normal(nodes, config["features"]), "edges": draws.whole(nodes, 2, 2 * nodes),
            "classes": draws.whole(config["classes"], nodes)}


_NO_CACHE: Config = {"use_cache": False}
_TINY: Config = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ONE_LAYER = _TINY | {"num_hidden_layers": 1}
_ONE_LABEL: Config = {"problem_type": "single_label_classification"}  # else the first forward sets it, and the second compiles again

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "decoder with positions learned", "tokens", _of_transformers("GPT2", "LMHeadModel"), Draws.text, r"transformer\.h\.\d+",
        Size({"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
             | _NO_CACHE, 2, 12),
        Size({"vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25} | _NO_CACHE, 7, 1024, 1.56, 18.5)),
    "qwen2": Family(
        "decoder, embedding and head tied", "tokens", _of_transformers("Qwen2", "ForCausalLM"), Draws.text, r"model\.layers\.\d+",
        Size(_TINY | _NO_CACHE | {"num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32}, 2, 12),
        Size(_NO_CACHE | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
                          "num_key_value_heads": 2, "intermediate_size": 11008, "tie_word_embeddings": True,
                          "max_position_embeddings": 2048}, 3, 2048, 3.09, 26.0)),
    "moe": Family(
        "decoder, mixture of experts", "tokens", _of_transformers("Qwen3Moe", "ForCausalLM"), Draws.text, r"model\.layers\.\d+",
        Size(_ONE_LAYER | _NO_CACHE | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                                       "moe_intermediate_size": 32, "router_aux_loss_coef": 0.0, "tie_word_embeddings": False}, 2, 12),
        Size(_NO_CACHE | {"vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16,
                          "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 32,
                          "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "router_aux_loss_coef": 0.0,
                          "tie_word_embeddings": False}, 4, 2048, 2.62, 7.0)),
    "bert": Family(
        "encoder", "tokens", _of_transformers("Bert", "ForMaskedLM"), Draws.text, r"bert\.encoder\.layer\.\d+",
        Size(_ONE_LAYER | {"max_position_embeddings": 32}, 2, 12),
        Size({"vocab_size": 30522, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16},
             16, 512, 1.28, 20.0)),
    "t5": Family(
        "encoder and decoder", "tokens", _of_transformers("T5", "ForConditionalGeneration"), Draws.text, r"(en|de)coder\.block\.\d+",
        Size(_NO_CACHE | {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,
                          "decoder_start_token_id": 0}, 2, 12),
        Size(_NO_CACHE | {"vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16,
                          "decoder_start_token_id": 0}, 16, 512, 0.74, 49.0)),
    "whisper": Family(
        "speech", "tokens that are said", _of_transformers("Whisper", "ForConditionalGeneration"), _speech,
        r"model\.(en|de)coder\.layers\.\d+",
        Size(_NO_CACHE | {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16,
                          "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                          "decoder_start_token_id": 1}, 2, 8),
        # Whisper large has twice the layers: 330 s were not enough to compile it beside two others.
        Size(_NO_CACHE | {"vocab_size": 51865, "d_model": 1280, "encoder_layers": 16, "decoder_layers": 16,
                          "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
                          "decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80},
             8, 256, 0.81, 12.0)),
    "vit": Family(
        "vision transformer", "pixels a side", _of_transformers("ViT", "ForImageClassification"),
        lambda draws, config: draws.images(config["num_labels"]), r"vit(\.encoder)?\.layers?\.\d+",
        Size(_ONE_LABEL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8,
                           "patch_size": 4, "num_labels": 5}, 2, 8),
        Size(_ONE_LABEL | {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
                           "image_size": 224, "patch_size": 14, "num_labels": 1000}, 64, 224, 0.63, 30.0)),
    "convnext": Family(
        "convolutions", "pixels a side", _of_transformers("ConvNextV2", "ForImageClassification"),
        lambda draws, config: draws.images(config["num_labels"]), r"convnextv2\.encoder\.stages\.\d+\.layers\.\d+",
        Size(_ONE_LABEL | {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_labels": 5}, 2, 16),
        Size(_ONE_LABEL | {"depths": [3, 3, 27, 3], "hidden_sizes": [352, 704, 1408, 2816], "num_labels": 1000}, 48, 224, 0.66, 13.5)),
    "dit": Family(
        "diffusion", "latents a side", _plain(plain_models.Dit), _noised, r"blocks\.\d+",
        Size({"width": 32, "layers": 2, "heads": 4, "side": 8, "classes": 10}, 2, 8),
        Size({"width": 1152, "layers": 28, "heads": 16, "side": 32}, 64, 32, 0.67, 24.0)),
    "dlrm": Family(
        "recommender", "rows looked up in a table", _plain(plain_models.Dlrm), _clicks, r"bottom|top",
        Size({"tables": 4, "rows": 50, "width": 8, "hidden": 16}, 8, 2),
        Size({"tables": 26, "rows": 500_000, "width": 64, "hidden": 1024}, 8192, 4, 0.83, 4.0)),
    "lstm": Family(
        "recurrent", "tokens", _plain(plain_models.LstmLanguageModel),
        lambda draws, config: {"tokens": draws.whole(config["vocabulary"], draws.batch, draws.length)}, r"lstm|readout",
        Size({"vocabulary": 64, "width": 16, "layers": 2}, 2, 6),
        Size({"vocabulary": 32000, "width": 3072, "layers": 6}, 64, 128, 0.65, 12.0)),
    "mamba": Family(
        "state space", "tokens", _of_transformers("Mamba2", "ForCausalLM"), Draws.text, r"backbone\.layers\.\d+",
        Size(_NO_CACHE | {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 8, "head_dim": 8, "num_heads": 4,
                          "n_groups": 1, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}, 2, 8),
        Size(_NO_CACHE | {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 32, "state_size": 64, "head_dim": 64,
                          "num_heads": 64, "n_groups": 1, "chunk_size": 64}, 4, 1024, 0.95, 30.0)),
    "gnn": Family(
        "graph network", "nodes of a graph", _plain(plain_models.GraphNetwork), _graph, r"layers\.\d+",
        Size({"features": 6, "width": 16, "layers": 2, "classes": 3}, 2, 8),
        Size({"features": 128, "width": 2048, "layers": 24, "classes": 64}, 16, 1024, 0.61, 30.0)),
}


def is_family(size: str) -> bool:
    """Whether a size's name is one of the zoo's."""
    return size.removesuffix(SMALL) in FAMILIES


def family_of(size: str) -> tuple[Family, Size]:
    """The family and the size of a name. Raises CannotRun for another name."""
    name = size.removesuffix(SMALL)
    if name not in FAMILIES:
        raise CannotRun(f"found family {name!r}, expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    return family, family.size(small=size.endswith(SMALL))


def build(size: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model of a name, seed 0, in training mode. Its weights are drawn where they stay."""
    family, of = family_of(size)
    torch.manual_seed(0)
    with device:
        model = family.make(of.config)
    model.to(dtype).train()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # plans are made of the memory that is free
    return model


def batches(size: str, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
    """Batch after batch, the same for every row; floating-point numbers in the model's dtype."""
    family, of = family_of(size)
    draws = Draws(torch.Generator(device=device).manual_seed(1), dtype, batch, length)
    while True:
        yield family.draw(draws, of.config)


def blocks(size: str, model: nn.Module) -> list[nn.Module]:
    """The modules of a model that a compile block by block takes."""
    pattern = re.compile(family_of(size)[0].blocks)
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]
