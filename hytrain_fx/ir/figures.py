"""A figure as people read it: three digits and a unit that keeps it between 1 and 1000."""

from __future__ import annotations


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
