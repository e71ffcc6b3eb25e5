"""The sharper rule: every layer has its own window, from its gradient to its next use.

Gradients arrive last layer first and the next forward uses the first layer first, so the windows
are nested, and updates in order of layer keep every deadline iff each prefix of layers fits the
window of its last one. With the first k layers on the device (A_k = their update time there) the
step takes

    T(k) = t_f + t_b + max( A_k, max_{m >= k, q} [ cost_q(k..m) - W_q(m) ] )    q in {cpu, d2h, h2d}
    W(m) = sum_{j<m} forward_j + min( sum_{j<m} backward_j, t_b - t_c )

where t_c is the time from the begin of the backward to the commit, before which no update begins
(t_b when it comes at the end). For updates by the CPU that begin on a guess, t_c = 0.

W_q is W minus the time one chunk spends in the other two stages (copy out, update and copy back are
a pipeline).

The first term grows with k, the second falls: the better neighbour of their crossing is the optimum
over prefixes, and a prefix is the best set of its size.

With a share y of every other unit streamed, states crossing the link and the update running on the
device, the same rows hold with

    A = A_k + y (A_n - A_k)      cpu (1-y)
    d2h (1-y) gradients + y states out      h2d (1-y) weights + y states in
    host_memory  (1-y) bytes of a CPU update with its copies + y bytes of states in and out, over
                 the bandwidth where that is known

A stage of a pipeline stands still for a bubble between backward and forward, while it waits for
another stage. Every window is longer by that, and A counts as far as it is longer than the bubble.

With several ranks all costs are those of one rank's shards, and the bandwidth is one rank's part.
A gradient is there after its reduce-scatter, and a forward begins after its all-gather: each window
is shorter by both (`lost_us`).

Weights in shards are gathered instead, some forwards ahead of the one that reads them: their
windows end that much earlier (`early_us`).

A weight that rests on the host is fetched between its update and the forward: that is its h2d.

All prefixes share their right sides, so one share for all units is optimal. T is convex in y for a
given k.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.equation import cheapest
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes, streamed_bytes
from hytrain_fx.ir.profile import Profile, UnitProfile


@dataclass(frozen=True)
class Excess:
    """By how much the units k..`last` overrun the window of unit `last` on one resource.

    Negative when they fit.
    """

    last: int
    resource: str
    demand_us: float
    window_us: float

    @property
    def overrun_us(self) -> float:
        """Demand less window."""
        return self.demand_us - self.window_us


@dataclass(frozen=True)
class Windows:
    """Nested windows of the units, per resource q that a unit updated by the CPU uses.

    `costs_us[q][l]` is what unit l takes of q, `windows_us[q][l]` the window W_q(l), `gpu_us[l]`
    its update time on the device. `streamed_us[q][l]` is what unit l takes of q when it is
    streamed, `share` the share y that is; `costs_us` are those of this mix. `bubble_us` is part of
    every window, and hides updates on the device as well.
    """

    windows_us: dict[str, tuple[float, ...]]
    costs_us: dict[str, tuple[float, ...]]
    gpu_us: tuple[float, ...]
    streamed_us: dict[str, tuple[float, ...]] = field(default_factory=dict)
    share: float = 0.0
    bubble_us: float = 0.0

    @property
    def n(self) -> int:
        """Number of units."""
        return len(self.gpu_us)

    def streaming(self, share: float) -> Windows:
        """These windows with a share y of every unit not on the device streamed.

        The CPU updates only the rest of these units.
        """
        mixed = {q: tuple((1 - share) * cost + share * streamed for cost, streamed in zip(costs, self.streamed_us[q], strict=True))
                 for q, costs in self.costs_us.items()} if share else self.costs_us
        return Windows(self.windows_us, mixed, self.gpu_us, self.streamed_us, share, self.bubble_us)

    def device_us(self, k: int) -> float:
        """A: update time on the device.

        It covers the first k units, and the streamed share of the others.
        """
        resident_us, all_us = self._gpu_prefix[k], self._gpu_prefix[self.n]
        return resident_us + self.share * (all_us - resident_us)

    def row(self, resource: str, k: int, last: int) -> Excess:
        """The row of units k..`last` on one resource."""
        return Excess(last, resource, sum(self.costs_us[resource][k : last + 1]), self.windows_us[resource][last])

    def tightest(self, k: int) -> Excess | None:
        """The tightest prefix row with the first k units on the device; None for k = n."""
        if k == self.n:
            return None
        if k not in self._tightest:  # the reasons of many units ask for the same
            self._tightest[k] = self._tightest_row(k)
        return self._tightest[k]

    def _tightest_row(self, k: int) -> Excess:
        found = (-math.inf, k, "", 0.0)
        for resource, cost in self.costs_us.items():
            for m, (demand, window) in enumerate(zip(accumulate(cost[k:]), self.windows_us[resource][k:], strict=True), start=k):
                if demand - window > found[0]:
                    found = (demand - window, m, resource, demand)
        _, last, resource, demand = found
        return Excess(last, resource, demand, self.windows_us[resource][last])

    def exposed_us(self, k: int) -> float:
        """What the updates add to forward and backward: max(A_k, the worst overrun)."""
        return max(self._exposed_device_us(k), self._overrun_us(k))

    def solve(self) -> int:
        """The k in 0..n that exposes least, the smaller one on a tie."""
        crossing = bisect_left(range(self.n + 1), 0.0, key=lambda k: self._exposed_device_us(k) - self._overrun_us(k))
        return cheapest(min(crossing, self.n), self.exposed_us)

    def _exposed_device_us(self, k: int) -> float:
        return max(self.device_us(k) - self.bubble_us, 0.0)

    def _overrun_us(self, k: int) -> float:
        overruns = (map(operator.sub, accumulate(cost[k:]), self.windows_us[resource][k:]) for resource, cost in self.costs_us.items())
        return max(0.0, max(chain.from_iterable(overruns), default=0.0))

    @functools.cached_property
    def _tightest(self) -> dict[int, Excess]:
        return {}

    @functools.cached_property
    def _gpu_prefix(self) -> list[float]:
        return list(accumulate(self.gpu_us, initial=0.0))


def window_lengths(forward_us: Sequence[float], backward_us: Sequence[float], commit_us: float = 0.0) -> tuple[float, ...]:
    """W(m) for every unit, less the common t_b.

    It is what the device computes between the unit's gradient, or the commit where that is later,
    and its next use.
    """
    left_us = max(sum(backward_us) - commit_us, 0.0)
    forward, backward = (accumulate(us[:-1], initial=0.0) for us in (forward_us, backward_us))
    return tuple(f + min(b, left_us) for f, b in zip(forward, backward, strict=True))


def lost_us(forward_us: Sequence[float], units: Sequence[UnitProfile]) -> tuple[float, ...]:
    """How much shorter collectives make the window of every unit.

    The window is then from the end of the unit's reduce-scatter to the begin of its all-gather.
    Collectives run one after the other. Where they are late, they hold the forward up. That makes
    windows longer, so the loss may be negative.
    """
    ready_us, computed_us = [0.0] * len(units), 0.0
    end_us = 0.0
    for u in reversed(units):
        computed_us += u.backward_us
        end_us = max(end_us, computed_us) + u.reduce_scatter_us
        ready_us[u.index] = end_us - computed_us
    lost, held_up_us = [], 0.0
    forward_begin_us = computed_us
    for u, before_us in zip(units, (0.0, *forward_us), strict=False):
        forward_begin_us += before_us
        end_us += u.all_gather_us + u.gather_us
        held_up_us = max(held_up_us, end_us - forward_begin_us)
        lost.append(ready_us[u.index] + u.all_gather_us + u.gather_us - held_up_us)
    return tuple(lost)


def early_us(forward_us: Sequence[float], units: Sequence[UnitProfile], ahead: int) -> tuple[float, ...]:
    """How much earlier than its forward each unit's update must have ended.

    A unit whose weights are in shards is gathered `ahead` forwards before it is read, and whoever
    launches these forwards waits until it is updated.
    """
    return tuple(sum(forward_us[max(u.index - ahead, 0) : u.index]) if u.gathered_params else 0.0 for u in units)


def windows_under(discipline: Discipline, profile: Profile, guard: float) -> Windows:
    """The windows of a measured model under a runtime that works by this discipline."""
    return windows_of(profile, guard=guard, chunk_params=discipline.chunk_params, early_updates=discipline.early_updates,
                      updates_in_backward=discipline.commit_at == "backward_start", one_barrier=discipline.barrier != "none",
                      units_ahead=discipline.units_ahead)


def windows_of(
    profile: Profile, *, guard: float, chunk_params: int | None, updates_in_backward: bool, early_updates: bool = False,
    one_barrier: bool = False, units_ahead: int = 0,
) -> Windows:  # fmt: skip
    """The windows of a measured model; CPU times are multiplied by `guard`.

    Copies to the host always start in the backward, and so do `early_updates` by the CPU.

    With `one_barrier` the whole forward waits for all updates, so that no window has forward time
    in it.
    """
    units = profile.units
    forward, backward = [0.0 if one_barrier else u.forward_us for u in units], [u.backward_us for u in units]
    commit_us = profile.commit_us if updates_in_backward else sum(backward)
    lengths = {"h2d": window_lengths(forward, backward, commit_us), "d2h": window_lengths(forward, backward)}
    if profile.has_collectives or profile.gathers:
        less_us = tuple(map(operator.add, lost_us(forward, units), early_us(forward, units, units_ahead)))
        lengths = {q: tuple(w - less for w, less in zip(own, less_us, strict=True)) for q, own in lengths.items()}
    lengths = {q: tuple(w + profile.bubble_us for w in own) for q, own in lengths.items()}
    lengths["cpu"] = lengths["d2h" if early_updates else "h2d"]
    costs = {"d2h": tuple(u.d2h_us for u in units),
             "cpu": tuple(guard * u.cpu_update_us for u in units),
             "h2d": tuple(u.reloaded_share * u.h2d_us + u.fetch_us for u in units)}
    chunk = [1.0 if chunk_params is None else min(1.0, chunk_params / u.params) for u in units]
    pipeline = [sum(cost[u.index] for cost in costs.values()) for u in units]
    windows = {q: tuple(w - share * (whole - own) for w, share, whole, own in zip(lengths[q], chunk, pipeline, costs[q], strict=True))
               for q in costs}
    streamed = {"d2h": tuple(u.stream_out_us for u in units), "cpu": (0.0,) * len(units), "h2d": tuple(u.stream_in_us for u in units)}
    if (rate := bytes_per_us(profile)) is not None:
        windows["host_memory"] = lengths["cpu"]
        costs["host_memory"] = tuple(guard * cpu_bytes(u) / rate for u in units)
        streamed["host_memory"] = tuple(streamed_bytes(u) / rate for u in units)
    return Windows(windows, costs, tuple(u.gpu_update_us for u in units), streamed, bubble_us=profile.bubble_us)
