"""Importing the package, and reports from the command line, load nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "sympy", "deepspeed", "matplotlib", "plotly", "transformers", "accelerate", "lightning")


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after it has run `code`.

    The last line of its output tells.
    """
    told = f"{code}\nimport json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", [
    "import hytrain_fx; hytrain_fx.Config, hytrain_fx.Plan",
    "import hytrain_fx.__main__",
    "import hytrain_fx.explain.plan.text, hytrain_fx.explain.graphs.dump_folder",
])
def test_importing_loads_nothing_heavy(code: str) -> None:
    """`import hytrain_fx`, the command line, and printing plans and dumps need no torch.

    The plans and dump folders are saved ones.
    """
    assert loaded_after(code) == set()


def test_the_offline_report_needs_no_torch() -> None:
    """`python -m hytrain_fx report` runs without torch; sympy solves the closed form."""
    arguments = ["report", "--model", "llama-1.3b", "--device", "h200", "--tokens", "4096", "--json"]
    code = f"from hytrain_fx.__main__ import main\nassert main({arguments!r}) == 0"
    assert loaded_after(code) == {"sympy"}
