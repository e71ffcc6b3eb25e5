"""The models that are timed: Llama shapes from transformers, random weights, random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 512},
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5504, "num_attention_heads": 16},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 26, "intermediate_size": 8192, "num_attention_heads": 24},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "num_attention_heads": 32},
    "10b": {"hidden_size": 4608, "num_hidden_layers": 38, "intermediate_size": 12288, "num_attention_heads": 36},
}
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build(size: str, sequence: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = False) -> nn.Module:
    """A LlamaForCausalLM of a named shape, seed 0, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 32000, **SHAPES[size]}
    config = LlamaConfig(**shape, max_position_embeddings=sequence, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


def batches(size: str, batch: int, sequence: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Random tokens [batch, sequence], the same ones for every mode."""
    generator = torch.Generator(device=device).manual_seed(1)
    vocabulary = SHAPES[size].get("vocab_size", 32000)
    while True:
        yield torch.randint(0, vocabulary, (batch, sequence), device=device, generator=generator)
