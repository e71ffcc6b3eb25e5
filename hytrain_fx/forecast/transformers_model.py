"""The shape of any model that transformers knows, from its config alone.

It is built on the meta device and run once on fake tensors: no weight is allocated, nothing is
downloaded. (`bench` builds it on a real device.) The class is the config's architecture, or the
first of the automatic classes that takes the config. Example inputs go by what the model reads:

    text                  token ids; counted in tokens
    text to text          the same for the decoder, as many tokens as the encoder reads
    images, recordings    one sample of the length or size that the config names, and as many ids as
                          its decoder or text side takes; counted in samples
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.forecast.meta_model import shape_of
from hytrain_fx.forecast.shapes import ModelShape

_DTYPE = torch.bfloat16  # what is trained in; experts' grouped products know no other
WAY_OUT = "package.module:factory takes any model, with example inputs"
_AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSpeechSeq2Seq",
         "AutoModelForImageClassification", "AutoModelForCTC", "AutoModel")
_LONGEST = 512  # tokens of the example: work a token and attention's width do not depend on it
_RECURRENT = 16  # the same where tokens are taken one by one
_RECORDED = 16_000  # values of a recording, a second of it
_LOGGERS = ("transformers", "torch._subclasses.fake_tensor")


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the model that a `config.json` describes.

    Raises UnsupportedError where transformers is not installed or does not know the model_type,
    ConfigError where the model cannot be built or run.
    """
    with quiet():
        known = known_config(config, name)
        model = build(known, name, torch.device("meta"))
        inputs, sampled = example(model, known, torch.device("meta"))
        try:
            shape = shape_of(model, name, inputs, counted="samples" if sampled else "tokens")
        except ConfigError as error:
            raise ConfigError(f"{name} was built, but not run: {error}. {WAY_OUT}") from error
    context = context_of(known)
    return shape if sampled or context is None else replace(shape, context=context)


def context_of(config: Any) -> int | None:
    """The longest sequence of its text, in tokens, where the config has one."""
    text = getattr(config, "get_text_config", lambda: config)()
    context = getattr(text, "max_position_embeddings", None)
    return context if isinstance(context, int) else None


def known_config(config: Mapping[str, Any], name: str) -> Any:
    """The config as transformers has it. Raises as `shape_of_config`."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise UnsupportedError(f"the config of {name!r} needs transformers: pip install transformers. {WAY_OUT}") from error
    family = config.get("model_type")
    if family not in CONFIG_MAPPING:
        found = f"model_type {family!r} is not known to transformers" if family else f"the config of {name!r} has no model_type"
        raise UnsupportedError(f"{found}; {WAY_OUT}")
    try:
        read = CONFIG_MAPPING[family].from_dict(dict(config))
        if hasattr(read, "apply_spec_augment"):
            read.apply_spec_augment = False  # it masks by numpy, which no fake tensor takes
        return read
    except Exception as error:  # a config's own check may raise anything
        raise ConfigError(f"the config of {name!r} is not one of model_type {family!r}: {_line(error)}") from error


def build(config: Any, name: str, device: torch.device) -> nn.Module:
    """The model in bf16: of its architecture, or of the first class that takes it.

    On a real device its weights are drawn there. Raises ConfigError where no class takes it.
    """
    import transformers

    order = sorted(_AUTO, key=lambda auto: "Seq2Seq" not in auto) if config.is_encoder_decoder else _AUTO
    named = [getattr(transformers, str(architecture), None) for architecture in config.architectures or ()]
    makers: list[Any] = [of._from_config for of in named if of is not None and hasattr(of, "_from_config")]
    makers += [getattr(transformers, auto).from_config for auto in order if type(config) in getattr(transformers, auto)._model_mapping]
    last: Exception | None = None
    for make in makers:
        try:
            with device:
                model: nn.Module = make(config, dtype=_DTYPE)
            return model
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's constructor may raise anything: the next class may take it
            last = error
    told = f"transformers has no model for {type(config).__name__}" if last is None else _line(last)
    raise ConfigError(f"the model of {name!r} cannot be built from its config: {told}; {WAY_OUT}") from last


def example(
    model: nn.Module, config: Any, device: torch.device, samples: int = 1, length: int | None = None
) -> tuple[dict[str, Any], bool]:
    """Inputs by name, all zero, and whether they are counted in samples.

    `length` is of the text in tokens, None = a length that shows what a token takes.
    """
    takes = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    with device:
        if "pixel_values" in takes:
            inputs["pixel_values"] = torch.zeros(samples, _found(config, "num_channels", 3), *_image(config), dtype=_DTYPE)
        if "input_features" in takes:
            frames = 2 * _found(config, "max_source_positions", 1500)
            inputs["input_features"] = torch.zeros(samples, _found(config, "num_mel_bins", 80), frames, dtype=_DTYPE)
        if "input_values" in takes:
            inputs["input_values"] = torch.zeros(samples, _RECORDED, dtype=_DTYPE)
        sampled = bool(inputs)
        text = config.get_text_config()
        if length is None:
            longest = _LONGEST if _found(text, "num_attention_heads", 0) else _RECURRENT
            length = min(longest, _found(text, "max_position_embeddings", _found(text, "n_positions", _LONGEST)))
        if "input_ids" in takes and not {"input_features", "input_values"} & set(inputs):
            inputs["input_ids"] = torch.zeros(samples, length, dtype=torch.long)
        if "decoder_input_ids" in takes:
            target = min(length, _found(config, "max_target_positions", length))
            inputs["decoder_input_ids"] = torch.zeros(samples, target, dtype=torch.long)
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return inputs, sampled


def _image(config: Any) -> tuple[int, int]:
    size = _found(config, "image_size", 224)
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (size, size)


def _found(config: Any, key: str, otherwise: Any) -> Any:
    """A value of the config, or of its part for images."""
    for part in (config, getattr(config, "vision_config", None)):
        value = getattr(part, key, None)
        if value is not None:
            return value
    return otherwise


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers tells of missing kernels and generation is not about training."""
    with suppress(ImportError):
        importlib.import_module("transformers.utils.logging").get_logger()  # sets its level, once
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
