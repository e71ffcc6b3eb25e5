"""Which tests run where: tests/null without torch, tests/cpu on the CPU, tests/gpu with CUDA."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Nothing here depends on how fast the machine is: a deadline or slow generation on a busy one is no
# failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Caches of our own. Inductor's: some tests compile graphs whose nodes are dropped on purpose, and
# the cache's key does not know of that. Extensions': the lock of a build that was killed, in the
# user's cache, is waited for without end.
for variable in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
    if variable not in os.environ:
        os.environ[variable] = tempfile.mkdtemp(prefix="hytrain_fx-tests-")
        atexit.register(shutil.rmtree, os.environ[variable], ignore_errors=True)

# A shell's background job has the signal ignored, and some tests interrupt themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

GPU_TESTS = Path(__file__).parent / "gpu"
SLOWEST_FILES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`."""
    parser.addoption("--all", action="store_true", help="every parameter set of the tests marked `sample`, not some of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `sample` leaves out; mark tests/gpu with `gpu`, and skip it without CUDA."""
    left_out = set() if _names_tests(config) else _not_sampled(items)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_cuda() if gpu_items else ""
    if reason:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Keep pytest out of torch's trace log.

    It handles every logger that does not propagate, and for whoever handles this one torch writes
    out each graph of each compilation: a tenth of the time of all tests.
    """
    logging.getLogger("torch.__trace").propagate = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which files took longest, all tests together; `--durations` tells which tests."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (report for reports in terminalreporter.stats.values() for report in reports if isinstance(report, pytest.TestReport)):
        seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) < 2:
        return
    terminalreporter.section(f"slowest {min(SLOWEST_FILES, len(seconds))} of {len(seconds)} files, {sum(seconds.values()):.0f} s in all")
    for path in sorted(seconds, key=seconds.__getitem__, reverse=True)[:SLOWEST_FILES]:
        terminalreporter.line(f"{seconds[path]:.2f}s {path}")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process of xdist is given all paths, so its parent hands on what it was given."""
    node.workerinput["names_tests"] = _names_tests(node.config)


def _names_tests(config: pytest.Config) -> bool:
    """Whether all tests are wanted, or some by name: whoever names one wants to see it run."""
    if hasattr(config, "workerinput"):
        return bool(config.workerinput["names_tests"])
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.getoption("-k") or config.getoption("-m")
    return bool(config.getoption("--all") or named)


def _not_sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """All parameter sets of each test marked `sample(count)`, except for `count` of them."""
    families: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            families.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    left_out = set[pytest.Item]()
    for family in families.values():
        marker = family[0].get_closest_marker("sample")
        assert marker is not None
        left_out.update(set(family) - _sampled(family, min(marker.args[0], len(family))))
    return left_out


def _sampled(family: list[pytest.Item], count: int) -> set[pytest.Item]:
    """Enough sets that as many values of each parameter occur as can.

    Where that leaves a choice, they are spread evenly.
    """
    spread = [family[i * len(family) // count] for i in range(count)]
    candidates = dict.fromkeys([*spread, *family])
    chosen, seen = set[pytest.Item](), Counter[tuple[str, int]]()

    def news(item: pytest.Item) -> tuple[int, int]:
        times = [seen[value] for value in _values(item)]
        return times.count(0), -sum(times)

    while len(chosen) < count:
        best = max(candidates, key=news)
        del candidates[best]
        chosen.add(best)
        seen.update(_values(best))
    return chosen


def _values(item: pytest.Item) -> list[tuple[str, int]]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else [(name, id(value)) for name, value in callspec.params.items()]


def _why_no_cuda() -> str:
    """Empty where a CUDA device can be used."""
    import torch  # not above: tests/null runs without torch

    if torch.cuda.is_available():
        return ""
    return f"needs a CUDA device; torch {torch.__version__} sees none"
