"""The processes that train one model together, each on its own batches.

    ranks_that_begin_alike    weights and buffers become those of the first rank
    tell                      what each rank has found, at a point that all come to
    require_alike             every rank has found the same
    mean                      the mean of each rank's tensors, element by element
    mean_shards               the same, and each rank gets its shards alone
    gather                    each rank's shards come to all ranks
    send                      what these three have packed goes, and is timed in a recording
    from_owner                what one rank has comes to all ranks
    add_up                    the sum of each rank's values

A collective that one rank does not come to would hang the others. So all of them are called by the
launching thread, in an order that the ranks agree on first. What they tell each other goes over a
gloo group of its own, with the point where a rank is: ranks at different points are told so.

The mean is that of DistributedDataParallel: each rank divides its own tensor by the number of
ranks, then all are summed in their dtype. With two ranks the sum is one rounding, so that no bit
depends on how a collective goes about it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Container, Sequence
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import distributed, nn

from hytrain_fx.errors import ConfigError, RankError
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.runtime.lane_times import LaneTimes
from hytrain_fx.runtime.own_states import leaves, map_leaves
from hytrain_fx.runtime.shard_layout import ShardLayout
from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.process_groups import all_gather, reduce_scatter, set_time_limit, time_limit

_foreach_copy_: Final = private_function("_foreach_copy_")
T = TypeVar("T")
_COMPILING: Final = timedelta(minutes=30)  # until all have compiled: one rank finds its graphs in a cache, another does not
_ALIGNED_BYTES: Final = 64  # where a tensor begins in what is summed together: kernels read whole lines


def ranks_that_begin_alike(model: nn.Module, process_group: Any, waiting: Container[object] = ()) -> Ranks | None:
    """The ranks of this group, with the weights and buffers of its rank 0; None for one process.

    process_group   None: the default group, where torch.distributed has one; False: none
    waiting         parameters that have no values yet

    Every rank of the group must call it. Raises ConfigError for anything else, RankError where the
    models differ in more than values.
    """
    ranks = ranks_of(process_group, next(model.parameters()).device)
    if ranks is not None:
        ranks.start_alike(model, waiting)
    return ranks


def ranks_of(process_group: Any, device: torch.device) -> Ranks | None:
    """The ranks of this group, None for one process. Every rank of it must call this.

    process_group   as of `ranks_that_begin_alike`, which raises the same ConfigError
    device          of their models
    """
    if process_group is False:
        return None
    ready = distributed.is_available() and distributed.is_initialized()
    if process_group is None and not ready:
        return None
    group = distributed.group.WORLD if process_group is None else process_group
    if not (ready and isinstance(group, distributed.ProcessGroup)):
        raise ConfigError(f"option process_group={group!r}: expected None, False, or a group of torch.distributed that this process is in; "
                          "call torch.distributed.init_process_group first")
    if distributed.get_world_size(group) == 1:
        return None
    backends = distributed.get_backend_config(group)
    if f"{device.type}:" not in backends:
        raise ConfigError(f"option process_group: the group has {backends} and the model is on {device.type}; expected one that works "
                          'there, as of init_process_group("nccl") for GPUs and "gloo" for CPUs')
    return Ranks(group, device)


def count_of_ranks(process_group: Any) -> int:
    """How many processes `ranks_that_begin_alike` would find; makes nothing."""
    if process_group is False or not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(process_group if isinstance(process_group, distributed.ProcessGroup) else None)


class Packed(NamedTuple):
    """Memory that is to go from rank to rank, and what sends it and gives what comes of it."""

    bucket: torch.Tensor
    send: Callable[[], list[torch.Tensor]]


class _Form(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _without_memory(leaf: Any) -> Any:
    return _Form(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


class Ranks:
    """One rank's view of the group.

    rank, size   this process's number in the group, and how many there are
    times        when `send` was under way, in a recording
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.times = LaneTimes(device)
        self._device = device
        # Collectives of the loop's own, on the group that it gave, may come between ours at another
        # place on each rank (async_save's come at any time). So ours have a group to themselves.
        # Ranks outside the group do not make these calls, so they must not wait for them
        # (use_local_synchronization). The groups are never given back: torch names a new group by
        # the groups that exist, so two ranks that gave one back at different times would wait for
        # each other under different names.
        ranks = distributed.get_process_group_ranks(group)
        self._limit, self._patience = time_limit(group, device), _COMPILING
        backend = distributed.get_backend_config(group)
        self._group = distributed.new_group(ranks, timeout=self._limit, backend=backend, use_local_synchronization=True)
        self._control = distributed.new_group(ranks, timeout=_COMPILING, backend="gloo", use_local_synchronization=True)

    @cached_property
    def mesh(self) -> Any:
        """The ranks as a DeviceMesh of one dimension, for DTensors on the CPU."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._control, "cpu")

    def in_words(self, updates: str) -> str:
        """For `explain`. `updates`: what each rank updates."""
        return (f"{self.size} ranks train together, this is rank {self.rank}: gradients are averaged as the backward makes them, each rank "
                f"updates {updates}")

    def start_alike(self, model: nn.Module, waiting: Container[object] = ()) -> None:
        """Give this model the weights and buffers of rank 0, except those in `waiting`.

        Raises RankError where the models differ in more than values.
        """
        tensors = [*model.named_parameters(), *model.named_buffers()]
        form = tuple(f"{name} {tuple(of.shape)} {of.dtype}" for name, of in tensors)
        self.require_alike("the model's parameters and buffers", form)
        with torch.no_grad():
            for name, of in tensors:
                if of in waiting:
                    continue
                whole = of.detach().contiguous()
                send = partial(distributed.broadcast, whole, group=self._group, group_src=0, async_op=True)
                self._run(f"the values of {name}", send)
                if whole.data_ptr() != of.data_ptr():
                    of.copy_(whole)

    def tell(self, point: str, found: tuple[str, ...]) -> tuple[int, ...]:
        """Tell all ranks what this one has found, at a point that all come to.

        Gives a digest for each rank: equal ones have found the same. Every rank gets the same
        digests.

        Raises RankError, on every rank, where one is at another point or does not come in time.
        """
        return self.tell_number(point, _digest(found))

    def tell_number(self, point: str, number: int) -> tuple[int, ...]:
        """As `tell`, with a number of 64 bits instead of a digest."""
        own = torch.tensor([_digest((point,)), number], device="cpu")
        of_ranks = torch.empty(2 * self.size, dtype=torch.int64, device="cpu")
        try:
            all_gather(of_ranks, own, group=self._control, async_op=True).wait(self._patience)
        except RuntimeError as error:
            raise self._missing(point) from error
        points, digests = of_ranks.view(self.size, 2).unbind(1)
        if bool((points == points[0]).all()):
            return tuple(digests.tolist())
        at = self.of_all(point, point)
        other = next(rank for rank, of in enumerate(at) if of != at[0])
        raise RankError(f"rank 0 has come to {at[0]}, rank {other} to {at[other]}: all ranks make as many forwards, backwards and steps, "
                        "and read gradients, states and weights together")

    def require_alike(self, what: str, found: tuple[str, ...]) -> None:
        """Compare what the ranks have found, item by item.

        Raises RankError, on every rank, where one differs, and as `tell` does.
        """
        if len(set(self.tell(what, found))) == 1:
            return
        of_ranks = self.of_all(what, found)
        other = next(rank for rank, of in enumerate(of_ranks) if of != of_ranks[0])
        pairs = enumerate(zip_longest(of_ranks[0], of_ranks[other], fillvalue="nothing"))
        at, (first, second) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        raise RankError(f"{what} differ between ranks: number {at} is {first} on rank 0 and {second} on rank {other}; "
                        "every rank must run the same model, and ask for the same")

    def all_have_compiled(self) -> None:
        """From now on no rank waits for another longer than the group's time limit."""
        if self._patience != self._limit:
            self._patience = self._limit
            set_time_limit(self._control, self._limit)

    def of_all(self, what: str, found: T) -> list[T]:
        """What each rank has found. Raises RankError as `mean` does."""
        of_ranks: list[Any] = [None] * self.size
        try:
            distributed.all_gather_object(of_ranks, found, group=self._control)
        except RuntimeError as error:
            raise self._missing(what) from error
        return of_ranks

    def mean(self, parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor], of: str) -> Packed:
        """The mean over the ranks of each tensor, in the order of memory of `like`.

        parts  of one dtype
        like   dense tensors of the parts' shapes
        of     whose gradients they are, for messages

        The parts are read now; what is given divides and sums them, on the stream that is current
        then: beside the backward. It raises RankError where a rank does not come in time, or has
        failed.
        """
        bucket, views = _bucket(like, parts[0].dtype)
        _foreach_copy_(views, list(parts))

        def send() -> list[torch.Tensor]:
            bucket.div_(self.size)
            self._run(f"the gradients of {of} and others", partial(distributed.all_reduce, bucket, group=self._group, async_op=True))
            return views

        return Packed(bucket, send)

    def mean_shards(self, wholes: Sequence[torch.Tensor], layout: ShardLayout, of: str) -> Packed:
        """This rank's shard of the mean of each tensor, over the ranks.

        wholes   flat, of one dtype, in the layout's order
        of       whose gradients they are, for messages

        As `mean`, with flat tensors.
        """
        bucket = layout.pack(wholes)

        def send() -> list[torch.Tensor]:
            bucket.div_(self.size)
            what = f"the gradients of {of} and others"
            if layout.is_even:
                own = bucket.new_empty(layout.lengths[self.rank])
                self._run(what, partial(reduce_scatter, own, bucket, group=self._group, async_op=True))
                return layout.shards(own)
            parts = layout.parts(bucket)
            parts[self.rank] = parts[self.rank].clone()  # what is given keeps no other rank's part alive
            for rank, part in enumerate(parts):
                if part.numel():
                    self._run(what, partial(distributed.reduce, part, group=self._group, group_dst=rank, async_op=True))
            return layout.shards(parts[self.rank])

        return Packed(bucket, send)

    def gather(self, wholes: Sequence[torch.Tensor], layout: ShardLayout, of: str) -> Packed:
        """Each rank's shard of each tensor comes to all ranks: the same tensors, whole.

        wholes   flat, of one dtype, in the layout's order. This rank's shards are there
        of       what they are, for messages

        As `mean`: other ranks' shards are there after what is given has been called.
        """
        bucket, own = layout.pack_own(wholes)

        def send() -> list[torch.Tensor]:
            if layout.is_even:
                self._run(of, partial(all_gather, bucket, own, group=self._group, async_op=True))
            else:
                for rank, part in enumerate(layout.parts(bucket)):
                    if part.numel():
                        self._run(of, partial(distributed.broadcast, part, group=self._group, group_src=rank, async_op=True))
            layout.unpack_others(bucket, wholes)
            return list(wholes)

        return Packed(bucket, send)

    def send(self, packed: Collection[Packed], kind: TaskKind, row: int) -> list[list[torch.Tensor]]:
        """Send what belongs together, on the current stream: what comes of each.

        kind, row   what it is in a recording, and the first of the parameters in it

        Raises RankError as `mean` does.
        """
        if not self.times.recording:
            return [of.send() for of in packed]
        with self.times.around(kind, row, sum(of.bucket.nbytes for of in packed)):
            return [of.send() for of in packed]

    def from_owner(self, owner: int, own: Any, of: str) -> Any:
        """What one rank has, on every rank: a nest of values, its tensors on the CPU.

        own   of the owner; other ranks' is not read

        Raises RankError as `mean` does.
        """
        form = self.of_all(of, map_leaves(own, _without_memory) if self.rank == owner else None)[owner]
        tensors = iter([leaf for leaf in leaves(own) if isinstance(leaf, torch.Tensor)] if self.rank == owner else ())

        def brought(leaf: Any) -> Any:
            if not isinstance(leaf, _Form):
                return leaf
            flat = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
            if self.rank == owner:
                flat.copy_(next(tensors))
            self._run(of, partial(distributed.broadcast, flat, group=self._group, group_src=owner, async_op=True))
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu").copy_(flat)

        return map_leaves(form, brought)

    def of_each(self, own: torch.Tensor, of: str) -> torch.Tensor:
        """The values of every rank, one row for each. `own`: 1-dim, as long on all of them.

        Raises RankError as `mean` does.
        """
        found = own.new_empty(self.size * own.numel())
        self._run(of, partial(all_gather, found, own.contiguous(), group=self._group, async_op=True))
        return found.view(self.size, -1)

    def add_up(self, values: torch.Tensor, of: str) -> None:
        """Each element becomes the sum over the ranks. Raises RankError as `mean` does."""
        self._run(of, partial(distributed.all_reduce, values, group=self._group, async_op=True))

    def _run(self, what: str, begin: Callable[[], Any]) -> None:
        """Run a collective with the group's time limit. On a GPU the stream waits, not the host."""
        try:
            begin().wait()
        except RuntimeError as error:
            raise self._missing(what) from error

    def _missing(self, what: str) -> RankError:
        return RankError(f"rank {self.rank} of {self.size} waited for {what}: another rank has failed or stopped, or has not come so far "
                         "within the group's time limit, init_process_group(timeout=...). Look at the first error of the other ranks. "
                         "All make as many forward and backward passes and steps, and read new weights together: "
                         "call hytrain_fx.settle(model) on every rank before one of them reads alone, to save or to evaluate")


@lru_cache(maxsize=256)
def _digest(found: tuple[str, ...]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(found).encode()).digest()[:7], "big")


def _bucket(like: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat tensor, and in it a view for each of `like`, in its order of memory."""
    aligned = _ALIGNED_BYTES // dtype.itemsize
    begins, end = [], 0
    for tensor in like:
        begins.append(end)
        end += math.ceil(tensor.numel() / aligned) * aligned
    bucket = like[0].new_zeros(end, dtype=dtype)  # what lies between them is summed, too
    return bucket, [bucket.as_strided(tensor.shape, tensor.stride(), begin) for tensor, begin in zip(like, begins, strict=True)]
