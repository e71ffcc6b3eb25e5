"""The same loop twice, on a model compiled by torch and on one compiled by hytrain_fx.

The torch model has an optimizer written by hand.

    HandAdam     the bitwise reference: `runtime.arithmetic.adamw_` on fp32 masters, one plain
                 tensor op per rounding
    TorchAdam    the reference that a user would write: torch.optim.AdamW or Adam (foreach=False) on
                 fp32 masters kept by hand
    Twins        both models, compiled once and put back to the start for each fact
    compare      fresh models for one fact; what a loop gives on the torch model is kept while a
                 file's tests run (`PlainResults`)
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Piece, PlacedPiece, Placement
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.rounding import parameter_key, random_bits
from hytrain_fx.session.optimizer import OffloadedOptimizer
from hytrain_fx.session.session import Session

from .models import Batches, gpt

Make = Callable[[], tuple[nn.Module, Batches]]
Loop = Callable[[Any, Any, Batches], list[float]]
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class HandAdam(torch.optim.Optimizer):
    """AdamW (or Adam, where not `decoupled`) with the library's stated arithmetic, in torch ops.

    It updates one parameter after the other.

    moments    "bf16" in a group or for all: both moments are bf16 tensors, rounded by chance
    """

    def __init__(self, params: Iterable[Any], *, decoupled: bool = True, moments: str = "fp32", **hyper: Any) -> None:
        whole = torch.optim.AdamW([torch.zeros(1)], **hyper).defaults
        self._decoupled = decoupled
        super().__init__(params, {**whole, "moments": moments})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            self.state[parameters[number]] = copy.deepcopy(saved)  # torch's casts masters to the parameters' dtype

    def state_dict(self) -> dict[str, Any]:
        """Written elements of weights are in the masters of what is given; the optimizer's stay."""
        kept = {p: state["master"].clone() for p, state in self.state.items() if state}
        self._follow_written()
        found = copy.deepcopy(super().state_dict())
        for p, master in kept.items():
            self.state[p]["master"] = master
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_written()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    @torch.no_grad()
    def _follow_written(self) -> None:
        """Copy written elements of weights to their masters, with a gradient or without."""
        for p, state in self.state.items():
            if p.dtype != torch.float32 and state:
                state["master"].copy_(torch.where(state["master"].to(p.dtype) == p, state["master"], p.float()))

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, master=p.detach().float().clone())
            dtype = torch.bfloat16 if group["moments"] == "bf16" else torch.float32
            state.update({name: torch.zeros_like(p, dtype=dtype) for name in ("m", "v", "vmax")})
        state["step"] += 1
        scalars = AdamScalars.of(group, state["step"], decoupled=self._decoupled, torch_cuda=p.is_cuda)
        assert p.grad is not None
        master = p.detach() if p.dtype == torch.float32 else state["master"]
        wide = [state[name].float() for name in ("m", "v", "vmax")]
        adamw_(p.grad, master, wide, scalars, out=p)
        if group["moments"] == "bf16":
            bits = self._random_bits(p, scalars.rounding_key)
            wide = [rounded_by_chance(wide[0], bits & 0xFFFF), rounded_by_chance(wide[1], bits >> 16), wide[2]]
        for name, value in zip(("m", "v", "vmax"), wide, strict=True):
            state[name].copy_(value)

    def _random_bits(self, p: torch.Tensor, step_key: int) -> torch.Tensor:
        """In the order of the parameter's memory."""
        number = next(n for n, one in enumerate(one for group in self.param_groups for one in group["params"]) if one is p)
        flat = random_bits(torch.arange(p.numel(), device=p.device), step_key ^ parameter_key(number))
        return flat.as_strided(p.shape, p.stride())


def rounded_by_chance(values: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The bf16 number below or above in magnitude: above where the rest of the bits and `chance`,
    both of 0..0xFFFF, reach 0x10000 together.
    """
    bits = values.view(torch.int32)
    below, rest = bits & ~0xFFFF, (bits & 0xFFFF).long()
    found = torch.where(rest + chance >= 0x10000, below + 0x10000, below).view(torch.float32)
    return torch.where(values.isnan(), values, found).to(torch.bfloat16)


class TorchAdam(torch.optim.Optimizer):
    """A class's own step on fp32 masters: gradients are cast up, weights cast down.

    With fp32 parameters it is that class itself.
    """

    def __init__(self, params: Iterable[Any], kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **hyper: Any) -> None:
        super().__init__(params, dict(hyper))
        self.masters = {p: p.detach().float().clone() for group in self.param_groups for p in group["params"]}
        plain: dict[str, Any] = {"foreach": False} if kind.__module__.startswith("torch.") else {}
        self._inner = kind([{**g, "params": [self.masters[p] for p in g["params"]]} for g in self.param_groups], **plain)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for ours, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in ours.items() if key != "params"})
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        self._inner.step()
        for p, master in self.masters.items():
            p.copy_(master)


def whole_pieces(numels: Sequence[int], placement: Sequence[Placement]) -> tuple[PlacedPiece, ...]:
    """Parameters of these sizes, none of which is cut, where `placement` has them."""
    pairs = zip(numels, placement, strict=True)
    return tuple(PlacedPiece(Piece(number, 0, numel), place) for number, (numel, place) in enumerate(pairs))


def plain_loop(steps: int, between: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None) -> Loop:
    """`steps` ordinary steps over the batches, again and again.

    `between` is called after each of them, with its number.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(steps):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            between(model, optimizer, step)
        return losses

    return loop


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor has the same bits in both, wherever it is, and none is NaN."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert not value.isnan().any(), f"{name} is NaN"
        one, other = value.cpu(), expected[name].cpu()  # streamed weights are saved on the host
        assert torch.equal(one, other), f"{name}: {(one != other).sum()} of {one.numel()} differ, by {(one - other).abs().max()}"


class Twins:
    """One model compiled by torch and by hytrain_fx.

    `restart` puts both back to the first weights.
    """

    def __init__(self, make: Make, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain: Any
        self.ours: Any
        self.plain, self.batches = make()
        torch.manual_seed(0)
        self.ours, _ = make()
        self.plain.compile(dynamic=options.get("dynamic"), options=options.get("options"))
        self._moments = options.get("moments", "fp32")
        self.first = weights(self.plain)
        trained = [p for p in self.ours.parameters() if p.requires_grad]
        _, self.optimizer = hytrain_fx.compile(self.ours, torch.optim.AdamW(trained, **HYPER), **options)
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    @property
    def session(self) -> Session:
        """The session of the model compiled by hytrain_fx."""
        return session_of(self.ours)

    def restart(self, **hyper: Any) -> tuple[HandAdam, OffloadedOptimizer]:
        """Start again: first weights, no states, the hyper-parameters `HYPER` and `hyper`.

        Gives a new optimizer for the reference, and ours.
        """
        self.optimizer.zero_grad()
        for model in (self.plain, self.ours):
            model.zero_grad()
            model.load_state_dict(self.first)
        empty = self.optimizer.state_dict()
        packed = [{"params": saved["params"], **first, **hyper} for saved, first in zip(empty["param_groups"], self._groups, strict=True)]
        self.optimizer.load_state_dict({"state": {}, "param_groups": packed})
        trained = [p for p in self.plain.parameters() if p.requires_grad]
        return HandAdam(trained, moments=self._moments, **{**HYPER, **hyper}), self.optimizer

    def agree(self, loop: Loop, delays: Mapping[Stage, int] = MappingProxyType({}), **hyper: Any) -> list[float]:
        """Run the loop on both from the start: losses, weights and buffers have the same bits.

        delays   microseconds by stage of our engine, on average

        Gives the losses.
        """
        reference, optimizer = self.restart(**hyper)
        expected = loop(self.plain, reference, self.batches)
        for stage, mean_us in delays.items():
            self.session.engine.set_delay(stage, mean_us)
        found = loop(self.ours, optimizer, self.batches)
        for stage in delays:
            self.session.engine.set_delay(stage, 0)
        assert found == expected
        assert_same(weights(self.ours), weights(self.plain))
        return found

    def close(self) -> None:
        hytrain_fx.close(self.ours)


Result = tuple[list[float], dict[str, torch.Tensor]]
_Key = tuple[Any, ...]


class PlainResults:
    """What loops gave on plain models: losses and weights, made once for all ways to train ours.

    Two functions are the same where their code is, with the same values closed over; one that
    closes over what cannot be compared, or may change (a list), is run each time.
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, Result] = {}

    def of(self, run: Callable[[], Result], *parts: Any) -> Result:
        """What `run` gives; it depends on nothing but `parts` and torch's threads."""
        try:
            key = (torch.get_num_threads(), *map(_key, parts))
            if key not in self._kept:
                self._kept[key] = run()
        except _NotComparable:
            return run()
        losses, tensors = self._kept[key]
        return list(losses), dict(tensors)

    def forget(self) -> None:
        """The next file's graphs may be compiled otherwise."""
        self._kept.clear()


class _NotComparable(Exception):
    """A part of a key may change or has no `==`."""


PLAIN_RESULTS = PlainResults()


def _key(part: Any) -> Any:
    if isinstance(part, types.FunctionType):
        held = tuple(cell.cell_contents for cell in part.__closure__ or ())
        return part.__module__, part.__code__, *map(_key, (part.__defaults__, part.__kwdefaults__, held))
    if isinstance(part, dict):
        return tuple((name, _key(value)) for name, value in sorted(part.items()))
    if isinstance(part, tuple):
        return tuple(map(_key, part))
    if part is None or isinstance(part, (bool, int, float, str, torch.dtype, type)):
        return type(part), part
    raise _NotComparable


def compare(
    make: Make,
    loop: Loop,
    *,
    decoupled: bool = True,
    hyper: dict[str, Any] | None = None,
    groups: Callable[[Any], list[dict[str, Any]]] | None = None,
    rtol: float = 0.0,
    plain_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[float]:
    """The loop on a fresh model of each kind: `Twins.agree` for one fact alone.

    `groups` makes the optimizer's groups, where there is more than one. `plain_options` are
    Inductor's, for the plain model. `rtol` is for models whose gradients themselves differ in the
    last bits, because Inductor fuses the two graphs differently.
    """
    hyper = {**HYPER, **(hyper or {})}
    dynamic, moments = options.get("dynamic"), options.get("moments", "fp32")

    def run(ours: bool) -> Result:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = make()
        trained: list[Any] = groups(model) if groups is not None else [p for p in model.parameters() if p.requires_grad]
        if ours:
            kind = torch.optim.AdamW if decoupled else torch.optim.Adam
            optimizer: Any = kind(trained, **hyper)
            hytrain_fx.compile(model, optimizer, **options)
        else:
            optimizer = HandAdam(trained, decoupled=decoupled, moments=moments, **hyper)
            model.compile(dynamic=dynamic, options=plain_options)
        torch.manual_seed(1)
        result = loop(model, optimizer, batches), weights(model)
        if ours:
            hytrain_fx.close(model)
        return result

    expected = PLAIN_RESULTS.of(lambda: run(False), make, loop, decoupled, hyper, groups, plain_options, dynamic, moments)
    found = run(True)
    if rtol:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    else:
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])
    return found[0]


def gpt_in(dtype: torch.dtype) -> Make:
    """Makes a small GPT with parameters of this dtype."""

    def make() -> tuple[nn.Module, Batches]:
        model, batches = gpt()
        return model.to(dtype), batches

    return make
