"""What a generated program trains, compiled by torch and by hytrain_fx.

The model has drawn units, the optimizer two groups.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.session.session import Session
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from . import optimizers
from .loops import HandAdam
from .models import VOCABULARY, GptBlock
from .rank_loops import backward_averaged, clipped_in_shards
from .threads import threads_left

DTYPES = ("float32", "bfloat16", "autocast")  # autocast: fp32 parameters under autocast to bf16
ADAMS = ("AdamW", "Adam", "AdamW amsgrad", "AdamW moments")
OPTIMIZERS = (*ADAMS, "SGD nesterov", "RMSprop", "Lion", "Adagrad")
OPTIONS: dict[str, dict[str, Any]] = {
    "k=0": {"k": 0},
    "k=2": {"k": 2},
    "k=all": {"gpu_states": 1.0},
    "solved": {"warmup_steps": 2, "replan_every": 5},
    "gpu_states=0.5": {"gpu_states": 0.5, "warmup_steps": 2},
    "stream=1.0": {"k": 0, "stream": 1.0},
    "stream=0.5": {"k": 1, "stream": 0.5},
    "torch engine": {"k": 1, "engine": "torch"},
    "weights streamed": {"k": 0, "weights": "streamed"},
    "weights streamed, solved": {"weights": "streamed", "gpu_states": 0.5, "warmup_steps": 2, "replan_every": 5},
}
RANK_OPTIONS: dict[str, dict[str, Any]] = {
    "weights sharded": {"k": 0, "weights": "sharded"},
    "weights sharded, solved": {"weights": "sharded", "gpu_states": 0.5, "warmup_steps": 2, "replan_every": 5},
    "shards on the host": {"k": 0, "weights": "sharded_host"},
    "shards on the host, solved": {"weights": "sharded_host", "gpu_states": 0.5, "warmup_steps": 2, "replan_every": 5},
}
FOR_ADAM_ALONE = ("stream=1.0", "stream=0.5")
FOR_BF16_ALONE = ("weights streamed", "weights streamed, solved")
# Of both sides. With this on, Inductor's fallbacks hand attention to its backward in a layout that
# its kernel on the CPU misreads, also in the plain loop. And another layout has other last bits.
INDUCTOR_OPTIONS: dict[str, Any] = {"layout_optimization": False}


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Small(nn.Module):
    """A block with small parameters: the rows of several fit one chunk."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3)
        self.down = nn.Linear(3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Broken(nn.Module):
    """A graph break before its layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + self.linear(x)  # type: ignore[no-any-return]


class Disabled(nn.Module):
    """A layer that torch.compile leaves to eager code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """A layer whose activations the backward computes again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = GptBlock(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


UNITS: dict[str, Callable[[int], nn.Module]] = {  # by width
    "linear": lambda width: nn.Linear(width, width),
    "norm": nn.LayerNorm,
    "small": Small,
    "conv": Conv,
    "attention": GptBlock,
    "shared": lambda width: nn.Linear(width, width),  # one layer, at each of its places
    "break": Broken,
    "disabled": Disabled,
    "recomputed": Recomputed,
}


class Composed(nn.Module):
    """An embedding, units in any order, and a head that may be tied to the embedding.

    The forward returns a loss.
    """

    def __init__(self, units: tuple[str, ...], tied: bool, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        shared = UNITS["shared"](width)
        self.units = nn.ModuleList(shared if name == "shared" else UNITS[name](width) for name in units)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for unit in self.units:
            x = unit(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), (tokens * 7 + 3).flatten() % VOCABULARY)


@dataclass(frozen=True)
class Setup:
    """What is compiled once for many programs.

    ranks   how many processes train the model together; each runs the program on its own batches
    device  where both models are; calls that a GPU alone can make are drawn there, too
    """

    units: tuple[str, ...] = ("linear",)
    tied: bool = False
    dtype: str = "float32"
    optimizer: str = "AdamW"
    options: str = "k=0"
    width: int = 8
    ranks: int = 1
    device: str = "cpu"

    @property
    def is_adam(self) -> bool:
        return self.optimizer in ADAMS

    @property
    def is_partly_eager(self) -> bool:
        """Whether eager code makes gradients: torch does not capture a loop with a break in it."""
        return "break" in self.units or "disabled" in self.units

    @property
    def shards_weights(self) -> bool:
        """Whether no rank keeps whole weights."""
        return self.options in RANK_OPTIONS

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep shards of the optimizer's states: it has a kernel of ours."""
        return self.ranks > 1 and (self.is_adam or self.optimizer == "Lion")

    def casting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "autocast" else contextlib.nullcontext()

    def make_model(self) -> nn.Module:
        """With one rank always the same weights, with several each rank's own."""
        torch.manual_seed(distributed.get_rank() if self.ranks > 1 else 0)
        dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
        return Composed(self.units, self.tied, self.width).to(self.device, dtype)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Matrices and vectors; amsgrad, or moments in bf16, is of the first group alone."""
        kept: dict[str, dict[str, Any]] = {"amsgrad": {"amsgrad": True}, "moments": {"moments": "bf16"}}
        flag = kept.get(self.optimizer.split()[-1], {})
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": of, **flag} for of, flag in ((matrices, flag), (vectors, {})) if of]

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer."""
        groups = self.groups(model)
        if self.is_adam:
            return getattr(torch.optim, self.optimizer.split()[0])(groups, lr=1e-2)  # type: ignore[no-any-return]
        return optimizers.make(self.optimizer, groups)

    def make_reference(self, model: nn.Module) -> torch.optim.Optimizer:
        """The reference optimizer, whose bits count."""
        if self.is_adam:
            return HandAdam(self.groups(model), decoupled=self.optimizer != "Adam", lr=1e-2,
                            weight_decay=0.0 if self.optimizer == "Adam" else 1e-2)
        return optimizers.make(self.optimizer, self.groups(model))


@dataclass
class Side:
    """One of the two loops, with what it holds."""

    model: Any
    optimizer: Any
    is_ours: bool
    setup: Setup
    batches: list[torch.Tensor]
    rank: int = 0
    scaler: Any = None
    scheduler: Any = None
    losses: list[torch.Tensor] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    saved: tuple[dict[str, Any], dict[str, Any]] | None = None
    closed: list[weakref.ref[Any]] = field(default_factory=list)  # of ours: engines that a call has closed
    planted: Callable[[], None] = lambda: None  # after each compilation of ours
    said: dict[str, Any] = field(default_factory=dict)  # by a call on ours, for the same call on the plain side

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def begin(self) -> None:
        """Drop all that an earlier program held."""
        self.scaler = torch.amp.GradScaler(self.setup.device, init_scale=2.0**10, growth_interval=3)
        self.scheduler, self.saved = None, None
        self.losses, self.held = [], []
        for p in self.parameters:
            p.requires_grad_(True)

    def chosen(self, at: int) -> bool:
        """Whether a call that one rank alone makes is this one's."""
        return at % self.setup.ranks == self.rank

    def backward(self, loss: torch.Tensor) -> None:
        """The loss's backward; the plain side averages what it makes over the ranks, by hand."""
        if self.setup.ranks > 1 and self.setup.is_partly_eager:
            self.model.zero_grad()  # sums of gradients that eager code makes are refused
        if self.is_ours or self.setup.ranks == 1:
            loss.backward()
        else:
            backward_averaged(self.parameters, self.setup.ranks, loss)

    def clip_norm(self, most: float) -> float:
        """`clip_grad_norm_`; the plain side takes the norm as the ranks' shards have it."""
        if self.is_ours or self.setup.ranks == 1 or not self.setup.is_sharded:
            return float(clip_grad_norm_(self.model.parameters(), most))
        return clipped_in_shards(self.setup.ranks, self.model, most)

    @property
    def session(self) -> Session:
        return session_of(self.model)

    def compile(self) -> None:
        """Compile ours, with a new optimizer. Slots of weights are NaN once they are read."""
        made = self.setup.make_optimizer(self.model)
        options = {"options": INDUCTOR_OPTIONS, **(OPTIONS | RANK_OPTIONS)[self.setup.options]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(NAN_VARIABLE, "1")
            _, self.optimizer = hytrain_fx.compile(self.model, made, workers=2 if self.setup.ranks == 1 else 1, timeout_s=30.0, **options)
        self.planted()


class Pair:
    """The model of a setup compiled twice, put back to the start for each program."""

    def __init__(self, setup: Setup) -> None:
        torch._dynamo.reset()
        self.setup = setup
        rank = distributed.get_rank() if setup.ranks > 1 else 0
        torch.manual_seed(1 + rank)
        shapes = ((2, 6), (2, 6), (2, 6), (3, 5))
        batches = [torch.randint(0, VOCABULARY, shape).to(setup.device) for shape in shapes]
        plain, ours = setup.make_model(), setup.make_model()
        if setup.ranks > 1:
            for value in plain.state_dict().values():
                distributed.broadcast(value, 0)
        plain.compile(options=INDUCTOR_OPTIONS)
        self._first = {name: value.detach().clone() for name, value in plain.state_dict().items()}
        self.plain = Side(plain, setup.make_reference(plain), False, setup, batches, rank)
        self.ours = Side(ours, None, True, setup, batches, rank, said=self.plain.said)
        self.ours.compile()
        self._empty = copy.deepcopy(self.ours.optimizer.state_dict())

    def restart(self) -> None:
        """First weights, no gradients, no states, first options in every group."""
        for side in (self.plain, self.ours):
            side.begin()
            side.optimizer.zero_grad()
            side.model.zero_grad()
            side.model.train()
            side.model.load_state_dict(self._first)
        self.ours.optimizer.load_state_dict(copy.deepcopy(self._empty))
        self.plain.optimizer = self.setup.make_reference(self.plain.model)

    def close(self) -> str:
        """Close ours and drop both. Gives what is left over, empty where nothing is."""
        session = self.ours.session
        watched: list[tuple[str, weakref.ref[Any]]] = [("engine", weakref.ref(session.engine)), ("states", weakref.ref(session.states))]
        watched += [("engine closed before", engine) for engine in self.ours.closed]
        hytrain_fx.close(self.ours.model)
        del session
        self.ours = self.plain = None  # type: ignore[assignment]
        gc.collect()
        left = [what for what, of in watched if of() is not None]
        return ", ".join(left + threads_left())


@contextmanager
def quick_compiling() -> Iterator[None]:
    """Compile quickly: no Inductor kernels, one thread for torch, room for graphs of every call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The plain loop's graphs follow `requires_grad` in torch 2.11 only with the second.
    dynamo = torch._dynamo.config.patch(recompile_limit=64, skip_tensor_guards_with_matching_dict_tags=False)
    with inductor_config.patch(fallback_by_default=True), dynamo:
        yield
    torch.set_num_threads(threads)
