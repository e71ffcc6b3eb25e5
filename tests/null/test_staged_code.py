"""One list of lines for all stages of a graph gives every stage back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.explain.graphs.staged_code import CodeLine, code_lines, staged

CAPTURED = '''class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 4]", s0: "Sym(s0)", plain):
        # File: /home/me/net.py:12 in forward, code: return self.up(x)
        mm: "f32[2, 8]" = torch.ops.aten.mm.default(primals_1, plain);  primals_1 = plain = None

        # No stacktrace found for following nodes
        relu: "f32[2, 8]" = torch.ops.aten.relu.default(mm);  mm = None
        return (relu, s0)
'''
REWRITTEN = '''class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8, 4]", s0: "Sym(s0)", plain):
        # File: /home/me/net.py:12 in forward, code: return self.up(x)
        mm: "f32[2, 8]" = torch.ops.aten.mm.default(primals_1, plain);  primals_1 = plain = None

        # No stacktrace found for following nodes
        release_default = torch.ops.hytrain_fx.release.default([mm], 0, [0]);  release_default = None
        relu: "f32[2, 8]" = torch.ops.aten.relu.default(mm);  mm = None
        return (relu, None)
'''


def test_a_text_is_read_as_arguments_nodes_and_return() -> None:
    """Arguments are lines of their own, and comments become the origin of the lines below.

    What frees a value is left out.
    """
    assert code_lines(CAPTURED) == [
        CodeLine("primals_1", 'primals_1: "f32[8, 4]"', "", True),
        CodeLine("s0", 's0: "Sym(s0)"', "", True),
        CodeLine("plain", "plain", "", True),
        CodeLine("mm", 'mm: "f32[2, 8]" = torch.ops.aten.mm.default(primals_1, plain)', "net.py:12  return self.up(x)"),
        CodeLine("relu", 'relu: "f32[2, 8]" = torch.ops.aten.relu.default(mm)', ""),
        CodeLine("", "return (relu, s0)", ""),
    ]


def test_a_rewrite_adds_and_ends_lines() -> None:
    """Only what differs is there twice: the inserted node comes, the old return goes."""
    lines = staged((CAPTURED, CAPTURED, REWRITTEN))
    changed = [(one.line.text.split(" ")[0], one.begin, one.end) for one in lines if (one.begin, one.end) != (0, None)]
    assert changed == [("release_default", 2, None), ("return", 0, 2), ("return", 2, None)]
    assert len(lines) == len(code_lines(CAPTURED)) + 2


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), min_size=1, max_size=6))
def test_every_stage_comes_back(stages: list[list[str]]) -> None:
    """Whatever a pass inserts, removes or moves, each stage's lines are its text's, in order."""
    texts = ["\n".join(["def forward(self):", *(f"{name} = f()" for name in names)]) for names in stages]
    lines = staged(texts)
    for stage, text in enumerate(texts):
        shown = [one.line for one in lines if one.begin <= stage and (one.end is None or stage < one.end)]
        assert shown == code_lines(text)


def test_no_stage_has_no_lines() -> None:
    """A graph that no pass saw shows nothing."""
    assert staged(()) == []
