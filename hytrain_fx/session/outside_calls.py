"""Says once what to write where a loop's gradients come from code that nobody captures.

    loss = model.training_step(batch)   eager code: it reads the weights one by one
    loss.backward()                     autograd's own gradients, from no graph of ours
    optimizer.step()                    warns: hytrain_fx.compile(model.training_step, optimizer)

The training is right, and little is hidden.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Final

import torch
from torch import nn

from hytrain_fx.errors import HytrainWarning

_LIBRARY: Final = ("hytrain_fx.", "torch.", "contextlib.")


class OutsideCalls:
    """Of one compiled model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._methods = frozenset(dir(type(model))) - frozenset(dir(nn.Module)) | {"forward"}  # looked for at each touch
        self._method: str | None = None  # of the model, that read a weight
        self._called = False
        self._settled = False

    def called(self) -> None:
        """The compiled call is entered, with gradients on."""
        self._called = True

    def touched(self) -> None:
        """Eager code reads a weight: remember through which method of the model."""
        if not self._settled and self._method is None and torch.is_grad_enabled():
            self._method = self._outermost_method(sys._getframe(1))

    def stepped(self, captured: bool, eager: bool) -> None:
        """After a step.

        captured    whether a captured backward has run, in this step or before
        eager       whether autograd has added gradients that came from no graph
        """
        if captured:
            self._settled = True
        elif eager and not self._called and not self._settled:
            self._settled = True
            warnings.warn(f"the gradients of this step come from code that ran outside the compiled call, so its updates begin at step() "
                          f"and little of them is hidden. {self._advice()}", HytrainWarning, stacklevel=loop_level())
        self._called = False

    def _advice(self) -> str:
        if self._method == "forward":
            return "Call model(...) instead of model.forward(...)"
        if self._method is not None:
            return f"Compile the method that the loop calls: hytrain_fx.compile(model.{self._method}, optimizer)"
        return ("Call the model itself, or make a method of what the loop does with its layers, and compile that: "
                "hytrain_fx.compile(model.method, optimizer)")

    def _outermost_method(self, frame: FrameType | None) -> str | None:
        model, found = self._model(), None
        if model is None:
            return None
        own = vars(model)
        while frame is not None:
            code = frame.f_code
            named = code.co_name in self._methods or code.co_name in own
            if named and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is model:
                found = code.co_name
            frame = frame.f_back
        return found


def loop_level() -> int:
    """What `stacklevel` a warning of the caller needs to name the loop's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_LIBRARY):
        level, frame = level + 1, frame.f_back
    return level
