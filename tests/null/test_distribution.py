"""What a user installs: the built sdist and the wheel made from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "__pycache__")
NATIVE_SOURCES = {".h", ".cpp", ".cu"}


def build(kind: str, source: Path, target: Path) -> Path:
    """Build "sdist", "wheel" or "editable" of the tree `source` into `target`.

    It uses the setuptools that is installed.
    """
    target.mkdir(exist_ok=True)
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run = subprocess.run([sys.executable, "-c", call], cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return next(target.iterdir())


def project_files(suffixes: set[str]) -> set[str]:
    """Paths of the library's files with these suffixes, relative to the repository."""
    found = (path for path in (ROOT / "hytrain_fx").rglob("*") if path.suffix in suffixes)
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of this tree, unpacked: setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_BEHIND)
    with tarfile.open(build("sdist", folder / "tree", folder / "dist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        archive.extractall(folder / "unpacked")
    return next((folder / "unpacked").iterdir())


@pytest.fixture(scope="module")
def wheel_names(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the wheel that is built from the sdist."""
    with zipfile.ZipFile(build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "dist")) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_every_native_source_and_the_type_marker(wheel_names: set[str]) -> None:
    """All .py, .h, .cpp, .cu, .html and .svg files and py.typed are installed.

    The engine is built from them at first use.
    """
    expected = project_files({".py", ".html", ".svg", *NATIVE_SOURCES}) | {"hytrain_fx/py.typed"}
    assert any(PurePosixPath(name).suffix in NATIVE_SOURCES for name in expected)
    assert expected <= wheel_names


def test_the_wheel_installs_one_package_and_nothing_beside_it(wheel_names: set[str]) -> None:
    """No top-level `passes`, `cost_model` or `tests` lands in site-packages."""
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hytrain_fx"}


def test_the_sdist_has_no_links_and_carries_the_tests(sdist: Path) -> None:
    """The links at the top level stay in the repository; tests, examples and scripts travel."""
    assert not any(path.is_symlink() for path in sdist.rglob("*"))
    assert not (sdist / "passes").exists()
    assert not (sdist / "cost_model").exists()
    assert all((sdist / name).is_file() for name in ("LICENSE", "README.md", "scripts/test", "examples/train_gpt.py", "tests/conftest.py"))


def test_an_editable_install_is_a_path_and_no_import_hook(sdist: Path, tmp_path: Path) -> None:
    """An editable install is a path, because Python asks import hooks last.

    With a hook, a script beside a folder `hytrain_fx` (the clone) would import that folder, which
    has no `compile`.
    """
    with zipfile.ZipFile(build("editable", sdist, tmp_path / "editable")) as archive:
        (pth,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert not any(name.endswith(".py") for name in archive.namelist())
        assert archive.read(pth).decode().strip() == str(sdist)
