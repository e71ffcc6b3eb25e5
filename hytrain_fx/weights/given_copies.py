"""The copies of one weight that were handed out, for as long as somebody may write to one.

    give       one more tensor of the memory, for the loop
    written    what was written through any of them, also through one that is gone by now
    are_held   whether any use of the memory is left but this one

The memory is kept while anybody else has it, and until what was written into it is followed. It is
looked at when a tensor that was handed out dies, and whenever it is asked for: a view or a NumPy
array may live longer.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from hytrain_fx.torch_private.trace import storage_uses_reader


@dataclass(slots=True, eq=False)
class _Given:
    """One tensor that was handed out.

    copy      has its memory; None once nobody else has
    version   of what was followed
    """

    copy: torch.Tensor | None
    version: int


class GivenCopies:
    """Those of one weight and one memory.

    Each tensor that is handed out keeps the memory by an entry of its own. So none is lost where
    another thread drops an older one meanwhile.
    """

    def __init__(self) -> None:
        self._uses_of, self._alone = storage_uses_reader()
        self._all: list[_Given] = []  # no other is put in its place: what is called at a tensor's death has it

    @property
    def copy(self) -> torch.Tensor | None:
        """A tensor of the memory; None once nobody else has it."""
        return next((found for given in self._all if (found := given.copy) is not None), None)

    def give(self, copy: torch.Tensor) -> torch.Tensor:
        """A tensor of the memory of `copy`, shape and dtype as there, for the loop."""
        made = copy.detach()
        self._all.append(_Given(copy, copy._version))
        weakref.finalize(made, self._let_go, dying=1).atexit = False
        return made

    def written(self) -> torch.Tensor | None:
        """The values, where some were written since the last call; else None."""
        found = None
        for given in self._all:
            copy = given.copy
            if copy is not None and copy._version != given.version:
                given.version, found = copy._version, copy
        return found

    def are_held(self) -> bool:
        """Whether anybody else has the memory, or has written to it since `written`."""
        self._let_go()
        self._all[:] = [given for given in self._all if given.copy is not None]
        return bool(self._all)

    def _let_go(self, dying: int = 0) -> None:
        """Forget the memory where nobody else has it, and nobody has written to it.

        dying   tensors that use it still and are at their end
        """
        for given in self._all:
            copy = given.copy
            if copy is not None and copy._version == given.version and self._uses_of(copy) <= self._alone + dying:
                given.copy = None
