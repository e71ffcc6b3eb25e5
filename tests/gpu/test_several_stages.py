"""Several optimizers on one rank of a pipeline, on GPUs: tests/cpu/test_several_stages.py.

There a step that was left out is told of at the next one by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..cpu import several_stages
from ..cpu.rank_loops import require_bits_by_hand, started
from .test_pipelines import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loops", [several_stages.late, several_stages.raised], ids=["late", "raised"])
def test_loops_have_the_bits_by_hand(loops: Callable[[int, int], Any], backend: str, tmp_path: Path) -> None:
    """An optimizer steps in every second iteration; steps are left out, and told of together."""
    ranks = started(loops, 2, tmp_path, backend=backend)
    assert all(isinstance(of, dict) for of in ranks), ranks
    require_bits_by_hand(ranks, "seen")
