"""What is private of torch's tensors.

Metadata without values, `.grad` in C, who counts references, where a stream is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.names import private_name

without_torch_function: Final = torch._C.DisableTorchFunctionSubclass
"""A context manager: inside, no subclass's `__torch_function__` is consulted.

The plain method or property of `Tensor` runs.
"""


def metadata_functions() -> frozenset[Callable[..., Any]]:
    """What `__torch_function__` sees for reads that need no values of the tensor.

    Shape, dtype, device, autograd's fields, hash.
    """
    properties = (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr", "_version"),
        *("requires_grad", "is_leaf", "grad_fn", "grad", "_grad", "grad_dtype", "retains_grad"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
        *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_mtia"),
        *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested"),
    )
    methods = (
        *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "_is_view"),
        *("__len__", "__hash__", "__dir__"),
    )
    return frozenset(
        [getattr(Tensor, name).__get__ for name in properties if hasattr(Tensor, name)]
        + [getattr(Tensor, name) for name in methods if hasattr(Tensor, name)]
        + [torch.numel, torch.is_floating_point, torch.is_complex]
    )


def wrapper_tensor(cls: type[Tensor], size: torch.Size, strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of class `cls` with metadata only.

    Its memory may not be written through a raw pointer (C++ extensions get an error).
    """
    tensor = torch.Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor

use_count: Final[Callable[[Tensor], int]] = Tensor._use_count  # type: ignore[attr-defined]
"""How many references C++ counts to a tensor; the Python object is one.

Call it `without_torch_function`.
"""


def allow_in_foreach(cls: type[Tensor]) -> None:
    """Let `clip_grad_norm_(foreach=None)` take its foreach form for `cls` too, as DTensor does.

    The forms differ in bits on CUDA.
    """
    from torch.utils import _foreach_utils

    supported = getattr(_foreach_utils, "_foreach_supported_types", None)
    if not isinstance(supported, list):
        raise UnsupportedError(f"torch {torch.__version__} has no list torch.utils._foreach_utils._foreach_supported_types")
    if cls not in supported:
        supported.append(cls)


def property_reader(name: str) -> Callable[[Tensor], Any]:
    """What reads a property of a tensor in C, for `map` over many tensors.

    Raises UnsupportedError.
    """
    found = getattr(Tensor, name, None)
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} has no Tensor.{name}; hytrain_fx needs it and was run on torch 2.11 and 2.13")
    return cast(Callable[[Tensor], Any], found.__get__)


_hooks_of: Final = property_reader("_backward_hooks")
_accumulate_hooks_of: Final = property_reader("_post_accumulate_grad_hooks")
get_grad: Final[Callable[[Tensor], Tensor | None]] = property_reader("grad")
"""`.grad` read in C, whatever the class of the parameter. Call it `without_torch_function`."""
set_grad: Final[Callable[[Tensor, Tensor | None], None]] = vars(torch._C.TensorBase)["grad"].__set__
"""`.grad` written in C, whatever the class of the parameter. Call it `without_torch_function`."""
delete_grad: Final[Callable[[Tensor], None]] = vars(torch._C.TensorBase)["grad"].__delete__
set_data: Final[Callable[[Tensor, Tensor], None]] = vars(torch._C.TensorBase)["data"].__set__
"""`.data` written in C, whatever the class of the parameter. Call it `without_torch_function`."""


def any_tensor_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a tensor hook is on any of them, at 0.05 us each.

    Call it `without_torch_function`: looking is no access to the values.
    """
    return any(map(_hooks_of, parameters))


def count_accumulate_hooks(parameters: Iterable[nn.Parameter]) -> int:
    """How many post-accumulate hooks are on all of them. Call it `without_torch_function`."""
    return sum(map(len, filter(None, map(_accumulate_hooks_of, parameters))))


def gradient_hooks(parameter: nn.Parameter) -> tuple[Callable[..., Any], ...]:
    """The tensor hooks and the post-accumulate hooks registered on a parameter."""
    found: list[Callable[..., Any]] = []
    with without_torch_function():  # looking is no access to the values
        for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, attribute, None)
            found += list(hooks.values()) if hooks else []
    return tuple(found)


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Mark tensors as written, so that a backward through their old values is torch's own error."""
    torch.autograd.graph.increment_version(tensors)


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor is a view of, as a number.

    The same for two tensors that share it, also where they are on the meta device.
    """
    return int(tensor.untyped_storage()._cdata)


def current_stream_of(device: torch.device) -> Callable[[], int]:
    """What gives the handle of a CUDA device's current stream.

    It takes a tenth of the time of `torch.cuda.current_stream`.
    """
    return partial(private_name("torch._C", "_cuda_getCurrentRawStream"), device.index)
