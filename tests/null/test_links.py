"""The links `passes` and `cost_model` at the top level lead to the packages.

They are no packages themselves.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("passes", "cost_model")


@pytest.mark.parametrize("name", LINKS)
def test_a_link_leads_to_the_package_of_its_name(name: str) -> None:
    """`passes` and `cost_model` show the folders of these names in `hytrain_fx`."""
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / "hytrain_fx" / name


@pytest.mark.parametrize("name", LINKS)
def test_an_import_through_a_link_is_an_error_that_names_the_right_import(name: str) -> None:
    """From the repository's root `import passes` fails and says `import hytrain_fx.passes`."""
    run = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "ImportError" in run.stderr
    assert f"expected `import hytrain_fx.{name}`" in run.stderr
