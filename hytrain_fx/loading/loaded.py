"""A model on the meta device gets values, and stays the same objects.

    parameters    swapped with new ones on the device: who has a parameter, the optimizer among
                  them, has the new one (`torch.utils.swap_tensors`)
    buffers       the modules hold new ones
    streamed, sharded    bf16 matrices wait until they are where they rest (first_weights.py)

An error gives everything back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, EngineError, UnsupportedError
from hytrain_fx.loading.first_weights import FirstWeights, read_into
from hytrain_fx.loading.meta_tensors import Awaited, awaited_tensors, on_meta_in_words
from hytrain_fx.loading.source import AskedSource, TensorSource
from hytrain_fx.runtime.native.storage_memory import can_put
from hytrain_fx.runtime.rank_errors import told_to_ranks
from hytrain_fx.runtime.ranks import count_of_ranks, ranks_of
from hytrain_fx.runtime.states.store import is_dense


@contextmanager
def loaded(model: Any, optimizer: Any, config: Config) -> Iterator[Config]:
    """Within it the model has values, on the device of the options, or waits for its masters.

    A model that has values is left alone. The options are given with a `FirstWeights` as loader
    where weights wait.

    Raises UnsupportedError or ConfigError, and changes nothing, where model, options and source do
    not fit. After an error inside, all is as it was before.
    """
    if not isinstance(model, nn.Module):  # `compile` says what it expects
        yield config
        return
    on_meta = on_meta_in_words(model)
    if config.loader is None:
        if on_meta:
            raise UnsupportedError(f"{on_meta}; hand over where they come from: hytrain_fx.compile(model, optimizer, device=\"cuda\", "
                                   "loader=hytrain_fx.from_safetensors(path)), or make the model with values")
        yield config
        return
    with told_to_ranks("its loader", lambda: ranks_of(config.process_group, device_of(config))):
        loading = _begun(model, optimizer, config, on_meta)
    try:
        yield replace(config, loader=loading.first)
    except BaseException:
        loading.undo()
        raise
    finally:
        loading.first.done()


def _begun(model: nn.Module, optimizer: Any, config: Config, on_meta: str | None) -> _Loading:
    """What does not wait is loaded. Raises as `loaded` does."""
    source = config.loader if isinstance(config.loader, TensorSource) else AskedSource(config.loader)
    source.opened()
    if not on_meta:
        raise UnsupportedError("loader is for a model on the meta device, and this one has values; make it inside hytrain_fx.on_meta(), or "
                               "load it (model.load_state_dict) and leave loader out")
    if getattr(optimizer, "state", None):
        raise UnsupportedError("the optimizer has states, and the model has no values yet; make a new optimizer, and load the "
                               "state_dict() of this one after hytrain_fx.compile()")
    loading = _Loading(model, optimizer, source, device_of(config), wait=_wait(config), ranks=count_of_ranks(config.process_group))
    try:
        loading.load()
    except BaseException:
        loading.undo()
        loading.first.done()
        raise
    return loading


class _Loading:
    """One model that gets values."""

    def __init__(
        self, model: nn.Module, optimizer: Any, source: TensorSource, device: torch.device, *, wait: bool, ranks: int
    ) -> None:
        self.first = FirstWeights(source, compares=ranks > 1)
        self._source = source
        self._device = device
        self._undo: list[Callable[[], object]] = []
        self._awaited = awaited_tensors(model, source)
        groups = getattr(optimizer, "param_groups", ())
        trained = {id(p) for group in groups for p in group["params"]} if wait else set()
        self._waiting = [of for of in self._awaited if of.tensor.is_meta and id(of.tensor) in trained and may_wait(of.tensor)]

    def load(self) -> None:
        """Give each tensor its values, in the model's order."""
        waiting = {id(of.tensor) for of in self._waiting}
        most_bytes = max((of.tensor.nbytes for of in self._waiting), default=0)
        for of in self._awaited:
            if of.name is None and of.tensor.device == self._device:
                continue
            if not isinstance(of.tensor, nn.Parameter):
                self._give_buffer(of)
                continue
            new = nn.Parameter(_empty_like(of.tensor, self._device), requires_grad=of.tensor.requires_grad)
            if id(of.tensor) not in waiting:
                self._fill(new, of)
            self._swap(of, new)
            if id(of.tensor) in waiting:
                self.first.lend(of.tensor, of, new, most_bytes)  # `new` is what was on the meta device now

    def undo(self) -> None:
        """Give the model what it had."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _fill(self, new: torch.Tensor, of: Awaited) -> None:
        if of.name is None:
            new.detach().copy_(of.tensor.detach())
        else:
            read_into(new.detach(), of, of.tensor, self._source)

    def _swap(self, of: Awaited, new: nn.Parameter) -> None:
        new.__dict__.update(of.tensor.__dict__)
        try:
            swap_tensors(of.tensor, new)
        except RuntimeError as error:
            raise UnsupportedError(f"{of.name} cannot be given values in place ({error}); drop what holds it besides the model and the "
                                   "optimizer, a weak reference or a kept graph") from error
        self._undo.append(partial(swap_tensors, of.tensor, new))

    def _give_buffer(self, of: Awaited) -> None:
        if of.name is None:
            new = of.tensor.to(self._device)  # as `model.to(device)` does it; an expanded one cannot be written to
        else:
            new = torch.empty_like(of.tensor, device=self._device)  # the strides of a dense one, and others' elements apart
            self._fill(new, of)
        for module, name in of.places:
            setattr(module, name, new)
            self._undo.append(partial(setattr, module, name, of.tensor))


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def may_wait(tensor: torch.Tensor) -> bool:
    """Whether it is a weight that can be streamed (`streamed_homes.may_stream`)."""
    return tensor.requires_grad and tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and tensor.numel() > 0 and is_dense(tensor)


def device_of(config: Config) -> torch.device:
    """The device of the options, with its number. Raises ConfigError for what is none."""
    try:
        device = torch.device(config.device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError("supported are CPU and CUDA devices")
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"option device={config.device!r}: expected the device to train on, \"cuda\" or \"cpu\" ({error})") from error


def _wait(config: Config) -> bool:
    """Whether weights are to be streamed or sharded, as far as the options say.

    Where they cannot be for another reason, the session refuses them.
    """
    if not config.fetches or config.streamed != (count_of_ranks(config.process_group) == 1):
        return False
    try:
        can_put()
    except EngineError:
        return False
    return True
