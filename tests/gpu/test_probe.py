"""Rates of the link, measured on a GPU."""

from __future__ import annotations

import torch

from hytrain_fx.runtime.probe import full_duplex_us_per_byte


def test_both_directions_have_a_rate_of_the_link() -> None:
    """With both directions busy each moves between 0.1 and 1000 GB/s: the figures are of copies, and in microseconds per byte."""
    for us_per_byte in full_duplex_us_per_byte(torch.device("cuda")):
        assert 0.1 < 1e-3 / us_per_byte < 1000
