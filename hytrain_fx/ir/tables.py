"""Columns of text that line up: numbers to the right, words to the left."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,), gap: str = "  ") -> str:
    """Lines of equal columns under their heads; columns in `words` are aligned to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]

    def joined(line: Sequence[str]) -> str:
        sized = enumerate(zip(line, widths, strict=True))
        return gap.join(text.ljust(width) if column in words else text.rjust(width) for column, (text, width) in sized).rstrip()

    return "\n".join(joined(line) for line in (heads, *rows))


def shortened(names: Sequence[str], shown: int = 2) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
