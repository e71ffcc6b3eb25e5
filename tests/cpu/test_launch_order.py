"""launch_order: a fused kernel comes once its inputs are made, and holds nothing back."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.launch_order import LaunchOrder, in_graph_order


@dataclass(frozen=True)
class Dependency:
    name: str


@dataclass(frozen=True)
class Kernel:
    """A node of the scheduler, as far as it is read. Its parts stand at `at` in the graph."""

    at: tuple[int, ...]
    needs: frozenset[int] = frozenset()

    @property
    def min_order(self) -> int:
        return min(self.at)

    @property
    def unmet_dependencies(self) -> list[Dependency]:
        return [Dependency(f"buf{of}") for of in sorted(self.needs)]

    def get_buffer_names(self) -> list[str]:
        return [f"buf{of}" for of in self.at]


def inductors(kernels: list[Kernel]) -> list[Kernel]:
    """Inductor's order: by first parts, before each what it needs."""
    maker = {of: kernel for kernel in kernels for of in kernel.at}
    found: dict[Kernel, None] = {}

    def visit(kernel: Kernel) -> None:
        if kernel not in found:
            for of in sorted(kernel.needs):
                visit(maker[of])
            found[kernel] = None

    for kernel in sorted(kernels, key=lambda one: one.min_order):
        visit(kernel)
    return list(found)


def test_a_sum_over_layers_comes_behind_the_last_of_them() -> None:
    """The example in the module's docstring: the offloads no longer stand behind it."""
    sums = Kernel((1, 4, 7), frozenset({0, 3, 6}))
    chain = {0: Kernel((0,)), 3: Kernel((3,), frozenset({0})), 6: Kernel((6,), frozenset({3}))}
    offloads = {at: Kernel((at,), frozenset({at - 2})) for at in (2, 5)}
    last = Kernel((8,), frozenset({6, 7}))
    before = inductors([*chain.values(), sums, *offloads.values(), last])
    assert before == [chain[0], chain[3], chain[6], sums, offloads[2], offloads[5], last]
    assert in_graph_order(before) == [chain[0], offloads[2], chain[3], offloads[5], chain[6], sums, last]


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(1, 6), max_size=3)), min_size=1, max_size=24))
def test_any_order_is_valid_and_pulls_nothing_forward(drawn: list[tuple[int, set[int]]]) -> None:
    """Each kernel comes once, behind what it needs, and no kernel sooner than its first part.

    Sooner: before another whose place, as it stands in the graph or as its inputs let it, is
    earlier. Kernels of one part each keep the graph's order.
    """
    group_of: list[int] = []  # of each part: those of a group are one kernel
    parts: list[list[int]] = []
    needs: list[set[int]] = []
    for at, (group, back) in enumerate(drawn):
        reads = {at - of for of in back if at >= of}
        # a part joins a kernel where no other kernel would have to run between
        if group < len(parts) and all(group_of[of] == group or max(parts[group_of[of]]) < min(parts[group]) for of in reads):
            parts[group].append(at)
            needs[group] |= {of for of in reads if group_of[of] != group}
            group_of.append(group)
        else:
            group_of.append(len(parts))
            parts.append([at])
            needs.append(reads)
    given_order = inductors([Kernel(tuple(of), frozenset(needed)) for of, needed in zip(parts, needs, strict=True)])
    found = in_graph_order(given_order)
    assert sorted(kernel.at for kernel in found) == sorted(kernel.at for kernel in given_order)
    maker = {of: kernel for kernel in found for of in kernel.at}
    place: dict[Kernel, int] = {}
    for kernel in found:
        assert all(maker[of] in place for of in kernel.needs)
        place[kernel] = max([kernel.min_order, *(place[maker[of]] for of in kernel.needs)])
    assert list(place.values()) == sorted(place.values())
    if all(len(kernel.at) == 1 for kernel in found):
        assert [kernel.min_order for kernel in found] == list(range(len(drawn)))


def test_other_nodes_are_an_error_with_the_version() -> None:
    """Nodes of another torch may not have what is read of them."""
    with pytest.raises(UnsupportedError, match=r"the nodes of Inductor's scheduler in torch .*'min_order'"):
        LaunchOrder()([SimpleNamespace(unmet_dependencies=[])])


def test_inductors_cache_knows_it_by_its_text() -> None:
    """Torch 2.13 asks for an id, torch 2.11 pickles it. Both are the same in the next process."""
    assert LaunchOrder().uuid() == LaunchOrder().uuid()
    assert pickle.dumps(LaunchOrder()) == pickle.dumps(pickle.loads(pickle.dumps(LaunchOrder())))
