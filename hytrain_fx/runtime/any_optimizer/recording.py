"""One step of an optimizer on one parameter, run without memory.

The parameter, its gradient and what is kept in its shape are meta tensors; scalars are real. The
numbers come out as the user's own Python computes them, and the operations on tensors are written
down.

    Python          step += 1; p.mul_(1 - lr * decay); m.lerp_(grad, 1 - beta1); ...
    written down    mul_(v0, n0), lerp_(v2, v1, n1), ...
                    v: values (0 the parameter, 1 its gradient, then its states)
    numbers         n0 = 0.999, n1 = 0.1          a recording of the next step has others
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hytrain_fx.runtime.any_optimizer.marks import Marks, copied, refuse_set
from hytrain_fx.runtime.any_optimizer.shell import Options, Shells, changed_options, run_step
from hytrain_fx.runtime.own_states import Entry, frozen, is_scalar, map_leaves
from hytrain_fx.torch_private.operators import every_operation, signature_of
from hytrain_fx.torch_private.tensors import memory_of

META = torch.device("meta")


class Untraceable(Exception):
    """This step cannot be written down; the message says why."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: the parameter, its gradient, a state, or what an operation made."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or a 0-dim tensor on the CPU; every recording has its own."""

    index: int
    kind: str


@dataclass(frozen=True, slots=True)
class Device:
    """Where the parameter is."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation.

    Its arguments are nests of `Value`, `Number`, `Device` and constants; `made` are the values it
    makes, by position.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int | None, int], ...]  # (position among several results or None, value)


@dataclass(frozen=True)
class Form:
    """Shape and strides of a parameter."""

    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tensor.shape, tensor.stride())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat tensor of all elements, in the order of the parameter's memory, in its form."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def empty(self) -> torch.Tensor:
        """On the meta device, fp32."""
        return torch.empty_strided(self.shape, self.stride, dtype=torch.float32, device=META)


@dataclass(frozen=True)
class Recording:
    """What a step does.

    `entry` is what is kept afterwards: a nest of `Value`, copies of scalars, and other values; None
    for nothing.

    inputs     values that are given: parameter, gradient, states
    copied     values of `entry` that are the gradient's memory: what is kept is a copy
    options, attributes   what the step has set in its group, and on the optimizer
    """

    inputs: int
    calls: tuple[Call, ...]
    numbers: tuple[Any, ...]
    entry: Entry | None
    copied: frozenset[int]
    options: Options
    attributes: dict[str, Any]

    @property
    def key(self) -> Hashable:
        """Equal for steps that differ in numbers only.

        Raises TypeError where a constant cannot be compared.
        """
        calls = tuple((call.operation, frozen(call.args), frozen(call.kwargs), call.made) for call in self.calls)
        return self.inputs, calls, self.kept, self.copied

    @property
    def kept(self) -> tuple[int, ...]:
        """The values of `entry`, each once, in order."""
        found: dict[int, None] = {}
        map_leaves(self.entry, lambda leaf: found.setdefault(leaf.index) if isinstance(leaf, Value) else None)
        return tuple(found)


def record(shells: Shells, form: Form, options: Options, entry: Entry | None, marks: Marks) -> Recording:
    """The step on a parameter of this form with this entry and these marks, which stay the same.

    Raises Untraceable; UnsupportedError for a step that sets something on the parameter.
    """
    shell, parameter, states = _without_memory(shells, form, options, entry, marks)
    gradient = parameter.grad
    assert gradient is not None
    tape = _Tape([parameter, gradient, *states])
    memory = memory_of(parameter)
    try:
        with every_operation(tape.call):
            run_step(shell)
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(str(error).strip().split("\n")[0] or type(error).__name__) from error
    if memory_of(parameter) != memory:
        raise Untraceable("its step gives the parameter other memory")
    refuse_set(shells.kind.__name__, parameter, marks)
    changed = changed_options(options, shell.param_groups[0]), shells.changed_attributes(shell)
    return tape.recording(shell.state.get(parameter), memory_of(gradient), *changed)


def entry_after(shells: Shells, form: Form, options: Options, entry: Entry | None, marks: Marks) -> Entry:
    """What is kept after a step, tensors on the meta device.

    Where the step needs values, what it has made until then.
    """
    shell, parameter, _ = _without_memory(shells, form, options, entry, marks)
    with contextlib.suppress(Exception):
        run_step(shell)
    return dict(shell.state.get(parameter, {}))


def _without_memory(
    shells: Shells, form: Form, options: Options, entry: Entry | None, marks: Marks
) -> tuple[torch.optim.Optimizer, nn.Parameter, list[torch.Tensor]]:
    """An optimizer of a parameter on the meta device that has a gradient, this entry and marks.

    Also the tensors of the entry, in order.
    """
    states: list[torch.Tensor] = []

    def at_rest(leaf: Any) -> Any:
        if is_scalar(leaf):
            return leaf.clone()
        if isinstance(leaf, torch.Tensor):
            states.append(torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META))
            return states[-1]
        return leaf

    parameter = nn.Parameter(form.empty())
    vars(parameter).update(copied(marks))
    parameter.grad = form.empty()
    state: dict[torch.Tensor, Entry] = {} if entry is None else {parameter: map_leaves(entry, at_rest)}
    return shells.make([(dict(options), [parameter])], state), parameter, states


class _Tape:
    """Runs operations on meta tensors and writes them down."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = len(inputs)
        self._values = list(inputs)  # by index; kept, so that no other tensor gets their identity
        self._index = {id(value): index for index, value in enumerate(inputs)}
        self._aliases: list[torch.Tensor] = []  # kept for the same reason
        self._calls: list[Call] = []
        self._numbers: list[Any] = []

    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and write it down if it works on meta tensors or makes one."""
        result = self._run(operation, args, kwargs)
        given = self._any_meta((args, kwargs))
        if given or self._any_meta(result):
            signature = signature_of(operation)
            taken = tuple(self._taken(arg, i in signature.numbers, i in signature.written) for i, arg in enumerate(args))
            named = {key: self._taken(arg, key in signature.numbers, key in signature.written) for key, arg in kwargs.items()}
            self._calls.append(Call(operation, taken, named, self._made(result)))
        return result

    def recording(self, entry: Entry | None, gradient: int, options: Options, attributes: dict[str, Any]) -> Recording:
        """All of it. `gradient`: the memory of the gradient."""
        kept = map_leaves(entry, self._kept)
        recording = Recording(self._inputs, tuple(self._calls), tuple(self._numbers), kept, frozenset(), options, attributes)
        return replace(recording, copied=frozenset(index for index in recording.kept if memory_of(self._values[index]) == gradient))

    def _run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            raise Untraceable(f"{operation} draws random numbers")
        return operation(*args, **kwargs)

    def _any_meta(self, nest: Any) -> bool:
        found: list[bool] = []
        map_leaves(nest, lambda leaf: found.append(isinstance(leaf, torch.Tensor) and leaf.device == META))
        return any(found)

    def _taken(self, arg: Any, number: bool, written: bool) -> Any:
        def leaf_taken(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if leaf.device == META:
                    return Value(self._find(leaf))
                if written or not is_scalar(leaf):
                    raise Untraceable(f"a tensor of shape {tuple(leaf.shape)} on the {leaf.device.type} meets the parameter's")
                return self._number(leaf.clone(), str(leaf.dtype))
            if isinstance(leaf, float) or (number and isinstance(leaf, int) and not isinstance(leaf, bool)):
                return self._number(leaf, type(leaf).__name__)
            return Device() if leaf == META else leaf

        return map_leaves(arg, leaf_taken)

    def _number(self, value: Any, kind: str) -> Number:
        self._numbers.append(value)
        return Number(len(self._numbers) - 1, kind)

    def _find(self, tensor: torch.Tensor) -> int:
        if id(tensor) in self._index:
            return self._index[id(tensor)]
        # `.data` makes another tensor of the same memory without an operation
        memory = memory_of(tensor)
        for index, value in enumerate(self._values):
            if memory_of(value) == memory and Form.of(value) == Form.of(tensor) and value.storage_offset() == tensor.storage_offset():
                self._remember(tensor, index)
                return index
        raise Untraceable("its step uses a tensor that no operation has made")

    def _remember(self, tensor: torch.Tensor, index: int) -> None:
        self._index[id(tensor)] = index
        if index == len(self._values):
            self._values.append(tensor)
        else:
            self._aliases.append(tensor)

    def _made(self, result: Any) -> tuple[tuple[int | None, int], ...]:
        several = isinstance(result, tuple | list)
        made = []
        for position, tensor in enumerate(result if several else [result]):
            if isinstance(tensor, torch.Tensor) and tensor.device == META and id(tensor) not in self._index:
                index = len(self._values)
                self._remember(tensor, index)
                made.append((position if several else None, index))
        return tuple(made)

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device == META:
            return Value(self._find(leaf))
        if isinstance(leaf, torch.Tensor) and not is_scalar(leaf):
            raise Untraceable(f"its step keeps a tensor of shape {tuple(leaf.shape)} on the {leaf.device.type}")
        return leaf
