"""draftsmith-new-model: a folder that every verb takes as a target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.conf.entry import compose_settings
from draftsmith.conf.schema_new_model import NewModelConfig
from draftsmith.data.chat_mask import ChatMasker
from draftsmith.data.new_model import run
from draftsmith.models.target import TargetModel

SCHEMA = "draftsmith.conf.schema_new_model:NewModelConfig"
SMALL = (
    "vocab_size=270",
    "hidden_size=32",
    "intermediate_size=48",
    "num_hidden_layers=2",
    "num_attention_heads=4",
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [
        {"text": "the cat sat on the mat and the dog sat on the door, 1 23 times\n"},
        {"messages": [{"role": "user", "content": "où?"}, {"role": "assistant", "content": "the"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 4))
    return path


def settings(rows: Path, output: Path, *overrides: str) -> NewModelConfig:
    words = [f"input={rows}", f"output={output}", *SMALL, *overrides]
    return compose_settings("new_model", SCHEMA, words)


def test_the_folder_is_a_target_with_its_own_tokenizer(rows: Path, tmp_path: Path) -> None:
    run(settings(rows, tmp_path / "new"))
    target = TargetModel.load(str(tmp_path / "new"), dtype="float32")
    assert (target.vocab_size, len(target.tokenizer), target.num_layers) == (270, 270, 2)
    assert target.eos_token_ids == (2,)
    text = "the cat 123 où\n\tdéjà"
    ids = target.tokenizer(text).input_ids
    assert target.tokenizer.decode(ids) == text
    assert target.tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    head = target.model.get_output_embeddings()
    assert head.weight is target.model.get_input_embeddings().weight
    masker = ChatMasker(target.tokenizer, eos_token_ids=target.eos_token_ids)
    document = masker.encode_document("the cat")
    assert document.loss_mask == [1] * len(document.input_ids)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state_alone(
    rows: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(settings(rows, tmp_path / name, f"seed={seed}", "tie_word_embeddings=false"))
    assert torch.equal(before, torch.get_rng_state())
    a, b, c = (
        TargetModel.load(str(tmp_path / name), dtype="float32").fingerprint for name in "abc"
    )
    assert a == b
    assert a.differences(c) == ("weights",)


def test_mistakes_are_named(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 4000.*gives only \d+ tokens"):
        run(settings(rows, tmp_path / "new", "vocab_size=4000"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        run(settings(rows, tmp_path / "there"))
    rows.write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: no text"):
        run(settings(rows, tmp_path / "new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "there"]
    for word in ("hidden_size=36", "num_attention_heads=6", "num_key_value_heads=3"):
        with pytest.raises(ValueError, match="key/value heads"):
            settings(rows, tmp_path / "new", word)
