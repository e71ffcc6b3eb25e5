"""The models that are timed: Llama shapes from transformers, random weights, random tokens.

Weights are made where they stay. A size that ends in `-causal` is the same model, but attention is
told that it is causal. Otherwise transformers makes a mask where torch.compile traces the whole
model (with use_cache=False), and none where blocks are compiled one by one: attention with a mask
takes much longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.case import CannotRun, require

VOCABULARY = 32000
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 512},
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "num_attention_heads": 12},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5504, "num_attention_heads": 16},
    "3b": {"hidden_size": 3072, "num_hidden_layers": 26, "intermediate_size": 8192, "num_attention_heads": 24},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "num_attention_heads": 32},
    "10b": {"hidden_size": 4608, "num_hidden_layers": 38, "intermediate_size": 12288, "num_attention_heads": 36},
}
INITIAL_STD = 0.02
CAUSAL = "-causal"


def family_shape(width: int) -> dict[str, int]:
    """The family that is searched for the largest model; w32 is Llama 7B.

    A model has `width` heads of 128, and as many layers.
    """
    hidden = 128 * width
    return {"hidden_size": hidden, "num_hidden_layers": width, "intermediate_size": 256 * -(-8 * hidden // (3 * 256)),
            "num_attention_heads": width}


def layered_shape(heads: int, layers: int) -> dict[str, int]:
    """The families that grow by layers alone: `heads` heads of 128, h32l32 is Llama 7B."""
    return family_shape(heads) | {"num_hidden_layers": layers}


def family_size(family: str, layers: int) -> str:
    """The size with so many layers of the family `w`, or `hH`. Raises CannotRun for another."""
    if family != "w" and not re.fullmatch(r"h[1-9]\d*", family):
        raise CannotRun(f"found family {family!r}, expected w, or hH for H heads of 128")
    return f"w{layers}" if family == "w" else f"{family}l{layers}"


def shape_of(size: str) -> dict[str, int]:
    """Keys of a LlamaConfig for a name of SHAPES, `wN` or `hHlN`, `-causal` or not.

    Raises CannotRun for another.
    """
    size = size.removesuffix(CAUSAL)
    if size in SHAPES:
        return {"vocab_size": VOCABULARY, **SHAPES[size]}
    if found := re.fullmatch(r"w([1-9]\d*)", size):
        return {"vocab_size": VOCABULARY, **family_shape(int(found[1]))}
    if found := re.fullmatch(r"h([1-9]\d*)l([1-9]\d*)", size):
        return {"vocab_size": VOCABULARY, **layered_shape(int(found[1]), int(found[2]))}
    raise CannotRun(f"found size {size!r}, expected one of {', '.join(SHAPES)}, wN for N heads of 128 and N layers, or hHlN for H heads of "
                    f"128 and N layers; each may end in {CAUSAL}")


def build(size: str, sequence: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = False, *,
          on_meta: bool = False) -> nn.Module:
    """A LlamaForCausalLM of a named shape, seed 0, in training mode.

    It is made without memory and its weights are drawn on `device` in `dtype`: no other copy of
    them ever exists. `on_meta`: it stays without memory, for `drawn_by_name`. Raises CannotRun for
    an unknown size or where transformers is not installed.
    """
    of = require("transformers", "transformers", "the model")
    config = of.LlamaConfig(**shape_of(size), max_position_embeddings=sequence, tie_word_embeddings=False, use_cache=False,
                            attn_implementation=attention(size))
    with torch.device("meta"):
        model: nn.Module = of.LlamaForCausalLM(config)
    model.to(dtype)
    if not on_meta:
        model.to_empty(device=device)
        _draw_weights(model)
    # Its frequencies are buffers, kept in fp32 and computed when it is made.
    rotary = model.model.rotary_emb  # type: ignore[union-attr]
    model.model.rotary_emb = type(rotary)(config).to(device)  # type: ignore[union-attr]
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


def attention(size: str) -> str:
    """The name by which transformers has the attention of this size."""
    if not size.endswith(CAUSAL):
        return "sdpa"
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)  # nobody makes masks for this name
    return "sdpa_causal"


def drawn_by_name(model: nn.Module, device: torch.device) -> Callable[[str], torch.Tensor]:
    """A loader for a model that was built `on_meta`: a tensor is drawn alone, by its own seed."""
    shapes = {name: (number, tensor.shape, tensor.dtype) for number, (name, tensor) in enumerate(model.state_dict().items())}

    def draw(name: str) -> torch.Tensor:
        number, shape, dtype = shapes[name]
        if len(shape) < 2:
            return torch.ones(shape, dtype=dtype, device=device)
        generator = torch.Generator(device=device).manual_seed(number)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, INITIAL_STD, generator=generator)

    return draw


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Matrices normal, norms one, as transformers does; with the seed of every mode."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, INITIAL_STD)
        else:
            parameter.fill_(1.0)


def batches(size: str, batch: int, sequence: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens [batch, sequence] that are their own labels, the same ones for every mode."""
    generator = torch.Generator(device=device).manual_seed(1)
    vocabulary = shape_of(size)["vocab_size"]
    while True:
        tokens = torch.randint(0, vocabulary, (batch, sequence), device=device, generator=generator)
        yield {"input_ids": tokens, "labels": tokens}
