"""Several ranks whose models come from loaders: each keeps its shard, and no weight is whole."""

from __future__ import annotations

from pathlib import Path

from . import loaded_loops
from .rank_loops import WIDTH, WORDS, started
from .sharded_loops import require_resident_bits

LARGEST_BYTES = 2 * WIDTH * WIDTH
MATRICES_BYTES = 2 * (2 * WORDS * WIDTH + 4 * WIDTH * WIDTH)
VECTORS_BYTES = 2 * 6 * WIDTH


def test_ranks_with_loaders_have_the_bits_of_models_made_whole(tmp_path: Path) -> None:
    """Resident and sharded, from values and from an initialiser; losses, weights and states.

    With shards a rank never has more than the memory that all waiting parameters share, of the
    largest one, and vectors. Weights that do not fit are told at close(), which closes nothing.
    """
    ranks = started(loaded_loops.all_of_it, 2, tmp_path)
    require_resident_bits([[loaded] for loaded, _, _ in ranks])
    require_resident_bits([[initialised] for _, initialised, _ in ranks])
    for (whole, resident, *sharded), _, said in ranks:
        assert whole["there"] == resident["there"] == MATRICES_BYTES + VECTORS_BYTES
        assert resident["most"] > MATRICES_BYTES / 2
        for run in sharded:
            assert run["there"] == VECTORS_BYTES
            assert LARGEST_BYTES <= run["most"] <= LARGEST_BYTES + VECTORS_BYTES
        assert "Sharded weights are given back on each rank's device. Save optimizer.sharded_state_dict()" in said


def test_ranks_that_load_other_values_are_told(tmp_path: Path) -> None:
    """Shards of different models would train as one."""
    for found in started(loaded_loops.others, 2, tmp_path):
        assert found.startswith("RankError: the weights that loaders give differ between ranks: number 0 is words.weight with the digest")
