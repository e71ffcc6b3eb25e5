"""Which parameters the model holds, and where, call by call.

Graphs are made for the parameters that they were captured with.

Dynamo makes parameters inputs of its graphs, and checks of them what it checks of any tensor: a
graph runs with any others of their shape. Ours have nodes for certain rows. So each layout, the
rows by place, has graphs of its own, and these find the parameters by identity again:

    functional_call(model, clones)      no row is in its place: no nodes, gradients go to the clones
    two layers exchanged, a tie         the same rows in other places
    load_state_dict(assign=True)        as with clones; `step()` would train what the model no
                                        longer has, which is an error there
    p.requires_grad_(False), and back   other graphs make other gradients; torch 2.11 does not look
                                        at it again where modules are as before
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Final, NamedTuple

from torch import nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.modules import Slots
from hytrain_fx.torch_private.tensors import property_reader, without_torch_function
from hytrain_fx.weights.guard import CountedParameter, touched

_is_trained: Final = property_reader("requires_grad")


class Layout(NamedTuple):
    """What a model holds.

    places     in the order of `named_parameters`: name, and the row of what is there, -1 for a
               tensor that is not managed
    trained    by row: whether it requires a gradient
    """

    places: tuple[tuple[str, int], ...]
    trained: tuple[bool, ...]


class ParameterPlaces:
    """The places of one compiled model."""

    def __init__(self, model: nn.Module, table: ParameterTable) -> None:
        self._model = weakref.ref(model)
        self._table = table
        self._slots = Slots(model)
        self._known = {name: weakref.ref(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self.compiled = self._look()
        self._changed = False  # when the model was last called

    def layout(self) -> Layout:
        """What the model holds now.

        Managed parameters of other models among it are waited for: graphs of this one know nothing
        of them.
        """
        self._changed = not self._slots.are_as_found()
        if self._changed:
            return self._look()
        return Layout(self.compiled.places, self._trained())

    def require_trained(self) -> None:
        """Raise UnsupportedError where a new parameter has replaced a managed one.

        The optimizer still has the one that the model lost.
        """
        if not self._changed or self._slots.are_as_found():
            return
        here = {id(p) for _, p in self._places()}
        lost = [name for name, p in zip(self._table.names, self._table.parameters, strict=True) if id(p) not in here]
        new = [name for name, p in self._places() if self._is_new(name, p)]
        if not lost or not new:
            return
        found = next((name for name in new if name in lost), new[0])
        raise UnsupportedError(
            f"{found} is a new parameter, made after hytrain_fx.compile() by a layer that was replaced or by load_state_dict(assign=True): "
            f"the optimizer still has the old {found if found in lost else lost[0]}, and would not train the new one. Load without "
            "assign=True; or call hytrain_fx.close(model), make a new optimizer, and call hytrain_fx.compile() again"
        )

    def _is_new(self, name: str, parameter: nn.Parameter) -> bool:
        """Not there at `compile`, to be trained, and not another compiled model's."""
        known = self._known.get(name)
        return (parameter.requires_grad and id(parameter) not in self._table.row_of and (known is None or known() is not parameter)
                and not isinstance(parameter, CountedParameter))

    def _look(self) -> Layout:
        row_of = self._table.row_of
        found = []
        for name, parameter in self._places():
            row = row_of.get(id(parameter), -1)
            if row < 0:
                touched(parameter)
            found.append((name, row))
        return Layout(tuple(found), self._trained())

    def _trained(self) -> tuple[bool, ...]:
        with without_torch_function():
            return tuple(map(_is_trained, self._table.parameters))

    def _places(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self._model()
        return iter(()) if model is None else model.named_parameters(remove_duplicate=False)
