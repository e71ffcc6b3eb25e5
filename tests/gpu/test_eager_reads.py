"""On a GPU, whatever eager code of a forward reads, on any stream, has the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..cpu.test_eager_reads import MODELS, Deep, require_same_as_plain


class OtherStream(Deep):
    """Eager code reads a weight on a stream of its own, then on the forward's."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x @ self.layers[3].weight
        main.wait_stream(side)
        y.record_stream(main)
        return y + x @ self.layers[3].weight  # type: ignore[no-any-return]


class OtherStreamLater(Deep):
    """The forward's stream is the first to read; the other one waits for nothing of it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        y = x @ self.layers[3].weight
        with torch.cuda.stream(side):
            z = x @ self.layers[3].weight
            z = z + x @ self.layers[3].weight + self.layers[3].bias
        main.wait_stream(side)
        z.record_stream(main)
        return y + z  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"stream": 1.0}, {"engine": "torch"}, {"k": 2}], ids=["host", "streamed", "torch engine", "k"])
@pytest.mark.parametrize("kind", [*MODELS, OtherStream, OtherStreamLater])
def test_slow_updates_change_no_bit(kind: type[Deep], options: dict[str, Any]) -> None:
    """Losses and weights are those of the plain compiled loop."""
    require_same_as_plain(kind, "cuda", **options)
