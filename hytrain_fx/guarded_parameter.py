"""A parameter that notices when somebody touches its weight outside the compiled call.

    guarded = guard_type(on_touch)        once per compiled model
    guard(p, guarded)                     after step(): type(p) is guarded, still the same object, still an nn.Parameter
    model.weight.sum()                    p becomes a plain nn.Parameter, on_touch(p) runs (waits for a weight in flight), then sum() runs
    unguard(p)                            at entry of the compiled call: Dynamo must see plain parameters

What touches is any torch function, method or property given `p`, also inside lists, tuples and dicts; not metadata, hooks, `requires_grad`
and `.grad`. Results are plain tensors: the class is off before the op runs.

Not noticed, because no torch function sees it:
  - memory reached without `p`: views, `.data` or `.detach()` results, numpy and DLPack aliases, raw pointers, tensors saved for a backward,
    all taken before `guard`. (The version counter that `step()` increments catches the saved tensors.)
  - `p` itself given to pybind11 functions of a C++ extension or to a torch.distributed process group's methods, which unpack it in C++.
    `torch.ops` and `torch.library` ops and Triton kernels (they ask for `data_ptr()`) are noticed.
  - torch functions that cannot be overridden: `torch.tensor(p)`, `p.as_subclass()`, `torch.utils.swap_tensors`, `torch.func.grad(f)(p)`.
  - a `__torch_function__` of another tensor subclass that comes first and switches torch functions off.
A torch.multiprocessing queue pickles by exact type: a guarded parameter is sent as a copy, not as shared memory. Another function under
`torch.compile` breaks its graph at a guarded parameter, and with `fullgraph=True` is refused: read the parameter once before it.
`nn.Parameter(p)` of a guarded `p` raises torch's RuntimeError: give it `p.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import new_class
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from hytrain_fx.torch_private import metadata_functions, without_torch_function

OnTouch = Callable[[nn.Parameter], None]
"""Called with a parameter that is plain again, before the op that touched it runs; it may block. If it raises, the guard stays."""


class GuardedParameter(nn.Parameter):
    """The class a parameter has while guarded; made for one model by `guard_type`. Never instantiated: parameters are given it."""

    on_touch: ClassVar[OnTouch]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:  # nn.Parameter's would call type(self) before it reads self.data
        return cast(nn.Parameter, touched(self).__deepcopy__(memo))

    def __reduce_ex__(self, proto: Any) -> Any:
        return touched(self).__reduce_ex__(proto)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its effect is on the object, which no graph can hold
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in _TOUCHES_NOTHING:
            with without_torch_function():
                return func(*args, **kwargs)
        for parameter in _guarded_in((args, kwargs)):
            touched(parameter)
        return func(*args, **kwargs)


def guard_type(on_touch: OnTouch) -> type[GuardedParameter]:
    """A class of guarded parameters that call `on_touch`. One per compiled model: parameters carry no attribute of ours into a pickle."""
    return new_class("GuardedParameter", (GuardedParameter,), exec_body=lambda body: body.update(on_touch=staticmethod(on_touch)))


def guard(parameter: Tensor, guarded: type[GuardedParameter]) -> bool:
    """Give a plain nn.Parameter the class `guarded`. False, and nothing done, if its type is another one (a subclass of nn.Parameter)."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = guarded
    return type(parameter) is guarded


def unguard(parameter: Tensor) -> None:
    """Take the class off without calling `on_touch`; does nothing to a parameter that is not guarded."""
    if issubclass(type(parameter), GuardedParameter):
        parameter.__class__ = nn.Parameter


def is_guarded(parameter: Tensor) -> bool:
    """Whether the next touch of this parameter calls `on_touch`."""
    return issubclass(type(parameter), GuardedParameter)


def touched(parameter: Tensor) -> nn.Parameter:
    """The same parameter, plain and with `on_touch` called if it was guarded. What `on_touch` raises passes through, guard on again."""
    guarded = type(parameter)
    if issubclass(guarded, GuardedParameter):
        unguard(parameter)
        try:
            guarded.on_touch(cast(nn.Parameter, parameter))
        except BaseException:
            guard(parameter, guarded)
            raise
    return cast(nn.Parameter, parameter)


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
    | {vars(torch._C.TensorBase)["grad"].__delete__, Tensor.requires_grad_, Tensor.retain_grad}
    | {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
)
