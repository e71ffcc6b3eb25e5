"""What the processes of ranks have before they are forked (`rank_loops.begun`).

A fork server imports this. Each rank would do the same again, for a third of a second.
"""

from __future__ import annotations

import gc

import torch
import tqdm
from torch._inductor.fx_passes import joint_graph

from . import rank_loops as rank_loops

tqdm.tqdm.monitor_interval = 0  # no thread of it here: threads are not forked
joint_graph.lazy_init(torch.device("cpu"))  # patterns that torch looks for in every graph
# As in conftest.py. What is here is in no child's way, and not written to, so its memory is shared.
gc.freeze()
gc.set_threshold(200_000, 50, 100)
