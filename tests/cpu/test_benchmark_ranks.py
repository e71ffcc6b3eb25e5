"""`python -m benchmarks ranks`: rows that torchrun starts, and their table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.machine import machine
from benchmarks.ranks import ranks_markdown

LINE = ["ranks", "--size", "tiny", "--batch", "1", "--sequence", "16", "--window", "1", "--warmup", "4"]


def row(name: str, step_s: float, **more: Any) -> dict[str, Any]:
    """A measured row of two ranks."""
    return {"row": name, "workload": "3b, 4 x 2048, 2 ranks", "machine": machine(), "step_s": step_s, "windows_s": [step_s] * 3,
            "gpu_gb": 40.0, "host_gb": 90.0, "plan": None, **more}


def test_a_row_is_compared_with_its_floor() -> None:
    """One that failed says why; one of another workload has no floor."""
    failed = {"row": "ddp", "workload": "3b, 4 x 2048, 2 ranks", "machine": machine(), "error": "out of memory"}
    rows = {"a": row("floor", 0.2), "b": row("host", 0.3, plan="k=0"), "c": failed, "d": row("host", 0.9, workload="7b")}
    table = ranks_markdown(rows)
    assert "| host | 3b, 4 x 2048, 2 ranks | 0.3000 | 0.0% | 1.500 | 40.0 | 90.0 | k=0 |" in table
    assert "| ddp | 3b, 4 x 2048, 2 ranks | out of memory | - | - | - | - | - |" in table
    assert "| host | 7b | 0.9000 | 0.0% | - |" in table


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["floor", "fsdp2", "host"])
def test_two_ranks_make_a_row(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs; a second call finds it in the file."""
    out = tmp_path / "ranks.json"
    for _ in range(2):
        assert main([*LINE, "--rows", name, "--out", str(out)]) == 0
        assert f"| {name} | tiny, 1 x 16, 2 ranks | 0." in capsys.readouterr().out
        (tmp_path / f"ranks.{name}.log").write_text("not run again")
    assert json.loads(out.read_text())[f"{name} tiny 1x16 on 2"]["window_steps"] == 1


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There is another command for it."""
    assert main([*LINE, "--gpus", "1"]) == 1
    assert "found --gpus 1, expected at least 2" in capsys.readouterr().err
