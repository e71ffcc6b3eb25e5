"""Entry and exit of the compiled call: parameters are plain inside, guarded outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Gated(Protocol):
    """What is told of each call: the session of the compiled model."""

    def must_capture_anew(self) -> bool: ...
    def enter_forward(self) -> None: ...
    def leave_forward(self) -> None: ...


class CallGate:
    """Stands where `torch.nn.Module.compile` puts the compiled call; a copied or pickled model loses it and is a plain model.

    compile_call    makes the compiled call, anew each time
    """

    def __init__(self, compile_call: Callable[[], Callable[..., Any]], session: Gated) -> None:
        self._compile_call = compile_call
        self._compiled = compile_call()
        self.session = session

    # A torch.compile around it (the Trainer's torch_compile=True) breaks its graph here: its own would have none of our nodes.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.session.must_capture_anew():
            self._compiled = self._compile_call()
        self.session.enter_forward()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self.session.leave_forward()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None
