"""`scripts/setup-env` changes only what it made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands in for pip: writes down what it was asked for.
PIP = 'import sys\nopen(sys.prefix + "/asked", "a").write(" ".join(sys.argv[1:]) + "\\n")\nprint("much text")\n'
TORCH = '__version__ = "{version}"\nclass cuda:\n    is_available = staticmethod(lambda: False)\n'


def setup_env(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a tree that has nothing but it and pyproject.toml."""
    (tree / "scripts").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts/setup-env", tree / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tree)
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run([tree / "scripts/setup-env", "tests"], env=variables, capture_output=True, text=True, check=False)


def make_venv(folder: Path, pip: str = PIP, torch: str = "2.12.1") -> None:
    """A virtual environment that the script did not make; its pip and torch are stand-ins."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(pip)
    (packages / "torch.py").write_text(TORCH.format(version=torch))
    (packages / f"torch-{torch}.dist-info").mkdir()
    (packages / f"torch-{torch}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    (folder / "mine").write_text("of the user")


def mark_as_its_own(folder: Path) -> None:
    """Write the mark that the script leaves in what it makes."""
    found = subprocess.run([sys.executable, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=True)
    torch = metadata.version("torch")
    (folder / ".made-for").write_text(f"{found.stdout.strip()}, its torch: {torch}, in {folder.parent.resolve()}\n")


@pytest.mark.parametrize("name", [".venv", "elsewhere"])
def test_an_environment_that_it_did_not_make_is_left_as_it_was(tmp_path: Path, name: str) -> None:
    """One sentence names the way: another folder."""
    make_venv(tmp_path / name)
    before = sorted((tmp_path / name).rglob("*"))
    run = setup_env(tmp_path, **({} if name == ".venv" else {"VENV": name}))
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    assert f"found {name}, which this script did not make" in run.stderr
    assert "VENV=build/venv" in run.stderr
    assert sorted((tmp_path / name).rglob("*")) == before


def test_a_folder_that_is_no_environment_is_left_as_it_was(tmp_path: Path) -> None:
    """It asks for another folder."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/notes").write_text("of the user")
    run = setup_env(tmp_path)
    assert run.returncode == 1
    assert "VENV=" in run.stderr
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["notes"]


def test_an_environment_that_it_made_is_used_again(tmp_path: Path) -> None:
    """What is missing is installed into it, once, with one line a stage. Pip's output is logged."""
    make_venv(tmp_path / ".venv")
    mark_as_its_own(tmp_path / ".venv")
    first, second = (setup_env(tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (tmp_path / ".venv/mine").read_text() == "of the user"
    asked = (tmp_path / ".venv/asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["wheel", ".[tests]"]
    lines = first.stderr.splitlines()
    assert [re.sub(r"\d+ s$", "", line) for line in lines[:2]] == [
        "setup-env: installing setuptools and wheel ... ", "setup-env: installing hytrain_fx with the extra tests ... "]
    assert "torch 2.12.1" in lines[2]
    assert (tmp_path / ".venv/setup.log").read_text().count("much text") == 2
    assert second.stderr == ""


def test_a_stage_that_fails_shows_the_end_of_the_log(tmp_path: Path) -> None:
    """With the path of the whole."""
    make_venv(tmp_path / ".venv", PIP + "[print('line', n) for n in range(100)]\nsys.exit('no network')\n")
    mark_as_its_own(tmp_path / ".venv")
    run = setup_env(tmp_path)
    assert run.returncode != 0
    assert ".venv/setup.log" in run.stderr
    assert "no network" in run.stderr
    assert "line 99" in run.stderr
    assert "line 3\n" not in run.stderr
