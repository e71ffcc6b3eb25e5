"""Groups parameters into units from the module tree alone.

Units are the layers that the planner places together.

A unit is the outermost child of a container (ModuleList, Sequential, ModuleDict) that is not itself
a container: a decoder layer, a residual block, one Linear of a Sequential. A parameter outside
every container belongs to the module that owns it: an embedding, a head, a final norm. Rows are
positions in the list of managed names, which has a tied parameter once.

    GPT-2      transformer.wte | transformer.wpe | transformer.h.0 | transformer.h.1 | ... |
               transformer.ln_f
    ResNet     conv1 | bn1 | layer1.0 | layer1.1 | layer2.0 | ... | fc
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hytrain_fx.errors import UnsupportedError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer: its number (order of first row), its module path and the rows of its parameters."""

    number: int
    name: str
    rows: tuple[int, ...]


def group_units(model: nn.Module, names: Sequence[str]) -> tuple[Unit, ...]:
    """Units of the parameters `names` of `model`, numbered in the order of their first rows.

    A row is a position in `names`. Every row is in exactly one unit. Raises UnsupportedError for a
    name that is no parameter of the model.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(unit_path(model, name), []).append(row)
    return tuple(Unit(number, path, tuple(found)) for number, (path, found) in enumerate(rows.items()))


def unit_path(model: nn.Module, name: str) -> str:
    """The module path of the unit that the parameter `name` belongs to; "" is the model itself."""
    *path, attribute = name.split(".")
    module, walked = model, list[str]()
    for step in path:
        inside = isinstance(module, _CONTAINERS)
        child = getattr(module, step, None)
        if not isinstance(child, nn.Module):
            raise _no_such(name)
        module = child
        walked.append(step)
        if inside and not isinstance(module, _CONTAINERS):
            return ".".join(walked)
    if not isinstance(getattr(module, attribute, None), nn.Parameter):
        raise _no_such(name)
    return ".".join(walked)


def unit_of_rows(units: Sequence[Unit]) -> dict[int, int]:
    """The number of the unit that each row belongs to."""
    return {row: unit.number for unit in units for row in unit.rows}


def _no_such(name: str) -> UnsupportedError:
    return UnsupportedError(f"{name!r} is no parameter of the model; expected a name from model.named_parameters()")
