"""What all stages of a pipeline did in recorded steps, on one timeline."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.timeline.recording import Recording
from hytrain_fx.explain.timeline.stage_rows import stage_row, together
from hytrain_fx.explain.timeline.timeline import Timeline
from hytrain_fx.runtime.rank_errors import told_to_ranks
from hytrain_fx.session.over_stages import Stages, stages_of


def stages_timeline(stages: Stages, recordings: Recording | Iterable[Recording]) -> Timeline:
    """What all stages of a pipeline did in the steps that each rank has recorded.

        with hytrain_fx.record(stage.submod) as recording:
            ...two or three steps...
        everyone = hytrain_fx.stages_timeline(stage.submod, recording)

    stages       this rank's compiled stage; all of them where it has several
    recordings   of each of them, in the same order

    Every rank of the pipeline calls it, and gets the same. A backward begins where the work before
    it has ended, so a wait for another stage's gradients is in it.

    Raises UnsupportedError for a model that is not compiled as a stage, for a block that has not
    ended, and where the ranks are on several machines, whose clocks differ; RankError where another
    rank does not call it.
    """
    _, sessions, here = stages_of(stages)
    with told_to_ranks("stages_timeline", lambda: here.ranks):
        found = [recordings] if isinstance(recordings, Recording) else list(recordings)
        own = []
        for session, recording in zip(sessions, found, strict=True):
            stage = session.config.pipeline
            moved = recording.timeline.moved(recording.timeline.begins_us)
            own.append(stage_row(stage.number, moved.spans, stage.micro_batches))
    here.ranks.tell("the recorded steps of all stages", ())  # or an error that one of them has met
    told = here.ranks.of_all("the recorded steps of all stages", (platform.node(), own))
    machines = sorted({machine for machine, _ in told})
    if len(machines) > 1:
        raise UnsupportedError(f"the stages are on {len(machines)} machines ({', '.join(machines)}), whose clocks differ; "
                               "take each rank's own timeline")
    lanes = together([row for _, rows in told for row in rows], "measured")
    return Timeline(lanes.spans, lanes.unit_names, "measured", begins_us=lanes.begins_us)
