"""Stitching MTP modules into a target's checkpoint: what is added, what stays, what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent))

import mtp_support as support

from draftsmith.models.format_mtp import stored_names
from draftsmith.models.formats import read_foreign
from draftsmith.models.stitch import ADDED, INDEX, check_stitched

DEEPSEEK = "deepseek_v3"


def bytes_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor's dtype and bytes, through the index or the single file."""
    found = {}
    for name, file in stored_names(folder).items():
        with safe_open(file, framework="pt") as held:
            tensor = held.get_tensor(name)
        found[name] = (str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 in two shards or more; read only."""
    folder = support.save_target(
        tmp_path_factory.mktemp("target"), DEEPSEEK, max_shard_size="150KB"
    )
    (folder / "notes.txt").write_text("kept")
    return folder


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft of two modules for it."""
    folder = tmp_path_factory.mktemp("draft")
    support.make_draft(target, DEEPSEEK).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stitched(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with the draft's modules; read only."""
    folder = tmp_path_factory.mktemp("out") / "stitched"
    support.stitched(draft, target, folder, layout="deepseek")
    return folder


def test_every_tensor_and_file_of_the_target_stays_and_the_index_names_the_modules(
    target: Path, stitched: Path
) -> None:
    before, now = bytes_of(target), bytes_of(stitched)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(shards) >= 2
    assert {name: now[name] for name in before} == before
    added = now.keys() - before.keys()
    assert added
    assert all(name.startswith(("model.layers.3.", "model.layers.4.")) for name in added)
    for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        assert f"model.layers.4.{part}.weight" in added
    assert "model.layers.3.mlp.experts.3.gate_proj.weight" in added  # As the target's own layers.
    index = json.loads((stitched / INDEX).read_text())
    assert {index["weight_map"][name] for name in added} == {ADDED}
    old = json.loads((target / INDEX).read_text())
    assert {name: index["weight_map"][name] for name in before} == old["weight_map"]
    sizes = sum(len(data) for _, data in now.values())
    assert index["metadata"]["total_size"] == sizes > old["metadata"]["total_size"]
    assert (stitched / "notes.txt").read_text() == "kept"
    for name in shards:
        assert (stitched / name).samefile(target / name)


def test_the_config_says_how_many_modules_and_nothing_else_changes(
    target: Path, stitched: Path
) -> None:
    before = json.loads((target / "config.json").read_text())
    now = json.loads((stitched / "config.json").read_text())
    assert now.pop("num_nextn_predict_layers") == 2
    before.pop("num_nextn_predict_layers", None)
    assert now == before


def test_the_stitched_target_is_the_same_model(target: Path, stitched: Path) -> None:
    ids = torch.arange(12)[None]
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(target, dtype="float32")(ids).logits
        now = AutoModelForCausalLM.from_pretrained(stitched, dtype="float32")(ids).logits
    assert torch.equal(own, now)


def test_a_target_in_one_file_gets_an_index_and_no_single_file(draft: Path, tmp_path: Path) -> None:
    whole = support.save_target(tmp_path / "whole", DEEPSEEK, max_shard_size="1GB")
    assert not (whole / INDEX).exists()
    made = support.stitched(draft, whole, tmp_path / "out", layout="deepseek", link=False)
    names = sorted(path.name for path in made.folder.glob("*.safetensors*"))
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    before, now = bytes_of(whole), bytes_of(made.folder)
    assert {name: now[name] for name in before} == before
    assert made.num_kept == len(before)
    assert len(now) == len(before) + made.num_tensors
    first = made.folder / names[0]
    assert not first.samefile(whole / "model.safetensors")


def test_modules_take_the_dtypes_of_the_targets_layers(draft: Path, tmp_path: Path) -> None:
    whole = support.save_target(tmp_path / "whole", DEEPSEEK, max_shard_size="1GB")
    tensors = load_file(whole / "model.safetensors")
    bias = "mlp.gate.e_score_correction_bias"
    halved = {n: t if n.endswith(bias) else t.bfloat16() for n, t in tensors.items()}
    save_file(halved, whole / "model.safetensors", metadata={"format": "pt"})
    _without_fingerprint(draft, tmp_path / "draft")
    made = support.stitched(tmp_path / "draft", whole, tmp_path / "out", layout="deepseek")
    now = load_file(made.folder / "model-00002-of-00002.safetensors")
    assert {t.dtype for n, t in now.items() if not n.endswith(bias)} == {torch.bfloat16}
    assert {t.dtype for n, t in now.items() if n.endswith(bias)} == {torch.float32}


def _without_fingerprint(draft: Path, to: Path) -> None:
    shutil.copytree(draft, to)
    config = json.loads((to / "config.json").read_text())
    config["target_fingerprint"] = None
    (to / "config.json").write_text(json.dumps(config))


def test_replacing_takes_the_old_modules_out_of_their_shard(
    target: Path, stitched: Path, tmp_path: Path
) -> None:
    other = support.make_draft(stitched, DEEPSEEK, num_modules=1, target_fingerprint=None)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"carries MTP modules already.*replace=true"):
        support.stitched(tmp_path / "other", stitched, tmp_path / "out")
    made = support.stitched(
        tmp_path / "other", stitched, tmp_path / "out", replace=True, copies=False
    )
    before, now = bytes_of(target), bytes_of(made.folder)
    assert made.layout == "deepseek"
    assert {name: now[name] for name in before} == before
    assert not [name for name in now if name.startswith("model.layers.4.")]
    assert "model.layers.3.embed_tokens.weight" not in now
    held = [n for f in made.folder.glob("*.safetensors") for n in load_file(f)]
    assert sorted(held) == sorted(now)
    assert json.loads((made.folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    found = read_foreign(made.folder).tensors
    assert all(torch.equal(found[name], t) for name, t in other.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Set layout to one of deepseek"),
        ({"layout": "qwen"}, "2 MTP modules, but the qwen layout holds 1"),
    ],
)
def test_refuses_a_layout_that_is_not_known_or_too_small(
    target: Path, draft: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        support.stitched(draft, target, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_refuses_another_target_and_quantised_weights(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    shard = sorted(other.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({n: t + 1 for n, t in tensors.items()}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="trained for another target"):
        support.stitched(draft, other, tmp_path / "out", layout="deepseek")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised"):
        support.stitched(draft, other, tmp_path / "out", layout="deepseek")


def test_refuses_an_output_that_holds_something(target: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        support.stitched(draft, target, tmp_path, layout="deepseek")
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("fault", ["changed", "missing", "twice", "foreign"])
def test_the_check_sees_a_folder_that_is_not_right(
    target: Path, stitched: Path, tmp_path: Path, fault: str
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(stitched, wrong)
    named = load_file(stitched / ADDED)
    check_stitched(wrong, target, set(), named)
    shard = sorted(wrong.glob("model-0*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(iter(tensors))
    if fault == "changed":
        tensors[name].view(-1).view(torch.int32)[0] ^= 1  # One bit.
    elif fault == "missing":
        del tensors[name]
    elif fault == "twice":
        tensors |= {next(iter(named)): next(iter(named.values()))}
    else:
        tensors["stranger"] = torch.ones(2)
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="stitched folder is wrong"):
        check_stitched(wrong, target, set(), named)


def test_refuses_a_draft_that_is_no_mtp(target: Path, tmp_path: Path) -> None:
    from format_support import eagle3_config, make_draft

    from draftsmith.models.formats import new_draft

    config = eagle3_config()
    eagle = new_draft(config)
    eagle.load_state_dict(make_draft(config))
    eagle.save_pretrained(tmp_path / "eagle")
    with pytest.raises(ValueError, match="only MTP drafts"):
        support.stitched(tmp_path / "eagle", target, tmp_path / "out", layout="deepseek")
