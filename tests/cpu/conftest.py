"""How torch runs in these tests: one intra-op thread, and Inductor without kernels of its own where they are not the subject."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor_config

from hytrain_fx.session.turns import CHECK_LOCKS

# Compiling makes millions of objects that live long: looking through all of them every 700 takes a tenth of a test's time.
gc.freeze()
gc.set_threshold(200_000, 50, 100)
os.environ[CHECK_LOCKS] = "1"  # a session's locks are taken in their order, in every test


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set torch's intra-op threads for one test: 1, or the count of its marker `torch_threads`.

    Sums over several threads may differ from run to run in the last bit.
    """
    marker = request.node.get_closest_marker("torch_threads")
    count: int = marker.args[0] if marker else 1
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def inductor_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """In modules marked `fused_kernels` Inductor generates kernels, as it does for users; elsewhere the ops of its graphs run one by one.

    The C++ compiler takes half of a test's time. What a loop does between the graphs is the same either way; where buffers are written
    again and what is fused with what is not.
    """
    with inductor_config.patch(fallback_by_default=request.node.get_closest_marker("fused_kernels") is None):
        yield
