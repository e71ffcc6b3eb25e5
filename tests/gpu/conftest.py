"""One intra-op thread, as on a CPU.

Several processes of sixteen threads each would stand still at one another's barriers.
"""

from ..cpu.conftest import torch_threads

__all__ = ["torch_threads"]
