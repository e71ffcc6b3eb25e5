"""Entry and exit of the compiled call: parameters are plain inside, guarded outside.

Each layout of parameters has graphs of its own. So has each set of hooks on the model itself, which
are part of its graphs, as those of its layers are: Dynamo looks for new ones nowhere.

`put_gate` makes it what `model(...)` calls, and `find_session` finds the session through it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import HytrainError, HytrainWarning
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.callbacks import weakly
from hytrain_fx.session.late_streaming import LateStreaming
from hytrain_fx.session.outside_calls import loop_level
from hytrain_fx.session.session import Session
from hytrain_fx.torch_private.compiling import CompiledCall, compiled_call_of, raised_in_backend
from hytrain_fx.torch_private.modules import compiled_call, hooks_of, plain_call, set_compiled_call
from hytrain_fx.weights.places import Layout

MOST_LAYOUTS = 8
"""And sets of hooks, that are compiled at a time. One more takes the place of one that is out of
use. Where all are in use it runs in plain Python, as Dynamo's does beyond its recompile limit."""
OUT_OF_USE_CALLS = 100
"""Calls with other layouts since the last one, after which a layout is out of use."""


@dataclass(slots=True)
class _OfLayout:
    """The graphs of one layout, and the number of the last call that used them."""

    compiled: CompiledCall
    last: int = 0


class Entry:
    """One method through which the compiled model is entered, with its graphs by layout.

    compile_call    makes a compiled call, another one each time
    plain_call      the same call, not compiled
    """

    def __init__(self, compile_call: Callable[[], CompiledCall], plain_call: Callable[..., Any]) -> None:
        self.compile_call = compile_call
        self.plain_call = plain_call
        self.compiled: dict[tuple[Layout, Hashable], _OfLayout] = {}

    def forget(self) -> None:
        """Let go of its graphs."""
        for of in self.compiled.values():
            of.compiled.forget()
        self.compiled.clear()


class CallGate:
    """Stands where `torch.nn.Module.compile` puts the compiled call.

    A copied or pickled model loses it and is a plain model. `enter` leads to another method of the
    model, which is compiled too.

    compile_call    makes the compiled call of a method, another one each time
    plain_call      what `model(...)` calls when nothing is compiled
    session         is told of each call
    """

    def __init__(self, compile_call: Callable[[MethodType], CompiledCall], plain_call: MethodType, session: Session) -> None:
        self._compile_call = compile_call
        self._model: Any = plain_call.__self__
        self._places = session.places
        self._entries: list[Entry] = []
        self._calls = 0
        self._warned = False
        self.session = session
        session.pressure.weights = LateStreaming(session)
        self._forward = self.entry(plain_call)

    def entry(self, method: MethodType) -> Entry:
        """One more way in: `method`, compiled by itself."""
        entry = Entry(partial(self._compile_call, method), method)
        entry.compiled[self._places.compiled, hooks_of(self._model)] = _OfLayout(entry.compile_call())
        self._entries.append(entry)
        return entry

    # A torch.compile around it (the Trainer's torch_compile=True) breaks its graph here: its own
    # would have none of our nodes.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.enter(self._forward, args, kwargs)

    def enter(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method of this entry."""
        pressure = self.session.pressure
        with self.session.turns.calls:
            while True:
                begun = pressure.before_call() if self.session.depth == 0 else None
                try:
                    return self._in_turn(entry, args, kwargs)
                except torch.OutOfMemoryError as error:  # it holds what the call has made until this handler is left
                    if not pressure.repeats(begun, error):
                        raise

    def _in_turn(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.session.closed:  # while another thread was about to call the model
            return entry.plain_call(*args, **kwargs)
        with self.session.turns.compiles:
            pass  # torch refuses this call while another thread's backward compiles
        with whole() as gap:  # also what only looks: meanwhile torch functions are off in this thread
            if self.session.graphs.must_capture_anew():
                self.forget()
            layout = self._places.layout()
            call = self._call_of(entry, layout, hooks_of(self._model))
            self.session.enter_forward()
            try:
                try:
                    gap.open = True
                    if call is entry.plain_call or layout.places != self._places.compiled.places:
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

    def forget(self) -> None:
        """Let go of all graphs. The next call captures new ones."""
        for entry in self._entries:
            entry.forget()

    def _call_of(self, entry: Entry, layout: Layout, hooks: Hashable) -> Callable[..., Any]:
        self._calls += 1
        key = (layout, hooks)
        found = entry.compiled.get(key)  # once a call: a layout's hash is of all its names
        if found is None:
            if len(entry.compiled) >= MOST_LAYOUTS and not self._drop_one(entry):
                self._warn()
                return entry.plain_call
            found = entry.compiled[key] = _OfLayout(entry.compile_call())
        found.last = self._calls
        return found.compiled.call

    def _drop_one(self, entry: Entry) -> bool:
        """Forget the graphs of a layout that is out of use; False where there is none.

        Those of an early stage of gradual unfreezing are.
        """
        oldest = min(entry.compiled, key=lambda key: entry.compiled[key].last)
        if self._calls - entry.compiled[oldest].last <= OUT_OF_USE_CALLS:
            return False
        entry.compiled.pop(oldest).compiled.forget()
        return True

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the model's parameters have changed places, or been frozen, or hooks been put on the model, in more than "
                          f"{MOST_LAYOUTS} ways within {OUT_OF_USE_CALLS} calls, each of which is compiled: further ones run in plain "
                          "Python. Exchange values of parameters instead of the parameters, and leave hooks where they are",
                          HytrainWarning, stacklevel=loop_level())

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def put_gate(model: nn.Module, session: Session) -> None:
    """Make `model(...)` the compiled call of its session, which is closed where that fails."""
    of = session.config
    backend, on_eager = weakly(session.capture.backend), weakly(session.eager.before_eager_code)
    compile_call = partial(compiled_call_of, model, backend=backend, dynamic=of.dynamic, mode=of.mode, options=of.options,
                           on_eager=on_eager)
    try:
        set_compiled_call(model, CallGate(compile_call, plain_call(model), session))
    except BaseException:
        session.close()
        raise
    session.clock.built()


def find_session(model: nn.Module) -> Session | None:
    """The session of a compiled model, None where it has none."""
    gate = _gate_of(model)
    return None if gate is None else gate.session


def forget_graphs(model: nn.Module) -> None:
    """Let go of the graphs of a compiled model."""
    gate = _gate_of(model)
    if gate is not None:
        gate.forget()


def _gate_of(model: nn.Module) -> CallGate | None:
    gate = compiled_call(model)
    return gate if isinstance(gate, CallGate) else None
