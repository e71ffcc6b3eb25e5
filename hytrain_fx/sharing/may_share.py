"""Which models and set-ups a batch may be shared in."""

from __future__ import annotations

from torch import distributed, nn

from hytrain_fx.config import Config
from hytrain_fx.errors import UnsupportedError


def require_shareable(model: nn.Module, config: Config) -> None:
    """Raise UnsupportedError where `cpu_share` is asked for and parts of a batch would not do.

    Several processes; layers that normalise over the batch, or keep running values of it.
    """
    if config.cpu_share == 0:
        return
    if config.process_group is not False and _several_processes(config.process_group):
        raise UnsupportedError("cpu_share with several ranks: each would split its batch otherwise. Use cpu_share=0, or "
                               "process_group=False where this process trains on its own")
    for name, module in model.named_modules():
        if isinstance(module, _OVER_THE_BATCH) or getattr(module, "track_running_stats", False):
            raise UnsupportedError(f"cpu_share with {name or 'the model'}, a {type(module).__name__}: it sees the whole batch, and parts "
                                   "of it are normalised otherwise. Use LayerNorm or GroupNorm, or cpu_share=0")


_OVER_THE_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _several_processes(group: object) -> bool:
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group if isinstance(group, distributed.ProcessGroup) else None) > 1
