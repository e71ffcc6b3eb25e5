"""HyTrainer has the bits of the Trainer, also resumed and under autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError, HytrainWarning, UnsupportedError
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .framework_runs import Run, Runs, Tiny, each_once, example, not_offloaded, require_same, rounded_root, with_states
from .loops import assert_same, weights
from .models import mlp

STEPS, STOP, LAST = 6, 2, 4
MAX_NORM = 0.5
KEYS = ["loss", "grad_norm", "learning_rate", "eval_loss"]
CASES = ["fp32", *(pytest.param(case, marks=pytest.mark.sample(0)) for case in ("bf16", "Llama"))]
at = example("train_trainer", "transformers", "accelerate")


def train(ours: bool, case: str, folder: Path, start: Path | None) -> Run:
    """Updates of two batches each: warm-up, decay groups, clipping; every second one is evaluated.

    The checkpoint with the *highest* loss counts as the best. So the second evaluation stops the
    training early, at `LAST` of `STEPS`, and the first checkpoint is loaded at the end.

    Ours has the Trainer's defaults besides: fused AdamW, the filter of losses. And
    `torch_compile=True`, which compiles around the model, changes nothing.
    """
    from transformers import EarlyStoppingCallback

    model = at.new_model(1, 16) if case == "Llama" else Tiny()
    if not ours:
        model.compile()
    data = at.Windows(16)
    arguments = at.arguments(
        str(folder), STEPS, bf16=case == "bf16", warmup_steps=2, max_grad_norm=MAX_NORM, logging_steps=1, use_cpu=True,
        eval_strategy="steps", eval_steps=STOP, save_strategy="steps", save_steps=STOP, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
        **({"optim": "adamw_torch_fused", "logging_nan_inf_filter": True, "torch_compile": True} if ours else {}),
    )  # fmt: skip
    trainer = (at.HyTrainer if ours else at.Trainer)(
        model=model, args=arguments, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(8)),
        callbacks=[EarlyStoppingCallback(1)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if start is None else str(start / f"checkpoint-{STOP}"))
    left = not_offloaded(model) if ours else frozenset[str]()
    numbers = {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in KEYS}
    steps = (STOP, LAST) if start is None else (LAST,)
    found = Run(weights(model), numbers, {step: saved(folder / f"checkpoint-{step}") for step in steps}, folder, left)
    if ours:
        hytrain_fx.close(model)
    return found


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return with_states(load_file(folder / "model.safetensors"), states)


run = each_once(train)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ours", "resumed"])
def test_training_has_the_trainers_bits(run: Runs, kind: str, case: str) -> None:
    """Logged numbers, weights and checkpoints, whole and resumed from the Trainer's checkpoint."""
    plain, found = run("plain", case), run(kind, case)
    assert not found.not_offloaded
    require_same(found, plain)
    assert len(set(plain.numbers["loss"])) == len(found.numbers["loss"]) == LAST
    assert max(plain.numbers["grad_norm"]) > MAX_NORM


def test_the_best_checkpoint_is_loaded_at_the_end(run: Runs) -> None:
    """load_best_model_at_end gives the weights of the best checkpoint, not the last."""
    ours = run("ours", "fp32")
    best, last = ours.checkpoints[STOP], ours.checkpoints[LAST]
    assert_same({name: best[name] for name in ours.weights}, dict(ours.weights))
    assert any(not torch.equal(best[name], last[name]) for name in ours.weights)


# --- what is not trained


def trainer_of(folder: Path, *, ours: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return at.HyTrainer(model=Tiny(), args=at.arguments(str(folder), 1, use_cpu=True, **arguments), **(ours or {}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("made", ["closed", "model", "model_init"])
def test_a_second_training_has_the_trainers_bits(tmp_path: Path, made: str) -> None:
    """It goes on with the model and its states; with `model_init` it begins with new ones.

    So it does where the model was closed in between.
    """

    def trained(kind: Any) -> list[dict[str, torch.Tensor]]:
        def model() -> Tiny:
            model = Tiny()
            if kind is at.Trainer:
                model.compile()
            return model

        torch._dynamo.reset()
        arguments = at.arguments(str(tmp_path), 2, use_cpu=True)
        trainer = kind(args=arguments, train_dataset=at.Windows(16),
                       **({"model_init": model} if made == "model_init" else {"model": model()}))
        found = []
        for _ in range(2):
            trainer.train()
            found.append(weights(trainer.model))
            assert kind is at.Trainer or not not_offloaded(trainer.model)
            if made == "closed" and kind is at.HyTrainer and len(found) == 1:
                hytrain_fx.close(trainer.model)
        if kind is at.HyTrainer:
            hytrain_fx.close(trainer.model)
        return found

    with rounded_root():
        plain, ours = trained(at.Trainer), trained(at.HyTrainer)
    for found, expected in zip(ours, plain, strict=True):
        assert_same(found, expected)
    assert torch.equal(ours[0]["head.weight"], ours[1]["head.weight"]) == (made == "model_init")


OPTIMIZERS = ["adafactor", "adagrad", "rmsprop", "sgd"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizers_that_the_trainer_makes_keep_their_bits(tmp_path: Path, optim: str) -> None:
    """`optim=` of other optimizers trains to the Trainer's weights."""
    found = []
    for kind in (at.Trainer, at.HyTrainer):
        torch._dynamo.reset()
        model = Tiny()
        if kind is at.Trainer:
            model.compile()
        trainer = kind(model=model, args=at.arguments(str(tmp_path), 3, use_cpu=True, optim=optim), train_dataset=at.Windows(16))
        with rounded_root():
            trainer.train()
        found.append(weights(model))
    assert not not_offloaded(model)
    hytrain_fx.close(model)
    assert_same(found[1], found[0])


def test_the_note_of_a_refused_optimizer_names_optim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that the Trainer makes and we cannot take: the error says what to set."""

    class Quantised(torch.optim.AdamW):
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            self.table = torch.zeros(256)

    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer, "get_optimizer_cls_and_kwargs", lambda *_: (Quantised, {}))
    with pytest.raises(UnsupportedError, match="Quantised keeps a Tensor") as refused:
        trainer.create_optimizer()
    assert "for optim='adamw_torch'; tried are adamw_torch, " in refused.value.__notes__[0]


def test_an_optimizer_that_was_given_is_offloaded(tmp_path: Path) -> None:
    """`optimizers=(optimizer, None)` is offloaded, once; a second train() finds the same.

    Where the model was closed, it is offloaded again.
    """
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    trainer = at.HyTrainer(model=model, args=at.arguments(str(tmp_path), 1, use_cpu=True), optimizers=(optimizer, None))
    found = trainer.create_optimizer()
    assert isinstance(found, OffloadedOptimizer)
    assert found.param_groups is optimizer.param_groups
    assert trainer.create_optimizer() is trainer.optimizer is found
    trainer.optimizer = trainer.accelerator.prepare(found)
    assert trainer.create_optimizer() is trainer.optimizer
    hytrain_fx.close(model)
    again = trainer.create_optimizer()
    assert isinstance(again, OffloadedOptimizer)
    assert not again.session.closed
    assert again.param_groups is optimizer.param_groups
    hytrain_fx.close(model)


@pytest.mark.parametrize("option", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_that_converts_the_model_is_the_trainers(tmp_path: Path, option: str) -> None:
    """Loss and weights are those of the Trainer with the same weights.

    A further train() goes on in 16 bits, with the fp32 weights of before as masters.
    """

    def trainer_with(kind: Any, model: Tiny) -> Any:
        data = at.Windows(16)
        arguments = at.arguments(str(tmp_path), 2, use_cpu=True, **{option: True})
        return kind(model=model, args=arguments, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(8)))

    trained, plain = Tiny(), Tiny()
    trainer = trainer_with(at.HyTrainer, trained)
    trainer.train()
    before = weights(trained)
    plain.load_state_dict(before)
    found, expected = (each.evaluate()["eval_loss"] for each in (trainer, trainer_with(at.Trainer, plain)))
    assert found == expected
    assert_same(weights(trained), weights(plain))
    masters = {name: trainer.optimizer.state[parameter]["master"] for name, parameter in trained.named_parameters()}
    assert_same(masters, before)
    trainer.train()
    assert not not_offloaded(trained)
    assert {int(trainer.optimizer.state[parameter]["step"]) for parameter in trained.parameters()} == {4}
    assert any(not torch.equal(value, weights(plain)[name]) for name, value in weights(trained).items())
    trainer.evaluate()  # closed again


def test_a_create_optimizer_that_replaces_ours_is_refused(tmp_path: Path) -> None:
    """Nothing would be offloaded. The error has the line to write; calling ours within is fine."""

    class Replaces(at.HyTrainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
            return self.optimizer

    class Extends(at.HyTrainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, model: Any = None) -> Any:
            return super().create_optimizer(model)

    arguments = at.arguments(str(tmp_path), 1, use_cpu=True)
    with pytest.raises(UnsupportedError, match=r"Replaces.create_optimizer replaces .* Write class Replaces\(OffloadMixin, YourTrainer\)"):
        Replaces(model=Tiny(), args=arguments, train_dataset=at.Windows(16)).train()
    trainer = Extends(model=Tiny(), args=arguments, train_dataset=at.Windows(16))
    trainer.train()
    assert not not_offloaded(trainer.model)
    hytrain_fx.close(trainer.model)


@pytest.mark.parametrize("way", ["no model", "returns nothing"])
def test_an_own_create_optimizer_may_take_no_model_and_return_nothing(tmp_path: Path, way: str) -> None:
    """The Trainer itself takes both from a subclass, so they are offloaded too."""
    from hytrain_fx.integrations.transformers import OffloadMixin

    class TakesNone(at.Trainer):  # type: ignore[misc, name-defined]
        optimizer: Any

        def create_optimizer(self) -> Any:
            self.optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.125)
            return self.optimizer

    class ReturnsNone(at.Trainer):  # type: ignore[misc, name-defined]
        optimizer: Any

        def create_optimizer(self, model: Any = None) -> None:
            self.optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.125)

    class HyOwn(OffloadMixin, TakesNone if way == "no model" else ReturnsNone):  # type: ignore[misc]
        pass

    trainer = HyOwn(model=Tiny(), args=at.arguments(str(tmp_path), 1, use_cpu=True), train_dataset=at.Windows(16))
    trainer.train()
    assert not not_offloaded(trainer.model)
    hytrain_fx.close(trainer.model)


def test_options_reach_compile(tmp_path: Path) -> None:
    """`compile_options` are those of `hytrain_fx.compile`."""
    with pytest.raises(ConfigError, match="unknown option"):
        trainer_of(tmp_path, ours={"compile_options": {"no_such": 1}}).create_optimizer()


def test_several_gpus_are_refused(tmp_path: Path) -> None:
    """Where the Trainer would use DataParallel, the error says how to show one GPU."""
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES=0"):
        trainer.create_optimizer()


@pytest.mark.parametrize("arguments", [{"torch_compile_mode": "reduce-overhead"}, {"torch_compile_backend": "eager"}], ids=str)
def test_other_ways_to_compile_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """A mode or a backend of TrainingArguments would not be ours: the error names the option."""
    with pytest.raises(UnsupportedError, match="torch_compile_mode out of the TrainingArguments") as refused:
        trainer_of(tmp_path, **arguments).create_optimizer()
    assert next(iter(arguments.values())) in str(refused.value)


def test_a_filter_that_waits_for_the_gpu_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, `logging_nan_inf_filter=True` costs most of the overlap."""
    trainer = trainer_of(tmp_path, logging_nan_inf_filter=True)
    monkeypatch.setattr(type(trainer.args), "device", property(lambda self: torch.device("cuda")))
    with pytest.warns(HytrainWarning, match="logging_nan_inf_filter=False"):
        trainer.create_optimizer()
    hytrain_fx.close(trainer.model)


def test_a_torch_compile_around_the_model_keeps_our_graphs() -> None:
    """torch.compile(model) of a compiled model keeps the plain bits, and inserted nodes run."""

    def trained(ours: bool) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        if ours:
            model, optimizer = hytrain_fx.compile(model, optimizer, k=1)
        else:
            model.compile()
        around = torch.compile(model) if ours else model
        for (x,) in batches * 2:
            around(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        if ours:
            assert not not_offloaded(model)
            hytrain_fx.close(model)
        return found

    with rounded_root():
        assert_same(trained(True), trained(False))
