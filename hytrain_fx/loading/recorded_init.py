"""A model's own initialisation, run for one tensor at a time, with the bits of the plain one.

    with from_init() as loader:
        model = Model()             runs as it always does, on the CPU

    every operation     is noted, with torch's generator before it and the default dtype, if it
                        writes to memory
    a parameter         loses its memory while others are filled, and gets it back, by running again
                        what was done to it, when an operation is given it
    the block ends      parameters are on the meta device, the same objects
    a tensor is read    what was done to it is run again

What was done to a tensor is told by memory (storages): a view writes to what it is a view of.
Memory that NumPy has too may be written between operations. It cannot be resized, which tells it:
where its bytes are others than operations left, they are kept as they are then.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils import swap_tensors

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.loading.source import TensorSource
from hytrain_fx.torch_private.operators import every_operation, signature_of

_OVERWRITES: Final = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_"})
"""Operations after which nothing of what their first argument held is left."""
_UNFILLED: Final = ("empty", "new_empty", "resize_")
"""How operations are named that leave memory with any values."""
_KEPT_BYTES: Final = 64 << 20
"""Of parameters whose memory is kept while others are filled."""


def from_init(kept_bytes: int = _KEPT_BYTES) -> InitRecord:
    """Within it a model is made whose parameters take no memory; `compile(loader=...)` fills them.

    They have the bits of the plain model on the CPU after the same torch.manual_seed(), and the
    generator is afterwards where it would be.

    kept_bytes   host memory of parameters that are kept while others are filled

    Raises UnsupportedError, as the block ends, where something besides the model holds a parameter.
    """
    return InitRecord(kept_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _At:
    """A tensor, told by the memory that it is in."""

    memory: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _At:
        return cls(_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.shape, self.strides)


@dataclass(frozen=True, slots=True, eq=False)
class _Generator:
    """A generator of the code's own, as it was."""

    state: torch.Tensor


class _Noted(NamedTuple):
    """One operation.

    reads, writes   memory that it looks at, and that has other values afterwards
    made            the memory of what it returned, with its bytes
    generator       torch's CPU generator before it, where it draws
    default         the default dtype, which an operation without a dtype of its own asks for
    """

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[tuple[int, int], ...]
    generator: torch.Tensor | None
    default: torch.dtype


class _Left(NamedTuple):
    """A parameter as the block left it.

    memory     on the meta device
    at         where it was
    version    how often it had been written to by then: later writes have no values to change
    """

    memory: StorageWeakRef
    at: _At
    version: int


class InitRecord(TensorSource):
    """What was done to the parameters of a model that was made within it."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._noted: list[_Noted] = []
        self._known: dict[int, StorageWeakRef] = {}  # memory that was seen; a weak reference keeps its number from being used again
        self._filled: dict[int, int] = {}  # bytes of what was written
        self._dropped: dict[int, int] = {}  # bytes of what lost its memory
        self._shared: dict[int, bytes] = {}  # a digest of what NumPy may write to, as operations left it
        self._thread = threading.get_ident()
        self._parameters: dict[int, nn.Parameter] = {}  # by id
        self._left: dict[int, _Left] = {}  # by memory on the meta device
        self._within: ExitStack | None = None

    # ---- while the model is made ----

    def __enter__(self) -> Self:
        if self._within is not None or self._noted:
            raise UnsupportedError("this from_init() was entered before; make another one")
        self._within = ExitStack()
        for handle in (register_module_parameter_registration_hook(self._registered),
                       register_module_module_registration_hook(self._module_registered)):
            self._within.callback(handle.remove)
        self._within.enter_context(every_operation(self._operation))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._within is not None
        self._within.close()
        self._within = None
        if error is None:
            self._to_meta()
        self._parameters.clear()
        self._filled.clear()
        self._shared.clear()

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        if threading.get_ident() == self._thread and type(parameter) is nn.Parameter and parameter.device.type == "cpu":
            self._parameters[id(parameter)] = parameter

    def _module_registered(self, module: nn.Module, name: str, child: Any) -> None:
        """A copied module (copy.deepcopy) registers no parameters."""
        for parameter in child.parameters() if isinstance(child, nn.Module) else ():
            self._registered(child, "", parameter)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        if any(tensor.device.type != "cpu" for tensor in given):
            return operation(*args, **kwargs)
        name = _name_of(operation)
        overwritten = args[0] if name in _OVERWRITES and self._is_all_of_its_memory(args[0]) else None
        if overwritten is not None and sum(_key(tensor) == _key(overwritten) for tensor in given) > 1:
            overwritten = None
        for tensor in given:
            self._have(tensor, refill=tensor is not overwritten)
        reads = frozenset(_key(tensor) for tensor in given if tensor is not overwritten)
        at = pytree.tree_map(_as_noted, (args, kwargs))
        generator = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in operation.tags else None
        result = operation(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if tensor.device.type == "cpu"]
        new = [tensor for tensor in made if _key(tensor) not in self._known]
        writes = frozenset(map(_key, [*_written(operation, args, kwargs), *new]))
        if writes:
            self._known |= {_key(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in new}
            sizes = tuple((_key(tensor), tensor.untyped_storage().nbytes()) for tensor in made)
            self._noted.append(_Noted(operation, at[0], at[1], reads, writes, sizes, generator, torch.get_default_dtype()))
            shared = writes & self._shared.keys()
            self._shared |= {_key(tensor): _digest(tensor.untyped_storage()) for tensor in given if _key(tensor) in shared}
            if not name.startswith(("empty", "new_empty")):
                self._filled |= {_key(tensor): tensor.untyped_storage().nbytes() for tensor in (*given, *made) if _key(tensor) in writes}
                self._drop_others(reads | writes)
        return result

    def _have(self, tensor: torch.Tensor, *, refill: bool) -> None:
        """An operation is about to be given the tensor."""
        key, storage = _key(tensor), tensor.untyped_storage()
        if key not in self._known:  # made where no operation was seen, from Python's or NumPy's values
            self._known[key] = StorageWeakRef(storage)
            self._note_values(key, storage)
        elif key in self._dropped:
            storage.resize_(self._dropped.pop(key))
            if refill:
                storage.copy_(self._values([key])[key])
            self._filled[key] = storage.nbytes()
        elif refill and not storage.resizable():
            left = self._shared.get(key)
            if left is None and not any(_name_of(noted.run).startswith(_UNFILLED) for noted in self._needed({key})):
                left = _digest(self._values([key])[key])
            self._shared[key] = _digest(storage)
            if self._shared[key] != left:
                self._note_values(key, storage)

    def _note_values(self, key: int, storage: torch.UntypedStorage) -> None:
        """It has these values now, whatever was done to it."""
        values = _bytes_of(storage).clone()
        made = ((key, values.nbytes),)
        clone = torch.ops.aten.clone.default
        self._noted.append(_Noted(clone, (values,), {}, frozenset(), frozenset({key}), made, None, torch.get_default_dtype()))
        if not storage.resizable():
            self._shared[key] = _digest(storage)

    def _is_all_of_its_memory(self, tensor: torch.Tensor) -> bool:
        nbytes = self._dropped.get(_key(tensor), tensor.untyped_storage().nbytes())
        return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == nbytes

    def _drop_others(self, needed: frozenset[int]) -> None:
        """Parameters that are not needed now lose their memory where that is more than is kept."""
        if sum(self._filled.values()) <= self._kept_bytes:
            return
        of_parameters = {_key(parameter): parameter.untyped_storage() for parameter in self._parameters.values()}
        for key in list(self._filled.keys() - needed):
            if self._known[key].expired():
                del self._filled[key]
            elif key in of_parameters and of_parameters[key].resizable():
                of_parameters[key].resize_(0)
                self._dropped[key] = self._filled.pop(key)

    def _to_meta(self) -> None:
        """The parameters lose their memory, and what is not of them is forgotten."""
        self._require_memory_of_their_own()
        for parameter in self._parameters.values():
            if _key(parameter) not in self._dropped:
                self._have(parameter, refill=True)  # what NumPy wrote last
        for parameter in list(self._parameters.values()):
            at = _At.of(parameter)
            meta = nn.Parameter(torch.empty_strided(at.shape, at.strides, dtype=at.dtype, device="meta"), parameter.requires_grad)
            meta.__dict__.update(parameter.__dict__)
            memory = meta.untyped_storage()
            try:
                swap_tensors(parameter, meta)
            except RuntimeError as error:
                raise UnsupportedError(f"a parameter of shape {tuple(at.shape)} is held by something besides its model ({error}); "
                                       "from_init() cannot take its memory") from error
            self._left[memory._cdata] = _Left(StorageWeakRef(memory), at, _version_of(parameter))
            del parameter, meta  # and with it the memory
        wanted = [left.at for left in self._left.values()]
        held = [at for at in wanted if at.memory in self._known and not self._known[at.memory].expired()]
        if held:
            raise UnsupportedError(f"the memory of a parameter of shape {tuple(held[0].shape)} is held by something besides its model, a "
                                   "buffer or an attribute; from_init() cannot take it")
        needed = {id(noted) for noted in self._needed({at.memory for at in wanted})}
        self._noted = [noted for noted in self._noted if id(noted) in needed]

    def _require_memory_of_their_own(self) -> None:
        keys = list(map(_key, self._parameters.values()))
        if len(set(keys)) < len(keys):
            raise UnsupportedError("two parameters of the model share memory and are not one object, which from_init() cannot give back; "
                                   "tie them by assigning the parameter itself")

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
        """What plain initialisation would have left in `meta`.

        Raises UnsupportedError where it is no parameter that the block left, or was written since.
        """
        found = self._left.get(meta.untyped_storage()._cdata)
        if found is None:
            raise UnsupportedError(f"{name} was not made within from_init(), or was converted after it; move .to(dtype) into the block")
        if _version_of(meta) != found.version:
            raise UnsupportedError(f"{name} was written after from_init() ended: it has no memory then, and such values are lost. Move "
                                   "that into the block (model.apply, nn.init, load_state_dict)")
        yield found.at.on(self._values([found.at.memory])[found.at.memory])

    def _values(self, memory: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Such memory as it is after all that was noted, and what it was made of.

        Raises UnsupportedError where an operation gives another size than it did.
        """
        generator, default = torch.get_rng_state(), torch.get_default_dtype()
        found: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Generator):
                return torch.Generator("cpu").set_state(leaf.state)
            if not isinstance(leaf, _At):
                return leaf
            if leaf.memory not in found:  # it is overwritten, or only its form is asked for
                found[leaf.memory] = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="cpu").untyped_storage()
            return leaf.on(found[leaf.memory])

        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):  # what autocast converted within the block was noted
                for noted in self._needed(set(memory)):
                    if noted.generator is not None:
                        torch.set_rng_state(noted.generator)
                    args, kwargs = pytree.tree_map(real, (noted.args, noted.kwargs))
                    torch.set_default_dtype(noted.default)
                    for (key, nbytes), tensor in zip(noted.made, _tensors(noted.run(*args, **kwargs)), strict=True):
                        _require_size(noted, nbytes, tensor)
                        found[key] = tensor.untyped_storage()
        finally:
            torch.set_default_dtype(default)
            torch.set_rng_state(generator)
        return found

    def _needed(self, memory: set[int]) -> list[_Noted]:
        """The operations that the values there depend on, in their order."""
        found = []
        for noted in reversed(self._noted):
            if not memory.isdisjoint(noted.writes):
                memory = (memory - noted.writes) | noted.reads if noted.reads.isdisjoint(noted.writes) else memory | noted.reads
                found.append(noted)
        return found[::-1]


def _require_size(noted: _Noted, nbytes: int, tensor: torch.Tensor) -> None:
    found = tensor.untyped_storage().nbytes()
    if found != nbytes:
        raise UnsupportedError(f"{noted.run} gave {nbytes} bytes within from_init(), and {found} as it was run again: it does not give the "
                               "same each time, or values that it was given were written past torch's operations (data_ptr(), DLPack)")


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _digest(storage: torch.UntypedStorage) -> bytes:
    """Of memory that cannot be resized, or need not be any more: NumPy has it then."""
    values: Any = _bytes_of(storage).numpy()
    return hashlib.sha256(values).digest()


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # torch counts no writes to inference tensors


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written = signature_of(operation).written
    return _tensors([given for key, given in (*enumerate(args), *kwargs.items()) if key in written])


def _name_of(operation: Any) -> str:
    return str(operation._schema.name.removeprefix("aten::"))


def _as_noted(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _At.of(leaf)
    return _Generator(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf
