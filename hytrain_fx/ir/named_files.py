"""Files that somebody named: what is wrong with one is told by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hytrain_fx.errors import ConfigError


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError where it is none, OSError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not a text file ({error}); expected text in UTF-8") from error


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text is. Raises ValueError, which says what it is instead."""
    try:
        read = json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if not isinstance(read, dict):
        raise ValueError(f"found {type(read).__name__} {str(read)[:20]!r}")
    return read


def require_writable(path: Path | None) -> None:
    """Raises ConfigError where no file of this name can be written. None is no file."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or "\0" in path.name):
        raise ConfigError(f"{str(path)!r} cannot be written: expected the name of a file in a folder that exists")
