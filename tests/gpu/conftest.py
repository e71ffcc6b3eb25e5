"""As on a CPU, one intra-op thread: several processes of sixteen threads each come to a standstill in front of one another's barriers."""

from ..cpu.conftest import torch_threads

__all__ = ["torch_threads"]
