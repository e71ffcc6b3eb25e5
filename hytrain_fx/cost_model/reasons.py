"""Why a unit is updated where it is, in one sentence with the figures that decided it."""

from __future__ import annotations

from hytrain_fx.cost_model.equation import Balance
from hytrain_fx.cost_model.windows import Windows
from hytrain_fx.ir.figures import bytes_text, time_text

RESOURCE_WORDS = {"cpu": "CPU updates", "d2h": "gradient copies to the host", "h2d": "weight copies to the device",
                  "host_memory": "reads and writes of host memory"}
# states cross the link too
STREAMED_WORDS = {**RESOURCE_WORDS, "d2h": "copies to the host", "h2d": "copies to the device"}


def balance_reason(balance: Balance, unit: int, k: int) -> str:
    """The reason for `unit` when the balance of both sides puts the first `k` on the device."""
    if unit < k:
        return (f"on the device: with only the {unit} units before it there, CPU updates last {time_text(balance.cpu_side_us(unit))} "
                f"while backward and device updates last {time_text(balance.gpu_side_us(unit))}")
    slack_us = balance.gpu_side_us(k) - balance.cpu_side_us(k)
    verdict = f"{time_text(abs(slack_us))} {'less' if slack_us >= 0 else 'more'} than"
    return (f"on the CPU: its update ({time_text(balance.cpu_us[unit])}) is one of {balance.n - k} that last "
            f"{time_text(balance.cpu_side_us(k))}, {verdict} backward and device updates ({time_text(balance.gpu_side_us(k))})")


def windows_reason(windows: Windows, unit: int, k: int) -> str:
    """The reason for `unit` when the rule of windows puts the first `k` on the device."""
    first = min(unit, k)
    row = windows.tightest(first) if unit < k else windows.row("cpu", k, unit)
    assert row is not None  # only k = n has no row, and unit < n
    words = STREAMED_WORDS if windows.share else RESOURCE_WORDS
    what, span = words[row.resource], f"units {first}..{row.last}" if row.last > first else f"unit {first}"
    room_us = max(row.window_us + windows.device_us(first), 0.0)
    figures = f"{what} of {span} take {time_text(row.demand_us)}, between gradient and next use there are {time_text(room_us)}"
    if unit < k:
        return f"on the device: were it on the CPU, {figures}"
    if row.demand_us <= room_us:
        return f"on the CPU: hidden; {figures}"
    return f"on the CPU: {figures}, the forward waits for the rest"


def capped_reason(states_bytes: float, budget_bytes: int, fit: int, wanted: int) -> str:
    """The reason for a unit that should be on the device but does not fit."""
    return (f"on the CPU: k={wanted} would be best, but its states ({bytes_text(states_bytes)}) do not fit: the device has "
            f"{bytes_text(budget_bytes)} for states, {fit} units fill it")


def filling_reason(budget_bytes: int, k: int) -> str:
    """The reason for parameters that take what whole units leave of the device's memory."""
    return f"on the device: of its {bytes_text(budget_bytes)} for states k={k} leaves some free"


def host_full_reason(host_budget_bytes: int, least: int, wanted: int) -> str:
    """The reason for a unit that should be on the CPU but for which the host has no room."""
    return (f"on the device: k={wanted} would be best, but the host has {bytes_text(host_budget_bytes)} for states; "
            f"it is full without the first {least} units")


def fixed_reason(unit: int, k: int) -> str:
    """The reason for a unit when k was given, not solved."""
    return f"on the {'device' if unit < k else 'CPU'}: k={k} was given"


def streamed_reason(without: Windows, mix: Windows, unit: int, k: int) -> str:
    """The reason for the streamed part of `unit`.

    It says what binds without streaming, and with this share of it.
    """
    row = without.tightest(k)
    assert row is not None  # a unit from k on is streamed, so k < n
    span = f"units {k}..{row.last}" if row.last > k else f"unit {k}"
    now = max((mix.row(resource, k, row.last) for resource in mix.costs_us), key=lambda found: found.demand_us)
    room_us = max(row.window_us + without.device_us(k), 0.0)
    return (f"streamed: {RESOURCE_WORDS[row.resource]} of {span} alone would take {time_text(row.demand_us)}, between gradient and next "
            f"use there are {time_text(room_us)}; with {mix.share:.0%} streamed {STREAMED_WORDS[now.resource]} take "
            f"{time_text(now.demand_us)}")


def given_share_reason(unit: int, k: int) -> str:
    """The reason for the streamed part of a unit when the share was given, not solved."""
    return "streamed: the share of streamed parameters was given"


def balance_notes(balance: Balance, alpha: float) -> tuple[str, ...]:
    """What there is to say of the balance itself."""
    notes = []
    if balance.phi_us(0) >= 0:
        notes.append("the backward is at least as long as all CPU updates, so the equation gives k=0; "
                     "the first unit's gradient still comes last and its update is not hidden")
    if alpha >= 1:
        notes.append(f"alpha is {alpha:.3g}: the device updates no faster than the CPU")
    return tuple(notes)


def memory_notes(wanted: int, fit: int, least: int, units: int, verdict: str) -> tuple[str, ...]:
    """What a memory has made of the k that was wanted."""
    if wanted > fit:
        return (f"capped by memory: {fit} of {units} units fit, k={wanted} {verdict}",)
    if wanted < least:
        return (f"raised by host memory: it holds {units - least} of {units} units, k={wanted} {verdict}",)
    return ()
