"""What the steps inside a `hytrain_fx.record` block did, and what was predicted for one of them."""

from __future__ import annotations

from pathlib import Path

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.timeline.timeline import Timeline


class Recording:
    """The steps inside a `record` block.

    `predicted` is the schedule of the plan in force, None where there is none.

    `print` it for the last whole step with the predicted one under it, on one scale; `save` it; or
    take `timeline`, which has all steps.
    """

    def __init__(self, predicted: Timeline | None) -> None:
        self.predicted = predicted
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What ran when, in all steps. Raises UnsupportedError while the block has not ended."""
        if self._timeline is None:
            raise UnsupportedError("the record block has not ended (or ended with an error): take the timeline after it")
        return self._timeline

    def ended(self, timeline: Timeline) -> None:
        """The block has ended, and this is what was recorded."""
        self._timeline = timeline

    def text(self, width: int = 120) -> str:
        """The last whole step, the predicted one under it, lanes of `width` characters.

        Raises UnsupportedError as `timeline` does.
        """
        return self.timeline.last_step().text(width, *self._predicted())

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | Path) -> Path:
        """Write all steps as a Chrome trace (`.json`), or the last whole one as a picture (`.png`).

        A picture needs matplotlib.

        The predicted step stands below. Raises ConfigError for another suffix, UnsupportedError as
        `timeline` does.
        """
        if Path(path).suffix != ".json":
            return self.timeline.last_step().save(path, *self._predicted())
        launches = self.timeline.launches
        begin_us = launches[-2].backward_begin_us if len(launches) > 1 else 0.0
        return self.timeline.save(path, *(predicted.moved(begin_us) for predicted in self._predicted()))

    def _predicted(self) -> tuple[Timeline, ...]:
        return (self.predicted,) if self.predicted else ()
