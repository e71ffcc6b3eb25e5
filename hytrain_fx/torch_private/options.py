"""What this torch's Inductor takes as options and modes, read where torch keeps it.

A wrong one is an error before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

import torch

from hytrain_fx.errors import ConfigError, UnsupportedError


def graph_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Inductor options that a graph is compiled with. The user's go before ours."""
    return {**graph_order_kept(), **(mode_options(mode) if mode else {}), **(options or {})}


def graph_order_kept() -> dict[str, Any]:
    """What Inductor is given besides: kernels are launched in the order of the graph.

    Its own search for an order with less memory knows nothing of what our nodes start. Where a
    batch has few tokens it puts all gradients of weights, and so all copies to the host, behind the
    backward. `LaunchOrder` says what its fused kernels do.
    """
    from hytrain_fx.torch_private.launch_order import LaunchOrder  # it imports Inductor, for 2 s

    return {"reorder_for_peak_memory": False, "_post_fusion_custom_pass": LaunchOrder()}


def known_options(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The Inductor options under the names that Inductor has them by.

    Raises ConfigError for a mode or an option that torch does not know.

    The rules are those of `torch.compile`, which applies them to its own backend only.
    """
    if mode is not None:
        mode_options(mode)
    if not options:
        return {}
    config = _inductor_config()
    values, known = config.get_config_copy(), {}
    for given, value in options.items():
        name = given.replace("-", "_")
        if name not in values:
            raise ConfigError(f"options has {given!r}: expected the name of an Inductor option of torch {torch.__version__}"
                              f"{_nearest(name, values)}; torch._inductor.list_options() lists them")
        kind = config.get_type(name)
        if get_origin(kind) is None and not isinstance(value, kind):
            raise ConfigError(f"options has {given!r}={value!r}: expected {_named(kind)}, as torch {torch.__version__} has it")
        known[name] = value
    if known.get("triton.cudagraphs"):
        raise ConfigError("options has 'triton.cudagraphs'=True: expected options without CUDA graphs, which are not shown to work here")
    return known


def mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a `torch.compile(mode=...)` name stands for.

    Raises ConfigError for a name that torch does not know.
    """
    try:
        from torch._inductor import list_mode_options
    except ImportError:
        raise UnsupportedError(f"torch {torch.__version__} has no torch._inductor.list_mode_options; "
                               "hytrain_fx needs it and was run on torch 2.11 and 2.13") from None
    modes: dict[str, Any] = list_mode_options()
    if mode not in modes:
        accepted = ", ".join(repr(name) for name, options in modes.items() if not options.get("triton.cudagraphs"))
        raise ConfigError(f"option mode={mode!r}: expected None or one of {accepted}")
    return dict(modes[mode])


def _inductor_config() -> Any:
    from torch._inductor import config

    missing = [name for name in ("get_config_copy", "get_type") if not hasattr(config, name)]
    if missing:
        raise UnsupportedError(f"torch {torch.__version__} has no torch._inductor.config.{missing[0]}; "
                               "hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return config


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _named(kind: Any) -> str:
    return f"a value of type {getattr(kind, '__name__', kind)}"
