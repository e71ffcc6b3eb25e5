"""A model's own initialisation, run for one tensor at a time, with the bits of the plain one.

    with from_init() as loader:
        model = Model()             parameters are on the meta device; what is done to them is noted

    what is noted       operations that write to memory on the meta device, in order, with the state
                        of torch's generator before each that draws from it. These are also run at
                        once, on memory that is dropped, so that the generator goes on as it would
    a tensor is read    the operations that its values depend on are run again, on the CPU

Which operations these are is told by memory (storages): views write to what they are views of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.loading.meta_parameters import parameters_on_meta
from hytrain_fx.loading.source import TensorSource
from hytrain_fx.torch_private.operators import every_operation, signature_of

_DRAWS: Final = frozenset({"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
                           "rand_like", "randn_like", "randint_like"})
"""Operations that draw as many numbers whatever values they are given."""
_EMPTY: Final = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
_MOVES_MEMORY: Final = frozenset({"set_", "resize_"})


def from_init() -> InitRecord:
    """Within it models are made without memory, and `compile(loader=...)` initialises them.

    Parameters have the bits of the plain model on the CPU after the same torch.manual_seed(), and
    the generator is afterwards where it would be. Raises UnsupportedError within it for what cannot
    be run again: random numbers whose count depends on values, values of a parameter that are
    written to something else, a generator of the code's own.
    """
    return InitRecord()


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """One operation.

    reads, writes   storages
    outputs         what it returned, on the meta device
    generator       torch's CPU generator before it, where it draws
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[torch.Tensor, ...]
    generator: torch.Tensor | None


class InitRecord(TensorSource):
    """What was done to the parameters of models that were made within it."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._known: set[int] = set()  # storages that some operation has written
        self._unwritten: dict[int, torch.Tensor] = {}  # by storage: memory with values that nobody has written yet
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}  # by storage: parameters with values that modules do not have
        self._within: ExitStack | None = None

    # ---- while models are made ----

    def __enter__(self) -> Self:
        if self._within is not None or self._noted:
            raise UnsupportedError("this from_init() was entered before; make another one")
        self._within = ExitStack()
        self._within.enter_context(parameters_on_meta(self._begin_with))
        self._within.enter_context(every_operation(self._operation))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._within is not None
        self._within.close()
        self._within = None
        self._unwritten.clear()
        self._replaced.clear()

    def _begin_with(self, parameter: nn.Parameter, meta: nn.Parameter) -> None:
        """A module has registered a parameter: the values that it has by now, if it has any."""
        self._replaced[_storage(parameter)] = weakref.ref(parameter)
        if self._unwritten.pop(_storage(parameter), None) is None:
            values, memory = parameter.detach(), frozenset({_storage(meta)})
            self._note(_Noted(torch.Tensor.copy_, (meta.detach(), values), {}, memory, memory, (), None))

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        given = _tensors((args, kwargs))
        on_meta = any(tensor.is_meta for tensor in given)
        if not on_meta:
            result = operation(*args, **kwargs)
            made = _tensors(result)
            if not any(tensor.is_meta for tensor in made):
                self._watch_plain(operation, name, args, kwargs, made)
                return result
        generator = self._draw(operation, name, args, kwargs)
        written = _written(operation, args, kwargs)
        if name in _MOVES_MEMORY or any(not tensor.is_meta for tensor in written):
            raise UnsupportedError(f"initialisation runs {name} with a parameter that has no values within from_init(), and its result is "
                                   "kept elsewhere; initialise the model on the CPU, save it, and use from_safetensors")
        if on_meta:
            result = operation(*_without_values(args), **_without_values(kwargs))
            made = _tensors(result)
        before = frozenset(map(_storage, filter(_is_meta, given)))
        new = [tensor for tensor in made if tensor.is_meta and _storage(tensor) not in before]
        writes = frozenset(map(_storage, [*written, *new]))
        if writes:
            kept_args, kept_kwargs = pytree.tree_map(_kept, (args, kwargs))
            reads = before if name not in _EMPTY else frozenset()
            self._note(_Noted(operation, kept_args, kept_kwargs, reads, writes, tuple(tensor.detach() for tensor in made), generator))
        return result

    def _note(self, noted: _Noted) -> None:
        self._noted.append(noted)
        self._known |= noted.writes

    def _watch_plain(self, operation: Any, name: str, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        for tensor in _written(operation, args, kwargs):
            self._unwritten.pop(_storage(tensor), None)
            replaced = self._replaced.get(_storage(tensor), lambda: None)()
            if replaced is not None and _storage(replaced) == _storage(tensor):
                raise UnsupportedError("initialisation writes to a parameter by another reference than its module's, which has one without "
                                       "values within from_init(); initialise it before it is registered, or as an attribute of the module")
        if name in _EMPTY:
            self._unwritten.update({_storage(tensor): tensor.detach() for tensor in made})

    def _draw(self, operation: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The generator before a drawing operation, which has drawn when this returns."""
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return None
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            raise UnsupportedError(f"initialisation draws with a generator of its own ({name}), which from_init() cannot follow; use "
                                   "torch.manual_seed(), or initialise the model on the CPU, save it, and use from_safetensors")
        if name not in _DRAWS:
            raise UnsupportedError(f"initialisation draws random numbers by {name}, whose count may depend on values that are not there "
                                   "within from_init(); initialise the model on the CPU, save it, and use from_safetensors")
        before = torch.get_rng_state()
        operation(*_with_memory(args), **_with_memory(kwargs))
        return before

    # ---- when values are asked for ----

    @property
    def described(self) -> str:
        """As there."""
        return "from_init()"

    def forms(self) -> None:
        """It gives what models have without values."""
        return

    def opened(self) -> None:
        """Raise UnsupportedError within the block: more may be done to the parameters."""
        if self._within is not None:
            raise UnsupportedError("hytrain_fx.compile() was called within from_init(); end the block first, make the optimizer after it")

    @contextmanager
    def reading(self, name: str, meta: torch.Tensor) -> Iterator[torch.Tensor]:
        """What plain initialisation would have left in `meta`."""
        if _storage(meta) not in self._known:
            raise UnsupportedError(f"{name} was not made within from_init(), or was converted after it; move .to(dtype) into the block")
        generator = torch.get_rng_state()
        try:
            with torch.no_grad():
                memory = self._run(self._needed(_storage(meta)))
        finally:
            torch.set_rng_state(generator)
        yield _at(meta, memory[_storage(meta)])

    def _needed(self, storage: int) -> list[_Noted]:
        """The operations that the values there depend on, in their order."""
        needed, found = {storage}, []
        for noted in reversed(self._noted):
            if not needed.isdisjoint(noted.writes):
                needed |= noted.reads
                found.append(noted)
        return found[::-1]

    def _run(self, noted: list[_Noted]) -> dict[int, torch.UntypedStorage]:
        memory: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                if _storage(leaf) not in memory:  # only its form is asked for (empty_like)
                    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                return _at(leaf, memory[_storage(leaf)])
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        for step in noted:
            if step.generator is not None:
                torch.set_rng_state(step.generator)
            args, kwargs = pytree.tree_map(real, (step.args, step.kwargs))
            made = _tensors(step.run(*args, **kwargs))
            if step.outputs:
                for of, tensor in zip(step.outputs, made, strict=True):
                    memory.setdefault(_storage(of), _as_laid_out(of, tensor).untyped_storage())
        return memory


def _as_laid_out(meta: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """What an operation made, in the order of memory that it had without values."""
    if (made.stride(), made.storage_offset()) == (meta.stride(), meta.storage_offset()):
        return made
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype).copy_(made)


def _at(meta: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=meta.dtype).set_(memory, meta.storage_offset(), meta.shape, meta.stride())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.is_meta


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written = signature_of(operation).written
    return _tensors([given for key, given in (*enumerate(args), *kwargs.items()) if key in written])


def _with_memory(tree: Any) -> Any:
    return pytree.tree_map(
        lambda of: torch.empty_strided(of.shape, of.stride(), dtype=of.dtype) if isinstance(of, torch.Tensor) and of.is_meta else of, tree)


def _without_values(tree: Any) -> Any:
    return pytree.tree_map(lambda of: of.to("meta") if isinstance(of, torch.Tensor) and of.dim() else of, tree)


def _kept(leaf: Any) -> Any:
    """An argument as it is now: what has values is copied, as it may be written later."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach() if leaf.is_meta else leaf.detach().clone()
