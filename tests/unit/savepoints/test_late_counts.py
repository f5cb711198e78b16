"""Late rows are counted from the pipeline's first beginning, through a savepoint, whether dropped or sent on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import pipeline, program_of, taken
from msgspec.structs import replace

from cutwater.savepoints.files import LocalFiles
from cutwater.savepoints.writing import write_savepoint
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.operator import SENT
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.state import SliceManifest
from cutwater.spark.savepoint import savepoints
from cutwater.spark.savepoint.checkpoints import FORMAT, Checkpoint, FinishedBatch, Note
from cutwater.spark.savepoint.savepoint_restore import _late

UNUSED: Any = None


def test_late_rows_of_all_slices_go_into_a_savepoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = {7: SliceManifest({}, {"w": 2, SENT + "w": 3}), 8: SliceManifest({}, {SENT + "w": 4})}

    class Source:
        def __init__(self, *_: Any) -> None: ...

        def manifests(self) -> dict[int, SliceManifest]:
            return slices

    monkeypatch.setattr(savepoints, "_Source", Source)
    note = Note(FORMAT, 1, "pays", 4, 1, "log", program_of(pipeline()), {})
    kept, point = Checkpoint(str(tmp_path), LocalFiles()), FinishedBatch(0, PipelineOffset(1, 4), "key")
    states = savepoints._written(UNUSED, kept, note, point, str(tmp_path), LocalFiles())
    assert {s.operator.uid: (s.dropped_late, s.late_sent) for s in states} == {"last": (0, 0), "w": (2, 7)}


def test_late_rows_of_a_savepoint_are_counted_on(tmp_path: Path) -> None:
    p = pipeline()
    made = taken(tmp_path / "made").manifest
    counted = tuple(
        replace(own, dropped_late=2, late_sent=7) if own.operator.uid == "w" else own for own in made.operators
    )
    again = write_savepoint(tmp_path / "again", replace(made, operators=counted), {})
    own = Program(p.name, p.graph, {"payments": p.graph.nodes[0].rows})  # type: ignore[attr-defined]
    found = _late(again.manifest, list(own.plan.specs.values()), own)
    assert found == [(own.keys[0], "w", 2, None), (own.keys[0], SENT + "w", 7, None)]
