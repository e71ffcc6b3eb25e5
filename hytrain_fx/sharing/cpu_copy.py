"""The model once more, on the CPU: what trains the CPU's share.

    refresh     its weights are the committed ones, its buffers and modes the model's
    (backward)  its gradients are its own
    take_grads  and leave it, by row

A weight that rests on the host, as the CPU updates it, is read there: the copy has no memory for
it. Others are copied before each share, on a stream of their own, as the device is at work.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.method_call import MethodCall
from hytrain_fx.torch_private.tensors import without_torch_function


class CpuCopy:
    """A copy of one compiled model, which it does not keep alive.

    model   the copy, compiled for the CPU, with its compiled methods where the model has some

    Raises UnsupportedError for a model that has parameters with gradients outside its optimizer.
    """

    def __init__(self, model: nn.Module, table: ParameterTable, dynamic: bool | None) -> None:
        self._parameters = table.parameters
        self._memory: dict[int, Tensor] = {}  # by row: of weights that rest on the device
        # by row; `refresh` gives them memory
        self._weights = [nn.Parameter(torch.empty(0, dtype=p.dtype, device="cpu")) for p in table.parameters]
        with torch.no_grad(), without_torch_function():
            self.model = self._copied(model, table)
        self._seen: list[tuple[int, int]] = []
        self._stream = torch.cuda.Stream(table.device) if table.device.type == "cuda" else None
        self.model.compile(dynamic=dynamic)
        for name, value in vars(model).items():
            if isinstance(value, MethodCall):
                vars(self.model)[name] = torch.compile(getattr(self.model, name), dynamic=dynamic)

    @property
    def rows_with_memory(self) -> int:
        """How many weights the copy has memory for."""
        return len(self._memory)

    def _copied(self, model: nn.Module, table: ParameterTable) -> nn.Module:
        ours: dict[int, Any] = {id(p): weight for p, weight in zip(table.parameters, self._weights, strict=True)}
        for name, parameter in model.named_parameters():
            if id(parameter) in ours:
                continue
            if parameter.requires_grad and parameter.numel():
                raise UnsupportedError(f"{name} requires grad and is not in the optimizer: with cpu_share its gradient would be that of a "
                                       "part of the batch. Freeze it, or give it to the optimizer")
            ours[id(parameter)] = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=False)
        ours |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
        return copy.deepcopy(model, ours)

    def refresh(self, model: nn.Module, states: StateStore, begun: torch.cuda.Event | None, written: Collection[int]) -> None:
        """Show the weights as they are now. All updates have ended, and every state is at rest.

        begun     a point of the loop's stream, on a GPU: after it nobody has written a weight
        written   rows whose weights are not those that rest on the host
        """
        with torch.no_grad(), without_torch_function():
            self._follow(model)
            rows = [row for row in range(len(self._weights)) if row in written or not self._reads_at_home(states, row)]
            if self._stream is None:
                self._copy(rows)
                return
            with torch.cuda.stream(self._stream):  # in the loop's own stream it would come after the device's part
                if begun is not None:
                    self._stream.wait_event(begun)
                self._copy(rows)
            self._stream.synchronize()

    def _copy(self, rows: Sequence[int]) -> None:
        for row in rows:
            parameter = self._parameters[row]
            if row not in self._memory:
                self._memory[row] = _on_host(parameter, pinned=self._stream is not None)
                self._weights[row].data = self._memory[row]
            self._memory[row].copy_(parameter, non_blocking=True)

    def _reads_at_home(self, states: StateStore, row: int) -> bool:
        """Let the copy have the weight where it rests on the host; False where it does not."""
        found = weight_on_host(states, row, self._parameters[row])
        if found is None:
            return False
        self._memory.pop(row, None)
        if self._weights[row].data_ptr() != found.data_ptr():
            self._weights[row].data = found
        return True

    def _follow(self, model: nn.Module) -> None:
        """Modes and buffers of the model as the loop has left them."""
        for module, ours in zip(model.modules(), self.model.modules(), strict=True):
            ours.training = module.training
        for parameter, weight in zip(self._parameters, self._weights, strict=True):
            weight.requires_grad_(parameter.requires_grad)  # it may have been frozen meanwhile
        if self._versions(model) != self._seen:
            for kept, ours_of in zip(self._not_trained(model), self._not_trained(self.model), strict=True):
                ours_of.copy_(kept)
            self._seen = self._versions(model)

    def _not_trained(self, model: nn.Module) -> list[Tensor]:
        """Buffers, and parameters that the optimizer does not have, of the model or of the copy."""
        trained = {id(parameter) for parameter in (*self._parameters, *self._weights)}
        return [*model.buffers(), *(parameter for parameter in model.parameters() if id(parameter) not in trained)]

    def _versions(self, model: nn.Module) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for of in (model, self.model) for tensor in self._not_trained(of)]

    def require_unwritten(self, model: nn.Module) -> None:
        """Raise UnsupportedError where a forward has written a buffer, of the model or of the copy.

        Each of the two would have those of a part of the batch.
        """
        if self._versions(model) != self._seen:
            names = ", ".join(name for name, _ in model.named_buffers())
            raise UnsupportedError(f"a forward has written a buffer of the model, one of {names}: with cpu_share each part of a batch "
                                   "would leave its own. Use a layer without running values, or cpu_share=0")

    def has_grads(self) -> bool:
        """Whether the copy has gradients that were not taken."""
        return any(weight.grad is not None for weight in self._weights)

    def take_grads(self) -> Iterator[tuple[int, Tensor]]:
        """By row the gradients that the copy has; it has none then."""
        for row, weight in enumerate(self._weights):
            if weight.grad is not None:
                yield row, weight.grad
                weight.grad = None


def _on_host(parameter: Tensor, *, pinned: bool) -> Tensor:
    """Memory for a weight. Copies to what the driver does not pin are slower, and right."""
    try:
        return torch.empty_like(parameter, device="cpu", pin_memory=pinned)
    except RuntimeError:
        return torch.empty_like(parameter, device="cpu")


def weight_on_host(states: StateStore, row: int, parameter: Tensor) -> Tensor | None:
    """The weight of a whole parameter that the CPU updates, where it rests, in its shape.

    It is a master in fp32, or the half of a master that is the weight. None where the host has
    neither. The row's states are at rest.
    """
    if row in states.pieces.cut or states.placement.get(row) is not Placement.CPU:
        return None
    master = states.in_memory(row).master
    return master.as_strided(parameter.shape, parameter.stride()) if master.dtype == parameter.dtype else None
