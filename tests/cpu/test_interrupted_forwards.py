"""Forwards that are not one plain graph keep their bits.

They have eager code inside, a recompile for every length, dropout, or checkpointed calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hytrain_fx.runtime.engine import Stage

from .loops import Twins, compare, plain_loop
from .models import Batches, gpt, mlp
from .test_models import branching

# ---- graphs that are not one graph


class Interrupted(nn.Module):
    """A forward that eager code reads weights in: to log, or to compute with from some step on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.kind, self.late = kind, False
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "logs at the top":
            self.log()
        h = torch.relu(self.first(x))
        if self.kind == "logs in the middle":
            self.log()
        if self.kind == "computes later on" and self.late:
            return self.by_hand(h)  # type: ignore[no-any-return]
        return self.last(h).square().mean()  # type: ignore[no-any-return]

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def log(self) -> None:
        self.seen.append(float(self.last.weight.detach().double().sum()))

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def by_hand(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(h)
        return out.square().mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("kind", ["logs at the top", "logs in the middle", "computes later on"])
def test_eager_code_in_the_forward_sees_new_weights(kind: str, k: int) -> None:
    """Weights read outside the captured graphs are the last step's, however slow that step is.

    This holds with and without a gradient.
    """
    torch._dynamo.reset()
    made = Twins(lambda: (Interrupted(kind), [(torch.randn(5, 6),) for _ in range(3)]), k=k, workers=2, timeout_s=20.0)
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 2000)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(3)(model, optimizer, batches)
        model.late = True
        losses += plain_loop(3)(model, optimizer, batches)
        return [*losses, *model.seen]

    made.agree(loop)
    made.close()


@pytest.mark.parametrize("k", [0, 4])
def test_a_model_that_dynamo_gives_up_on(k: int) -> None:
    """Beyond the recompile limit the model runs in plain Python, and the training is the same.

    Each forward still waits for its weights.
    """
    torch._dynamo.reset()
    lengths = [(torch.randn(3 + size, 6),) for size in range(5)]
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False, assume_static_by_default=True):
        made = Twins(lambda: (mlp()[0], lengths), k=k, workers=2, timeout_s=20.0, dynamic=False)
        for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
            made.session.engine.set_delay(stage, 2000)
        made.agree(plain_loop(10))
        made.close()


def test_a_way_that_depends_on_a_value() -> None:
    """Of two graphs behind the first a step runs one; the other's weights rest."""
    compare(branching, plain_loop(6), k=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_length_for_every_step(dynamic: bool | None) -> None:
    """Sequences of five lengths: recompiled for symbolic sizes, the training stays the same."""

    def make() -> tuple[nn.Module, Batches]:
        model, _ = gpt()
        return model, [(torch.randint(0, 19, (2, length)),) for length in (6, 9, 4, 13, 5)]

    compare(make, plain_loop(5), k=1, dynamic=dynamic)


# ---- randomness


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.first(x)), 0.5, self.training)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"k": 0}, {"k": 1, "stream": 1.0}], ids=str)
def test_random_numbers_are_the_trainings_own(options: dict[str, Any]) -> None:
    """Measuring, probing and planning draw no random numbers.

    Dropout and noise are the plain loop's, also after the first plans.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(8):
            losses += plain_loop(1)(model, optimizer, [batches[step % 3]])
            losses.append(float(torch.rand(())))
        return losses

    compare(lambda: (Dropped(), [(torch.randn(8, 6),) for _ in range(3)]), loop, warmup_steps=1, replan_every=2, **options)


# ---- checkpointed calls


@pytest.mark.sample(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["around the compiled call", "inside"])
@pytest.mark.parametrize("k", [0, 2])
def test_activation_checkpointing(reentrant: bool, inside: bool, k: int) -> None:
    """torch.utils.checkpoint, either kind, in the model or around its call."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = mlp()[0], nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.last(x)
            return checkpoint(self.inner, x, use_reentrant=reentrant) if inside else self.inner(x)  # type: ignore[no-any-return]

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            x = batches[step % 3][0].clone().requires_grad_()
            loss = model(x) if inside else checkpoint(model, x, use_reentrant=reentrant)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(loss.detach()), float(x.grad.sum())]
        return losses

    compare(lambda: (Checkpointed(), mlp()[1]), loop, k=k)
