"""A plain LightningModule trains with `Offload` to the bits that it has without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import hytrain_fx
from hytrain_fx.errors import ConfigError, UnsupportedError

from .framework_runs import example, nodes_ran, once
from .loops import assert_same, weights

STEPS, STOP = 4, 2
MAX_NORM = 0.5
PRECISIONS = ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.sample(0))]
at = example("train_lightning", "lightning", "transformers")
lightning: Any = at.lightning
Offload: Any = at.Offload


class Validated(at.ByteGpt2):  # type: ignore[misc, name-defined]
    """The example's module with a validation; it keeps the norms before clipping.

    Lightning saves no random numbers, so it has no dropout.
    """

    def __init__(self) -> None:
        super().__init__(1, 16)
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.validations: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.validations.append(loss.detach())
        self.log("val_loss", loss)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))


class NodesRan(lightning.Callback):  # type: ignore[misc]
    """Stands before `Offload` and asks whether every gradient went through inserted nodes."""

    answer = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.answer = nodes_ran(pl_module.model)


@dataclass(frozen=True)
class Run:
    """What is left of a training."""

    losses: list[float]
    norms: list[float]
    validations: list[float]
    weights: dict[str, torch.Tensor]
    best: dict[str, torch.Tensor]
    checkpoint: Path
    nodes_ran: bool


def train(ours: bool, precision: str, folder: Path, resume: Path | None = None) -> Run:
    """Four updates of two batches, in two epochs; each is validated and saved.

    The "best" is the checkpoint with the highest loss, so not the last.
    """
    module, asked = Validated(), NodesRan()
    if not ours:
        module.model.compile()
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, "{step}", monitor="val_loss", mode="max", save_top_k=-1, save_on_train_epoch_end=True
    )
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", precision=precision, accumulate_grad_batches=2, gradient_clip_val=MAX_NORM,
        callbacks=[saving, *([asked, Offload()] if ours else [])], limit_train_batches=2 * STOP, num_sanity_val_steps=0,
        limit_val_batches=2, logger=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    data = at.windows(16)
    loaders = DataLoader(data, batch_size=4), DataLoader(Subset(data, range(8)), batch_size=4)
    trainer.fit(module, *loaders, ckpt_path=resume)
    trained = weights(module)
    validations = [loss.item() for loss in module.validations]
    trainer.validate(module, loaders[1], ckpt_path="best", verbose=False)
    return Run(
        [loss.item() for loss in module.losses], [norm.item() for norm in module.norms], validations, trained, weights(module),
        folder / f"step={STOP}.ckpt", asked.answer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`run(kind, precision)`; "resumed" goes on from the plain run's checkpoint half-way."""

    @once
    def run(kind: str, precision: str) -> Run:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "resumed":
            return train(True, precision, folder, run("plain", precision).checkpoint)
        return train(kind == "ours", precision, folder)

    return run


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fact", ["losses", "norms", "validations"])
def test_a_fit_has_the_numbers_of_the_plain_one(run: Callable[..., Run], fact: str, precision: str) -> None:
    """Losses by batch, norms before clipping and validations have the same bits."""
    plain, ours = run("plain", precision), run("ours", precision)
    assert getattr(ours, fact) == getattr(plain, fact)
    assert len(set(plain.losses)) == 2 * STEPS
    assert max(plain.norms) > MAX_NORM
    assert len(plain.validations) == 4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", ["weights", "best"])
def test_a_fit_has_the_weights_of_the_plain_one(run: Callable[..., Run], which: str, precision: str) -> None:
    """Trained weights have the plain bits, and those of the best checkpoint, loaded again."""
    plain, ours = run("plain", precision), run("ours", precision)
    assert ours.nodes_ran
    assert_same(getattr(ours, which), getattr(plain, which))
    assert any(not torch.equal(ours.best[name], ours.weights[name]) for name in ours.best)


def test_checkpoints_hold_the_same(run: Callable[..., Run]) -> None:
    """A checkpoint has the weights and states that the plain run's has at that step."""
    saved = [torch.load(run(kind, "32-true").checkpoint, weights_only=False) for kind in ("plain", "ours")]
    (plain, states), (ours, found) = ((each["state_dict"], each["optimizer_states"][0]["state"]) for each in saved)
    assert_same(ours, plain)
    assert found.keys() == states.keys()
    for row, state in states.items():
        assert_same(found[row], state)


def test_a_fit_resumes_from_the_plain_ones_checkpoint(run: Callable[..., Run]) -> None:
    """From half-way the plain run's last weights and losses are met."""
    plain, resumed = run("plain", "32-true"), run("resumed", "32-true")
    assert resumed.nodes_ran
    assert resumed.losses == plain.losses[2 * STOP :]
    assert_same(resumed.weights, plain.weights)


# --- which module is compiled, and what is refused


class TwoParts(lightning.LightningModule):  # type: ignore[misc]
    """No child has all parameters, so calls of the LightningModule itself are compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 1)
        self.explained: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.decoder(self.encoder(x).relu())
        return found

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(batch).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, foreach=False)


def fit(module: Any, *callbacks: Any) -> None:
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.linspace(-1, 1, 24).view(6, 4), batch_size=2))  # type: ignore[arg-type]


def test_a_module_of_several_parts_is_compiled_whole() -> None:
    """Where no child has every parameter, `self(...)` is compiled, with the plain bits."""

    class Asked(lightning.Callback):  # type: ignore[misc]
        answer = False

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.answer = nodes_ran(pl_module)

    @once
    def trained(ours: bool) -> dict[str, torch.Tensor]:
        module, asked = TwoParts(), Asked()
        fit(module, *([asked, Offload()] if ours else []))
        assert asked.answer is ours
        return weights(module)

    assert_same(trained(True), trained(False))


def test_a_fit_leaves_a_plain_model() -> None:
    """After a fit, also one that failed, the model is not compiled. Options reach `compile`."""
    module = TwoParts()
    fit(module, Offload(k=1))
    with pytest.raises(UnsupportedError):
        hytrain_fx.close(module)

    class Fails(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(module, Offload(), Fails())
    with pytest.raises(UnsupportedError):
        hytrain_fx.close(module)
    with pytest.raises(ConfigError, match="unknown option"):
        fit(module, Offload(no_such=1))


def test_several_devices_are_refused() -> None:
    """A strategy for several devices is refused when the fit starts."""
    trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(UnsupportedError, match="DDPStrategy"):
        Offload().on_fit_start(trainer, TwoParts())
