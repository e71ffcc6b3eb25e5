"""What `hytrain_fx.explain` returns. `print` it for one page of text, or take `to_json()`."""

from __future__ import annotations

from dataclasses import dataclass

from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.json import explanation_json
from hytrain_fx.explain.plan.report_text import explanation_text


@dataclass(frozen=True)
class Explanation(Explained):
    """One compiled model at one moment.

    The plan in force with its reasons, predicted next to measured times.
    """

    def to_json(self) -> str:
        """Everything as JSON text.

        The unit of a figure is the end of its name, its source the name of what it is in.
        """
        return explanation_json(self)

    def __str__(self) -> str:
        return explanation_text(self)
