"""The whole way of a native head: train it on its target, decode, stitch it in, start from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import mtp_support
import train_support

from draftsmith.conf.entry import compose_settings
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.format_mtp import LAYOUTS
from draftsmith.models.formats import read_foreign
from draftsmith.models.load import load_drafter
from draftsmith.models.target import TargetModel

METHOD = {"_target_": "draftsmith.models.mtp_native.NativeMtpMethod", "num_steps": 2}


def make_inputs(root: Path, tiny: Any, family: str) -> train_support.Inputs:
    """A tiny target of a family with its tokenizer, prepared rows and a cache."""
    from draftsmith.data import capture, prepare

    target = mtp_support.save_target(root / "target", family)
    tiny.make_tiny_tokenizer().save_pretrained(target)
    chats = train_support.write_chats(root / "chats.jsonl")
    made = train_support.Inputs(target, root / "prepared", root / "cache")
    schema = "draftsmith.conf.schema"
    common = ["target=local", f"target.name_or_path={target}", "target.dtype=float32"]
    common.append("target.device=cpu")
    rows = [*common, f"input={chats}", f"output={made.prepared}"]
    prepare.run(compose_settings("prepare", f"{schema}:PrepareConfig", rows))
    states = [*common, f"data={made.prepared}", f"cache={made.cache}", "dtype=float32"]
    states.append("aux_layer_ids=[0,1]")
    capture.run(compose_settings("cache", f"{schema}:CacheConfig", states))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "mimo", "qwen3_5"])
def test_train_decode_stitch_and_start_again(tmp_path: Path, tiny: Any, family: str) -> None:
    inputs = make_inputs(tmp_path, tiny, family)
    run = tmp_path / "run"
    layout = mtp_support.FAMILIES[family].layout
    method = METHOD | {"concat": LAYOUTS[layout].concat}
    settings = train_support.compose(inputs, "train.max_steps=30", method=method)
    rows = train_support.run_in_process(settings, run)
    losses = train_support.losses(rows)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])

    target = TargetModel.load(str(inputs.target), dtype="float32")
    prompts = [[5, 9, 33, 40], [7, 8, 100, 101, 102, 103, 11]]
    draft = load_drafter(run, target)
    made = Engine(target, draft, ChainPolicy(3)).run(
        [Request(prompt, max_new_tokens=20) for prompt in prompts]
    )
    for prompt, answer in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt])
        for token in answer.token_ids:
            logits = target.forward(ids, logits="last").logits
            assert logits is not None
            assert int(logits.argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)

    command = [
        sys.executable, "-P", "-c", "from draftsmith.conf.verbs import stitch; stitch()",
        f"draft={run}", "target=local", f"target.name_or_path={inputs.target}",
        f"layout={layout}", f"output={tmp_path / 'stitched'}",
    ]  # fmt: skip
    done = train_support.run_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bit-equal" in done.stdout
    found = read_foreign(tmp_path / "stitched").tensors
    own = draft.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    again = train_support.compose(
        inputs, "train.max_steps=1", "schedule=constant", "train.lr=1e-9",
        "schedule.warmup_steps=0", f"init_from={tmp_path / 'stitched'}",
        method=method,
    )  # fmt: skip
    first = train_support.losses(train_support.run_in_process(again, tmp_path / "again"))[0]
    assert first < 0.95 * losses[0]
