"""Accelerate's loop after our `prepare` has the bits of the same loop after its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .framework_runs import Run, Runs, Tiny, each_once, example, not_offloaded, require_same, with_states
from .loops import assert_same, weights

UPDATES, STOP = 4, 2
CASES = ["no", "bf16", pytest.param("Llama", marks=pytest.mark.sample(0))]
at = example("train_accelerate", "accelerate", "transformers")


def accelerator_of(**options: Any) -> Any:
    """One with these options: Accelerate keeps those of a process's first accelerator."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return at.Accelerator(cpu=True, **options)


@pytest.fixture(autouse=True, scope="module")
def forgotten_state() -> Iterator[None]:
    """The next module's accelerators are as they are set up there."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(ours: bool, case: str, folder: Path, start: Path | None) -> Run:
    """The example's loop: accumulation, clipping, a scheduler made before `prepare`.

    Each update is evaluated and saved. At the end the loop goes back to the state half-way, as to
    its best, and evaluates that. There is no dropout: a loader that starts draws a random number,
    so a resumed loop would have other ones, also without us.
    """
    accelerator = accelerator_of(gradient_accumulation_steps=at.ACCUMULATION, mixed_precision="no" if case == "Llama" else case)
    model, data = at.new_model(1, 16) if case == "Llama" else Tiny(dropout=0.0), at.windows(16)
    tokens = data[:4][0]
    evaluations: list[float] = []

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            evaluations.append(float(model(input_ids=tokens, labels=tokens).loss))
        model.train()

    def after_update(done: int) -> None:
        evaluate()
        accelerator.save_state(str(folder / str(done)))

    resume = None if start is None else (STOP, str(start / str(STOP)))
    prepare = at.prepare if ours else at.prepare_plain
    losses = at.train(accelerator, model, prepare, data, UPDATES, after_update=after_update, resume=resume)
    left = not_offloaded(model) if ours else frozenset[str]()
    accelerator.load_state(str((folder if start is None else start) / str(STOP)))
    evaluate()
    numbers = {"loss": [loss.item() for loss in losses], "evaluation": evaluations}
    steps = range(1 if start is None else STOP + 1, UPDATES + 1)
    found = Run(weights(model), numbers, {step: saved(folder / str(step)) for step in steps}, folder, left)
    if ours:
        hytrain_fx.close(model)
    return found


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    states = torch.load(folder / "optimizer.bin", weights_only=True)["state"]
    return with_states(load_file(folder / "model.safetensors"), states)


run = each_once(train)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ours", "resumed"])
def test_training_has_the_bits_of_the_plain_loop(run: Runs, kind: str, case: str) -> None:
    """Losses, evaluations, weights, checkpoints; whole, and resumed from the plain checkpoint."""
    plain, found = run("plain", case), run(kind, case)
    assert not found.not_offloaded
    require_same(found, plain)
    assert len(set(plain.numbers["loss"])) == UPDATES * at.ACCUMULATION
    assert len(found.checkpoints) == UPDATES if kind == "ours" else UPDATES - STOP


def test_load_state_goes_back(run: Runs) -> None:
    """After training, `load_state` of a checkpoint half-way gives its weights, not the last."""
    ours = run("ours", "no")
    assert_same({name: ours.checkpoints[STOP][name] for name in ours.weights}, dict(ours.weights))
    assert any(not torch.equal(ours.checkpoints[UPDATES][name], ours.weights[name]) for name in ours.weights)
    assert ours.numbers["evaluation"][-1] == ours.numbers["evaluation"][STOP - 1]


# --- what `prepare` hands on and refuses


def prepared(*others: Any, accelerator: Any = None, **options: Any) -> tuple[Any, ...]:
    model = torch.nn.Linear(4, 4)
    accelerator = accelerator or accelerator_of()
    return at.prepare(accelerator, model, torch.optim.AdamW(model.parameters()), *others, **options)  # type: ignore[no-any-return]


def test_all_objects_come_back_prepared_in_their_order() -> None:
    """All are prepared by Accelerate, and the optimizer is ours inside."""
    model, optimizer, loader = prepared(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4))))
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(optimizer.optimizer, OffloadedOptimizer)
    assert type(loader).__module__.startswith("accelerate")
    hytrain_fx.close(model)


def test_options_reach_compile() -> None:
    """Options of `prepare` are those of `hytrain_fx.compile`."""
    with pytest.raises(ConfigError, match="unknown option"):
        prepared(no_such=1)


def test_objects_in_another_order_are_refused() -> None:
    """The accelerator comes first, then the model: the error says what was found instead."""
    model = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match="the accelerator is a Linear; expected"):
        at.prepare(model, optimizer, accelerator_of())
    with pytest.raises(UnsupportedError, match=r"AdamW.*; expected a torch\.nn\.Module"):
        at.prepare(accelerator_of(), optimizer, model)


@pytest.mark.parametrize(("kind", "says"), [("FSDP", "without a plugin"), ("DEEPSPEED", "Leave deepspeed= out")])
def test_sharded_models_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str, says: str) -> None:
    """An accelerator that would shard the model is refused before anything is compiled."""
    from accelerate.utils import DistributedType

    accelerator = accelerator_of()
    monkeypatch.setattr(at.Accelerator, "distributed_type", DistributedType[kind])
    with pytest.raises(UnsupportedError, match=f"set up for {kind}; .*{says}"):
        prepared(accelerator=accelerator)


def test_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 replaces layers when Accelerate prepares the model: after it was compiled."""
    accelerator = accelerator_of()
    monkeypatch.setattr(at.Accelerator, "mixed_precision", "fp8")
    with pytest.raises(UnsupportedError, match=r'fp8, .*expected "no", "bf16" or "fp16"'):
        prepared(accelerator=accelerator)


OTHER_WAYS: list[dict[str, Any]] = [
    {"backend": "eager"},
    {"backend": "inductor", "mode": "max-autotune"},
    {"backend": "inductor", "use_regional_compilation": True},
]


@pytest.mark.parametrize("asked", OTHER_WAYS)
def test_other_ways_to_compile_are_refused(asked: dict[str, Any]) -> None:
    """A backend, a mode or regional compilation of Accelerate's would not be ours."""
    from accelerate.utils import TorchDynamoPlugin

    with pytest.raises(UnsupportedError, match=f"compile the model with .*{asked['backend']}.*expected nothing"):
        prepared(accelerator=accelerator_of(dynamo_plugin=TorchDynamoPlugin(**asked)))
