"""One file of tensors, several with an index, or the folder of either.

    from_safetensors    .safetensors, model.safetensors.index.json
    from_torch          torch.save(state_dict), pytorch_model.bin.index.json

Only headers are read before a tensor is asked for, and only its own bytes then.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.loading.source import Form, TensorSource

_SAFETENSORS_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_MAPPED_BYTES: Final = 4 << 20
"""So much is read of mapped files of torch before they are mapped again."""


def from_safetensors(path: str | Path) -> TensorFiles:
    """The tensors of a .safetensors file, of an index of several, or of a folder with either.

    For `compile(loader=...)`; also a function of a name. Raises UnsupportedError where nothing of
    that kind is there, or where the library safetensors is missing.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("from_safetensors needs the library safetensors: pip install safetensors") from error
    return SafetensorsFiles(Path(path))


def from_torch(path: str | Path) -> TensorFiles:
    """The tensors of a file that torch.save made of a state_dict(), of an index of several, or of a
    folder with either.

    For `compile(loader=...)`; also a function of a name. Files are mapped into memory, so they must
    be of torch 1.6 or newer. Raises UnsupportedError where nothing of that kind is there.
    """
    return TorchFiles(Path(path))


class TensorFiles(TensorSource):
    """Files of one kind, and the names in each.

    KIND      what is expected, for messages
    INDEX     the file that says which tensor is in which file
    ALONE     the file that holds all, in a folder without an index
    """

    KIND = ""
    INDEX = ""
    ALONE = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Path] = {}  # by name of a tensor
        self._forms: dict[str, Form] = {}
        self.opened()

    @property
    def described(self) -> str:
        """As there."""
        return str(self._path)

    def opened(self) -> None:
        """Read the index and the headers.

        Raises UnsupportedError where a file is missing or has another form.
        """
        files, listed = self._found()
        self._files, self._forms = {}, {}
        for file in files:
            for name, form in self._read_header(file).items():
                if name in self._files:
                    raise UnsupportedError(f"{name} is in {self._files[name].name} and in {file.name} of {self._path}; expected it in one")
                self._files[name], self._forms[name] = file, form
        gone = [name for name in listed if name not in self._forms]
        if gone:
            raise UnsupportedError(f"{self._path} lists {len(gone)} tensor(s) that its files do not have, {gone[0]} the first: files of "
                                   "another model, or some were not written to the end")

    def forms(self) -> Mapping[str, Form]:
        """All that the files have."""
        return self._forms

    def __call__(self, name: str) -> torch.Tensor:
        """A copy of one tensor, on the CPU. Raises KeyError where no file has it."""
        form = self._forms[name]
        with self.reading(name, torch.empty(form.shape, dtype=form.dtype, device="meta")) as tensor:
            return tensor.clone()

    def _found(self) -> tuple[list[Path], list[str]]:
        """The files, and the tensors that an index lists."""
        path = self._path
        if path.is_dir():
            path = next((path / name for name in (self.INDEX, self.ALONE) if (path / name).is_file()), path)
        if not path.is_file():
            raise UnsupportedError(f"{self._path} is no {self.KIND}, and no folder with {self.INDEX} or {self.ALONE}")
        if path.suffix != ".json":
            return [path], []
        try:
            listed = json.loads(path.read_text())["weight_map"]
            files = [path.parent / name for name in sorted(set(listed.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedError(f"{path} is no index: expected a weight_map of names to files ({error!r})") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UnsupportedError(f"{path} names {len(missing)} file(s) that are not beside it, {missing[0]} the first")
        return files, list(listed)

    def _read_header(self, file: Path) -> dict[str, Form]:
        try:
            return self._header(file)
        except Exception as error:  # each library has its own, down to bare ones
            raise UnsupportedError(f"{file} cannot be read as a {self.KIND}: {error}") from error

    @abstractmethod
    def _header(self, file: Path) -> dict[str, Form]:
        """The form of each tensor in one file."""


class SafetensorsFiles(TensorFiles):
    """Files of the library safetensors."""

    KIND = ".safetensors file"
    INDEX = "model.safetensors.index.json"
    ALONE = "model.safetensors"

    def _header(self, file: Path) -> dict[str, Form]:
        with _open_safetensors(file) as opened:
            return {name: self._form(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118  # it is no dict

    @staticmethod
    def _form(of: Any) -> Form:
        if of.get_dtype() not in _SAFETENSORS_DTYPES:
            raise ValueError(f"it has tensors of dtype {of.get_dtype()}")
        return Form(tuple(of.get_shape()), _SAFETENSORS_DTYPES[of.get_dtype()])

    @contextmanager
    def reading(self, name: str, meta: torch.Tensor) -> Iterator[torch.Tensor]:
        """Opened for one tensor: pages of a mapped file are the process's until it is closed."""
        with _open_safetensors(self._files[name]) as opened:
            yield opened.get_tensor(name)


class TorchFiles(TensorFiles):
    """Files of torch.save."""

    KIND = "file of torch.save(model.state_dict())"
    INDEX = "pytorch_model.bin.index.json"
    ALONE = "pytorch_model.bin"

    def opened(self) -> None:
        """Map the files again."""
        self._mapped: dict[Path, dict[str, torch.Tensor]] = {}
        self._read_bytes = 0  # since files were mapped
        super().opened()
        self._mapped.clear()

    def _header(self, file: Path) -> dict[str, Form]:
        return {name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in self._map(file).items()}

    def _map(self, file: Path) -> dict[str, torch.Tensor]:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        tensors = found if isinstance(found, dict) else {}
        others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
        if not tensors or others:
            what = f"{others[0]!r} is a {type(tensors[others[0]]).__name__}" if others else f"it holds a {type(found).__name__}"
            raise ValueError(f"{what}; expected tensors by name")
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @contextmanager
    def reading(self, name: str, meta: torch.Tensor) -> Iterator[torch.Tensor]:
        """From the file's mapping, which is let go of after some bytes: it takes memory by then."""
        file = self._files[name]
        if file not in self._mapped:
            self._mapped[file] = self._map(file)
        tensor = self._mapped[file][name]
        self._read_bytes += tensor.nbytes
        yield tensor
        if self._read_bytes > _MAPPED_BYTES:
            self._mapped.clear()
            self._read_bytes = 0


def _open_safetensors(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(file), framework="pt", device="cpu")
