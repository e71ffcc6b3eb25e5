"""Host memory while a model on the meta device is loaded: what rests, and little beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .loading_memory import build

pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """75 MB of bf16 weights, in a file of each kind."""
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("files")
    values = build().state_dict()
    save_file(values, made / "safetensors")
    save_file(values, made / "whole")
    torch.save(values, made / "torch")
    return made


def measured(how: str, folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.cpu.loading_memory", how, str(folder / how)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("how", ["safetensors", "torch", "init"])
def test_beside_what_rests_is_less_than_a_twentieth_of_it(how: str, folder: Path) -> None:
    """At most 1.05 times what rests, also where states have no pages yet.

    Before the first step only the weights' halves of the masters have been written, so those are
    counted, not all that will rest.
    """
    found = measured(how, folder)
    assert found["rests"] == 6 * found["weights"]
    assert found["most"] >= found["weights"]  # the weights are there
    assert found["most"] - found["weights"] <= 0.05 * found["rests"], found


def test_a_whole_model_beside_it_would_be_seen(folder: Path) -> None:
    """A loader that has all tensors at once breaks that bound: it measures what it says."""
    found = measured("whole", folder)
    assert found["most"] - found["weights"] > 0.05 * found["rests"], found
