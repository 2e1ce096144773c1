"""The text of each generated token, such that the pieces joined are the decoded answer.

A token's text depends on its neighbours: a character may be spread over several tokens, and some
tokenizers drop a leading space. So a piece is never decoded alone; it is what the whole text shows
beyond the tokens before it. A character that is not complete yet belongs to the token that
completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

WINDOW = 8
"""Tokens decoded together to see what one more adds; longer than any character's bytes."""
UNFINISHED = "\ufffd"
"""What decoders show for bytes that are no character (yet)."""


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """One piece per token; joined they are the answer with its special tokens.

    Args:
        tokenizer: the target's.
        token_ids: the answer.
    """
    ids = list(token_ids)
    whole: str = tokenizer.decode(ids, skip_special_tokens=False)
    pieces: list[str] = []
    shown = 0
    for end in range(1, len(ids) + 1):
        piece = _added(tokenizer, ids, end)
        if end == len(ids):
            piece = whole[shown:]
        elif piece is None or not whole.startswith(piece, shown):
            # The slow way, over the whole text: what its decoding shares with the answer.
            before = str(tokenizer.decode(ids[:end], skip_special_tokens=False))
            piece = whole[shown : len(commonprefix([before, whole]))]
        pieces.append(piece)
        shown += len(piece)
    return pieces


def _added(tokenizer: Any, ids: list[int], end: int) -> str | None:
    """What the last token of ids[:end] adds to those before it; None where that is unsure."""
    start = max(0, end - 1 - WINDOW)
    before = str(tokenizer.decode(ids[start : end - 1], skip_special_tokens=False))
    after = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
    if UNFINISHED in after or not after.startswith(before) or (start > 0 and not before):
        return None
    return after[len(before) :]
