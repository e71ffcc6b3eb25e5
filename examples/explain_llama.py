"""Print the plan of a Llama-shaped Hugging Face model.

It says which layer is updated where, why, and what was predicted and measured.

    python examples/explain_llama.py
    python examples/explain_llama.py --layers 26 --hidden 3072 --tokens 2048 --batch 4
        # about 3 billion parameters: a GPU

The weights and tokens are random: the plan depends on shapes and times only. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import hytrain_fx


def llama(layers: int, hidden: int, vocabulary: int, tokens: int) -> LlamaForCausalLM:
    """A Llama with random weights and its usual proportions.

    Heads are 64 wide (128 from a width of 2048 on), an MLP 8/3 of the width.
    """
    heads = hidden // (128 if hidden >= 2048 else 64)
    mlp_width = (hidden * 8 // 3 + 63) // 64 * 64
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=mlp_width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=tokens,
            use_cache=False,
        )
    )


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if gpu else "float32")
    args = parser.parse_args()

    model = llama(args.layers, args.hidden, args.vocabulary, args.tokens).to(args.device, getattr(torch, args.dtype))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = hytrain_fx.compile(model, optimizer)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters in {args.dtype} on {args.device}; the first step compiles")

    tokens = torch.randint(args.vocabulary, (args.batch, args.tokens), device=args.device)
    for _ in tqdm(range(args.steps), unit="step"):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss of the last step: {loss.item():.4f}\n")

    print(hytrain_fx.explain(model))
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
