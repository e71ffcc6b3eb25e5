"""Values nested in plain dicts, lists and tuples: what optimizers keep for a parameter, and what torch operations take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with every leaf changed."""
    if type(value) is dict:
        return {key: map_leaves(of, change) for key, of in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_leaves(of, change) for of in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf, in the order of `map_leaves`."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (tuple, list):
        for of in value:
            yield from leaves(of)
    else:
        yield value


def frozen(value: Any) -> Hashable:
    """The nest as a value that can be a key; leaves must be hashable. Raises TypeError."""
    if type(value) is dict:
        return ("dict", *((key, frozen(of)) for key, of in value.items()))
    if type(value) in (tuple, list):
        return (type(value).__name__, *(frozen(of) for of in value))
    hash(value)
    return (type(value), value)
