"""A DFlash draft of ours, exported and decoded by transformers itself (speculation_type="dflash"):
the same tokens and the same matches in every round as our decoder, in float32, greedy.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.conf.schema import ExportConfig, TargetConfig
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.export import export_draft

TOKENS = 24


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """bench/engine_transformers.py, which `make engine-check` runs on the quickstart's draft."""
    path = Path(__file__).parent.parent / "bench" / "engine_transformers.py"
    spec = importlib.util.spec_from_file_location("engine_transformers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A draft that knows one text by heart and others hardly, in transformers' form."""
    root = tmp_path_factory.mktemp("dflash")
    sharp = support.sharp_target(tiny, root / "target")
    torch.manual_seed(0)
    draft = DFlashMethod(
        num_hidden_layers=1, mask_token_id=support.MASK, head_dim=16, block_size=5, decay=4.0
    ).build(sharp.target.head(), None, support.LAYERS)
    support.overfit(draft.train(), sharp.target, sharp.batch, updates=60)
    draft = support.saved_and_loaded(draft, sharp.target, root / "draft")
    wanted = ExportConfig(
        draft=str(root / "draft"),
        format="transformers",
        output=str(root / "exported"),
        target=TargetConfig(name_or_path=str(root / "target")),
    )
    folder = export_draft(wanted).folder
    draw = torch.Generator().manual_seed(4)
    prompts = [sharp.prompt[0].tolist()]
    prompts += [torch.randint(4, 300, (n,), generator=draw).tolist() for n in (3, 7, 12)]
    return SimpleNamespace(
        draft=draft, target=sharp.target, folder=folder, source=root / "target", prompts=prompts
    )


def decode(script: ModuleType, exported: Any, folder: Path) -> Any:
    return script.decode_with_assistant(
        exported.source,
        folder,
        exported.prompts,
        tokens=TOKENS,
        stop_token_ids=list(exported.target.eos_token_ids),
    )


def test_transformers_decodes_the_export_round_by_round_as_we_do(
    script: ModuleType, exported: Any
) -> None:
    made = Engine(exported.target, exported.draft, ChainPolicy(4)).run(
        [Request(prompt, TOKENS) for prompt in exported.prompts]
    )
    found = decode(script, exported, exported.folder)
    assert found["architecture"] == "MuseGlimmerAssistantModel"
    accepted = set()
    for ours, theirs in zip(made, found["answers"], strict=True):
        assert theirs["token_ids"] == ours.token_ids
        assert theirs["matches"] == [one.emitted - 1 for one in ours.rounds]
        accepted |= set(theirs["matches"])
    assert {0, 4} <= accepted, "drafts are rejected at once, and accepted to the last token"


def test_a_folder_with_another_mask_token_does_not_decode_the_same(
    script: ModuleType, exported: Any, tmp_path: Path
) -> None:
    """What the comparison would catch: the tokens stay the target's, the matches do not."""
    tensors = load_file(exported.folder / "model.safetensors")
    text = (exported.folder / "config.json").read_text()
    assert '"mask_token_id": 319' in text
    (tmp_path / "config.json").write_text(text.replace("319", "7"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    right, wrong = (decode(script, exported, folder) for folder in (exported.folder, tmp_path))
    for one, other in zip(right["answers"], wrong["answers"], strict=True):
        assert one["token_ids"] == other["token_ids"]
    assert right["answers"][0]["matches"] != wrong["answers"][0]["matches"]
