"""What the host still holds, for this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hytrain_fx.runtime.memory import available_host_bytes, host_budget_bytes

GROUPS = {2: ("memory.max", "memory.current", "memory.stat"),
          1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")}


@pytest.fixture(autouse=True)
def host_of_1000(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))


def write_group(root: Path, version: int, limit: str, usage: int) -> None:
    for name, text in zip(GROUPS[version], (limit, str(usage), "anon 5\ninactive_file 100"), strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "usage", "expected"), [("800", 300, 600), ("800", 950, 0), ("5000", 300, 1000)])
def test_a_container_s_limit_counts(version: int, limit: str, usage: int, expected: int, tmp_path: Path) -> None:
    """A container's limit less its use counts, where that is less than the system has.

    Memory that can be given back is not counted as used.
    """
    write_group(tmp_path, version, limit, usage)
    assert available_host_bytes(tmp_path) == expected


def test_without_a_limit_it_is_what_the_system_has(tmp_path: Path) -> None:
    """Without a control group, or with the limit "max", it is what the system has."""
    assert available_host_bytes(tmp_path) == 1000
    write_group(tmp_path, 2, "max", 300)
    assert available_host_bytes(tmp_path) == 1000


def test_a_given_limit_goes_before_all_others() -> None:
    """A given host_memory is taken unchanged; without it, most of what is available is used."""
    assert host_budget_bytes(12345) == 12345
    assert 0 <= host_budget_bytes(None) <= 900
