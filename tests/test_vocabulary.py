"""The draft vocabulary: which ids are picked, and how the two forms of the mapping agree."""

from __future__ import annotations

import time

import pytest
import torch

from draftsmith.data.vocabulary import DraftVocabulary, build_draft_vocabulary


def counts_of(size: int, **used: int) -> torch.Tensor:
    counts = torch.zeros(size, dtype=torch.int64)
    for name, count in used.items():
        counts[int(name[1:])] = count
    return counts


def test_unused_places_are_filled_with_the_lowest_unused_ids() -> None:
    """V01: exactly as many distinct ascending ids as asked for."""
    counts = torch.zeros(64, dtype=torch.int64)
    counts[40:60] = 3
    vocabulary = build_draft_vocabulary(
        counts, draft_vocab_size=32, tokenizer_size=64, always_include=[]
    )
    assert vocabulary.draft_to_target.tolist() == [*range(12), *range(40, 60)]
    assert vocabulary.draft_to_target.dtype == torch.int64
    assert vocabulary.coverage == 1.0


def test_offsets_and_mask_describe_the_same_ids() -> None:
    """V02: d2t holds offsets, not absolute ids."""
    vocabulary = DraftVocabulary(torch.tensor([0, 3, 7, 9]), coverage=1.0)
    assert vocabulary.offsets.tolist() == [0, 2, 5, 6]
    mask = vocabulary.mask(12)
    assert mask.dtype == torch.bool
    assert torch.equal(mask.nonzero().squeeze(1), torch.arange(4) + vocabulary.offsets)


def test_padding_ids_beyond_the_tokenizer_are_never_picked() -> None:
    """V05"""
    vocabulary = build_draft_vocabulary(
        counts_of(64, i3=5), draft_vocab_size=60, tokenizer_size=60, always_include=[]
    )
    assert vocabulary.draft_to_target.tolist() == list(range(60))
    with pytest.raises(ValueError, match="draft_vocab_size is 61; expected 1 to 60"):
        build_draft_vocabulary(
            counts_of(64, i3=5), draft_vocab_size=61, tokenizer_size=60, always_include=[]
        )


def test_counts_of_ids_that_the_tokenizer_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="another tokenizer"):
        build_draft_vocabulary(
            counts_of(64, i62=1), draft_vocab_size=8, tokenizer_size=60, always_include=[]
        )


def test_tokenizer_larger_than_the_model_picks_only_ids_that_the_model_has() -> None:
    vocabulary = build_draft_vocabulary(
        counts_of(50, i49=1), draft_vocab_size=50, tokenizer_size=60, always_include=[]
    )
    assert vocabulary.draft_to_target.max() == 49


def test_draft_vocabulary_larger_than_the_target_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 64"):
        build_draft_vocabulary(
            counts_of(64, i1=1), draft_vocab_size=65, tokenizer_size=100, always_include=[]
        )


def test_large_vocabularies_take_under_a_second() -> None:
    """V09: with room to spare, so that a busy machine does not fail it (here: 0.02 s)."""
    counts = torch.randint(0, 50, (200_000,), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    vocabulary = build_draft_vocabulary(
        counts, draft_vocab_size=32_000, tokenizer_size=200_000, always_include=[199_999]
    )
    assert time.perf_counter() - start < 1.0
    assert len(vocabulary.draft_to_target) == 32_000
    assert bool((vocabulary.draft_to_target.diff() > 0).all())
    left_out = torch.ones(200_000, dtype=torch.bool)
    left_out[vocabulary.draft_to_target] = False
    # Whatever was picked (but for the required id) is at least as frequent as what was not.
    assert counts[vocabulary.draft_to_target[:-1]].min() >= counts[left_out].max()


def test_end_of_turn_ids_are_always_in() -> None:
    counts = counts_of(64, i10=9, i11=8, i12=7, i13=6)
    vocabulary = build_draft_vocabulary(
        counts, draft_vocab_size=4, tokenizer_size=64, always_include=[2, 2]
    )
    assert vocabulary.draft_to_target.tolist() == [2, 10, 11, 12]
    assert vocabulary.coverage == pytest.approx(24 / 30)


def test_end_of_turn_ids_that_do_not_exist_or_do_not_fit_are_refused() -> None:
    counts = counts_of(64, i10=9)
    for ids in ([64], [-1], [1, 2, 3]):
        with pytest.raises(ValueError, match="always_include"):
            build_draft_vocabulary(
                counts, draft_vocab_size=2, tokenizer_size=64, always_include=ids
            )
