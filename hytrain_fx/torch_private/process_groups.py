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


def set_time_limit(group: Any, limit: timedelta) -> None:
    """From now on a collective of this group on the CPU may take so long. The group is gloo's.

    torch ends no process before the threads of its collectives have ended, by this limit.

    Raises UnsupportedError where torch does not let it be set.
    """
    try:
        group._get_backend(torch.device("cpu"))._set_default_timeout(limit)
    except (AttributeError, RuntimeError) as error:
        raise _other_torch(f"does not let the time limit of {group!r} be set ({error})") from error


def time_limit(group: Any, device: torch.device) -> timedelta:
    """How long a collective of this group on tensors of this device may take.

    Raises UnsupportedError where torch does not tell.
    """
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError) as error:
        raise _other_torch(f"does not tell the time limit of {group!r} ({error})") from error
    if not isinstance(limit, timedelta):
        raise _other_torch(f"tells {limit!r} as a time limit of {group!r}, expected a timedelta")
    return limit


def _other_torch(does: str) -> UnsupportedError:
    return UnsupportedError(f"torch {torch.__version__} {does}; hytrain_fx was run on torch 2.11 and 2.13")
