"""Groups parameters into units from the module tree and from sizes.

Units are the layers that the planner places together.

A unit is the outermost child of a container (ModuleList, Sequential, ModuleDict) that is not itself
a container: a decoder layer, a residual block, one Linear of a Sequential. A parameter outside
every container belongs to the module that owns it: an embedding, a head, a final norm. Rows are
positions in the list of managed names, which has a tied parameter once.

    GPT-2      transformer.wte | transformer.wpe | transformer.h.0 | transformer.h.1 | ... |
               transformer.ln_f
    ResNet     conv1 | bn1 | layer1.0 | layer1.1 | layer2.0 | ... | fc

A unit that holds much of the model is split, since its gradients leave together when the last of
them is there: its large children are units, down to single parameters, and what is small stays
under its name.

    ConvNeXt   ... | stages.2.layers.0 | stages.2.layers.1 | ...     (not stages.2: 66 % of it)
    MoE        ... | layers.0 | layers.0.mlp.experts.gate_up_proj | layers.0.mlp.experts.down_proj
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hytrain_fx.errors import UnsupportedError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LARGEST_SHARE = 0.04
"""The most that a unit holds unsplit, of all parameters: layers of a deep decoder stay whole."""
SMALLEST_LIMIT = 32 * 2**20
"""Parameters that any unit may hold unsplit: about 6 ms of updates on a CPU, and of the link."""
_SMALL = 1 / 8  # of the limit: a child with less is no unit, as launching one costs as much as copying it


@dataclass(frozen=True, slots=True)
class Unit:
    """A layer: its number (order of first row), its module path and the rows of its parameters."""

    number: int
    name: str
    rows: tuple[int, ...]


def group_units(model: nn.Module, names: Sequence[str], smallest_limit: int = SMALLEST_LIMIT) -> tuple[Unit, ...]:
    """Units of the parameters `names` of `model`, numbered in the order of their first rows.

    A row is a position in `names`. Every row is in exactly one unit. A unit that holds more than
    `LARGEST_SHARE` of all parameters, and more than `smallest_limit`, is split; small parts stay
    together. Raises UnsupportedError for a name that is no parameter of the model.
    """
    by_path: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        by_path.setdefault(unit_path(model, name), []).append(row)
    numels = [model.get_parameter(name).numel() for name in names]
    limit = max(smallest_limit, round(sum(numels) * LARGEST_SHARE))
    found = [part for path, rows in by_path.items() for part in _split(path, rows, names, numels, limit).items()]
    found.sort(key=lambda part: part[1][0])
    return tuple(Unit(number, path, tuple(rows)) for number, (path, rows) in enumerate(found))


def _split(path: str, rows: list[int], names: Sequence[str], numels: Sequence[int], limit: int) -> dict[str, list[int]]:
    """Rows by the paths of units: `path` itself, or its large descendants and what is left."""
    if len(rows) == 1 or sum(numels[row] for row in rows) <= limit:
        return {path: rows}
    depth = path.count(".") + 1 if path else 0
    children: dict[str, list[int]] = {}
    for row in rows:
        children.setdefault(".".join(names[row].split(".")[: depth + 1]), []).append(row)
    parts = {name: part for child, found in children.items() for name, part in _split(child, found, names, numels, limit).items()}
    large = {name: part for name, part in parts.items() if sum(numels[row] for row in part) > limit * _SMALL}
    rest = sorted(row for name, part in parts.items() if name not in large for row in part)
    return {path: rest, **large} if rest else large


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
