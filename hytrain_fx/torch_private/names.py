"""A private name of torch, or an error that says which name is gone from which torch."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from hytrain_fx.errors import HytrainWarning, UnsupportedError

_OLDEST: Final = (2, 11)
_NEWEST: Final = (2, 13)


def require_release() -> None:
    """Raises UnsupportedError where torch is older than 2.11.

    Warns where it is newer than what hytrain_fx was run on.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < _OLDEST:
        raise UnsupportedError(f"torch {torch.__version__} is too old: hytrain_fx needs torch 2.11 or newer; pip install --upgrade torch")
    if release > _NEWEST:
        warnings.warn(f"hytrain_fx was run on torch 2.11 to 2.13, this is {torch.__version__}: run its test suite (./scripts/test) before "
                      "you rely on it", HytrainWarning, stacklevel=3)


def private_function(name: str) -> Callable[..., Any]:
    """`torch.<name>`, an underscored function without a public twin (`_foreach_mul_`).

    Raises UnsupportedError.
    """
    function = getattr(torch, name, None)
    if function is None:
        raise UnsupportedError(f"torch {torch.__version__} has no torch.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return cast(Callable[..., Any], function)


def private_name(module: str, name: str) -> Any:
    """`<module>.<name>`. Raises UnsupportedError."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {module}.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13"
        ) from None
