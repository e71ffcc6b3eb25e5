"""`hytrain-fx`, or `python -m hytrain_fx`: this machine, reports without a GPU, plans, graphs.

    doctor     whether training with overlap works on this machine, and what it can do
    report     what a model would cost on a machine, for each way of placing the updates (nothing is
               run)
    plan       the plan for a model on a machine, as text or JSON (nothing is run)
    pipeline   what a model would cost as the stages of a pipeline (nothing is run)
    ways       ways to train a large model on several GPUs, side by side (nothing is run)
    share      where it pays that the CPU trains a part of each batch (nothing is run)
    bench      steps of a model timed on this machine: plain, all states on the host, plan solved
    profile    this machine's rates, measured, as a file for `report --device`
    explain    a saved plan as text
    inspect    the graphs of a script or a dump folder, and what each pass inserted
    build      compile the native engine now, instead of at the first use
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hytrain_fx.errors import ConfigError, EngineError, HytrainError
from hytrain_fx.forecast.bench.command import add_bench
from hytrain_fx.forecast.command import Answer, add_doctor, add_pipeline, add_plan, add_profile, add_report, plan_of
from hytrain_fx.forecast.share_command import add_share
from hytrain_fx.forecast.ways_command import add_ways
from hytrain_fx.ir.named_files import read_text, require_writable

if TYPE_CHECKING:
    from torch import nn

    from hytrain_fx.explain.graphs.inspection import Inspection

_STDOUT = Path("-")
_PROGRAM = "hytrain-fx"
_SCRIPT_ONLY = ("html", "svg", "layer", "parameter")
_INSPECT = """Runs a script and inspects the models that it compiles, or lists a dump folder.

    python -m hytrain_fx inspect train.py --html graphs.html -- --steps 20      # everything behind -- is the script's
    python -m hytrain_fx inspect train.py --layer model.layers.0                # the nodes that act for one layer
    python -m hytrain_fx inspect dumped --diff                                  # what compile(..., dump="dumped") wrote

While the script runs, `hytrain_fx.compile` also hands its models to a `Witness`, which keeps them alive until they are inspected: when
the script closes them, or when it ends. Nothing else of the script changes; what it prints goes to stderr.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0, 1 where `doctor` finds that training would not work, or 2 where the command cannot be
    done: one line on stderr says why.

    An error of a script that is inspected is raised as it is.
    """
    own, behind = split_arguments(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(own, argparse.Namespace(script_arguments=behind))
    if behind and args.command != "inspect":
        parser.error(f"unrecognized arguments: -- {' '.join(behind)}")
    try:
        answer = args.run(args)
        shown = answer if isinstance(answer, Answer) else Answer(answer)
        print(shown.text)
        return shown.status
    except _ScriptFailed as failed:
        of_the_script = failed.error
    except (HytrainError, OSError) as error:
        told = str(error) if isinstance(error, EngineError) else " ".join(str(error).split())  # a compiler's lines stay lines
        print(f"{parser.prog} {args.command}: {told}", file=sys.stderr)
        return 2
    raise of_the_script


def _parser() -> argparse.ArgumentParser:
    prog = _PROGRAM if Path(sys.argv[0]).name == _PROGRAM else "python -m hytrain_fx"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_doctor(commands)
    add_report(commands)
    add_plan(commands, _plan)
    add_pipeline(commands)
    add_ways(commands)
    add_share(commands)
    add_profile(commands)
    add_bench(commands)
    explain = commands.add_parser("explain", help="print a saved plan")
    explain.add_argument("--plan", required=True, type=Path, help="a file that holds the text of Plan.to_json()")
    explain.add_argument("--json", action="store_true", help="the plan as JSON, checked")
    explain.set_defaults(run=_explain)
    add_inspect(commands)
    build = commands.add_parser("build", help="compile the native engine, where no wheel brought it")
    build.add_argument("--json", action="store_true", help="the path as JSON")
    build.set_defaults(run=_build)
    return parser


def _explain(args: argparse.Namespace) -> str:
    from hytrain_fx.explain.plan.text import plan_text
    from hytrain_fx.ir.plan import Plan

    plan = Plan.from_json(read_text(args.plan))
    return plan.to_json() if args.json else plan_text(plan)


def _plan(args: argparse.Namespace) -> str:
    from hytrain_fx.explain.plan.text import plan_text

    plan = plan_of(args)
    return plan.to_json() if args.json else plan_text(plan)


def _build(args: argparse.Namespace) -> str:
    from hytrain_fx.runtime.native import libraries

    path = str(libraries.library(libraries.SOURCES, tells=True).path)
    return json.dumps({"library": path}) if args.json else path


# ---- inspect ----


def add_inspect(commands: Any) -> None:
    """The command `inspect`."""
    inspect = commands.add_parser("inspect", help="the graphs of a script, or of a dump folder",
                                  description=_INSPECT, formatter_class=argparse.RawDescriptionHelpFormatter)
    inspect.add_argument("source", type=Path, help="a Python script, or the folder given to compile(..., dump=...)")
    inspect.add_argument("--diff", action="store_true", help="show the inserted nodes of each graph in their context")
    inspect.add_argument("--json", nargs="?", type=Path, const=_STDOUT, metavar="FILE", help="everything as JSON; no FILE: print it")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no other file")
    inspect.add_argument("--svg", type=Path, metavar="FILE", help="write the task graph as a picture")
    inspect.add_argument("--layer", metavar="NAME", help="only the nodes that act for this layer or module path")
    inspect.add_argument("--parameter", metavar="NAME", help="only the nodes that act for this parameter")
    inspect.set_defaults(run=_inspect)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at the first `--`.

    argparse cannot have both options and a rest after a positional.
    """
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


class Witness:
    """Sees the models that are compiled while it watches, and inspects each before it is closed."""

    def __init__(self) -> None:
        self.inspections: list[Inspection] = []
        self._open: list[nn.Module] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Stand in for `compile` and `close`, under both names they can be imported by.

        At the end what is still open is inspected.
        """
        import hytrain_fx
        from hytrain_fx import api

        plain_compile, plain_close = api.compile, api.close

        def compile(model: Any, *args: Any, **options: Any) -> Any:
            compiled = plain_compile(model, *args, **options)
            self._open.append(getattr(model, "__self__", model))
            return compiled

        def close(model: nn.Module) -> None:
            self._inspect(model)
            plain_close(model)

        places = (vars(hytrain_fx), vars(api))
        try:
            for names in places:
                names.update(compile=compile, close=close)
            yield
            for model in tuple(self._open):
                self._inspect(model)
        finally:
            for names in places:
                names.update(compile=plain_compile, close=plain_close)

    def _inspect(self, model: nn.Module) -> None:
        from hytrain_fx import api

        if any(model is one for one in self._open):
            self.inspections.append(api.inspect(model))
            self._open = [one for one in self._open if one is not model]


class _ScriptFailed(Exception):
    """The script raised this error: it is not one of the command line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def inspect_script(script: Path, arguments: Sequence[str] = ()) -> tuple[Inspection, ...]:
    """Run `script` as `python script arguments...` would, and inspect every model that it compiled.

    The models come in the order of closing.

    Raises ConfigError where it compiled none, _ScriptFailed with what the script raises, and its
    SystemExit with a status other than 0.
    """
    witness = Witness()
    argv, path = sys.argv, list(sys.path)
    try:
        sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *path[1:]]
        with witness.watching(), contextlib.redirect_stdout(sys.stderr), _ended_well():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    if not witness.inspections:
        raise ConfigError(f"{script} compiled no model; expected a call of hytrain_fx.compile(model, optimizer) in it")
    return tuple(witness.inspections)


@contextlib.contextmanager
def _ended_well() -> Iterator[None]:
    """A script may end with `sys.exit(0)`. What it raises is told from an error of inspecting."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except Exception as error:
        raise _ScriptFailed(error) from error


def _inspect(args: argparse.Namespace) -> str:
    for path in (args.html, args.svg, args.json):
        require_writable(path)  # a script may run for hours
    if args.layer and args.parameter:
        raise ConfigError(f"found --layer {args.layer} and --parameter {args.parameter}, expected one: nodes are those of one name")
    named = [path for path in (args.html, args.svg, args.json) if path not in (None, _STDOUT)]
    twice = [path for at, path in enumerate(named) if path in named[:at]]
    if twice:
        raise ConfigError(f"found {twice[0]} given twice, expected a file of its own for each of --html, --svg and --json")
    if args.source.is_file():
        return "\n\n".join(_shown(args, number, found) for number, found in enumerate(inspect_script(args.source, args.script_arguments)))
    asked = [name for name in _SCRIPT_ONLY if getattr(args, name) is not None]
    if asked:
        raise ConfigError(f"found --{asked[0]} for {args.source}, expected a script: a dump folder has texts only")
    if not args.source.is_dir():
        raise ConfigError(f"found neither a script nor a folder {str(args.source)!r}; expected a Python script, or the folder given to "
                          "compile(..., dump=...)")
    return _dumped(args)


def _shown(args: argparse.Namespace, number: int, found: Inspection) -> str:
    """What is printed of one model.

    Files are written; those of a second model have its number before the suffix.
    """
    from hytrain_fx.explain.graphs.json import nodes_json

    search = args.parameter or args.layer
    nodes = found.find(search) if search else ()
    told: list[str] = []
    forms: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (args.html, lambda: found.to_html(search or "")),
        (args.svg, found.to_svg),
        (args.json, lambda: nodes_json(nodes) if search else found.to_json()),
    )
    for path, make in forms:
        if path == _STDOUT:
            return make()
        if path is not None:
            path = path.with_stem(f"{path.stem}.{number}") if number else path
            path.write_text(make(), encoding="utf-8")
            told.append(f"wrote {path}")
    if search:
        told += [f"{node.graph}  {node.op}  # {node.note}" for node in nodes]
    else:
        told.append(found.diff() if args.diff else str(found))
    return "\n".join(told)


def _dumped(args: argparse.Namespace) -> str:
    from hytrain_fx.explain.graphs.dump_folder import dump_diff, dump_text, read_dump

    passes = read_dump(args.source)
    if args.json is None:
        return dump_diff(passes) if args.diff else dump_text(passes)
    text = json.dumps([asdict(dumped) | {"after": str(dumped.after)} for dumped in passes], indent=1)
    if args.json == _STDOUT:
        return text
    args.json.write_text(text, encoding="utf-8")
    return f"wrote {args.json}"


if __name__ == "__main__":
    sys.exit(main())
