"""What torch keeps to itself of process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from hytrain_fx.errors import UnsupportedError


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
