"""Weights that somebody besides the model holds, where no guard can watch.

A kept `state_dict()`, `.data`, a view, NumPy, DLPack.

Such a holder would find old weights after `step()`, as the new ones are still on their way. Torch
counts who uses a storage: what is beyond the parameters in it and this library is a holder, whoever
made it and whenever. `step()` has such weights updated before it returns. So it has weights in the
host memory of several processes (`share_memory()`): others read them uncounted.

Not seen: who keeps the parameter object itself in C++, a raw pointer, or memory of a GPU in another
process. They call `hytrain_fx.settle(model)` before they read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hytrain_fx.errors import HytrainWarning
from hytrain_fx.runtime.garbage import uncollected
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.torch_private.trace import storage_uses_reader

_NAMED = 3  # of the weights in the warning


class HeldWeights:
    """Counts the holders of each weight's storage.

    rows    those of the last `find`
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._uses_of, self._alone = storage_uses_reader()
        self._ours: dict[int, int] = {}  # uses by this library, by storage: weights may share one
        self._nested = False
        self._warned = False
        self.rows: tuple[int, ...] = ()
        self._expect()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Around what makes this library hold weights, or let go of them.

        Nobody else's code runs meanwhile. May be nested.

        No garbage is collected inside: an alias in it would be taken for one that this library has
        let go of.
        """
        if self._nested:
            yield
            return
        self._nested = True
        with uncollected():
            before = self._uses()
            try:
                yield
            finally:
                self._nested = False
                storages = self._storages()
                more = {of: now - then for of, now, then in zip(storages, self._uses(), before, strict=True)}
                self._ours = {of: self._ours.get(of, 0) + count for of, count in more.items()}
                self._expect()

    def find(self, wait: Callable[[Sequence[int]], None]) -> tuple[int, ...]:
        """The rows whose memory others hold too; warns once. About 0.5 us a parameter.

        `wait`: for updates of rows; called where somebody holds a weight, as that may be such an
        update (the torch engine's). Parameters have the memory that the last `ours` has left them
        with.
        """
        uses = self._uses()
        if (more := self._above(uses)):
            wait(more)
            uses = self._uses()
        if uses != self._expected:
            self._let_go(uses)
        self.rows = tuple(sorted({*self._above(uses), *self._shared}))
        if self.rows and not self._warned:
            self._warned = True
            self._warn()
        return self.rows

    def _above(self, uses: list[int]) -> list[int]:
        if uses == self._expected:
            return []
        return [row for row, (now, of) in enumerate(zip(uses, self._expected, strict=True)) if now > of]

    def _let_go(self, uses: list[int]) -> None:
        """What is below was this library's, and garbage since."""
        below = {storage: of - now for storage, now, of in zip(self._storages(), uses, self._expected, strict=True) if now < of}
        for storage, fewer in below.items():
            self._ours[storage] = self._ours.get(storage, 0) - fewer
        self._expect()

    def _expect(self) -> None:
        storages = self._storages()
        weights = Counter(storages)
        self._expected = [self._alone - 1 + weights[of] + self._ours.get(of, 0) for of in storages]
        with without_torch_function():
            self._shared = [row for row, p in enumerate(self._parameters) if p.device.type == "cpu" and p.is_shared()]

    def _uses(self) -> list[int]:
        with without_torch_function():
            return list(map(self._uses_of, self._parameters))

    def _storages(self) -> list[int]:
        with without_torch_function():
            return [parameter.untyped_storage()._cdata for parameter in self._parameters]

    def _warn(self) -> None:
        named = ", ".join(repr(self._names[row]) for row in self.rows[:_NAMED])
        more = f" and {len(self.rows) - _NAMED} more" if len(self.rows) > _NAMED else ""
        warnings.warn(
            f"the memory of {named}{more} is held outside the model too (a kept state_dict(), .data, .detach(), a view, a NumPy or DLPack "
            "array, another module, thread or process, or a graph kept for another backward): step() waits for their updates, so that it "
            "shows the new weights, and nothing of these updates is hidden. Keep a .clone() instead, or drop it before step()",
            HytrainWarning,
            stacklevel=8,
        )
