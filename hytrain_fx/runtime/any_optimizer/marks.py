"""What a loop has put on a parameter (`weight.lr_mult = 0.1`).

A step of the user's class may read it there, so the parameter of a shell has it too.

    marks_of     as they are now
    copied       what a step gets that runs now: numbers of its own, large tensors as they are
    fixed        what a step gets that runs later: tensors as they are now, on the CPU
    beside       of these, large tensors where the row rests
    cut          for a small parameter in the trial
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.any_optimizer.shell import same
from hytrain_fx.runtime.own_states import is_tensor, map_leaves

Marks = dict[str, Any]

_OF_DYNAMO = "_dynamo_"  # put there while torch.compile traces; no step reads it
_FEW_ELEMENTS = 128


def marks_of(parameter: torch.Tensor) -> Marks:
    """What is in the parameter's attributes now, by name. Nothing of torch's own."""
    return {key: value for key, value in vars(parameter).items() if not key.startswith(_OF_DYNAMO)}


def copied(marks: Marks) -> Marks:
    """For a step that runs now. Writes to numbers and nests do not reach the user's."""
    own: Marks = map_leaves(marks, lambda leaf: leaf.detach().clone() if _is_small(leaf) else leaf)
    return own


def fixed(marks: Marks) -> Marks:
    """For a step that runs later: tensors are copied to the CPU (waits for their device)."""
    own: Marks = map_leaves(marks, lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf)
    return own


def beside(marks: Marks, device: torch.device) -> Marks:
    """Tensors with dimensions on this device."""
    there: Marks = map_leaves(marks, lambda leaf: leaf.to(device) if is_tensor(leaf) else leaf)
    return there


def cut(marks: Marks, whole: Sequence[int], shape: Sequence[int]) -> Marks:
    """For a parameter of `shape` in place of `whole`, with as many dimensions.

    Tensors with those dimensions (a mask) have its size in each that is the parameter's.
    """

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        small = leaf.detach()
        if small.dim() == len(whole):
            for dim, (size, wanted) in enumerate(zip(whole, shape, strict=True)):
                if small.shape[dim] == size:
                    small = small.index_select(dim, torch.arange(wanted, device=small.device) % size)
        return small.to("cpu", copy=True)

    made: Marks = map_leaves(marks, of_leaf)
    return made


def refuse_set(kind: str, parameter: torch.Tensor, before: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where a step has set or taken away what is on its parameter.

    `before`: what it was given.
    """
    after = marks_of(parameter)
    changed = sorted(key for key in after.keys() | before.keys()
                     if not (key in after and key in before and same(after[key], before[key])))
    if changed:
        raise UnsupportedError(
            f"{kind}.step() sets {changed[0]!r} on a parameter, which would be lost: steps run on parameters that have the same attributes "
            "and are made for one step; keep it in optimizer.state[parameter]"
        )


def _is_small(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.numel() <= _FEW_ELEMENTS
