"""The tensors of a model that are to get values, each with its name in a source.

All is checked here, before anything of the model is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.loading.source import Form, TensorSource, require_form


@dataclass(frozen=True, eq=False)
class Awaited:
    """One parameter or buffer.

    name      the source's; None where the source does not give it, and its own values stay
    places    modules that hold it, with its name there
    """

    tensor: torch.Tensor
    name: str | None
    places: tuple[tuple[nn.Module, str], ...]


def on_meta_in_words(model: nn.Module) -> str | None:
    """Which parameters or buffers of the model are on the meta device; None where none is."""
    names = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    return f"{len(names)} tensor(s) of the model are on the meta device, without values ({names[0]}, ...)" if names else None


def awaited_tensors(model: nn.Module, source: TensorSource) -> tuple[Awaited, ...]:
    """Every parameter and buffer of a model, tied ones once, in the order of `named_parameters`.

    Raises UnsupportedError where the source lacks one or has another, where shapes or dtypes do not
    fit, and where something on the meta device has no name in a source.
    """
    forms = source.forms()
    saved = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in saved.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    if forms is not None:
        _require_all(list(by_tensor.values()), saved, forms, source.described)
    found = []
    for tensor, places in _held(model):
        names = by_tensor.get(id(tensor), [])
        if tensor.is_meta and not names:
            raise UnsupportedError(
                f"{_name_of(model, tensor)} is on the meta device and not in state_dict(), so no loader gives it values: a non-persistent "
                "buffer, as rotary embeddings have it. Make the model inside hytrain_fx.on_meta(), which leaves buffers with values")
        _require_plain(names[0] if names else "", tensor)
        found.append(Awaited(tensor, _asked(names, tensor, forms), tuple(places)))
    _require_no_others(model)
    return tuple(found)


def _asked(names: Sequence[str], tensor: torch.Tensor, forms: Mapping[str, Form] | None) -> str | None:
    """The name by which a source is asked for a tensor that a model has by these."""
    if forms is None:
        return names[0] if tensor.is_meta else None
    # the last one, as load_state_dict() writes them one after the other
    return next((name for name in reversed(names) if name in forms), None)


def _held(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[tuple[nn.Module, str]]]]:
    """Parameters, then buffers, with the modules that hold them."""
    held: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
    for kind in ("named_parameters", "named_buffers"):
        for module in model.modules():
            for name, tensor in getattr(module, kind)(recurse=False, remove_duplicate=False):
                held.setdefault(id(tensor), (tensor, []))[1].append((module, name))
    yield from held.values()


def _require_all(groups: Sequence[list[str]], saved: Mapping[str, torch.Tensor], forms: Mapping[str, Form], where: str) -> None:
    """`groups`: the names of each tensor."""
    missing = [names[0] for names in groups if not any(name in forms for name in names)]
    unexpected = [name for name in forms if name not in saved]
    if missing or unexpected:
        lists = [f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
                 for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise UnsupportedError(f"{where} does not have the names of the model's state_dict(): {' and '.join(lists)}. Hand over a function "
                               "of a name that asks it by other names, loader=lambda name: source(...)")
    for name, form in forms.items():
        require_form(name, form, saved[name], where)


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        return
    if type(tensor) is not nn.Parameter:
        raise UnsupportedError(f"{name} is a {type(tensor).__name__}; supported are plain torch.nn.Parameter objects")
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise UnsupportedError(f"{name} has hooks and no values yet; register hooks after hytrain_fx.compile()")


def _require_no_others(model: nn.Module) -> None:
    """No tensor on the meta device is a plain attribute of a module: nothing would find it."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UnsupportedError(f"{path + '.' if path else ''}{name} is a tensor on the meta device and no parameter or buffer, so "
                                       "no loader gives it values. Make the model inside hytrain_fx.on_meta(), which leaves it with values")


def _name_of(model: nn.Module, tensor: torch.Tensor) -> str:
    everything = chain(model.named_parameters(), model.named_buffers())
    return next(name for name, other in everything if other is tensor)
