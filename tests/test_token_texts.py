"""The text of each token: pieces that join to the answer, whatever the bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftsmith.eval.token_texts import token_texts


@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat",
        "caf\u00e9 na\u00efve",
        "\U0001f431\u200d\U0001f4bb ok \u65e5\u672c",
        "a\n\n  b",
    ],
)
def test_pieces_join_to_the_answer_with_characters_spread_over_tokens(
    tiny_tokenizer: Any, text: str
) -> None:
    ids = [*tiny_tokenizer(text, add_special_tokens=False).input_ids, 3]
    pieces = token_texts(tiny_tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tiny_tokenizer.decode(ids) == text + "<|im_end|>"
    assert pieces[-1] == "<|im_end|>"


def test_a_character_belongs_to_the_token_that_completes_it(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer("a\u65e5b", add_special_tokens=False).input_ids
    assert len(ids) == 5, "three bytes between two letters"
    assert token_texts(tiny_tokenizer, ids) == ["a", "", "", "\u65e5", "b"]


def test_bytes_that_are_no_text_still_join(tiny_tokenizer: Any) -> None:
    """A random model's answers: stray bytes, special tokens, ids past the tokenizer."""
    chance = random.Random(0)
    for length in (1, 7, 60):
        ids = [chance.randrange(4, 312) for _ in range(length)]
        pieces = token_texts(tiny_tokenizer, ids)
        assert "".join(pieces) == tiny_tokenizer.decode(ids)
        assert len(pieces) == length
    assert token_texts(tiny_tokenizer, []) == []


def test_a_decoder_that_drops_a_leading_space_still_joins() -> None:
    """As sentencepiece tokenizers do."""

    class Dropping:
        words = (" the", " cat", " sat", "s")

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return "".join(self.words[i] for i in ids).removeprefix(" ")

    ids = [0, 1, 3] * 8 + [2]
    pieces = token_texts(Dropping(), ids)
    assert "".join(pieces) == Dropping().decode(ids, skip_special_tokens=False)
    assert pieces[:4] == ["the", " cat", "s", " the"]
