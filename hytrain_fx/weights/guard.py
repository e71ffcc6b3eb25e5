"""A parameter that notices when somebody touches its weight outside the compiled call.

    guarded = guard_type(on_touch)        once per compiled model
    guard(p, guarded)                     after step(): type(p) is guarded, still the same object,
                                          still an nn.Parameter
    model.weight.sum()                    p becomes a CountedParameter, on_touch(p) runs (it waits
                                          for a weight in flight), then sum() runs
    model.weight.data.zero_()             the same, and p._version counts the write
    unguard_all([p])                      at entry of the compiled call: Dynamo must see plain ones

What touches is any torch function, method or property given `p`, also inside lists, tuples and
dicts; not metadata, hooks, `requires_grad` and `.grad`. Results are plain tensors: the class is off
before the op runs, or, where the guard stays, torch functions are. A CountedParameter is a plain
parameter to torch and Dynamo, at no cost per op; only its `.data` is another, for writes that come
after the first touch. Where a backward still needs the old weight, a write through `.data` is
torch's error, as one in place is.

Not noticed, because no torch function sees it:
  - memory reached without `p`: views, `.data` or `.detach()` results, NumPy and DLPack aliases,
    tensors saved for a backward, all taken before `guard`. (`held` counts who holds them; the
    version counter that `step()` increments catches the saved tensors.)
  - raw pointers: `hytrain_fx.settle(model)` before they are read.
  - `p` itself given to pybind11 functions of a C++ extension or to a torch.distributed process
    group's methods, which unpack it in C++. `torch.ops` and `torch.library` ops and Triton kernels
    (they ask for `data_ptr()`) are noticed.
  - torch functions that cannot be overridden: `torch.tensor(p)`, `p.as_subclass()`,
    `torch.utils.swap_tensors`, `torch.func.grad(f)(p)`.
  - a `__torch_function__` of another tensor subclass that comes first and switches torch functions
    off.
A torch.multiprocessing queue pickles by exact type: a guarded parameter is sent as a copy, not as
shared memory. Another function under `torch.compile` breaks its graph at a guarded parameter, and
with `fullgraph=True` is refused: read the parameter once before it (one that `stays` guarded:
compile the model with `autocast_copies=False`). `nn.Parameter(p)` of a guarded or touched `p`
raises torch's RuntimeError: give it `p.data`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from types import MethodType, new_class
from typing import Any, ClassVar, Final, Protocol, cast

import torch
from torch import Tensor, nn

from hytrain_fx.capture.parameters import ManagedParameter
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.torch_private.modules import FAST_FORWARDS, LOADS, SAVES
from hytrain_fx.torch_private.tensors import delete_grad, get_grad, metadata_functions, set_data, set_grad, without_torch_function

OnTouch = Callable[[nn.Parameter], None]
"""Called with a parameter that is a `CountedParameter`, before the op that touched it runs.

It may block. If it raises, the guard stays.
"""


class Elsewhere(Protocol):
    """Where a weight rests that is not on the device: what saves and loads modules goes there."""

    def saved(self, parameter: nn.Parameter) -> Tensor: ...  # what `state_dict()` is to have of it
    def loaded(self, parameter: nn.Parameter, values: Tensor) -> bool: ...  # what `load_state_dict()` gives; whether it was taken


class CountedParameter(ManagedParameter):
    """The class a parameter has from its first touch to the next compiled call.

    `.data` of a plain one has its own version counter.
    """

    @property
    def data(self) -> Tensor:
        """The same memory without a graph, in `detach()`'s form.

        Writes to it count as writes to the parameter.
        """
        return touched(self).detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data(touched(self), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:  # nn.Parameter's would call type(self), and be a CountedParameter
        return cast(nn.Parameter, _plainly(self, lambda plain: plain.__deepcopy__(memo)))

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plainly(self, lambda plain: plain.__reduce_ex__(proto))

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter's own, which takes no contents either
        return str(_plainly(self, repr))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its effect is on the object, which no graph can hold
def _torch_function(
    _: type, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    kwargs = {} if kwargs is None else kwargs
    if func in _TOUCHES_NOTHING:
        with without_torch_function():
            return func(*args, **kwargs)
    reached = [touched(parameter) for parameter in _guarded_in((args, kwargs))]
    if any(map(is_guarded, reached)):
        if all(issubclass(kind, CountedParameter) for kind in types):
            with without_torch_function():
                return func(*args, **kwargs)
        # Another class has a say in what `func` does: it finds them as if nobody watched.
        for parameter in reached:
            parameter.__class__ = CountedParameter
    return func(*args, **kwargs)


class _TorchFunction:
    """A class method, but for modules that ask whether there is one before they read the weight.

    They find a plain parameter's, so they go the way that they go with plain ones.
    """

    def __get__(self, parameter: nn.Parameter | None, guarded: type[nn.Parameter]) -> Any:
        if parameter is not None and sys._getframe(1).f_code in FAST_FORWARDS:
            touched(parameter)
            return nn.Parameter.__torch_function__
        return MethodType(_torch_function, guarded)


class GuardedParameter(CountedParameter):
    """The class a parameter has while guarded; made for one model by `guard_type`.

    Never instantiated: parameters are given it.
    """

    on_touch: ClassVar[OnTouch]
    settle: ClassVar[OnTouch]
    stays: ClassVar[Callable[[nn.Parameter], bool | None]]
    elsewhere: ClassVar[Callable[[nn.Parameter], Elsewhere | None]]
    lock: ClassVar[AbstractContextManager[object]]
    touching: ClassVar[set[int]]

    def detach(self) -> Tensor:
        """As any tensor's; `Module.state_dict()` gets the copy of a weight that rests elsewhere."""
        guarded = type(self)
        if sys._getframe(1).f_code is SAVES:
            with guarded.lock:
                # Another thread may have begun a compiled call meanwhile.
                place = guarded.elsewhere(self) if type(self) is guarded else None
                if place is not None:
                    return place.saved(self)
        return Tensor.detach(self)  # `super()` would ask for its class, which that thread changes

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        """As any tensor's; from `Module.load_state_dict()` it goes where the weight rests."""
        guarded = type(self)
        if sys._getframe(1).f_code is LOADS and type(src) in (Tensor, nn.Parameter) and src.shape == self.shape:
            with guarded.lock:
                place = guarded.elsewhere(self) if type(self) is guarded else None
                if place is not None and place.loaded(self, src):
                    return self
        return Tensor.copy_(self, src, non_blocking)

    __torch_function__ = _TorchFunction()


def _grad_noting(read: set[int]) -> property:
    """`.grad` of guarded parameters, as any tensor's.

    No touch, and loops ask for it often: it takes a third of the time of `__torch_function__`.

    read   is given the `id` of each whose `.grad` is a real tensor: whoever gets it may write to it
           unseen (`.data`), or keep it
    """

    def get(parameter: Tensor) -> Tensor | None:
        with without_torch_function():
            grad = get_grad(parameter)
        if type(grad) is Tensor:
            read.add(id(parameter))
        return grad

    def put(parameter: Tensor, value: Tensor | None) -> None:
        with without_torch_function():
            set_grad(parameter, value)

    def delete(parameter: Tensor) -> None:
        with without_torch_function():
            delete_grad(parameter)

    return property(get, put, delete)


def guard_type(
    on_touch: OnTouch,
    settle: OnTouch | None = None,
    lock: AbstractContextManager[object] | None = None,
    stays: Callable[[nn.Parameter], bool | None] | None = None,
    elsewhere: Callable[[nn.Parameter], Elsewhere | None] | None = None,
    gradient_read: set[int] | None = None,
) -> type[GuardedParameter]:
    """A class of guarded parameters that call `on_touch`.

    One per compiled model: parameters carry no attribute of ours into a pickle.

    settle    called before it, while the parameter is guarded still: another thread must not take a
              weight in flight for a new one
    lock      held meanwhile; one thread may take it twice
    stays     whether a parameter is guarded after a touch too: then each touch is told
    elsewhere where its weight rests, None: in its own memory
    gradient_read   by `_grad_noting`
    """
    own = {"on_touch": staticmethod(on_touch), "settle": staticmethod(settle or (lambda _: None)), "lock": lock or RLock(),
           "stays": staticmethod(stays or (lambda _: False)), "elsewhere": staticmethod(elsewhere or (lambda _: None)), "touching": set(),
           "grad": _grad_noting(set() if gradient_read is None else gradient_read)}
    return new_class("GuardedParameter", (GuardedParameter,), exec_body=lambda body: body.update(own))


def guard(parameter: Tensor, guarded: type[GuardedParameter]) -> bool:
    """Give a plain or touched parameter the class `guarded`.

    False, and nothing done, if its type is another subclass of nn.Parameter.
    """
    if type(parameter) in (nn.Parameter, CountedParameter):
        parameter.__class__ = guarded
    return type(parameter) is guarded


def guard_all(parameters: Iterable[Tensor], guarded: type[GuardedParameter]) -> None:
    """`guard` for each, at 0.06 us; at every entry and exit of compiled code."""
    for parameter in parameters:
        kind = type(parameter)
        if kind is nn.Parameter or kind is CountedParameter:
            parameter.__class__ = guarded


def unguard_all(parameters: Iterable[Tensor]) -> None:
    """Make guarded and touched parameters plain without calling `on_touch`.

    Does nothing to others.
    """
    for parameter in parameters:
        kind = type(parameter)
        if kind is not nn.Parameter and issubclass(kind, CountedParameter):
            parameter.__class__ = nn.Parameter


class PlainWhileRunning:
    """The parameters of one model, plain while compiled code runs and guarded otherwise.

    What that code reads is no touch.

    Several threads may run it at a time.

    touched    gives those that eager code has touched, which are guarded again as well
    """

    def __init__(self, parameters: Sequence[Tensor], guarded: type[GuardedParameter], touched: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters, self._guarded, self._touched = parameters, guarded, touched
        self._runs = 0  # compiled calls and backwards
        self._plain: dict[int, Tensor] = {}  # by `id`: to be guarded at the end of the last one

    def begin(self, of: Sequence[Tensor] | None = None) -> None:
        """A run begins, which reads no other parameters than these; None: it may read any."""
        with self._guarded.lock:
            self._runs += 1
            parameters = self._parameters if of is None else of
            self._plain.update(zip(map(id, parameters), parameters, strict=True))
            unguard_all(parameters)

    def end(self) -> None:
        """A run has ended."""
        with self._guarded.lock:
            self._runs -= 1
            if self._runs == 0:
                guard_all(self._plain.values(), self._guarded)
                guard_all(self._touched(), self._guarded)
                self._plain.clear()

    @contextmanager
    def while_running(self, of: Sequence[Tensor]) -> Iterator[None]:
        """Around a run that reads these. One that an interrupt breaks off as it begins ends too."""
        begun = False
        try:
            with whole():
                self.begin(of)
                begun = True
            yield
        finally:
            if begun:
                with whole():
                    self.end()

    def guard(self) -> None:
        """Guard them all."""
        guard_all(self._parameters, self._guarded)


def is_guarded(parameter: Tensor) -> bool:
    """Whether the next touch of this parameter calls `on_touch`."""
    return issubclass(type(parameter), GuardedParameter)


def touched(parameter: Tensor) -> nn.Parameter:
    """The same parameter, with `on_touch` called if it was guarded.

    It is no longer, unless it `stays` so. What `on_touch` raises passes through, guard on again.
    """
    guarded = type(parameter)
    if issubclass(guarded, GuardedParameter):
        with guarded.lock:
            if type(parameter) is guarded and id(parameter) not in guarded.touching:  # another thread may have touched it meanwhile
                _touch(cast(nn.Parameter, parameter), guarded)
    return cast(nn.Parameter, parameter)


def _touch(parameter: nn.Parameter, guarded: type[GuardedParameter]) -> None:
    guarded.touching.add(id(parameter))
    try:
        guarded.settle(parameter)
        if not guarded.stays(parameter):
            parameter.__class__ = CountedParameter
        guarded.on_touch(parameter)
    except BaseException:
        guard(parameter, guarded)
        raise
    finally:
        guarded.touching.discard(id(parameter))


def _plainly(parameter: nn.Parameter, read: Callable[[nn.Parameter], Any]) -> Any:
    """What `read` gives of the parameter as a plain one: nothing of ours goes into a copy."""
    plain = touched(parameter)
    before = type(plain)
    plain.__class__ = nn.Parameter
    try:
        return read(plain)
    finally:
        if type(plain) is nn.Parameter:  # a step() of another thread may have guarded it
            plain.__class__ = before


def _guarded_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_guarded(value):
            yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _guarded_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _guarded_in(item)


def _setters(*names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(Tensor, name).__set__ for name in names)


_TOUCHES_NOTHING: Final = (
    metadata_functions()
    | _setters("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
    | {delete_grad, Tensor.requires_grad_, Tensor.retain_grad}
    | {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
)
