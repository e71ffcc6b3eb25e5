"""Which reader takes a model's source: a function, a closed form, or transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.forecast.shapes import ModelShape, read_config, read_shape

_PYTHON_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def is_factory(source: str) -> bool:
    """Whether it names a function, as `package.module:factory`."""
    return _PYTHON_PATH.match(source) is not None and not os.path.exists(source)


def find_model(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """The shape of `package.module:factory`, a registered name, or a `config.json`.

    The config is a path, its folder, or its content. Families with a closed form need no torch;
    any other is built by transformers on the meta device.

    Raises ConfigError where there is no such model, UnsupportedError where nothing knows it.
    """
    if isinstance(source, str) and is_factory(source):
        from hytrain_fx.forecast.meta_model import shape_of_factory

        return shape_of_factory(source)
    try:
        return read_shape(source)
    except UnsupportedError:
        from hytrain_fx.forecast.transformers_model import shape_of_config

        return shape_of_config(*read_config(source))
