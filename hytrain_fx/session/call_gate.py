"""Entry and exit of the compiled call: parameters are plain inside, guarded outside.

Each layout of parameters has graphs of its own.

`put_gate` makes it what `model(...)` calls, and `find_session` finds the session through it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import HytrainError, HytrainWarning
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.callbacks import weakly
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.compiling import compiled_call_of, raised_in_backend
from hytrain_fx.torch_private.modules import compiled_call, plain_call, set_compiled_call
from hytrain_fx.weights.places import Layout

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


class CallGate:
    """Stands where `torch.nn.Module.compile` puts the compiled call.

    A copied or pickled model loses it and is a plain model.

    compile_call    makes a compiled call, another one each time
    plain_call      the same call, not compiled
    session         is told of each call
    """

    def __init__(self, compile_call: Callable[[], Callable[..., Any]], plain_call: Callable[..., Any], session: Session) -> None:
        self._compile_call = compile_call
        self._plain_call = plain_call
        self._places = session.places
        self._compiled = {session.places.compiled: _CompiledCall(compile_call())}
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
        if self.session.graphs.must_capture_anew():
            self._compiled.clear()
        layout = self._places.layout()
        call = self._call_of(layout)
        with whole() as gap:
            self.session.enter_forward()
            try:
                try:
                    gap.open = True
                    if call is self._plain_call or layout.places != self._places.compiled.places:
                        self.session.eager.wait_for_all()  # what is there instead may share memory with any weight
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
                          "parameters instead of the parameters", HytrainWarning, stacklevel=4)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def put_gate(model: nn.Module, session: Session) -> None:
    """Make `model(...)` the compiled call of its session, which is closed where that fails."""
    of = session.config
    backend, on_eager = weakly(session.capture.backend), weakly(session.eager.before_eager_code)
    compile_call = partial(compiled_call_of, model, backend, of.dynamic, of.mode, of.options, on_eager)
    try:
        set_compiled_call(model, CallGate(compile_call, plain_call(model), session))
    except BaseException:
        session.close()
        raise
    session.clock.built()


def find_session(model: nn.Module) -> Session | None:
    """The session of a compiled model, None where it has none."""
    gate = compiled_call(model)
    return gate.session if isinstance(gate, CallGate) else None
