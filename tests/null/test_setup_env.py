"""`scripts/setup-env` deletes only what it made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
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


def make_foreign_venv(folder: Path, torch: str) -> None:
    """A virtual environment that the script did not make; its pip and torch are stand-ins."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(PIP)
    (packages / "torch.py").write_text(TORCH.format(version=torch))
    (packages / f"torch-{torch}.dist-info").mkdir()
    (packages / f"torch-{torch}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    (folder / "mine").write_text("of the user")


@pytest.mark.parametrize("name", [".venv", "elsewhere"])
def test_an_environment_that_it_did_not_make_is_used_and_kept(tmp_path: Path, name: str) -> None:
    """What is missing is installed into it once; torch is there and is not installed again.

    Nothing of pip's output is shown.
    """
    make_foreign_venv(tmp_path / name, torch="2.12.1")
    first, second = (setup_env(tmp_path, **({} if name == ".venv" else {"VENV": name})) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (tmp_path / name / "mine").read_text() == "of the user"
    asked = (tmp_path / name / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["wheel", ".[tests]"]
    assert "did not make" in first.stderr
    assert "torch 2.12.1" in first.stderr
    assert "much text" not in first.stderr
    assert (tmp_path / name / "setup.log").read_text().count("much text") == 2
    assert len(second.stderr.splitlines()) == 1


def test_an_old_torch_that_it_did_not_install_is_left_to_the_user(tmp_path: Path) -> None:
    """It says which torch it found and which it needs, and asks for another folder."""
    make_foreign_venv(tmp_path / ".venv", torch="2.4.0")
    run = setup_env(tmp_path)
    assert run.returncode == 1
    assert all(word in run.stderr for word in ("2.4.0", ">= 2.11", "VENV="))
    assert not (tmp_path / ".venv/asked").exists()


def test_a_folder_that_is_no_environment_is_left_as_it_was(tmp_path: Path) -> None:
    """It asks for another folder."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/notes").write_text("of the user")
    run = setup_env(tmp_path)
    assert run.returncode == 1
    assert "VENV=" in run.stderr
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["notes"]
