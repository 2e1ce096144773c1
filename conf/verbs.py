"""The console scripts. Each names its work by text and loads it only when the settings are right:
help and mistakes come at once, and torch is imported when there is something to compute.
"""

from __future__ import annotations

import sys

from draftsmith.conf.entry import load_named, run_verb


def prepare() -> None:
    """draftsmith-prepare."""
    run_verb(
        "draftsmith.data.prepare:run",
        root="prepare",
        schema="draftsmith.conf.schema:PrepareConfig",
    )


def regenerate() -> None:
    """draftsmith-regenerate."""
    run_verb(
        "draftsmith.data.regenerate:run",
        root="regenerate",
        schema="draftsmith.conf.schema:RegenerateConfig",
    )


def cache() -> None:
    """draftsmith-cache, and draftsmith-cache verify."""
    if sys.argv[1:2] == ["verify"]:
        load_named("draftsmith.data.capture:main")()
    run_verb(
        "draftsmith.data.capture:run", root="cache", schema="draftsmith.conf.schema:CacheConfig"
    )


def evaluate() -> None:
    """draftsmith-evaluate."""
    run_verb(
        "draftsmith.eval.evaluate:run",
        root="evaluate",
        schema="draftsmith.conf.schema:EvaluateConfig",
    )


def compare() -> None:
    """draftsmith-compare."""
    run_verb(
        "draftsmith.eval.compare:run",
        root="compare",
        schema="draftsmith.conf.schema:CompareConfig",
    )


def export() -> None:
    """draftsmith-export."""
    run_verb(
        "draftsmith.models.export:run",
        root="export",
        schema="draftsmith.conf.schema:ExportConfig",
    )


def import_checkpoint() -> None:
    """draftsmith-import."""
    run_verb(
        "draftsmith.models.import_checkpoint:run",
        root="import",
        schema="draftsmith.conf.schema:ImportConfig",
    )


def stitch() -> None:
    """draftsmith-stitch."""
    run_verb(
        "draftsmith.models.stitch:run",
        root="stitch",
        schema="draftsmith.conf.schema_stitch:StitchConfig",
    )


def profile() -> None:
    """draftsmith-profile."""
    run_verb(
        "draftsmith.eval.profiling:run",
        root="profile",
        schema="draftsmith.conf.schema_serving:ProfileConfig",
    )


def calibrate() -> None:
    """draftsmith-calibrate."""
    run_verb(
        "draftsmith.eval.calibrate:run",
        root="calibrate",
        schema="draftsmith.conf.schema_calibrate:CalibrateConfig",
    )


def simulate() -> None:
    """draftsmith-simulate."""
    run_verb(
        "draftsmith.eval.simulate:run",
        root="simulate",
        schema="draftsmith.conf.schema_serving:SimulateConfig",
    )


def new_model() -> None:
    """draftsmith-new-model."""
    run_verb(
        "draftsmith.data.new_model:run",
        root="new_model",
        schema="draftsmith.conf.schema_new_model:NewModelConfig",
    )
