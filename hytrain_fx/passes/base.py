"""What a pass is: a function that edits one graph in place, and a contract.

    @graph_pass(needs=Fact.GRADS_OFFLOADED, gives=Fact.STEPS_INSERTED, kinds="backward")
    def insert_steps(module, context):
        ...
        return "updates armed after 4 offloads"

A pass decides nothing. It finds nodes by target and by their note (`note`), inserts and removes
nodes, and leaves fake results, lint, rules, timing and text to the pipeline. A function without a
contract is a pass too: it needs annotated nodes, gives nothing, and runs on every graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.pass_record import Notes


class Fact(StrEnum):
    """What holds of a graph once some pass has run.

    A contract may also name other facts, as text.
    """

    ANNOTATED = "nodes are annotated"
    GRADS_OFFLOADED = "every managed gradient is offloaded"
    STEPS_INSERTED = "updates follow each offload"
    RELOADS_INSERTED = "reloads follow each update"
    RELEASED = "weights that can be shown to be read are released"
    BACKWARD_ENDED = "the end of the backward releases the rest"
    OUTPUTS_DROPPED = "offloaded gradients are no outputs"
    WAITS_INSERTED = "every reader of a weight comes after a wait"
    FETCHES_INSERTED = "every reader of a saved weight comes after a fetch"
    LET_GO = "weights that can be shown to be read are let go of"


@dataclass(frozen=True)
class PassContract:
    """Facts that must hold before a pass, facts that it makes true, and its kinds of graph."""

    needs: frozenset[str] = frozenset({Fact.ANNOTATED})
    gives: frozenset[str] = frozenset()
    kinds: frozenset[GraphKind] = frozenset(GraphKind)


@dataclass(frozen=True)
class PassContext:
    """What a pass may ask for.

    The captured graph, the units, and the session whose number the nodes carry.
    """

    graph: CapturedGraph
    units: tuple[Unit, ...]
    session: int

    @cached_property
    def unit_of(self) -> Mapping[int, int]:
        """The number of the unit that each row belongs to."""
        return unit_of_rows(self.units)


Edit = Callable[[fx.GraphModule, PassContext], object]
"""Edits the graph; returns None, a line for people, or several."""


@dataclass(frozen=True)
class GraphPass:
    """A rewrite of one graph, in place, with its name and contract.

    A call returns what was done, for people.
    """

    name: str
    contract: PassContract
    edit: Edit

    def __call__(self, module: fx.GraphModule, context: PassContext) -> Notes:
        """Edit the graph."""
        said = self.edit(module, context)
        lines = () if said is None else (said,) if isinstance(said, str) else said
        if not isinstance(lines, tuple | list) or not all(isinstance(line, str) for line in lines):
            raise TypeError(f"it returned {type(said).__name__}; expected None, a line of text or several: a pass edits the graph in place")
        return tuple(lines)


def graph_pass(
    *, needs: str | Iterable[str] = Fact.ANNOTATED, gives: str | Iterable[str] = (), kinds: str | Iterable[str] = tuple(GraphKind)
) -> Callable[[Edit], GraphPass]:
    """Make a function `(module, context)` a pass with this contract, under the function's name.

    needs    facts that must hold before it: of `hytrain_fx.passes.base.Fact`, or any text that
             another pass gives
    gives    facts that hold after it, each given by one pass of a list only
    kinds    the graphs it runs on, of "forward", "backward" and "inference"

    Raises ConfigError for another kind of graph, or for what is not such a function.
    """
    try:
        known = frozenset(map(GraphKind, _several(kinds)))
    except ValueError as error:
        raise ConfigError(f"graph_pass(kinds={kinds!r}): {error}; expected some of {', '.join(GraphKind)}") from None
    contract = PassContract(_several(needs), _several(gives), known)
    return lambda edit: as_pass(edit, contract)


def as_pass(given: Any, contract: PassContract | None = None) -> GraphPass:
    """Make a pass of what a list of passes holds.

    That may be a pass, a function, or an object that is called like one.

    An object may state its `contract`. Raises ConfigError for anything else.
    """
    if isinstance(given, GraphPass):
        return given
    name = getattr(given, "name", None) or getattr(given, "__name__", None) or type(given).__name__
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"passes: {given!r} has no name (found {name!r}); expected a function with a name, or an object with `name`")
    if not callable(given) or isinstance(given, type) or not _takes_module_and_context(given):
        raise ConfigError(f"passes: {name} is {given!r}; expected a function of two arguments, `def {name}(module, context)`")
    own = getattr(given, "contract", None)
    if own is not None and not isinstance(own, PassContract):
        raise ConfigError(f"passes: {name}.contract is {own!r}; expected a hytrain_fx.passes.base.PassContract")
    return GraphPass(name, contract or own or PassContract(), given)


def _several(names: str | Iterable[str]) -> frozenset[str]:
    return frozenset({names}) if isinstance(names, str) else frozenset(names)


def _takes_module_and_context(edit: Callable[..., Any]) -> bool:
    try:
        inspect.signature(edit).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a C function that does not say what it takes
        return True
    return True
