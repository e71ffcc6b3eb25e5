"""One intra-op thread by default: sums over several threads may differ from run to run in the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set torch's intra-op threads for one test: 1, or the count of its marker `torch_threads`."""
    marker = request.node.get_closest_marker("torch_threads")
    count: int = marker.args[0] if marker else 1
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)
