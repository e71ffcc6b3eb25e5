"""Masters are the weights, in fp32."""

from __future__ import annotations

import pytest
import torch

from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.states.split_master import load_masters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1000, CHUNK_PARAMS + 3])
def test_each_element_is_its_weight_s(dtype: torch.dtype, numel: int) -> None:
    """Each master has its weight's elements, also in chunks whose last one is short."""
    weight = torch.randn(numel).to(dtype)
    master = torch.full((numel,), torch.nan)
    load_masters([(master, weight), (weight, weight)])
    assert torch.equal(master, weight.float())
