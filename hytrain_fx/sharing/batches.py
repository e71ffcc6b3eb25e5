"""A batch in two parts, along the first dimension of its tensors.

    part_of(batch, begin, end)   some of its sequences
    counted(parts, ..., weigh)   what share of the batch's mean each part is

A batch is a tensor, or tuples, lists and mappings of tensors. Numbers, strings and tensors without
a dimension go to both parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hytrain_fx.errors import UnsupportedError

_LEFT_OUT: Final = -100  # the ignore_index of torch's losses, where nothing else is said
_FOR_ALL: Final = (int, float, str, bool, bytes, type(None))

Weigh = Callable[[Any], Any]
"""From a part of a batch to how much it counts in the mean: a number, or a tensor of one."""


def sequences_of(batch: Any) -> int:
    """Sequences of a batch: the length of its tensors' first dimension.

    Raises UnsupportedError where tensors differ in it, there is none, or one is not on the CPU.
    """
    found: dict[int, str] = {}
    for name, tensor in _tensors(batch, "batch"):
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{name} is on {tensor.device}: share() takes batches on the CPU and moves the device's part itself. "
                                   "Leave out .to(device)")
        if tensor.dim():
            found.setdefault(tensor.shape[0], name)
    if len(found) != 1:
        what = " and ".join(f"{count} in {name}" for count, name in found.items()) or "no tensor with a dimension"
        raise UnsupportedError(f"a batch is split along the first dimension of its tensors, and has {what}; expected the same number of "
                               "sequences in each. Expand what all sequences share, or leave it out of the batch")
    return next(iter(found))


def part_of(batch: Any, begin: int, end: int) -> Any:
    """Sequences `begin..end` of a batch, in its structure: views of its tensors."""
    return _mapped(batch, lambda tensor: tensor[begin:end] if tensor.dim() else tensor)


def moved(part: Any, device: torch.device) -> Any:
    """The same on this device. Pinned tensors are copied without a wait."""
    return _mapped(part, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))


def counted(parts: Sequence[Any], lengths: Sequence[int], weigh: Weigh | None) -> list[float]:
    """By part: its weight in the mean of the whole batch. They add up to 1, up to rounding.

    Without `weigh` each sequence counts alike (`require_even`). Raises UnsupportedError for counts
    that are no numbers >= 0 or are all zero.
    """
    if weigh is None:
        counts = [float(length) for length in lengths]
    else:
        counts = [_number(weigh(part)) for part in parts]
        if not all(0 <= count < math.inf for count in counts) or not any(counts):
            raise UnsupportedError(f"weigh() gave {counts} for the parts of a batch; expected numbers >= 0, of which one is more than 0")
    return [count / sum(counts) for count in counts]


def require_even(batch: Any) -> None:
    """Raise UnsupportedError for labels that a loss leaves out, and for masks with zeros.

    A mean over what is left weighs sequences unevenly then.
    """
    for name, tensor in _tensors(batch, "batch"):
        left_out = tensor.dtype in (torch.int64, torch.int32) and bool((tensor == _LEFT_OUT).any())
        masked = "mask" in name.lower() and not bool(tensor.all())
        if left_out or masked:
            what = "labels of -100" if left_out else "zeros"
            raise UnsupportedError(f"{name} has {what}: sequences of this batch count unevenly in a mean. Say what a part counts, "
                                   "share(batch, model, weigh=lambda part: (part['labels'] != -100).sum())")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(f"weigh() gave a {type(value).__name__}; expected a number, or a tensor of one") from error


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch with its place, such as `batch['labels']`.

    Raises UnsupportedError for what is neither a tensor nor a container, nor the same for all.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        if value and all(isinstance(item, _FOR_ALL) for item in value):
            raise UnsupportedError(f"{name} is a {type(value).__name__} without tensors, which may be one value a sequence: make it a "
                                   "tensor, or leave it out of the batch")
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}[{number}]")
    elif not isinstance(value, _FOR_ALL):
        raise UnsupportedError(f"{name} is a {type(value).__name__}; a batch is split along dimension 0 of its tensors: expected a "
                               "tensor, or tuples, lists and dicts of tensors")


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(item, change) for item in value])
    return value
