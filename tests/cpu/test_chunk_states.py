"""A chunk's state changes only as the table in csrc/chunk.h says.

Builds with HYTRAIN_FX_CHECK_STATES end the program at any other change.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hytrain_fx.runtime.native import build


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that takes a chunk through the states whose numbers it is given."""
    folder = tmp_path_factory.mktemp("states")
    source, program = folder / "states.cpp", folder / "states"
    source.write_text("""
        #include "chunk.h"
        using namespace hytrain_fx;
        int main(int count, char** arguments) {
          Chunk chunk(0, 1, nullptr);
          for (int i = 1; i < count; ++i) {
            for (int s = 0; s < kChunkStates; ++s)
              if (std::string(arguments[i]) == kChunkStateNames[s]) chunk.set_state(static_cast<ChunkState>(s));
          }
        }
    """)
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fPIC")]
    command = [build.find_compiler(), *flags, "-O0", "-DHYTRAIN_FX_CHECK_STATES", f"-I{build.CSRC}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize(
    "path",
    [
        "LANDED QUEUED UPDATED SENT AWAITED",
        "LANDED QUEUED FLAGGED SENT AWAITED",
        "LANDED QUEUED GUESSED SENT",
        "LANDED QUEUED GUESSED TAKEN_BACK QUEUED UPDATED",
        "LANDED QUEUED GUESSED TAKEN_BACK QUEUED LEFT_OUT AWAITED",
        "LANDED QUEUED LANDED WITHDRAWN RESTORING LANDED QUEUED",
    ],
)
def test_a_chunk_takes_the_ways_of_a_step(program: Path, path: str) -> None:
    """A chunk may take every path of a step.

    These are a plain step, a step after flags, right and wrong guesses, a step left out, and an
    update put back.
    """
    assert subprocess.run([program, *path.split()], check=False).returncode == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("QUEUED", "QUEUED after AWAITED"),
        ("LANDED LANDED", "LANDED after LANDED"),
        ("LANDED UPDATED", "UPDATED after LANDED"),
        ("LANDED QUEUED UPDATED AWAITED", "AWAITED after UPDATED"),
        ("LANDED QUEUED GUESSED WITHDRAWN LANDED", "LANDED after WITHDRAWN"),
        ("LANDED QUEUED FLAGGED UPDATED", "UPDATED after FLAGGED"),
    ],
)
def test_another_transition_ends_the_program(program: Path, path: str, message: str) -> None:
    """Any other transition ends the program, with both states in the message.

    Examples: updated before it was queued, given a gradient before its weight has left.
    """
    done = subprocess.run([program, *path.split()], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
