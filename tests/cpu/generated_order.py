"""Check on Inductor's generated Python that each inserted call stands where it was put.

The scheduler may move a call as long as its operands exist. A call that sank far below the kernel
that made its operands starts its copy late; a wait that rose far above its first reader blocks too
early. Both train correctly, only slower, so this measures, on text:

    extern_kernels.mm(buf4, primals_7, out=buf5)                               distance
    torch.ops.hytrain_fx.release.default([buf5], 0, [3])                       0: nothing between
    cpp_fused_add_1(buf5, buf6)
    buf9 = torch.ops.hytrain_fx.grad_offload.default([buf5, buf6], 0, [3, 4])  0: the line above
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hytrain_fx.errors import GraphInvariantError

_OURS = re.compile(r"torch\.ops\.hytrain_fx\.(\w+)\.default\((.*)\)")
_BUFFER = re.compile(r"\b(?:buf\d+|primals_\d+|arg\d+_\d+|tangents_\d+)\b")
_RENAMED = re.compile(r"^\s+(buf\d+) = (buf\d+)$", re.MULTILINE)
_LAUNCH = re.compile(r"^(?:\w+ = )?(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+|(?:cpp|triton)_\w+(?:\.run)?|aten\.\w+)\(")
_BODY = re.compile(r"^\s+def call\(self, args\):|^def call\(args\):")


@dataclass(frozen=True, slots=True)
class CallDistance:
    """One inserted call in generated code.

    distance   launches of others between the call and its neighbour: the last launch before it that
               touches one of its operands; for a wait, the first launch after it that does. 0 where
               there is no such launch
    """

    op: str
    line: int
    distance: int


def call_distances(code: str) -> tuple[CallDistance, ...]:
    """The inserted calls of one generated module, in order."""
    launches = list(_launches(code))
    renamed = dict(_RENAMED.findall(code))
    found = []
    for index, (line, text) in enumerate(launches):
        ours = _OURS.search(text)
        if ours is None:
            continue
        named = set(_BUFFER.findall(ours[2]))
        operands = named | {renamed[name] for name in named if name in renamed}
        around = launches[index + 1 :] if ours[1] == "wait" else launches[:index][::-1]
        found.append(CallDistance(ours[1], line, _launches_to(operands, around)))
    return tuple(found)


def check_generated_order(code: str, limit: int) -> tuple[CallDistance, ...]:
    """The distances, after a check that none is over `limit`.

    Raises GraphInvariantError naming the call.
    """
    distances = call_distances(code)
    for call in distances:
        if call.distance > limit:
            raise GraphInvariantError(
                f"{call.op} in line {call.line} of the generated code stands {call.distance} launches from its operands, expected at most "
                f"{limit}: the scheduler has moved it, and updates start late; please report this with the torch version"
            )
    return distances


def _launches(code: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each launch inside the generated `call`."""
    inside = False
    for number, line in enumerate(code.splitlines(), 1):
        inside = inside or bool(_BODY.match(line))
        if inside and _LAUNCH.match(line.strip()):
            yield number, line.strip()


def _launches_to(operands: set[str], launches: list[tuple[int, str]]) -> int:
    """Launches that are not ours before the first of `launches` that touches an operand."""
    passed = 0
    for _, text in launches:
        if operands & set(_BUFFER.findall(text)):
            return passed
        passed += 0 if _OURS.search(text) else 1
    return 0
