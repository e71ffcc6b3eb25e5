"""The README's code runs as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hytrain_fx.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BATCHES = 8  # more than the steps that are measured before a plan is in force
COMMAND = re.compile(r"^    python -m hytrain_fx (report [^#\n]*)", re.MULTILINE)


def names_the_readme_takes_as_given() -> dict[str, Any]:
    """A tiny model and what its loop needs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss_fn": nn.functional.cross_entropy,
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(BATCHES)],
        "torch": torch,
    }


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block after block in one process; the plan, the graphs and the timeline are printed, the trace is written."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names = names_the_readme_takes_as_given()
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "grad_offload" in printed
    assert "weight to the device" in printed
    assert (tmp_path / "steps.json").is_file()


def test_the_report_of_the_readme_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a table of ways to place the updates."""
    (line,) = COMMAND.findall(README)
    assert main(shlex.split(line)) == 0
    assert "ZeRO-Offload" in capsys.readouterr().out


def test_the_links_of_the_readme_lead_somewhere() -> None:
    """Every relative link and picture is a file or folder of the repository."""
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
