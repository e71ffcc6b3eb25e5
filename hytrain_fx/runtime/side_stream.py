"""Streams of a GPU beside the one that computes. On the CPU, where there are no streams, nothing.

    SideStream       one of our own
    BackwardStreams  the loop's: one calls `backward()`, and that runs on others
    read_here        memory that may be dropped at once

Memory of nodes is not given to `record_stream`: the launching thread runs ahead of the device, so
that nothing of it would be free again before the backward ends. Instead what the side stream reads
of the computing stream's is kept until that stream has been made to wait. Other memory that is
dropped once it was read, a gradient that user code made, is for `read_here`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from hytrain_fx.torch_private.autograd import at_end_of_backward, running_backward

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
            try:
                yield
            finally:  # what was launched before an error reads it all the same
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


class BackwardStreams:
    """The stream that calls `backward()` waits for the compiled backwards that ran on others.

    A backward runs on the stream of its forward. Autograd has the caller's stream wait for that by
    the gradients that it adds itself. It is given none of those that graphs keep to themselves, and
    an AccumulateGrad node that somebody keeps may be of another stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backward = -1  # the last one
        self._streams: set[torch.cuda.Stream] = set()  # those of its graphs

    def graph_begins(self) -> None:
        """A compiled backward is about to be launched on the current stream; call it on its thread.

        What else is to be called at the end of this backward finds its gradients there, where it
        comes from graphs.
        """
        if self._device.type != "cuda":
            return
        if (backward := running_backward()) != self._backward:
            self._backward, self._streams = backward, set()
            at_end_of_backward(partial(self._wait, self._streams))
        self._streams.add(torch.cuda.current_stream(self._device))

    def _wait(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """On the caller's stream, when the backward has ended."""
        here = torch.cuda.current_stream(self._device)
        for stream in streams:
            if stream != here:
                here.wait_stream(stream)


def read_here(tensor: torch.Tensor) -> None:
    """The current stream reads it, whichever stream's memory it is: it may be dropped at once."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
