"""Reading checkpoint folders of other programs: what is recognised, asked for and refused.

X.., V.., M.. are rows of the collection of faults that users of other toolkits met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from format_support import (
    DRAFT_VOCAB,
    VOCAB,
    eagle1_config,
    eagle3_config,
    export,
    make_draft,
    read_back,
    written,
)

from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import read_foreign, recognise_foreign, to_format


def test_m03_rotary_settings_per_layer_type_and_old_names_are_read(tmp_path: Path) -> None:
    """M03: nested rotary settings; `type` for rope_type; a partly rotated head is refused."""
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}}

    def reread(**keys: Any) -> dict[str, Any]:
        def change(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
            for name in ("rope_parameters", "rope_scaling", "rope_theta"):
                del raw[name]
            raw |= keys

        return read_back(written(tmp_path, eagle3_config(), "vllm", change=change)).config.to_dict()

    assert reread(rope_parameters=nested)["rope_parameters"]["rope_theta"] == 7e5
    old = reread(rope_theta=3e4, rope_scaling={"type": "linear", "factor": 2.0})
    expected = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
    assert old["rope_parameters"] == expected
    assert reread()["rope_parameters"]["rope_theta"] == 1e4
    with pytest.raises(ValueError, match=r"only a part of each head \(partial_rotary_factor 0.5"):
        reread(partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match="rope_theta 1.0, but rope_parameters says 2.0"):
        reread(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 2.0})


def test_m04_biases_fit_the_flag(tmp_path: Path) -> None:
    """M04: flag and tensors agree, also when a folder is read."""
    assert (
        "midlayer.self_attn.q_proj.bias"
        in export(eagle3_config(attention_bias=True), "vllm").tensors
    )

    def drop_flag(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["attention_bias"] = False

    folder = written(tmp_path, eagle3_config(attention_bias=True), "vllm", change=drop_flag)
    with pytest.raises(ValueError, match=r"self_attn.k_proj.bias is not known"):
        read_back(folder)


def test_v02_and_v07_a_map_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """V02: absolute ids instead of offsets. V07: sizes that contradict each other."""

    def check(change: Callable[[dict[str, Any], dict[str, Tensor]], None], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_back(written(tmp_path, eagle3_config(), "vllm", change=change))

    def absolute(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = tensors["t2d"].nonzero().squeeze(-1)

    def absolute_alone(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        absolute(raw, tensors)
        del tensors["t2d"]

    def smaller(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["draft_vocab_size"] = 10

    def full(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["vocab_size"] = DRAFT_VOCAB

    check(absolute, "d2t holds absolute target ids; it must hold offsets|does not hold 24 offsets")
    check(absolute_alone, r"does not hold 24 offsets \(target id - draft id\)")
    check(lambda _, tensors: tensors.pop("d2t"), "has no d2t: nobody can know which")
    check(smaller, "draft_vocab_size 10, but lm_head.weight has 24 rows")
    check(full, "both have 24 tokens, but d2t moves ids")


def test_a_map_without_its_mask_or_a_needless_one_is_read(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "a", eagle3_config(), "vllm", change=lambda _, tensors: tensors.pop("t2d")
    )
    assert torch.equal(read_back(folder).tensors["t2d"], make_draft(eagle3_config())["t2d"])

    def identity(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int32)
        tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)

    folder = written(tmp_path / "b", eagle3_config(draft_vocab_size=VOCAB), "vllm", change=identity)
    assert not {"d2t", "t2d"} & read_back(folder).tensors.keys()


def test_x02_a_missing_head_is_never_filled_in(tmp_path: Path) -> None:
    """X02: an engine would draft with random numbers and accept nothing."""
    folder = written(
        tmp_path / "a", eagle3_config(), "vllm", change=lambda _, t: t.pop("lm_head.weight")
    )
    with pytest.raises(ValueError, match=r"no lm_head.weight: an engine would draft with random"):
        read_back(folder)

    def without_head(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        raw["draft_vocab_size"] = None  # SGLang's way to say that the head is the target's.
        del tensors["lm_head.weight"]

    full = eagle3_config(draft_vocab_size=VOCAB)
    draft = read_back(written(tmp_path / "b", full, "sglang", change=without_head))
    assert draft.uses_target_head
    for name in ("norm.weight", "midlayer.mlp.up_proj.weight", "fc.weight"):
        folder = written(
            tmp_path / name, eagle3_config(), "vllm", change=lambda _, t, name=name: t.pop(name)
        )
        with pytest.raises(ValueError, match=rf"{name.removeprefix('midlayer.')}"):
            read_back(folder)


def test_x05_missing_layer_ids_are_asked_for_with_the_default_explained(tmp_path: Path) -> None:
    """X05: absent ids; the error has the line to paste."""

    def drop(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        del raw["eagle_aux_hidden_state_layer_ids"], raw["eagle_config"]

    folder = written(tmp_path, eagle3_config(), "eagle", change=drop)
    with pytest.raises(ValueError, match=r"N // 2 and N - 3.*aux_layer_ids=\[1,3,4\]"):
        read_back(folder)
    with pytest.raises(ValueError, match=r"with target.name_or_path=... these are worked out"):
        read_foreign(folder)
    config = read_back(folder, aux_layer_ids=[1, 3, 4]).config
    assert isinstance(config, Eagle3Config)
    assert config.aux_layer_ids == [1, 3, 4]
    with pytest.raises(ValueError, match="fc reads 3 target layers, but 2 are named"):
        read_back(folder, aux_layer_ids=[1, 3])


def test_x06_either_place_of_the_layer_ids_is_read(tmp_path: Path) -> None:
    """X06: nested alone, flat alone, both; contradicting ones are refused."""

    def reread(flat: list[int] | None, nested: list[int] | None) -> Any:
        def change(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
            raw["eagle_aux_hidden_state_layer_ids"] = flat
            raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = nested

        return read_back(written(tmp_path, eagle3_config(), "vllm", change=change))

    assert reread([2, 4, 5], None).config.aux_layer_ids == [1, 3, 4]
    assert reread([2, 4, 5], [1, 3, 4]).config.aux_layer_ids == [1, 3, 4]
    alone = reread(None, [1, 3, 4])
    assert alone.config.aux_layer_ids == [1, 3, 4]
    assert any("give aux_layer_ids=[0, 2, 3]" in remark for remark in alone.remarks)
    with pytest.raises(ValueError, match="They name different layers"):
        reread([1, 3, 4], [1, 3, 4])


def test_x07_older_names_of_the_norms_are_read(tmp_path: Path) -> None:
    def rename(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del raw["fc_norm"]
        raw["use_aux_norm"] = True
        for index, name in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{index}.weight")

    config = eagle3_config(fc_norm=True)
    draft = read_back(written(tmp_path, config, "sglang", change=rename))
    assert isinstance(draft.config, Eagle3Config)
    assert draft.config.fc_norm
    assert torch.equal(draft.tensors["fc_norm.2.weight"], make_draft(config)["fc_norm.2.weight"])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("hidden_norm.weight", r"hidden_norm.weight is not known"),
        ("markov_head.markov_w1.weight", r"markov_head.markov_w1.weight is not known"),
        ("mask_hidden", "mask_hidden belongs to a P-EAGLE draft"),
        ("prefix_gru.weight_ih_l0", "belongs to a Domino draft"),
    ],
)
def test_x11_tensors_of_other_methods_are_never_taken_for_an_eagle_drafts(
    tensor: str, message: str, tmp_path: Path
) -> None:
    def add(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[tensor] = torch.ones(2)

    with pytest.raises(ValueError, match=message):
        read_back(written(tmp_path, eagle3_config(), "vllm", change=add))


@pytest.mark.parametrize("tensor", ["mtp.fc.weight", "model.layers.4.eh_proj.weight"])
def test_x12_mtp_layers_are_refused_by_name(tensor: str, tmp_path: Path) -> None:
    """X12: until stitching is there, MTP layers are not taken for an EAGLE draft."""

    def add(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[tensor] = torch.ones(2)

    with pytest.raises(ValueError, match="belongs to a MTP draft"):
        read_back(written(tmp_path, eagle1_config(), "vllm", change=add))


def test_folders_are_recognised_by_config_and_names(tmp_path: Path) -> None:
    sources = {
        "vllm": "EAGLE-3, as vLLM and SGLang read it",
        "eagle": "EAGLE-3, EAGLE's own form",
        "speculators": "EAGLE-3, speculators",
    }
    for format, source in sources.items():
        folder = written(tmp_path / format, eagle3_config(), format)
        assert read_back(folder).source == recognise_foreign(folder) == source
    assert recognise_foreign(written(tmp_path / "one", eagle1_config(), "vllm")) == "EAGLE-1"
    assert recognise_foreign(tmp_path) is None


def test_pickled_weights_are_read_without_running_code(tmp_path: Path) -> None:
    folder = written(tmp_path, eagle3_config(), "vllm")
    expected = read_back(folder).tensors
    foreign = export(eagle3_config(), "vllm")
    (folder / "model.safetensors").unlink()
    torch.save(foreign.tensors, folder / "pytorch_model.bin")
    found = read_back(folder).tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert recognise_foreign(folder) is not None

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"fc.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        read_back(folder)
    assert not (tmp_path / "ran").exists()


def test_several_weight_files_are_read_by_their_index(tmp_path: Path) -> None:
    folder = written(tmp_path, eagle3_config(), "vllm")
    expected = read_back(folder).tensors
    tensors = export(eagle3_config(), "vllm").tensors
    (folder / "model.safetensors").unlink()
    parts = {"a.bin": {}, "b.bin": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        parts[("a.bin", "b.bin")[index % 2]][name] = tensor
    weight_map = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        torch.save(part, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_back(folder).tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (folder / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"b.bin is missing"):
        read_back(folder)


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    def check(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read_back(folder)

    check(tmp_path / "none", "is no folder")
    check(tmp_path, "no config.json")
    (tmp_path / "config.json").write_text("[1]")
    check(tmp_path, "holds a list, expected a JSON object")
    (tmp_path / "config.json").write_text("{")
    check(tmp_path, "not valid JSON")
    (tmp_path / "config.json").write_text("{}")
    check(tmp_path, r"neither model.safetensors nor pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    check(tmp_path, "cannot be read: it is damaged")

    def drop(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
        return lambda raw, _: raw.pop(name)

    def reread(name: str, format: str = "vllm") -> Path:
        return written(tmp_path / name, eagle3_config(), format, change=drop(name))

    check(reread("hidden_size"), "lacks hidden_size. Add what the checkpoint was made with")
    check(reread("norm_before_residual", "speculators"), "lacks norm_before_residual")
    check(reread("transformer_layer_config", "speculators"), "lacks transformer_layer_config")
    check(reread("speculators_model_type", "speculators"), "speculators checkpoint of type None")

    def other(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    check(written(tmp_path / "other", eagle3_config(), "vllm", change=other), "not recognised")

    def own(raw: dict[str, Any], _: dict[str, Tensor]) -> None:
        raw["draftsmith_class"] = "draftsmith.models.eagle3.Eagle3Draft"

    check(written(tmp_path / "own", eagle3_config(), "vllm", change=own), "needs no import")


def test_numbers_that_are_not_finite_are_refused_both_ways(tmp_path: Path) -> None:
    config = eagle3_config()
    tensors = make_draft(config)
    tensors["norm.weight"][3] = float("nan")
    with pytest.raises(ValueError, match=r"Not finite: norm.weight"):
        to_format(config, tensors, format="vllm", target=None)

    def spoil(_: dict[str, Any], found: dict[str, Tensor]) -> None:
        found["norm.weight"][0] = float("inf")

    with pytest.raises(ValueError, match=r"norm.weight is not finite"):
        read_back(written(tmp_path, config, "vllm", change=spoil))
