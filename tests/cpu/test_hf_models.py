"""Transformers' own model classes, tiny and with random weights, have the plain model's bits.

The plain model is compiled too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .loops import compare
from .models import Batches

pytestmark = pytest.mark.fused_kernels

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def llama_checkpointed() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY, max_position_embeddings=16))  # type: ignore[no-any-return]


def vit() -> nn.Module:
    sizes = {key: value for key, value in TINY.items() if key != "vocab_size"}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))  # type: ignore[no-any-return]


def text(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def images(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 2])}


# A weight of a convolution is not copied to channels-last ahead of its wait, and on some CPUs
# oneDNN's convolutions of the two layouts have other last bits. So the plain model keeps layouts
# too, as the documentation tells who compares losses.
KEPT_LAYOUTS: dict[Any, dict[str, Any]] = {vit: {"layout_optimization": False}}


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("make", "batch"), [(vit, images), (llama, text), (llama_checkpointed, text), (gpt2, text), (bert, text)], ids=lambda f: f.__name__
)
def test_a_transformers_model_trains_with_the_bits_of_the_plain_one(
    make: Callable[[], nn.Module], batch: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    """Four steps with clipping have the plain bits, one unit on the device.

    Dropout is on where the model has it, and the loss is `output.loss` as in HF's examples.
    """

    def loop(model: Any, optimizer: Any, _: Batches) -> list[float]:
        model.train()
        losses = []
        for step in range(4):
            loss = model(**batch(step)).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(loss.detach()), float(norm)]
        return losses

    compare(lambda: (make(), []), loop, plain_options=KEPT_LAYOUTS.get(make), k=1)
