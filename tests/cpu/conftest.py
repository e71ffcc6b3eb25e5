"""How torch runs in these tests.

There is one intra-op thread. Inductor and its kernels run only where they are the subject.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor_config

from hytrain_fx.session.turns import CHECK_LOCKS

from .interpreted import graphs_interpreted
from .loops import PLAIN_RESULTS

# Compiling makes millions of objects that live long: looking through all of them every 700 takes a
# tenth of a test's time.
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
def compiled_graphs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What becomes of captured graphs in a module.

        marked `fused_kernels`                  Inductor compiles them and generates kernels, as it
                                                does for users
        marked `inductor`, all with `--all`     Inductor compiles them; the ops run one by one
        else                                    they run as FX has them, op by op (`interpreted`)

    What a loop does between the graphs is the same each time. In what order ops run, what memory is
    written again and what is fused is not. Inductor takes more than half of a test's time, the C++
    compiler half of the rest.
    """
    PLAIN_RESULTS.forget()
    if request.node.get_closest_marker("fused_kernels") is not None:
        yield
    elif request.node.get_closest_marker("inductor") is not None or request.config.getoption("--all"):
        with inductor_config.patch(fallback_by_default=True):
            yield
    else:
        with graphs_interpreted():
            yield
