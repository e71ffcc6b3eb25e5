"""A stream of a GPU beside the one that computes. On the CPU, where there are no streams, nothing.

Memory of nodes is not given to `record_stream`: the launching thread runs ahead of the device, so
that nothing of it would be free again before the backward ends. Instead what the side stream reads
of the computing stream's is kept until that stream has been made to wait. Other memory that is
dropped once it was read, a gradient that user code made, is for `read_here`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_KEPT: Final = 2  # handed over and not waited for


class SideStream:
    """One stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: deque[tuple[object, torch.cuda.Event]] = deque()

    @contextmanager
    def beside(self, reads: object = None) -> Iterator[None]:
        """It is the current stream meanwhile, and begins with what the present one has done by now.

        reads   memory of the present stream that it reads: kept until that stream waits for it.
                The present stream waits so for what was handed over the time before the last
        """
        if self._stream is None:
            yield
            return
        present = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            yield
            if reads is not None:
                self._kept.append((reads, self._stream.record_event()))
        if len(self._kept) > _KEPT:
            _, read = self._kept.popleft()
            present.wait_event(read)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """It is the current stream meanwhile, and goes on where it is."""
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream waits for all that it does."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._kept.clear()


def read_here(tensor: torch.Tensor) -> None:
    """The current stream reads it, whichever stream's memory it is: it may be dropped at once."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
