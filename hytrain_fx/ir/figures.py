"""A figure as people read it: three digits and a unit that keeps it between 1 and 1000."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def time_text(us: float) -> str:
    """Microseconds in as "950 us", "12.3 ms" or "1.2 s"."""
    for scale, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(us) >= scale:
            return f"{_three_digits(us / scale)} {unit}"
    return f"{_three_digits(us)} us"


def bytes_text(nbytes: float) -> str:
    """Bytes in as "512 B", "1.5 kB" ... "80 GB", in powers of 1000."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= scale:
            return f"{_three_digits(nbytes / scale)} {unit}"
    return f"{_three_digits(nbytes)} B"


def count_text(count: float) -> str:
    """A count in as "950", "12.3 k", "1.2 M" or "6.74 G"."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)}{unit}"
    return _three_digits(count)


def params_text(count: float) -> str:
    """A number of parameters; billions are B, as people say of models: "6.74 B"."""
    return count_text(count).replace("G", "B")


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ---- Columns of text that line up: numbers to the right, words to the left ----


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Lines of equal columns under their heads.

    Columns in `words` are aligned to the left, the others to the right.
    """
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]

    def joined(line: Sequence[str]) -> str:
        sized = enumerate(zip(line, widths, strict=True))
        return "  ".join(text.ljust(width) if column in words else text.rjust(width) for column, (text, width) in sized).rstrip()

    return "\n".join(joined(line) for line in (heads, *rows))


@dataclass(frozen=True, slots=True)
class Table:
    """A heading, column heads, rows of cells, and remarks below.

    Columns in `words` are words, the others numbers. Without rows it is a heading with remarks.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    words: tuple[int, ...] = (0,)

    def text(self) -> str:
        """Its lines; those without rows have no column heads."""
        lines = [table(self.heads, self.rows, self.words)] if self.rows else []
        return "\n".join([*([self.title] if self.title else []), *lines, *self.remarks])


def shortened(names: Sequence[str], shown: int = 2) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
