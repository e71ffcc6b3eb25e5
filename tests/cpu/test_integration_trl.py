"""TRL's SFTTrainer with `OffloadMixin` has the bits of SFTTrainer, also resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx

from .framework_runs import once
from .loops import assert_same, weights

trl: Any = pytest.importorskip("trl", reason="trl is not installed")
datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed  # noqa: E402

from hytrain_fx.integrations.transformers import OffloadMixin  # noqa: E402

STEPS, STOP = 4, 2


class HySFTTrainer(OffloadMixin, trl.SFTTrainer):  # type: ignore[misc]
    """What a user writes."""


@dataclass(frozen=True)
class Run:
    """What is left of a training."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    folder: Path
    not_offloaded: set[str]


def tokenizer() -> Any:
    """One that knows numbers: nothing is downloaded."""
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def train(ours: bool, folder: Path, resume: Path | None = None) -> Run:
    """Four updates of two batches, clipped, with a checkpoint half-way."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not ours:
        model.compile()
    rows = torch.randint(2, 64, (16, 16), generator=torch.Generator().manual_seed(0))
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        optim="adamw_torch", max_grad_norm=0.5, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=16, logging_steps=1,
        save_strategy="steps", save_steps=STOP, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = (HySFTTrainer if ours else trl.SFTTrainer)(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_dict({"input_ids": rows.tolist()}), processing_class=tokenizer()
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    found = set[str]()
    if ours:
        explained = hytrain_fx.explain(model)
        assert explained.node_runs["cpu_step"] > 0
        found = set(explained.not_offloaded)
    log = trainer.state.log_history
    losses, norms = ([entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm"))
    done = Run(weights(model), losses, norms, folder, found)
    if ours:
        hytrain_fx.close(model)
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """`run(kind)`; "resumed" goes on from the checkpoint that the offloaded run saved half-way."""

    @once
    def run(kind: str) -> Run:
        resume = run("ours").folder / f"checkpoint-{STOP}" if kind == "resumed" else None
        return train(kind != "plain", tmp_path_factory.mktemp(kind), resume)

    return run


@pytest.mark.parametrize("kind", ["ours", pytest.param("resumed", marks=pytest.mark.sample(0))])
@pytest.mark.parametrize("fact", ["losses", "norms"])
def test_the_log_is_sfttrainers(run: Callable[[str], Run], fact: str, kind: str) -> None:
    """Losses and norms before clipping have the same bits, also resumed from half-way."""
    plain = getattr(run("plain"), fact)
    assert getattr(run(kind), fact) == plain
    assert len(set(plain)) == STEPS


@pytest.mark.parametrize("kind", ["ours", pytest.param("resumed", marks=pytest.mark.sample(0))])
def test_the_weights_are_sfttrainers(run: Callable[[str], Run], kind: str) -> None:
    """Weights have the same bits; only the head, read by TRL in eager code, has no overlap."""
    assert_same(run(kind).weights, run("plain").weights)
    assert {name for name in run(kind).not_offloaded if "lm_head" not in name} == set()
