"""What torch keeps to itself of process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from hytrain_fx.errors import UnsupportedError

# The newer of two names for the same, where torch has it: 2.13 warns of the other.
# None where torch was built without torch.distributed.
_names = vars(distributed)
all_gather: Final[Callable[..., Any]] = _names.get("all_gather_single") or _names.get("all_gather_into_tensor")  # type: ignore[assignment]
reduce_scatter: Final[Callable[..., Any]] = _names.get("reduce_scatter_single") or _names.get("reduce_scatter_tensor")  # type: ignore[assignment]


def time_limit(group: Any, device: torch.device) -> timedelta:
    """How long a collective of this group on tensors of this device may take.

    Raises UnsupportedError where torch does not tell.
    """
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(f"torch {torch.__version__} does not tell the time limit of {group!r} ({error}); "
                               "hytrain_fx was run on torch 2.11 and 2.13") from error
    if not isinstance(limit, timedelta):
        raise UnsupportedError(f"torch {torch.__version__} tells {limit!r} as a time limit of {group!r}, expected a timedelta")
    return limit
