"""The documentation site: mkdocs.yml, docs/ and the docstrings make one.

It needs nothing from elsewhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches on its own: scripts, styles, fonts, pictures. A link that a reader may
# follow is no part of it.
FETCHED = re.compile(r"""<(?:script|img|iframe|link)[^>]*(?:src|href)=["']?(?:https?:)?//[^"' >]+|url\(["']?(?:https?:)?//|@import""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors.

    Warnings are for broken links, pages out of the navigation, and names that the reference does
    not find.
    """
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    """One HTML file for each Markdown file."""
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert "troubleshooting" in pages
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_the_reference_has_the_public_names_and_their_options(site: Path) -> None:
    """Every name of `hytrain_fx.__all__` has an entry.

    The aligned list of Config's docstring is a list.
    """
    import hytrain_fx

    html = (site / "api.html").read_text()
    anchors = set(re.findall(r'id="hytrain_fx\.([\w.]+)"', html))
    assert {name for name in hytrain_fx.__all__ if not any(anchor.endswith(name) for anchor in anchors)} == set()
    assert "<li><code>shadow_memory</code>: bytes of host memory" in html


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """No page and no style sheet has a script, font or picture of another host."""
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 10
    assert {str(path.relative_to(site)): found for path in files if (found := FETCHED.findall(path.read_text()))} == {}
