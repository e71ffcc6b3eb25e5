"""Failures that would silently train on with wrong weights, in kernels that Inductor fuses.

Bits are right with the cure and wrong without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from .loops import Twins, plain_loop
from .models import gpt
from .test_silent_failures import spoil_at_release, test_a_weight_written_ahead_of_its_last_reader_is_wrong

__all__ = ["test_a_weight_written_ahead_of_its_last_reader_is_wrong"]  # once more, with fused readers

pytestmark = [pytest.mark.fused_kernels, pytest.mark.sample(0)]  # .ci/run names this file


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    made = Twins(gpt, k=0, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))  # compiled, and the plan in force
    yield made
    made.close()


def offload_late(twins: Twins, patch: pytest.MonkeyPatch, copied: bool) -> None:
    """Gradients leave only at the end of the backward, as with an asynchronous copy.

    They leave the graph's own buffers, or copies of them.
    """
    engine, nodes = twins.session.engine, twins.session.nodes
    offload, end = engine.grad_offload, nodes.backward_end
    waiting: list[tuple[Sequence[int], list[torch.Tensor]]] = []

    def grad_offload(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        waiting.append((rows, [grad.clone() if copied else grad for grad in grads]))

    def backward_end(graph: int, rows: Sequence[int]) -> None:
        for late, grads in waiting:
            offload(late, grads)
            engine.arm_cpu(late)
            engine.arm_reload(late)
        waiting.clear()
        end(graph, rows)

    patch.setattr(engine, "grad_offload", grad_offload)
    patch.setattr(nodes, "backward_end", backward_end)


def test_a_gradients_buffer_is_reused_behind_its_offload(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late read of the graph's own buffer gives wrong weights, even with a reference held.

    A late read of the ring's copy does not.
    """
    with monkeypatch.context() as patch:
        offload_late(twins, patch, copied=True)
        twins.agree(plain_loop(3))
    with monkeypatch.context() as patch:
        offload_late(twins, patch, copied=False)
        with pytest.raises(AssertionError):
            twins.agree(plain_loop(3))
    twins.agree(plain_loop(3))


def test_a_weight_is_written_only_after_its_last_reader(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT's weights may be overwritten right at their release: the backward has used them."""
    with monkeypatch.context() as patch:
        spoil_at_release(twins, patch, release_early=False)
        twins.agree(plain_loop(3))
