"""The draft vocabulary in training: what is counted and taught, what is a miss, what is saved."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.data.vocabulary import build_draft_vocabulary
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import Predictions
from draftsmith.train.checkpoint import save_draft
from draftsmith.train.objectives import OBJECTIVES, make_objective

VOCAB = 8


@dataclass
class Vocabulary:
    draft_to_target: Tensor


def predictions(labels: list[int] | None = None) -> tuple[Predictions, nn.Module]:
    """Two places over draft ids {0, 1, 2, 3} of 8; the teacher puts 0.9 on id 6 at the first and on
    id 2 at the second, and the draft is sure of id 2 at both."""
    head = nn.Linear(2, VOCAB, bias=False).requires_grad_(False)
    probs = torch.full((2, VOCAB), 0.1 / 7)
    probs[0, 6] = probs[1, 2] = 0.9
    head.weight.copy_(probs.log().T)
    hidden = torch.tensor([[[0.0, 0.0, 9.0, 0.0]] * 2]).requires_grad_()
    return Predictions(
        draft_hidden=hidden,
        draft_head_weight=torch.eye(4).requires_grad_(),
        target_hidden=torch.eye(2),
        supervised=torch.ones(1, 2, dtype=torch.bool),
        weights=torch.ones(1, 2),
        draft_to_target=torch.tensor([0, 1, 2, 3]),
        labels=None if labels is None else torch.tensor(labels),
    ), head


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"ce", "ce_l1"}))
def test_a_target_choice_outside_the_draft_vocabulary_is_not_taught_and_is_a_miss(
    name: str,
) -> None:
    """V04"""
    made, head = predictions()
    output = make_objective(name)(made, head)
    assert output.in_vocabulary.tolist() == [False, True]
    assert output.correct.tolist() == [[False, True]]
    # Not removed: it is supervised, so it counts in the denominator of the acceptance.
    assert made.supervised.all()
    assert float(output.acceptance[0, 0]) < 0.1 < float(output.acceptance[0, 1])
    output.loss_sum.backward()
    assert made.draft_hidden.grad is not None
    assert float(made.draft_hidden.grad[0, 0].abs().max()) == 0.0
    assert float(made.draft_hidden.grad[0, 1].abs().max()) > 0.0


def test_labels_are_taken_in_the_draft_vocabularys_numbering() -> None:
    """V06, for cross entropy: a label is a target id, the loss reads the draft's column of it."""
    made, head = predictions(labels=[9 - 8, 7])
    made.draft_to_target = torch.tensor([1, 4, 5, 7])  # 1 is draft id 0, 7 is draft id 3.
    output = make_objective("ce")(made, head)
    log_probs = made.draft_hidden.detach()[0].log_softmax(-1)
    wanted = -(log_probs[0, 0] + log_probs[1, 3])
    assert float(output.loss_sum.detach()) == pytest.approx(float(wanted), rel=1e-6)
    made.labels = torch.tensor([6, -1])  # Outside, and no label at all.
    assert float(make_objective("ce")(made, head).loss_sum.detach()) == 0.0


def test_words_of_the_prompt_are_not_counted(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """V10: counts are taken under the loss mask; the end-of-turn id is always in."""
    from draftsmith.conf.schema import PrepareConfig, TargetConfig
    from draftsmith.data.prepare import prepare

    chats = tmp_path / "chats.jsonl"
    rows = [
        {"prompt": "cat " * 40, "response": "the dog ran"},
        {"prompt": "cat " * 40, "response": "the dog sat"},
    ]
    chats.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    folder = tiny_folder("llama")
    prepared = prepare(
        PrepareConfig(
            target=TargetConfig(name_or_path=str(folder)),
            input=str(chats),
            output=str(tmp_path / "prepared"),
        )
    )
    counts = prepared.token_counts
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    of_prompt = set(tokenizer(" cat cat cat", add_special_tokens=False).input_ids)
    of_answers = set(tokenizer("the dog ran sat", add_special_tokens=False).input_ids)
    only_prompt = of_prompt - of_answers
    assert only_prompt
    assert int(counts[sorted(only_prompt)].sum()) == 0
    size = int((counts > 0).sum())
    vocabulary = build_draft_vocabulary(
        counts, draft_vocab_size=size, tokenizer_size=len(tokenizer), always_include=[eos]
    )
    assert vocabulary.coverage == 1.0
    assert eos in vocabulary.draft_to_target.tolist()
    assert not only_prompt & set(vocabulary.draft_to_target.tolist())


def test_a_reduced_head_of_a_tied_target_stays_untied_and_comes_back_bit_equal(
    tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    """V08"""
    target = tiny_target("llama_tied")
    ids = torch.arange(0, 320, 5)
    draft = Eagle3Method(draft_vocab_size=len(ids)).build(target.head(), Vocabulary(ids), [0, 1, 2])
    assert torch.equal(draft.lm_head.weight, target.head().weight[ids])
    save_draft(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    loaded = load_draft(tmp_path / "draft")
    assert (
        json.loads((tmp_path / "draft" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert torch.equal(loaded.lm_head.weight, draft.lm_head.weight)
    assert torch.equal(loaded.d2t + torch.arange(len(ids)), ids)
    assert torch.equal(loaded.t2d.nonzero().squeeze(-1), ids)


def test_the_map_of_a_large_target_takes_under_a_second() -> None:
    """V = 152 000, counted, picked and written as offsets and mask (V03)."""
    tokens = torch.randint(0, 151_936, (2_000_000,), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    counts = torch.bincount(tokens, minlength=152_000)
    vocabulary = build_draft_vocabulary(
        counts, draft_vocab_size=32_000, tokenizer_size=151_936, always_include=[151_645]
    )
    offsets, mask = vocabulary.offsets, vocabulary.mask(152_000)
    assert time.perf_counter() - start < 1.0
    assert torch.equal(mask.nonzero().squeeze(1), torch.arange(32_000) + offsets)
