"""Models whose parameters take no memory, while their buffers have values.

    with on_meta():
        model = Model()         every parameter is on the meta device once a module has it

A layer makes a parameter empty, has a module register it, and fills it then: pages that nobody has
written to take no memory, and filling the one on the meta device does nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it modules that this thread makes have their parameters on the meta device.

    Buffers have values. For `compile(loader=...)`, which gives parameters theirs.
    """
    thread = threading.get_ident()
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def registered(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        before = known.get(id(parameter))
        if before is not None and before[0]() is parameter:  # two modules share it
            return before[1]
        meta = nn.Parameter(
            torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"), parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        known[id(parameter)] = weakref.ref(parameter), meta
        return meta

    handle = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]  # torch: it may return a parameter
    try:
        yield
    finally:
        handle.remove()
