"""examples/train_share.py at small size: the three curves lie on one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .framework_runs import EXAMPLES, example

SIZES = {
    "mlp": "--epochs 4 --batch 128 --layers 2 --width 64",
    "gpt": "--epochs 3 --batch 8 --steps 6 --layers 1 --width 32 --context 16 --lr 3e-3",
}


@pytest.mark.parametrize("task", list(SIZES))
def test_the_cpu_the_device_and_both_learn_alike(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses fall by epoch, the same on the CPU, on the device and on both, up to rounding."""
    told = tmp_path / "losses.json"
    options = [*SIZES[task].split(), "--device", "cpu", "--share", "0.25", "--json", str(told)]
    monkeypatch.setattr("sys.argv", ["train_share.py", task, *options])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as where it is run as a script: it imports its neighbours
    example("train_share", "matplotlib", "sklearn", "tqdm").main()
    losses = json.loads(told.read_text())
    assert list(losses) == ["cpu", "device", "both"]
    for of in losses.values():
        assert of == sorted(of, reverse=True)
        assert of[-1] < 0.9 * of[0]
        assert of == pytest.approx(losses["cpu"], rel=1e-2)
    assert losses["both"] != losses["device"], "the batches were not split"
