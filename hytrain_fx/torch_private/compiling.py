"""What is private of torch.compile.

The compiled call, Inductor's two halves, and what their graphs and errors say.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tqdm
from torch import fx, nn

from hytrain_fx.torch_private.names import private_name

# By path: where threads stand that have nothing to do.
_WAITING = tuple(
    str(Path(module.__file__ or "").parent / name)
    for module, names in ((threading, ("threading.py", "concurrent", "multiprocessing", "queue.py", "selectors.py")),
                          (torch, ("_inductor",)), (tqdm, ("_monitor.py",)))
    for name in names
)


def is_tracing() -> bool:
    """Whether torch.compile is building a graph on this thread right now."""
    return private_name("torch._guards", "TracingContext").try_get() is not None


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A compiled form of a method.

    codes    by `id`: code objects of frames that Dynamo has compiled for it, weakly. Frames behind
             graph breaks have code that all models of a class share
    """

    call: Callable[..., Any]
    codes: dict[int, Callable[[], types.CodeType | None]] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop what Dynamo has compiled of shared code that is near its limit of compiled forms.

        Call it when the compiled call is no longer used. Dynamo keeps the forms of a frame with the
        frame's code. Beyond the limit (`recompile_limit`) it runs the frame uncompiled. Where torch
        counts the forms of each call by themselves nothing is to be dropped. Else all of them
        count, and other models of the class compile theirs again at their next call.

        Nothing is dropped while another thread runs Python: it may be in that code, or come to it
        at any moment, and Dynamo would read memory that is gone (seen to end the process). Threads
        that wait in torch's or Python's own code do not count.
        """
        if isolates_calls() or is_tracing() or another_thread_runs():
            return
        forms = private_name("torch._dynamo.eval_frame", "_debug_get_cache_entry_list")
        most = private_name("torch._dynamo", "config").recompile_limit // 2
        for found in tuple(self.codes.values()):
            if (code := found()) is not None and len(forms(code)) >= most:
                private_name("torch._dynamo.eval_frame", "reset_code")(code)


def isolates_calls() -> bool:
    """Whether torch.compile can count the compiled forms of each of its calls by themselves."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def another_thread_runs() -> bool:
    """Whether a thread besides this one may be about to run a model.

    Not one in the code of these alone: threads that wait for a future or a timer, tqdm's monitor,
    and Inductor's, which are there from the first compilation on.
    """
    own = threading.get_ident()
    return any(of != own and not _waits(frame) for of, frame in sys._current_frames().items())


def _waits(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(_WAITING):
        frame = frame.f_back
    return frame is None


def compiled_call_of(
    model: nn.Module,
    plain: types.MethodType,
    backend: Callable[..., Any],
    dynamic: bool | None,
    mode: str | None,
    options: dict[str, Any],
    on_eager: Callable[[], None],
) -> CompiledCall:
    """The compiled form of `plain`, a method of `model`.

    Each one captures its own graphs. That of `model._call_impl` is what `model.compile(...)` makes.

    `on_eager` is called before a run that is not one graph from end to end: a graph break, or
    Dynamo gave up (recompile limit).

    `Module.compile` compiles `_call_impl`. Dynamo skips that frame, and the forward too where it is
    torch's own (nn.Sequential): the model would run uncompiled. So a frame of ours stands before
    it, with a code object of its own: recompiles are counted and limited by code object, and the
    ninth model of a class would run uncompiled too. Dynamo looks compiled code up by code object
    and backend, also that of a forward split by graph breaks: with a backend function of its own, a
    second call finds none of the first one's.
    """

    codes: dict[int, Callable[[], types.CodeType | None]] = {}

    def own_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        codes.update((id(code), weakref.ref(code)) for code in _codes_being_compiled())
        return backend(gm, example_inputs, **kwargs)

    # What run_model calls Dynamo would compile, and CUDA's current stream is another object in
    # compiled code.
    told = torch.compiler.disable(on_eager)
    function = plain.__func__

    # Dynamo traces into this frame but, marked so, leaves it alone where it is run: then it is
    # plain Python.
    def run_model(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            told()
        return function(model, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return run_model(*args, **kwargs)

    private_name("torch._dynamo.eval_frame", "skip_code")(run_model.__code__)
    # The name is part of what automatic dynamic shapes are remembered by.
    code = call.__code__.replace(co_name=f"{plain.__name__.lstrip('_')}_of_{type(model).__name__}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    apart: dict[str, Any] = {"isolate_recompiles": True} if isolates_calls() else {}
    return CompiledCall(torch.compile(own, backend=own_backend, dynamic=dynamic, mode=mode, options=options or None, **apart), codes)


def _codes_being_compiled() -> Iterator[types.CodeType]:
    """The code of the frame for which Dynamo calls a backend now.

    What comes after a graph break is a frame with code of its own. Then that of the frame that was
    broken too: no backend is called for one that has no operator before the break.
    """
    code: types.CodeType = private_name("torch._dynamo.symbolic_convert", "InstructionTranslator").current_tx().f_code
    yield code
    resumed = private_name("torch._dynamo.resume_execution", "ContinueExecutionCache").generated_code_metadata
    if code in resumed:
        yield resumed[code].code


def graph_break_after(gm: fx.GraphModule) -> str | None:
    """Where and why Dynamo ended this graph before the forward's end, None where it did not.

    As "file:line in function: reason".
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    frames = getattr(reason, "user_stack", None)
    if not getattr(reason, "graph_break", False) or not frames:
        return None
    place = frames[-1]
    return f"{place.filename}:{place.lineno} in {place.name}: {str(getattr(reason, 'reason', '')).partition(chr(10))[0]}"


def raised_in_backend(error: Exception) -> Exception | None:
    """What a backend raised, of an error that Dynamo made of it; None where it is another error."""
    made: type[Exception] = private_name("torch._dynamo.exc", "BackendCompilerFailed")
    return getattr(error, "inner_exception", None) if isinstance(error, made) else None


def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any], inner_compile: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run Inductor's front half, handing each graph to `inner_compile`.

    That is AOTAutograd, decompositions and partitioner.

    `options` are Inductor config patches; they also hold for the backward graph, which is compiled
    later.
    """
    run = private_name("torch._inductor.compile_fx", "compile_fx")
    return run(gm, inputs, inner_compile=inner_compile, config_patches=options or None)


def compile_fx_inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Run Inductor's back half on one graph: lowering, scheduling, code generation."""
    return private_name("torch._inductor.compile_fx", "compile_fx_inner")(gm, inputs, **kwargs)

Edit = Callable[[Sequence[Any]], Sequence[Any]]
"""Makes other results of a compiled graph's."""


def boxed_within(around: Callable[[], AbstractContextManager[Edit | None]], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` run inside `around()`, with the calling convention of Inductor's output.

    That is one list of arguments, emptied by the callee.

    What `around()` gives edits the results, if it gives anything.
    """

    def run(args: list[Any]) -> Any:
        with around() as edit:
            results = compiled(args)
            return results if edit is None else edit(results)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def autograd_cache_off() -> Iterator[None]:
    """Keep AOTAutogradCache out.

    It is consulted before `inner_compile`, and its key does not know of a rewrite.
    """
    with private_name("torch._functorch", "config").patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def layouts_kept() -> Iterator[None]:
    """Keep Inductor from copying convolution weights to channels-last (`layout_optimization`).

    It does so where the graph begins, ahead of any node.
    """
    with private_name("torch._inductor", "config").patch(layout_optimization=False):
        yield


def plain_input(desc: object) -> int | None:
    """The example input of the backend that a placeholder's `meta["desc"]` names.

    Its position, or None.
    """
    plain = private_name("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
    return int(desc.idx) if isinstance(desc, plain) else None


def is_given_gradient(desc: object) -> bool:
    """Whether a placeholder's `meta["desc"]` names a gradient that autograd hands to a backward."""
    return isinstance(desc, private_name("torch._functorch._aot_autograd.descriptors", "TangentAOTInput"))


def gradient_of(desc: object) -> int | None:
    """The example input of the backend whose gradient an output's descriptor names.

    Its position, or None.
    """
    grad = private_name("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
    return plain_input(desc.grad_of) if isinstance(desc, grad) else None
