"""Whether parameters may be stepped one by one.

The optimizer's class is tried on small parameters: all together, apart, and traced.

    together != apart     its step needs all parameters at once: refused
    together != traced    its step runs op by op

And on one of 8192 elements: from some size on, classes may keep states that are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.states import MASTER_ALONE
from hytrain_fx.runtime.any_optimizer.marks import Marks, copied, cut, marks_of, refuse_set
from hytrain_fx.runtime.any_optimizer.recording import Form, Untraceable, record
from hytrain_fx.runtime.any_optimizer.row_step import OpByOpStep, TracedStep, graph_of, own_of
from hytrain_fx.runtime.any_optimizer.shell import Options, Shells, changed_options, options_of, run_step
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.own_states import Entry, OwnStates, leaves, map_leaves
from hytrain_fx.torch_private.tensors import memory_of

_STEPS = 3
_OF_A_GROUP = 3  # parameters in a group
_LARGEST = 5  # elements in a dimension
_PACKED = 4096  # elements from which on torchao packs states, in blocks of 128 or 256
_INSTEAD = "use an optimizer that updates every parameter from its own gradient and state"


class Untrusted(Exception):
    """Recorded steps are not to be used; the message says why."""


class _Trial:
    """Small parameters in the groups of an optimizer, with the gradients of some steps."""

    def __init__(self, shells: Shells, optimizer: torch.optim.Optimizer) -> None:
        self.shells = shells
        self.sets: set[str] = set()  # options of groups, and attributes, that steps have set
        random = torch.Generator().manual_seed(0)
        self.options: list[Options] = []
        self.weights: list[list[torch.Tensor]] = []
        self.marks: list[list[Marks]] = []
        for group in optimizer.param_groups:
            self.options.append(options_of(group))
            chosen = _chosen(group["params"])
            self.weights.append([_random(_small_shape(p), random) for p in chosen])
            self.marks.append([self._cut(p, weight) for p, weight in zip(chosen, self.weights[-1], strict=True)])
        large = ((options_of(group), p) for group in optimizer.param_groups for p in group["params"] if p.numel() >= _PACKED)
        self.large = next(large, None)
        self.grads = [[[_random(w.shape, random) for w in of] for of in self.weights] for _ in range(_STEPS)]
        self.states: list[list[Entry | None]] = [[None] * len(of) for of in self.weights]
        self.begins_with_state = bool(optimizer.state)
        if self.begins_with_state:
            parameters = [[nn.Parameter(w.clone()) for w in of] for of in self.weights]
            self.states = self._constructed(self.options, parameters) or self.states

    def _constructed(self, options: Sequence[Options], parameters: Sequence[Sequence[nn.Parameter]]) -> list[list[Entry | None]] | None:
        """What the class's __init__ puts into its state; None if it cannot be called so."""
        groups = [{**of_group, "params": list(of)} for of_group, of in zip(options, parameters, strict=True)]
        try:
            made = self.shells.kind(groups, **self.shells.defaults)
        except Exception:  # its arguments are not its defaults
            return None
        return [[dict(made.state[p]) if p in made.state else None for p in group["params"]] for group in made.param_groups]

    def _cut(self, parameter: torch.Tensor, weight: torch.Tensor) -> Marks:
        return cut(marks_of(parameter), parameter.shape, weight.shape) if self.shells.reads_marks else {}

    def together(self) -> list[Any]:
        """Weights and entries after the steps of one optimizer.

        Raises UnsupportedError for state that belongs to no parameter.
        """
        parameters = [[nn.Parameter(w.clone()) for w in of] for of in self.weights]
        flat, marks = [p for of in parameters for p in of], [each for of in self.marks for each in of]
        for p, each in zip(flat, marks, strict=True):
            vars(p).update(copied(each))
        state: dict[torch.Tensor, Entry] = {
            p: entry for p, entry in zip(flat, (_copy(e) for of in self.states for e in of), strict=True) if entry is not None
        }
        shell = self.shells.make([(dict(options), of) for options, of in zip(self.options, parameters, strict=True)], state)
        for grads in self.grads:
            for p, grad in zip(flat, (grad for of in grads for grad in of), strict=True):
                p.grad = grad.clone()
            run_step(shell)
        for p, each in zip(flat, marks, strict=True):
            refuse_set(self.shells.kind.__name__, p, each)
        if others := [key for key in shell.state if not any(key is p for p in flat)]:
            raise UnsupportedError(f"{self.shells.kind.__name__} keeps state under {others[0]!r}, which is no parameter; {_INSTEAD}")
        for p in flat:
            if any(isinstance(leaf, torch.Tensor) and memory_of(leaf) == memory_of(p) for leaf in leaves(shell.state.get(p))):
                raise UnsupportedError(f"{self.shells.kind.__name__} keeps a parameter's own memory in its state; keep a copy of it")
        return [[p.detach(), shell.state.get(p)] for p in flat]

    def refuse_packed_states(self) -> None:
        """Raises UnsupportedError for states of a large parameter that are no plain tensors.

        Tried where the optimizer has such a parameter, with one of as many dimensions.
        """
        if self.large is None:
            return
        options, parameter = self.large
        dimensions = parameter.dim()
        shape = [2 * _PACKED] if dimensions < 2 else [_PACKED // 64, 128, *[1] * (dimensions - 2)]
        weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
        vars(weight).update(self._cut(parameter, weight))
        state: dict[torch.Tensor, Entry] = {}
        if self.begins_with_state:
            begun = self._constructed([options], [[weight]])
            if begun is None:
                return
            if (entry := begun[0][0]) is not None:
                state[weight] = entry
        shell = self.shells.make([(dict(options), [weight])], state)
        weight.grad = torch.ones_like(weight)
        run_step(shell)
        kinds = {type(leaf) for leaf in leaves(shell.state.get(weight)) if isinstance(leaf, torch.Tensor)}
        if packed := kinds - {torch.Tensor, nn.Parameter, nn.Buffer}:
            raise UnsupportedError(f"{self.shells.kind.__name__} keeps states of large parameters as {packed.pop().__name__}, which cannot "
                                   "rest in host memory and be updated there; use an optimizer whose states are plain tensors")

    def apart(self, *, traced: bool) -> Iterator[list[Any]]:
        """The same with an optimizer for each parameter, or with recorded steps.

        Raises Untraceable.
        """
        for options, weights, entries, marks, *grads in zip(self.options, self.weights, self.states, self.marks, *self.grads, strict=True):
            for weight, entry, each, *of_weight in zip(weights, entries, marks, *grads, strict=True):
                states = RowStates(MASTER_ALONE, weight.clone().flatten(), own=OwnStates(_copy(entry)))
                self._steps(Form.of(weight), dict(options), states, [grad.clone().flatten() for grad in of_weight], each, traced)
                yield [states.master.view(weight.shape), own_of(states).entry]

    def _steps(
        self, form: Form, options: Options, states: RowStates, grads: Sequence[torch.Tensor], marks: Marks, traced: bool
    ) -> None:
        shells = self.shells
        for grad in grads:
            if traced:
                recording = record(shells, form, options, own_of(states).entry, marks)
                TracedStep(form, graph_of(recording), recording)(states, grad, (), None)
                changed, attributes = recording.options, recording.attributes
            else:
                shell = OpByOpStep(form, shells, options, marks).run(states, grad, ())
                changed, attributes = changed_options(options, shell.param_groups[0]), shells.changed_attributes(shell)
            self.sets |= changed.keys() | attributes.keys()
            options.update(changed)
            shells = shells.with_attributes(attributes)


def refuse_searches(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedError for LBFGS.

    Its step needs all parameters at once, and the model too.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(f"{type(optimizer).__name__} needs all parameters at once: it searches along one line for all of them, and "
                               f"calls the model within its step; {_INSTEAD}")


def check_one_by_one(shells: Shells, optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """What the steps set on the optimizer and in its groups.

    Raises UnsupportedError where parameters cannot be stepped one by one, Untrusted where recorded
    steps are not the class's.
    """
    name = shells.kind.__name__
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        trial = _Trial(shells, optimizer)
        try:
            together, apart = trial.together(), list(trial.apart(traced=False))
            trial.refuse_packed_states()
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{name}.step() failed on small parameters, called without a closure ({type(error).__name__}: {error}); {_INSTEAD}"
            ) from error
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(f"{name}.step() draws random numbers, which updates beside the training would draw in another order")
    if not _same(together, apart):
        raise UnsupportedError(
            f"{name}.step() needs all parameters at once: stepping small tensors one by one gave other weights or states; {_INSTEAD}"
        )
    try:
        traced = list(trial.apart(traced=True))
    except (Untraceable, TypeError) as error:
        if trial.sets:
            raise UnsupportedError(
                f"{name}.step() sets {sorted(trial.sets)[0]!r} on itself or in its group, and cannot be traced ({error}): it would be set "
                "once for each parameter, while updates run; keep such numbers in optimizer.state[parameter]"
            ) from error
        return frozenset()  # some of its steps may be traceable: each is asked
    if not _same(together, traced):
        raise Untrusted("on small tensors its recorded operations gave other bits than its own step")
    return frozenset(trial.sets)


def _chosen(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A few of a group: one of each number of dimensions first."""
    by_dim = {p.dim(): p for p in reversed(parameters)}
    return [*by_dim.values(), *parameters][:_OF_A_GROUP]


def _small_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(min(size, _LARGEST - i % 2) for i, size in enumerate(parameter.shape))


def _random(shape: Sequence[int], random: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=random, dtype=torch.float32, device="cpu")


def _copy(entry: Entry | None) -> Entry | None:
    copied: Entry | None = map_leaves(entry, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
    return copied


def _same(one: Any, other: Any) -> bool:
    first, second = list(leaves(one)), list(leaves(other))
    return len(first) == len(second) and all(map(_same_leaf, first, second))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and bool(one == other)
