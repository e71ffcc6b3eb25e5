"""Fills the templates of `explain/templates` (jinja2).

Values are escaped, and a name that a template lacks is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("templates")


def render(name: str, **values: Any) -> str:
    """The text of the template `name` with these values."""
    # not at the top: printing text works without it
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template(name).render(**values)
