"""How many launches fit ahead of a busy GPU before the launching thread waits.

That depends on when hytrain_fx was imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hytrain_fx.runtime.launch_queue import VARIABLE

COUNT = """
x = torch.zeros(1, device="cuda")
x.add_(1)
torch.cuda.synchronize()
torch.cuda._sleep(3_000_000_000)
asleep = torch.cuda.Event()
asleep.record()
launches = 0
while launches < 20_000 and not asleep.query():
    x.add_(1)
    launches += 1
print(launches)
"""


@pytest.mark.parametrize(("program", "given", "least", "most"), [
    ("import torch, hytrain_fx", None, 3_500, 5_000),
    ("import hytrain_fx, torch; torch.cuda.is_available()", None, 3_500, 5_000),
    ("import torch; torch.cuda.is_available(); import hytrain_fx", None, 900, 1_100),
    ("import torch, hytrain_fx", "", 900, 1_100),
])
def test_launches_that_fit(program: str, given: str | None, least: int, most: int) -> None:
    """Four times as many launches fit if the import came before CUDA's first use.

    As many as ever fit if it came after, or if the user has said so.
    """
    env = {name: value for name, value in os.environ.items() if name != VARIABLE} | ({} if given is None else {VARIABLE: given})
    run = subprocess.run([sys.executable, "-c", program + COUNT], env=env, capture_output=True, text=True, check=True)
    assert least < int(run.stdout) < most
