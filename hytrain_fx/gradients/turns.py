"""What goes from rank to rank together in one backward graph, and in which order.

    ranks with the same nodes     a node's gradients together, in the order of rank 0
    a node that one rank lacks    the same: that rank adds zeros
    nodes that share rows         their rows together, as one rank has no part that another sends

So a rank whose batch takes a branch of its own (another graph there) trains with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx

Rows = tuple[int, ...]


def turns(of_ranks: Sequence[Sequence[Rows]]) -> tuple[Rows, ...]:
    """The rows that go together, of the nodes that each rank runs, in order.

    Each row is in one of them. One that is a node of every rank that has its rows is that node; the
    rows of others are sorted.
    """
    nodes = list(dict.fromkeys(node for of_rank in of_ranks for node in of_rank))
    groups = networkx.utils.UnionFind(row for node in nodes for row in node)
    for node in nodes:
        groups.union(*node)
    of_group: dict[int, list[Rows]] = {}
    for node in nodes:
        of_group.setdefault(groups[node[0]], []).append(node)
    return tuple(alike[0] if len(alike) == 1 else _all_rows(alike) for alike in of_group.values())


def _all_rows(nodes: Iterable[Rows]) -> Rows:
    return tuple(sorted({row for node in nodes for row in node}))
