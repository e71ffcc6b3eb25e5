"""What `bench` trains: a model with random weights, made where they stay, and a random batch.

The model is one that transformers builds from a config (a file, its folder, a shape's name, or a
model_type with its default sizes), in bf16; or what `package.module:factory` returns, with the
example inputs that it returns as the batch. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.meta_model import arguments_of, made_by, tokens_of
from hytrain_fx.forecast.models import is_factory
from hytrain_fx.forecast.shapes import Counted, read_config
from hytrain_fx.forecast.transformers_model import build, context_of, example, known_config, quiet

_BATCH, _TOKENS = 4, 2048  # sequences in a step, and tokens in one: where nothing is asked for
_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A step as the command line asks for it; None is what is not said."""

    model: str
    tokens: int | None = None
    batch: int | None = None
    sequence: int | None = None

    def sizes(self, context: int | None) -> tuple[int, int]:
        """Sequences in a step, and tokens in one. Raises ConfigError where they do not agree."""
        given = (self.tokens, self.batch, self.sequence)
        if any(of is not None and of < 1 for of in given):
            raise ConfigError(f"found --tokens {self.tokens} --batch {self.batch} --sequence {self.sequence}, expected at least 1 of each")
        sequence, batch = self.sequence, self.batch
        if sequence is None:
            most = min(_TOKENS, context or _TOKENS)
            sequence = self.tokens // batch if self.tokens and batch else min(self.tokens or most, most)
        if batch is None:
            batch = self.tokens // sequence if self.tokens else _BATCH
        if self.tokens is not None and batch * sequence != self.tokens:
            raise ConfigError(f"found --tokens {self.tokens} as {batch} sequences of {sequence}, expected --tokens to be --batch times "
                              "--sequence")
        if context is not None and sequence > context:
            raise ConfigError(f"found --sequence {sequence}, expected at most {context}, the model's context")
        return batch, sequence


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the batch of one step.

    loss     of what the model returns
    count    tokens or samples in the batch
    size     the batch in words
    """

    name: str
    model: nn.Module
    batch: Batch
    loss: Callable[[Any], torch.Tensor]
    count: int
    counted: Counted
    size: str

    @property
    def params(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of one step, as a plain loop has them."""
        args, kwargs = batch
        loss = self.loss(self.model(*args, **kwargs))
        loss.backward()
        return loss.detach()


def workload(asked: Asked, device: torch.device) -> Workload:
    """The model and its batch on `device`; on the meta device they take no memory.

    Raises ConfigError or UnsupportedError for a model or sizes that cannot be.
    """
    torch.manual_seed(0)
    found = _of_factory(asked, device) if is_factory(asked.model) else _of_config(asked, device)
    if not found.params:
        raise ConfigError(f"{found.name} has no parameters that require grad: there is nothing to train")
    found.model.train()
    return found


def _of_config(asked: Asked, device: torch.device) -> Workload:
    with quiet():
        given, name = _config_of(asked.model)
        config = known_config(given, name)
        batch, sequence = asked.sizes(context_of(config))
        model = build(config, name, device)
        inputs, sampled = example(model, config, device, batch, sequence)
        inputs = {key: _drawn(value, config) for key, value in inputs.items()}
    if sampled and asked.tokens is not None:
        raise ConfigError(f"found --tokens for {name}, which is counted in samples; expected --batch")
    loss = _own_or_square
    if type(model).__name__.endswith(_LABELLED):
        inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if sampled:
        return Workload(name, model, ((), inputs), loss, batch, "samples", f"{batch} samples")
    return Workload(name, model, ((), inputs), loss, batch * sequence, "tokens", f"{batch} x {sequence} tokens")


def _config_of(source: str) -> tuple[Mapping[str, Any], str]:
    """A config that is found by name or path, else the default one of a model_type."""
    try:
        return read_config(source)
    except ConfigError:
        with suppress(ImportError):
            from transformers import CONFIG_MAPPING

            if source in CONFIG_MAPPING:
                return {"model_type": source}, source
        raise


def _of_factory(asked: Asked, device: torch.device) -> Workload:
    if (asked.tokens, asked.batch, asked.sequence) != (None, None, None):
        raise ConfigError(f"found --tokens, --batch or --sequence for {asked.model}; expected none: the batch is what the function returns")
    model, inputs = made_by(asked.model, device)
    if inputs is None:
        raise ConfigError(f"{asked.model} returned a model alone, expected a pair of one and the inputs of its forward for one step")
    args, kwargs = arguments_of(inputs)
    tokens, sequence = tokens_of(args, kwargs)
    size = f"{tokens // sequence} x {sequence} tokens" if sequence else f"{tokens} samples"
    return Workload(asked.model.partition(":")[2], model, (args, kwargs), _own_or_square, tokens, "tokens" if sequence else "samples", size)


def _drawn(value: Any, config: Any) -> Any:
    """Random ids, or random numbers, of an input that is a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.normal_()
    return value.random_(0, int(getattr(config.get_text_config(), "vocab_size", 2)))


def _own_or_square(output: Any) -> torch.Tensor:
    """The loss that the model returns, else the mean square of the first numbers among it."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    first = next((part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()), None)
    if first is None:
        raise ConfigError(f"the model returned {type(output).__name__} without a loss or numbers; expected one of the two")
    return first.float().square().mean()
