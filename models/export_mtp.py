"""draftsmith-export of MTP drafts: speculators' form, checked before it is there.

Engines read MTP modules from the target's own checkpoint: that is draftsmith-stitch
(models/stitch.py). vLLM has no MTP among its speculators types; the form is for that program's own
trainer and for passing a head on without its target.

Check: tests/test_format_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.models.foreign_files import read_tensors, write_checked, write_folder
from draftsmith.models.format_keys import TargetFacts
from draftsmith.models.format_mtp import SPECULATORS, draft_tensors
from draftsmith.models.format_mtp_read import STATES_BEFORE, read_mtp
from draftsmith.models.format_mtp_write import modules_for_target, to_mtp_speculators
from draftsmith.models.mtp_module import MtpConfig
from draftsmith.models.target_source import loading_arguments, read_config
from draftsmith.models.target_structure import text_config_of

CLASSES = (
    "draftsmith.models.mtp.MtpDraft",
    "draftsmith.models.mtp.DepthwiseMtpDraft",
    "draftsmith.models.mtp_native.NativeMtpDraft",
)


def export_mtp(
    config: MtpConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    output: str | Path,
    target: TargetFacts | None,
    num_draft_tokens: int | None,
) -> tuple[Path, dict[str, Any], int, list[str]]:
    """Writes an MTP draft in speculators' form and reads it back.

    Returns:
        The folder, its config, the number of tensors, and what the user should know.

    Raises:
        ValueError: another format, an unknown target, a draft that the form cannot hold, or a
            folder that did not come back as it went in.
    """
    if format != "speculators":
        raise ValueError(
            f"format={format} has no form for MTP modules: engines read them from the target's own "
            "checkpoint. Stitch them into it (draftsmith-stitch), or choose format=speculators."
        )
    if target is None:
        raise ValueError(
            "The target is not known, and format=speculators holds its configuration. Give "
            "target.name_or_path=...."
        )
    text = text_config_of(read_config(target.name_or_path, target.source, _plain(target)))
    modules = modules_for_target(config, tensors, text, concat=SPECULATORS.concat)
    steps = len(config.step_weights or [])
    raw, named = to_mtp_speculators(
        modules,
        text,
        num_draft_tokens=num_draft_tokens or steps,
        verifier=target.source,
        architectures=target.architectures,
    )

    def write(aside: Path) -> None:
        write_folder(aside, raw, named)
        _check(aside, named, draft_tensors(modules))

    return write_checked(output, write), raw, len(named), [STATES_BEFORE]


def _plain(target: TargetFacts) -> dict[str, Any]:
    return loading_arguments(target.source, trust_remote_code=False, revision=None)


def _check(folder: Path, named: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    """Insists that the folder holds what was meant, and reads as the draft."""
    for found, expected in ((read_tensors(folder), named), (read_mtp(folder).tensors, ours)):
        same = found.keys() == expected.keys() and all(
            found[name].dtype == expected[name].dtype and found[name].equal(expected[name].cpu())
            for name in expected
        )
        if not same:
            raise ValueError("Read back, the export is not the draft: its tensors differ.")
