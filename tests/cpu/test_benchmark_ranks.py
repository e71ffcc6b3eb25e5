"""`python -m benchmarks ranks`: rows that torchrun starts, and their table."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.case import CannotRun, Case
from benchmarks.machine import machine
from benchmarks.one_rank import ZERO_STAGES
from benchmarks.peers import zero_offload_config
from benchmarks.ranks import ranks_markdown, rows_in
from benchmarks.turns import Rounds
from hytrain_fx.forecast.bench import process
from hytrain_fx.forecast.bench.process import lacked_memory, run_to_end, why_none

LINE = ["ranks", "--size", "tiny", "--batch", "1", "--sequence", "16", "--window", "1", "--warmup", "4"]


def row(name: str, step_s: float, **more: Any) -> dict[str, Any]:
    """A measured row of two ranks."""
    return {"row": name, "workload": "3b, 4 x 2048, 2 ranks", "machine": machine(), "step_s": step_s, "windows_s": [step_s] * 3,
            "gpu_gb": 40.0, "host_gb": 90.0, "plan": None, **more}


def test_a_row_is_compared_with_its_floor() -> None:
    """One that failed says why; one of another workload has no floor."""
    failed = {"row": "ddp", "workload": "3b, 4 x 2048, 2 ranks", "machine": machine(), "error": "out of memory"}
    host, other = row("host", 0.3, plan="k=0", predicted_step_s=0.28), row("host", 0.9, workload="7b")
    rows = {"a": row("floor", 0.2), "b": host, "c": failed, "d": other}
    table = ranks_markdown(rows)
    assert "| host | 3b, 4 x 2048, 2 ranks | 0.3000 | 0.0% | 1.500 | 0.2800 | 40.0 | 90.0 | k=0 |" in table
    assert "| ddp | 3b, 4 x 2048, 2 ranks | out of memory | - | - | - | - | - | - |" in table
    assert "| host | 7b | 0.9000 | 0.0% | - |" in table


def test_without_the_plain_loop_bits_are_those_of_the_first_row() -> None:
    """A model of which only shards fit has no other. What trains otherwise has bits of its own."""
    titles = {"sharded": 1, "sharded gpu_states=0.0": 1, "sharded k=3": 2, "sharded moments=bf16": 3, "host_bf16": 3, "fsdp2": 4,
              "clipped": 5, "clipped scaled_every=10": 6}
    rows = {of: row(of, 0.2, checksums=[bits, bits]) for of, bits in titles.items()}
    table = ranks_markdown({**rows, "other": row("host", 0.2, checksums=[5, 5], workload="1b")})
    found = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| 0\.2000 \|  \| ([^|]+) \|", table, re.MULTILINE))
    assert found == {"sharded": "-", "sharded gpu_states=0.0": "bits of sharded", "sharded k=3": "**other bits** than sharded",
                     "sharded moments=bf16": "-", "host_bf16": "bits of sharded moments=bf16", "fsdp2": "-", "host": "-",
                     "clipped": "-", "clipped scaled_every=10": "-"}


@pytest.mark.sample(0)
def test_two_ranks_make_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs. A row without its package says so, in the ranks' own line, not torchrun's after it.

    A second call finds rows in the file.
    """
    out = tmp_path / "ranks.json"
    (tmp_path / "deepspeed.py").write_text('raise ImportError("not installed")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main([*LINE, "--rows", "zero3_offload", "fsdp2", "floor", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| zero3_offload | tiny, 1 x 16, 2 ranks | mode zero_offload needs deepspeed, which cannot be imported here" in printed
    logs = [tmp_path / f"ranks.{of}_tiny_1_x_16.log" for of in ("fsdp2", "floor")]
    for log in logs:
        assert log.read_text()
        log.write_text("not run again")
    assert main([*LINE, "--rows", "fsdp2", "floor", "--out", str(out)]) == 0
    again = capsys.readouterr().out
    assert all(f"| {of} | tiny, 1 x 16, 2 ranks | 0." in text for of in ("fsdp2", "floor") for text in (printed, again))
    assert [log.read_text() for log in logs] == ["not run again"] * 2
    assert json.loads(out.read_text())["fsdp2 tiny, 1 x 16 on 2"]["window_steps"] == 1


@pytest.mark.sample(0)
def test_rows_of_a_file_take_turns_and_have_the_bits_of_averaging_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two at a time compile, one of ours is timed, and no file of a turn stays.

    Activations are recomputed: the compiler would like to fuse kernels of two layers then.
    """
    bits = [f"{of} tiny --batch 1 --sequence 16 --bits 3 --checkpointing" for of in ("by_hand", "sharded --option gpu_states=0.5")]
    timed = "host tiny --batch 1 --sequence 16 --window 1 --warmup 4"
    (tmp_path / "asked.rows").write_text("\n".join(["# bits", *bits, timed]))
    assert main(["ranks", "--file", str(tmp_path / "asked.rows"), "--together", "2", "--out", str(tmp_path / "ranks.json")]) == 0
    printed = capsys.readouterr().out
    for of in ("by_hand", "sharded gpu_states=0.5"):
        assert f"| {of} | tiny, 1 x 16, recomputed, 3 steps for their bits, 2 ranks | " in printed
    assert printed.count("its bits") == 2, printed
    assert re.search(r"\| host \| tiny, 1 x 16, 2 ranks \| 0\.\d+ \| .*\| k=0 of ", printed), printed
    assert not list(tmp_path.glob("*.turn*"))


@pytest.mark.parametrize(("line", "found"), [("hosts tiny", "hosts"), ("host", "size"), ("host tiny --batch x", "x"),
                                             ("host tiny --scaled-every 2", "for clipped")])
def test_a_wrong_line_is_named(line: str, found: str) -> None:
    """With its number."""
    with pytest.raises(CannotRun, match=f"line 2, .*{found}"):
        list(rows_in(f"floor tiny\n{line}"))


def test_rows_compile_in_rounds_and_are_timed_alone() -> None:
    """The second waits while the first is timed; a third does not begin before both were."""
    rounds = Rounds()
    rounds.begin()
    rounds.begin()
    rounds.compiled()
    assert not rounds.is_next(), "the other one compiles"
    rounds.compiled()
    assert rounds.is_next()
    assert not rounds.is_next(), "the other one is timed"
    begun = threading.Thread(target=rounds.begin)
    begun.start()
    rounds.end(compiled=True, timed=True)
    assert rounds.is_next()
    begun.join(0.1)
    assert begun.is_alive()
    rounds.end(compiled=True, timed=True)
    begun.join(5.0)
    assert not begun.is_alive()
    rounds.stop()
    with pytest.raises(CannotRun, match="interrupted"):
        rounds.begin()


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """There is another command for it."""
    assert main([*LINE, "--gpus", "1"]) == 1
    assert "found --gpus 1, expected at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ZERO_STAGES)
def test_deepspeed_reads_what_a_row_asks_for(name: str) -> None:
    """By its own reading of the configuration: stage, offload, AdamW, batch on each rank."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(zero_offload_config(Case("zero_offload", "tiny", 3, clip=1.0), ZERO_STAGES[name]))
    assert f"zero{found.zero_optimization_stage}_offload" == name
    assert found.zero_config.offload_optimizer.device == "cpu"
    assert found.zero_config.offload_param is None
    assert (found.optimizer_name, found.train_micro_batch_size_per_gpu, found.gradient_clipping) == ("adamw", 3, 1.0)


def test_the_error_of_a_rank_is_told() -> None:
    """Not torchrun's, which comes last and says only that there was one."""
    printed = "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n=="
    assert why_none(1, printed, 1.0) == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_row_killed_by_somebody_is_not_said_to_lack_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer time limit sends the signal that the system does, whose count tells them apart."""
    counts = iter((7, 7, 7, 8, None))
    monkeypatch.setattr(process, "_kills_for_memory", lambda: next(counts))
    told = []
    for _ in range(3):
        with (tmp_path / "log").open("w") as log:
            status = run_to_end(["sh", "-c", "kill -9 $$"], log.fileno(), 60.0, os.environ)
        told.append(why_none(status, "", 60.0))
    assert told[0].startswith("killed from outside, and not for want of memory")
    assert list(map(lacked_memory, told)) == [False, True, True]


def test_ranks_end_with_their_row(tmp_path: Path) -> None:
    """torchrun starts each in a session of its own, which killing the row's does not reach."""
    begins = "import subprocess, time; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        assert run_to_end([sys.executable, "-c", begins], log.fileno(), 3.0, os.environ) is None
    rank = int((tmp_path / "log").read_text())
    end_s = time.monotonic() + 20.0
    while psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.05)
