"""The recipe of examples/train_resume.py: a kill while saving leaves a whole checkpoint.

Training goes on from it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_resume.py"

# Forks a saver for each kill: torch is imported once. Each checkpoint is one number in many places,
# 8 MB of them.
SAVERS = """
import os, sys, signal, time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import torch
spec = spec_from_file_location("train_resume", sys.argv[1])
example = module_from_spec(spec)
spec.loader.exec_module(example)
torch.set_num_threads(1)
path = Path(sys.argv[2])
for wait_us in map(int, sys.argv[3:]):
    begin = torch.load(path)["step"] if path.exists() else 0
    saver = os.fork()
    if saver == 0:
        for step in range(begin + 1, begin + 10_000):
            weights, states = (torch.full((1 << 20,), float(step)) for _ in range(2))
            example.save_whole(path, {"step": step, "weights": weights, "states": states})
    time.sleep(wait_us / 1e6)
    os.kill(saver, signal.SIGKILL)
    os.waitpid(saver, 0)
    if path.exists():
        found = torch.load(path, weights_only=True)
        assert found["step"] >= begin
        assert bool((found["weights"] == found["step"]).all() and (found["states"] == found["step"]).all())
    print(found["step"] if path.exists() else 0, path.with_name(path.name + ".unfinished").exists(), flush=True)
"""


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at 25 random moments of repeated saving leaves one whole checkpoint each time.

    It is never an older one.
    """
    pytest.importorskip("transformers", reason="the example needs transformers")
    waits = [str(random.Random(number).randint(20_000, 200_000)) for number in range(25)]
    command = [sys.executable, "-c", SAVERS, str(EXAMPLE), str(tmp_path / "run.pt"), *waits]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
    steps = [int(line.split()[0]) for line in lines if re.fullmatch(r"\d+ (True|False)", line)]
    assert len(steps) == 25
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert any(line.endswith("True") for line in lines)  # some of them were hit with the next file half written


@pytest.mark.sample(0)
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """The example, killed right after a save and started again, ends with the same weights.

    They have the bits of a run that was not killed.
    """
    pytest.importorskip("transformers", reason="the example needs transformers")
    sizes = ["--layers", "1", "--width", "16", "--context", "16", "--steps", "40", "--every", "2", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # sums over several threads may differ in the last bit

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLE), "--checkpoint", str(tmp_path / name), *sizes]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)

    whole, _ = start("whole.pt").communicate(timeout=200)
    killed = start("killed.pt")
    deadline_s = time.monotonic() + 200
    while not (tmp_path / "killed.pt").exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert torch.load(tmp_path / "killed.pt", weights_only=True)["step"] < 40
    resumed, _ = start("killed.pt").communicate(timeout=200)
    assert "goes on after step" in resumed
    assert whole.splitlines()[-1].startswith("weights after 40 steps")
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
