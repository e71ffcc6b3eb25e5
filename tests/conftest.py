"""Which tests run where: tests/null without torch, tests/cpu with torch on the CPU, tests/gpu with a CUDA device."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Nothing here depends on how fast the machine is: a deadline or slow generation on a busy one is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Caches of our own. Inductor's: some tests compile graphs whose nodes are dropped on purpose, and the cache's key does not know of that.
# Extensions': the lock of a build that was killed, in the user's cache, is waited for without end.
for variable in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
    if variable not in os.environ:
        os.environ[variable] = tempfile.mkdtemp(prefix="hytrain_fx-tests-")
        atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/gpu with `gpu`, and skip what has that marker where there is no CUDA device."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_cuda() if gpu_items else ""
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str:
    """Empty where a CUDA device can be used."""
    import torch  # not above: tests/null runs without torch

    if torch.cuda.is_available():
        return ""
    return f"needs a CUDA device; torch {torch.__version__} sees none"
