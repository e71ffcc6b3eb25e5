"""The folder that receives each graph's text before and after each pass (`Config.dump`).

    01.backward.02.insert_steps.before.txt
    01.backward.02.insert_steps.after.txt       a sorted listing of the folder is the story

A folder that cannot be written is an error when the model is compiled. One that cannot be written
any more (the disk is full, the folder was removed) ends the dump with one warning: it must not end
the training.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from hytrain_fx.errors import ConfigError, HytrainWarning
from hytrain_fx.ir.pass_record import PassRecord


class GraphDump:
    """Writes texts into a folder, which is made if it is missing.

    Raises ConfigError where the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._ended = False
        try:
            self.folder = Path(folder).absolute()  # the script may go to another one
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(b"\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"option dump={str(folder)!r} cannot be written: {error}; expected a folder that is there or can be made, "
                              "with room on its disk") from error

    def write(self, graph: str, number: int, record: PassRecord) -> None:
        """The two texts of a pass, the `number`th over `graph` (`01.backward`)."""
        if self._ended:
            return
        try:
            for side, text in (("before", record.before), ("after", record.after)):
                (self.folder / f"{graph}.{number:02}.{record.name}.{side}.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self._ended = True
            warnings.warn(f"the dump in {str(self.folder)!r} ends before {graph}.{number:02}.{record.name}, training goes on: {error}. "
                          f"Make room there, or leave dump out", HytrainWarning, stacklevel=2)
