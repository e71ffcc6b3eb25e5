"""Entry and exit of the compiled call: parameters are plain inside, guarded outside; each layout of parameters has graphs of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hytrain_fx.errors import HytrainError
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.turns import Turns
from hytrain_fx.torch_private.tensors import raised_in_backend
from hytrain_fx.weights.places import Layout, ParameterPlaces

MOST_LAYOUTS = 8
"""That are compiled at a time. One more takes the place of one that is out of use. Where all are in
use it runs in plain Python, as Dynamo's does beyond its recompile limit."""
OUT_OF_USE_CALLS = 100
"""Calls with other layouts since the last one, after which a layout is out of use."""


@dataclass(slots=True)
class _CompiledCall:
    """The graphs of one layout, and the number of the last call that used them."""

    call: Callable[..., Any]
    last: int = 0


class Gated(Protocol):
    """What is told of each call: the session of the compiled model."""

    turns: Turns
    closed: bool

    def must_capture_anew(self) -> bool: ...
    def enter_forward(self) -> None: ...
    def before_eager_code(self) -> None: ...
    def leave_forward(self) -> None: ...


class CallGate:
    """Stands where `torch.nn.Module.compile` puts the compiled call; a copied or pickled model loses it and is a plain model.

    compile_call    makes the compiled call, anew each time
    plain_call      the same call, not compiled
    places          what the model holds
    """

    def __init__(
        self, compile_call: Callable[[], Callable[..., Any]], plain_call: Callable[..., Any], session: Gated, places: ParameterPlaces
    ) -> None:
        self._compile_call = compile_call
        self._plain_call = plain_call
        self._places = places
        self._compiled = {places.compiled: _CompiledCall(compile_call())}
        self._calls = 0
        self._warned = False
        self.session = session

    # A torch.compile around it (the Trainer's torch_compile=True) breaks its graph here: its own
    # would have none of our nodes.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.session.turns.calls:
            return self._in_turn(*args, **kwargs)

    def _in_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.session.closed:  # while another thread was about to call the model
            return self._plain_call(*args, **kwargs)
        with self.session.turns.compiles:
            pass  # torch refuses this call while another thread's backward compiles
        if self.session.must_capture_anew():
            self._compiled.clear()
        layout = self._places.layout()
        call = self._call_of(layout)
        with whole() as gap:
            self.session.enter_forward()
            try:
                try:
                    gap.open = True
                    if layout.places != self._places.compiled.places:
                        self.session.before_eager_code()  # what is there instead may share memory with any weight
                    return call(*args, **kwargs)
                except Exception as error:
                    ours = raised_in_backend(error)
                    if isinstance(ours, HytrainError):  # its kind is part of what it says
                        raise ours from None
                    raise
                finally:
                    gap.open = False
            finally:
                self.session.leave_forward()

    def _call_of(self, layout: Layout) -> Callable[..., Any]:
        self._calls += 1
        compiled = self._compiled.get(layout)  # once a call: a layout's hash is of all its names
        if compiled is None:
            if len(self._compiled) >= MOST_LAYOUTS and not self._drop_one():
                self._warn()
                return self._plain_call
            compiled = self._compiled[layout] = _CompiledCall(self._compile_call())
        compiled.last = self._calls
        return compiled.call

    def _drop_one(self) -> bool:
        """Forget the graphs of a layout that is out of use; False where there is none.

        Those of an early stage of gradual unfreezing are.
        """
        oldest = min(self._compiled, key=lambda layout: self._compiled[layout].last)
        if self._calls - self._compiled[oldest].last <= OUT_OF_USE_CALLS:
            return False
        del self._compiled[oldest]
        return True

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the model's parameters have changed places, or been frozen, in more than {MOST_LAYOUTS} ways within "
                          f"{OUT_OF_USE_CALLS} calls, each of which is compiled: further ones run in plain Python. Exchange values of "
                          "parameters instead of the parameters", stacklevel=4)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None
