"""What the tests of the integrations share.

    example         a script of examples/ as a module
    Tiny            a language model that compiles in a fraction of a Llama's time
    Run             what is left of a training
    each_once       the fixture `run` of a module: trainings by kind and case, each done once
    require_same    a training has the bits of another
    rounded_root    torch's AdamW with its square root correctly rounded
    not_offloaded   the weights whose gradients did not go through the inserted nodes
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.runtime.arithmetic import square_root

from .loops import assert_same

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, *needs: str) -> Any:
    """examples/`name`.py as a module; skips where a package that it needs is missing."""
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tiny(nn.Module):
    """Called as a causal language model of transformers is; each byte guesses the next one."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(256, 8), nn.Linear(8, 16), nn.Linear(16, 256)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self.head(self.dropout(self.layer(self.embedding(input_ids)).tanh()))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@dataclass(frozen=True)
class Run:
    """What is left of a training.

    weights          at its end
    numbers          by name, in the order of their making: losses, norms, evaluations...
    checkpoints      by step: weights and optimizer states as they were saved
    folder           where they were saved
    not_offloaded    of a training that is ours, as `details` of explain are
    """

    weights: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Sequence[float]]
    checkpoints: Mapping[int, Mapping[str, torch.Tensor]]
    folder: Path
    not_offloaded: frozenset[str] = frozenset()
    details: str = ""


Runs = Callable[[str, str], Run]


def each_once(train: Callable[[bool, str, Path, Path | None], Run]) -> Any:
    """The fixture `run` of a module.

    `run(kind, case)` is `train(ours, case, folder, start)`. The kinds are "plain", "ours", and
    "resumed", which is ours too and goes on from what "plain" has saved in `start`.
    """

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
        @functools.cache
        def kept(kind: str, case: str) -> Run:
            start = kept("plain", case).folder if kind == "resumed" else None
            torch._dynamo.reset()
            with rounded_root():
                return train(kind != "plain", case, tmp_path_factory.mktemp(kind), start)

        return kept

    return run


def require_same(found: Run, plain: Run) -> None:
    """Weights, checkpoints and numbers have the bits of the plain ones, numbers from the end on."""
    assert found.numbers.keys() == plain.numbers.keys()
    for name, numbers in found.numbers.items():
        assert len(numbers) > 1, name
        assert list(numbers) == list(plain.numbers[name][-len(numbers) :]), name
    assert_same(dict(found.weights), dict(plain.weights))
    for step, saved in found.checkpoints.items():
        assert_same(dict(saved), dict(plain.checkpoints[step]))


def with_states(weights: Mapping[str, torch.Tensor], states: Mapping[Any, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Weights, and the states of an optimizer's state_dict."""
    return {**weights, **{f"{row} {name}": torch.as_tensor(value) for row, state in states.items() for name, value in state.items()}}


@contextmanager
def rounded_root() -> Iterator[None]:
    """torch's AdamW with its square root correctly rounded, as ours is (MKL's is not)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", square_root, raising=False)
        yield


def not_offloaded(model: nn.Module) -> frozenset[str]:
    """The weights whose gradients did not go through the inserted nodes."""
    found = hytrain_fx.explain(model)
    return frozenset(found.not_offloaded) if found.node_runs["cpu_step"] > 0 else frozenset(name for name, _ in model.named_parameters())
