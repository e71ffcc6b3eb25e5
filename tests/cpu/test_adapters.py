"""LoRA by the `peft` library on a small Llama: only the adapters train.

The frozen base is left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .loops import compare, weights
from .models import Batches

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def lora_llama(dtype: torch.dtype) -> tuple[nn.Module, Batches]:
    """fp32 adapters on a base of `dtype`, as peft makes them."""
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).to(dtype)
    lora = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, lora), [(torch.randint(0, 31, (2, 7)),) for _ in range(3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 1])
def test_lora_adapters_train_alike(k: int, dtype: torch.dtype) -> None:
    """With an adapter, losses and weights are the plain loop's, and the base keeps its bits.

    The same holds for an evaluation without the adapter, and for the merged weights.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        base = {name: value for name, value in weights(model).items() if "lora" not in name}
        found = []
        for step in range(5):
            (tokens,) = batches[step % 3]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
            if step == 2:
                with torch.no_grad(), model.disable_adapter():
                    found.append(float(model(input_ids=tokens, labels=tokens).loss))
        after = weights(model)
        assert all(torch.equal(after[name], value) for name, value in base.items())
        return found

    found = compare(lambda: lora_llama(dtype), loop, k=k)
    assert found[0] != found[4]
