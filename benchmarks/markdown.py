"""Rows as Markdown.

Ratios are only between rows of one machine and one boot; where there is no such row: -
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.case import Case
from benchmarks.cases import CaseSet
from benchmarks.machine import machine_text
from benchmarks.results import Results, Row, all_gpu_of, floor_of, is_short, peer_of

COLUMNS = ("run", "mode", "s a step", "spread", "of floor", "of all-GPU", "x ZeRO-Offload", "x torchao", "predicted", "k",
           "device / CPU / streamed", "GPU idle", "GPU GB", "reserved GB", "host GB", "pinned GB")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def machines(results: Results) -> str:
    """One line for each machine, with the letter that its rows bear."""
    return "\n".join(f"- run {letter}: {machine_text(json.loads(found))}" for found, letter in _letters(results).items())


def rows_table(results: Results, cases: Sequence[Case]) -> str:
    """The rows of one model and batch, beside floor, all-GPU and peers."""
    return table(COLUMNS, [_line(results, case, row) for case in cases if (row := results.measured(case)) is not None])


def claims_table(results: Results, case_sets: Iterable[CaseSet]) -> str:
    """What was claimed and what came out, for claims whose rows are both there. May be empty."""
    lines = []
    for case_set in case_sets:
        for claim in case_set.claims:
            over = results.step_over(claim.row, claim.against)
            if over is None:
                continue
            value = claim.value(over)
            must = f"at {'least' if claim.faster else 'most'} {claim.must:g} ({_yes(claim.met(value, claim.must))})"
            aim = "-" if claim.aim is None else f"{claim.aim:g} ({_yes(claim.met(value, claim.aim))})"
            lines.append([case_set.title, claim.text, f"**{value:.3f}**", must, aim])
    return f"## Claims\n\n{table(('case', 'step', 'found', 'must', 'aim'), lines)}" if lines else ""


def startup_table(results: Results) -> str:
    """Seconds from compile() to the end of the first full-speed step, by phase.

    Empty where no row has them.
    """
    found = [(case, row["startup"]) for case, row in results.all_measured() if "startup" in row]
    phases = list(dict.fromkeys(name for _, startup in found for name in startup if name.endswith("_us")))
    lines = [[f"`{case.key}`", *(f"{startup[name] / 1e6:.2f}" if name in startup else "-" for name in phases)] for case, startup in found]
    head = ("row", *(name.removesuffix("_us").replace("_", " ") for name in phases))
    return f"## Start-up, seconds\n\n{table(head, lines)}" if found else ""


def energy_table(results: Results) -> str:
    """Joules a step and millijoules a token of GPU and CPU packages, or why they are not counted.

    Empty where no row has them.
    """
    names = [f"{tier}_joules_per_{of}" for of in ("step", "token") for tier in ("gpu", "cpu")]
    found = [(case, row) for case, row in results.all_measured() if "energy_absent" in row]
    lines = [[f"`{case.key}`", *(_joules(row[name], 1000 if name.endswith("token") else 1) for name in names),
              "; ".join(f"{tier}: {why}" for tier, why in row["energy_absent"].items()) or "-"] for case, row in found]
    head = ("row", "GPU, J a step", "CPU packages, J a step", "GPU, mJ a token", "CPU packages, mJ a token", "not counted")
    return f"## Energy\n\nWhole boards and packages, idle power included.\n\n{table(head, lines)}" if found else ""


def failures(results: Results) -> str:
    """The rows that failed and why. Empty without one."""
    lines = [f"- `{case.key}`: {row['error']}" for case in results.cases() if (row := results.get(case)) is not None and "error" in row]
    return "\n".join(["## Failed", "", *lines]) if lines else ""


def _line(results: Results, case: Case, row: Row) -> list[str]:
    plan = row.get("plan") or {}
    share = plan.get("share")
    faster = [results.step_over(peer_of(case, mode), case) if peer_of(case, mode) != case else None for mode in ("zero_offload", "torchao")]
    error = row.get("predicted_step_s") and row["predicted_step_s"] / row["step_s"] - 1
    return [
        letter(results, row),
        f"`{case.label}`" + (f" ({row['window_steps']} steps a window: too short)" if is_short(row) else ""),
        f"{row['step_s']:.4f}",
        f"{row['spread']:.1%}",
        _ratio(results.step_over(case, floor_of(case))),
        _ratio(results.step_over(case, all_gpu_of(case))),
        *(_ratio(value) for value in faster),
        "-" if not error else f"{row['predicted_step_s']:.4f} ({error:+.1%})",
        f"{plan['k']}/{plan['units']}" if plan else "-",
        " / ".join(f"{share[place]:.0%}" for place in ("gpu", "cpu", "stream")) if share else "-",
        f"{row['idle_share']:.1%}" if "idle_share" in row else "-",
        *(_gb(row[name]) for name in ("gpu_peak_allocated_gb", "gpu_peak_reserved_gb", "host_rss_gb", "pinned_gb")),
    ]


def letter(results: Results, row: Row) -> str:
    """That of the machine on which a row was measured, - where it was not."""
    return _letters(results).get(json.dumps(row.get("machine")), "-")


def _letters(results: Results) -> dict[str, str]:
    """Machine, as JSON -> A, B, ... in the order of the rows."""
    found: dict[str, None] = dict.fromkeys(json.dumps(row["machine"]) for _, row in results.all_measured())
    return {text: chr(ord("A") + number % 26) for number, text in enumerate(found)}


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _joules(value: Any, factor: int) -> str:
    return "-" if value is None else f"{value * factor:.4g}"


def _gb(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


def _yes(met: bool) -> str:
    return "met" if met else "missed"
