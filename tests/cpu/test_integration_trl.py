"""TRL's SFTTrainer with `OffloadMixin` has the bits of SFTTrainer, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx

from .framework_runs import Run, Runs, each_once, not_offloaded, require_same, with_states
from .loops import assert_same, weights

trl: Any = pytest.importorskip("trl", reason="trl is not installed")
datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed  # noqa: E402

from hytrain_fx.integrations.transformers import OffloadMixin  # noqa: E402

STEPS, STOP = 6, 2
MAX_NORM = 0.5
KEYS = ["loss", "grad_norm", "learning_rate", "eval_loss"]
REST = [("resumed", "fp32"), ("ours", "defaults"), ("ours", "LoRA")]
TRAININGS = [("ours", "fp32"), *(pytest.param(*each, marks=pytest.mark.sample(0)) for each in REST)]


class HySFTTrainer(OffloadMixin, trl.SFTTrainer):  # type: ignore[misc]
    """What a user writes."""


def tokenizer() -> Any:
    """One that knows numbers: nothing is downloaded."""
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")


def llama() -> Any:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trainer_of(model: Any, folder: Path, *, ours: bool, case: str) -> Any:
    """Updates of two batches, clipped; every second one is evaluated and saved.

    "defaults" are those of SFTConfig: bf16 autocast, activations computed again. The rate falls
    where the evaluation does not get better. The checkpoint with the *highest* loss counts as the
    best, so the first one is loaded at the end.
    """
    defaults = case == "defaults"
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0) if case == "LoRA" else None
    rows = torch.randint(2, 64, (16, 16), generator=torch.Generator().manual_seed(0))
    data = datasets.Dataset.from_dict({"input_ids": rows.tolist()})
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        optim="adamw_torch", max_grad_norm=MAX_NORM, use_cpu=True, bf16=defaults, gradient_checkpointing=defaults, max_length=16,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "mode": "max"}, logging_steps=1,
        save_strategy="steps", save_steps=STOP, eval_strategy="steps", eval_steps=STOP, per_device_eval_batch_size=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    return (HySFTTrainer if ours else trl.SFTTrainer)(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer(),
        peft_config=adapters,
    )  # fmt: skip


def train(ours: bool, case: str, folder: Path, start: Path | None) -> Run:
    trainer = trainer_of(llama(), folder, ours=ours, case=case)
    model = trainer.model  # with adapters, another one than was given
    if not ours:
        model.compile()
    trainer.train(resume_from_checkpoint=None if start is None else str(start / f"checkpoint-{STOP}"))
    left, details = (not_offloaded(model), hytrain_fx.explain(model).details()) if ours else (frozenset[str](), "")
    numbers = {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in KEYS}
    steps = (STOP, STEPS) if start is None else (STEPS,)
    done = Run(weights(model), numbers, {step: saved(folder / f"checkpoint-{step}") for step in steps}, folder, left, details)
    if ours:
        hytrain_fx.close(model)
    return done


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    (weights_file,) = folder.glob("*model.safetensors")
    return with_states(load_file(weights_file), states)


run = each_once(train)


@pytest.mark.parametrize(("kind", "case"), TRAININGS)
def test_training_has_sfttrainers_bits(run: Runs, kind: str, case: str) -> None:
    """Numbers, weights and checkpoints; only the head, read in eager code, has no overlap."""
    plain, found = run("plain", case), run(kind, case)
    assert found.not_offloaded == (set() if case == "LoRA" else {"lm_head.weight"})
    require_same(found, plain)
    assert len(set(plain.numbers["loss"])) == STEPS
    assert len(set(plain.numbers["learning_rate"])) > 1
    assert max(plain.numbers["grad_norm"]) > (0 if case == "LoRA" else MAX_NORM)


def test_the_best_checkpoint_is_loaded_at_the_end(run: Runs) -> None:
    """load_best_model_at_end gives the weights of the best checkpoint, not the last."""
    ours = run("ours", "fp32")
    best, last = ours.checkpoints[STOP], ours.checkpoints[STEPS]
    assert_same({name: best[name] for name in ours.weights}, dict(ours.weights))
    assert any(not torch.equal(best[name], last[name]) for name in ours.weights)


def test_the_forward_waits_for_the_head_alone_in_eager_code(run: Runs) -> None:
    """SFTTrainer ends the graph before its chunked loss, which reads no other weight."""
    assert "weights of 1 of 4 layers are read by code outside of graphs, and waited for there: lm_head" in run("ours", "fp32").details
