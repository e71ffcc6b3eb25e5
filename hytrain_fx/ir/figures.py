"""A figure as people read it: three digits and a unit that keeps it between 1 and 1000."""

from __future__ import annotations

from collections.abc import Sequence


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


def shortened(names: Sequence[str], shown: int = 2) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
