"""Weights that somebody besides the model holds, where no guard can watch: a kept `state_dict()`, `.data`, a view, NumPy, DLPack.

Such a holder would find old weights after `step()`, as the new ones are still on their way. Torch counts who uses a storage: what is
beyond the parameter and this library is a holder, whoever made it and whenever. `step()` has such weights updated before it returns.

Not seen: who keeps the parameter object itself in C++, or a raw pointer. They call `hytrain_fx.settle(model)` before they read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hytrain_fx.torch_private import without_torch_function
from hytrain_fx.torch_private_trace import storage_uses_reader

_NAMED = 3  # of the weights in the warning


class HeldWeights:
    """Counts the holders of each weight's storage.

    rows    those of the last `find`
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._uses_of = storage_uses_reader()
        alone = self._uses_of(torch.zeros(1))  # the tensor, and whoever asks
        self._expected = [alone] * len(parameters)
        self._warned = False
        self.rows: tuple[int, ...] = ()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Around what makes this library hold weights, or let go of them; nobody else's code runs meanwhile."""
        before = self._uses()
        try:
            yield
        finally:
            uses = zip(self._expected, self._uses(), before, strict=True)
            self._expected = [of + now - then for of, now, then in uses]

    def find(self, wait: Callable[[Sequence[int]], None]) -> tuple[int, ...]:
        """The rows whose memory others hold too; warns once. About 0.5 us a parameter.

        `wait`: for updates of rows; called where somebody holds a weight, as that may be such an update (the torch engine's).
        """
        uses = self._uses()
        if (more := [row for row, (now, of) in enumerate(zip(uses, self._expected, strict=True)) if now > of]):
            wait(more)
            uses = self._uses()
        if uses == self._expected:
            self.rows = ()
            return self.rows
        # What is below has been let go of by us, as garbage that was collected or a weight that got a 16-bit copy.
        self._expected = list(map(min, self._expected, uses))
        more = [row for row, (now, of) in enumerate(zip(uses, self._expected, strict=True)) if now > of]
        sharing = self._sharing() if more else {}
        self.rows = tuple(row for row in more if uses[row] - self._expected[row] > sharing[row])
        if self.rows and not self._warned:
            self._warned = True
            self._warn()
        return self.rows

    def _uses(self) -> list[int]:
        with without_torch_function():
            return list(map(self._uses_of, self._parameters))

    def _sharing(self) -> dict[int, int]:
        """By row: uses of its storage by other managed parameters in the same storage, and by this library for them."""
        with without_torch_function():
            of = [parameter.untyped_storage()._cdata for parameter in self._parameters]
        parameters = Counter(of)
        return {row: parameters[storage] - 1 for row, storage in enumerate(of)}

    def _warn(self) -> None:
        named = ", ".join(repr(self._names[row]) for row in self.rows[:_NAMED])
        more = f" and {len(self.rows) - _NAMED} more" if len(self.rows) > _NAMED else ""
        warnings.warn(
            f"the memory of {named}{more} is held outside the model too (a kept state_dict(), .data, .detach(), a view, a NumPy or "
            "DLPack array, another module, or a graph kept for another backward): step() waits for their updates, so that it shows the "
            "new weights, and nothing of these updates is hidden. Keep a .clone() instead, or drop it before step()",
            stacklevel=7,
        )
