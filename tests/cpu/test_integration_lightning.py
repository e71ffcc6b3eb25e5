"""A plain LightningModule trains with `Offload` to the bits that it has without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import hytrain_fx
from hytrain_fx.errors import ConfigError, UnsupportedError

from .framework_runs import Run, Runs, Tiny, each_once, example, not_offloaded, require_same, rounded_root, with_states
from .loops import assert_same, weights

STEPS, STOP, LAST = 6, 2, 4
MAX_NORM = 0.5
CASES = ["32-true", *(pytest.param(case, marks=pytest.mark.sample(0)) for case in ("bf16-mixed", "GPT-2"))]
at = example("train_lightning", "lightning", "transformers")
lightning: Any = at.lightning
Offload: Any = at.Offload


class Validated(at.ByteGpt2):  # type: ignore[misc, name-defined]
    """The example's module with a validation; it keeps the norms before clipping.

    Lightning saves no random numbers, so it has no dropout.
    """

    def __init__(self, case: str) -> None:
        super().__init__(1, 16)
        if case != "GPT-2":
            self.model = Tiny()
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


class Asks(lightning.Callback):  # type: ignore[misc]
    """Stands before `Offload` and asks what was not offloaded."""

    answer = frozenset[str]()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.answer = not_offloaded(getattr(pl_module, "model", pl_module))


def train(ours: bool, case: str, folder: Path, start: Path | None) -> Run:
    """Updates of two batches, two in an epoch; each epoch is validated and saved.

    The checkpoint with the *highest* loss counts as the best. So the second validation stops the
    training early, at `LAST` of `STEPS`, and the first checkpoint is loaded at the end.
    """
    module, asked = Validated(case), Asks()
    if not ours:
        module.model.compile()
    chosen = {"monitor": "val_loss", "mode": "max"}
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True, **chosen)
    stopping = lightning.pytorch.callbacks.EarlyStopping(patience=1, strict=False, **chosen)  # resumed, it looks before a validation
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", precision="bf16-mixed" if case == "bf16-mixed" else "32-true", accumulate_grad_batches=2,
        gradient_clip_val=MAX_NORM, callbacks=[saving, stopping, *([asked, Offload()] if ours else [])], limit_train_batches=2 * STOP,
        num_sanity_val_steps=0, limit_val_batches=2, logger=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    data = at.windows(16)
    loaders = DataLoader(data, batch_size=4), DataLoader(Subset(data, range(8)), batch_size=4)
    begin = None if start is None else start / f"step={STOP}.ckpt"
    trainer.fit(module, *loaders, ckpt_path=begin)
    numbers = {
        name: [value.item() for value in values]
        for name, values in (("loss", module.losses), ("norm", module.norms), ("validation", module.validations))
    }
    trainer.validate(module, loaders[1], ckpt_path=begin or "best", verbose=False)  # in another folder Lightning forgets the best
    steps = (STOP, LAST) if start is None else (LAST,)
    return Run(weights(module), numbers, {step: saved(folder / f"step={step}.ckpt") for step in steps}, folder, asked.answer)


def saved(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(path, weights_only=False)
    return with_states(checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"])


run = each_once(train)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ours", "resumed"])
def test_a_fit_has_the_bits_of_the_plain_one(run: Runs, kind: str, case: str) -> None:
    """Losses, norms, validations, weights, checkpoints; whole, and from the plain checkpoint."""
    plain, found = run("plain", case), run(kind, case)
    assert not found.not_offloaded
    require_same(found, plain)
    assert len(set(plain.numbers["loss"])) == 2 * LAST
    assert max(plain.numbers["norm"]) > MAX_NORM
    assert len(plain.numbers["validation"]) == LAST


def test_the_best_checkpoint_can_be_loaded(run: Runs) -> None:
    """`ckpt_path="best"` gives the weights of the best checkpoint, not the last."""
    ours = run("ours", "32-true")
    assert_same({name: ours.checkpoints[STOP][name] for name in ours.weights}, dict(ours.weights))
    assert any(not torch.equal(ours.checkpoints[LAST][name], ours.weights[name]) for name in ours.weights)


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


class ByHand(TwoParts):
    """Manual optimization: `training_step` calls backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def fit(module: Any, *callbacks: Any, begin: Path | None = None, **options: Any) -> Any:
    """The trainer, after three steps from the checkpoint `begin`."""
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.linspace(-1, 1, 24).view(6, 4), batch_size=2), ckpt_path=begin)  # type: ignore[arg-type]
    return trainer


@pytest.mark.parametrize("kind", [TwoParts, ByHand])
def test_a_module_of_several_parts_is_compiled_whole(kind: type[TwoParts]) -> None:
    """Where no child has every parameter, `self(...)` is compiled, with the plain bits."""

    def trained(ours: bool) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        module, asked = kind(), Asks()
        fit(module, *([asked, Offload()] if ours else []))
        assert not asked.answer
        return weights(module)

    with rounded_root():
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


class Several(TwoParts):
    """Manual optimization with an optimizer for each list of parameters that `split` gives."""

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.split = split

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        optimizers: Any = self.optimizers()
        self.manual_backward(loss := super().training_step(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(parameters, lr=0.1, foreach=False) for parameters in self.split(self)]


SHARED: dict[str, tuple[Any, str]] = {
    "one child": (lambda m: (m.decoder.parameters(), [m.encoder.weight], [m.encoder.bias]), "1 and 2 .* both for self.encoder;"),
    "no child": (lambda m: ([m.encoder.weight, m.decoder.weight], [m.encoder.bias, m.decoder.bias]),
                 "0 and 1 .* both for the whole LightningModule;"),
}  # fmt: skip
APART: dict[str, Any] = {
    "children": lambda m: (m.decoder.parameters(), m.encoder.parameters()),
    "a child within the whole": lambda m: ([m.encoder.weight, m.decoder.weight, m.decoder.bias], [m.encoder.bias]),
}


@pytest.mark.parametrize("split", SHARED)
def test_two_optimizers_of_one_module_are_refused(split: str) -> None:
    """The error has their numbers and the module, and says what to do. Nothing is compiled."""
    parameters, expected = SHARED[split]
    module = Several(parameters)
    with pytest.raises(UnsupportedError, match=f"^optimizers {expected} .* direct child module of its own"):
        fit(module, Offload())
    for part in module.modules():
        with pytest.raises(UnsupportedError, match="is not compiled"):
            hytrain_fx.close(part)


@pytest.mark.parametrize("split", APART)
def test_optimizers_of_different_modules_have_the_plain_bits(split: str) -> None:
    """Each is offloaded with its module; one of the modules may lie within another."""

    def trained(ours: bool) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        module = Several(APART[split])
        fit(module, *([Offload()] if ours else []))
        return weights(module)

    with rounded_root():
        assert_same(trained(True), trained(False))


class Watches(lightning.pytorch.strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """Keeps whether the module was a plain one when it was moved to the CPU."""

    was_plain = False

    def teardown(self) -> None:
        try:
            hytrain_fx.close(self.lightning_module)
        except UnsupportedError:
            self.was_plain = True
        super().teardown()


@pytest.mark.parametrize("why", ["finished", "no batches"])
def test_a_fit_with_nothing_to_do_leaves_a_plain_model(tmp_path: Path, why: str) -> None:
    """It is closed before it is moved to the CPU, and the next fit trains it."""
    module, begin = TwoParts(), None
    if why == "finished":
        begin = tmp_path / "end.ckpt"
        fit(module).save_checkpoint(begin)
    strategy, callback, before = Watches("cpu"), Offload(), weights(module)
    fit(module, callback, begin=begin, strategy=strategy, **({} if begin else {"limit_train_batches": 0}))
    assert strategy.was_plain
    assert_same(weights(module), before)
    fit(module, callback)
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())


def refusal(strategy: Any, wrapped: Any = None) -> str:
    """Of a fit with this strategy; `wrapped`: what it makes of the module."""
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, devices=1, logger=False, enable_checkpointing=False)
    callback, module = Offload(), TwoParts()
    trainer.strategy.connect(module)
    try:
        callback.setup(trainer, module, "fit")
        trainer.strategy.model = wrapped
        callback.on_fit_start(trainer, module)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_strategies_that_change_the_module_or_average_are_refused() -> None:
    """Before the module is on its device; one that wraps it all the same when the fit starts."""
    strategies = lightning.pytorch.strategies
    assert 'is ModelParallelStrategy; expected processes with one device each' in refusal(strategies.ModelParallelStrategy())
    assert "has a ddp_comm_hook" in refusal(strategies.DDPStrategy(ddp_comm_hook=lambda state, bucket: None))
    assert "has a ddp_comm_state" in refusal(strategies.DDPStrategy(ddp_comm_state=object()))
    assert "DDPStrategy has wrapped the LightningModule in Sequential" in refusal("ddp", wrapped=nn.Sequential(TwoParts()))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_only_a_fit_is_changed(stage: str) -> None:
    """Any strategy may evaluate with the callback there."""
    trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", devices=1, logger=False, enable_checkpointing=False)
    before = trainer.strategy.configure_ddp
    Offload().setup(trainer, TwoParts(), stage)
    assert trainer.strategy.configure_ddp == before
    Offload().setup(trainer, TwoParts(), "fit")
    assert trainer.strategy.configure_ddp != before
