"""Weights that a hook on saved tensors (`torch.autograd.graph.saved_tensors_hooks`) is to be given.

Autograd saves weights and views of weights when their graph has run, and its slots are given away.
A hook that copies them then (`save_on_cpu`) would find no memory. And what it gives back to the
backward is another tensor, under which no fetch puts anything. So the weights that such a graph
reads are there before it runs, in memory of their own, until a training forward finds that nobody
holds them. The hook's copies have their values then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.torch_private.autograd import reading_save_hook
from hytrain_fx.weights.streamed_weights import StreamedWeights


def show_to_hook(streamed: StreamedWeights, table: ParameterTable, inputs: Iterable[Any]) -> None:
    """A graph with these inputs is about to run: a hook finds the weights among them that it saves.

    Raises OutOfMemoryError where the device has no room for all, RankError and UnsupportedError as
    `fill`.
    """
    if not streamed.wanted or not torch.is_grad_enabled() or (hook := reading_save_hook()) is None:
        return
    rows = [table.row_of[id(value)] for value in inputs if id(value) in table.row_of]
    try:
        with streamed.units.held():
            streamed.fill(rows)
    except torch.OutOfMemoryError as error:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        error.add_note(f"hooks on saved tensors are set ({name}), which read weights too: all that a graph reads are on the device while "
                       "they are. Leave the hooks out, or use torch.utils.checkpoint, whose hooks read none")
        raise
