"""Rows to token rows, in this process or in several; the result does not depend on how many.

Chunks of rows go to the processes in order and come back in order. Only a few chunks are under way
at a time, so memory stays flat however long the input is. The processes come from a fork server
that has no threads: a fork after a tokenizer has started its own can hang.

Check: tests/test_prepare.py (1 process = 4 processes).
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.chat_mask import ChatMasker, EncodedText
from draftsmith.data.conversations import RowError, parse_conversation
from draftsmith.data.row_files import RawRow, RowSource
from draftsmith.models.target_source import load_tokenizer

CHUNK_ROWS = 64
"""Rows per piece of work (our choice: a few hundredths of a second each)."""
CHUNKS_AHEAD = 4
"""Chunks under way per process."""
TOO_LONG = "no supervised token within max_length"
"""Reason of rows whose answers all lie beyond max_length."""
NOTHING_SUPERVISED = "no supervised token"


@dataclass(frozen=True)
class EncoderSettings:
    """Everything that a process needs to encode rows (plain values: it travels to it)."""

    target_name: str
    tokenizer_source: str
    loading_arguments: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    template_kwargs: dict[str, Any]
    input_format: str
    train_on: str
    max_length: int


@dataclass
class TokenRow:
    """One training row."""

    identity: str
    category: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass
class DroppedRow:
    """A row that could not be used, and why."""

    origin: str
    reason: str
    detail: str

    def describe(self) -> str:
        return f"{self.origin}: {self.reason}: {self.detail}"


@dataclass
class EncodedChunk:
    """What became of one chunk of rows."""

    num_read: int = 0
    num_kept: int = 0
    rows: list[TokenRow] = field(default_factory=list)
    dropped: list[DroppedRow] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    num_cut_answers: int = 0
    end_ids: Counter[int] = field(default_factory=Counter)
    """Last supervised token of each answer (before the cut to max_length)."""


class RowEncoder:
    """Encodes raw rows with the target's tokenizer and chat template."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        tokenizer = load_tokenizer(
            settings.target_name, settings.tokenizer_source, settings.loading_arguments
        )
        self.masker = ChatMasker(
            tokenizer,
            eos_token_ids=settings.eos_token_ids,
            template_kwargs=settings.template_kwargs,
            train_on=settings.train_on,
        )

    def encode_chunk(self, raw_rows: Sequence[RawRow]) -> EncodedChunk:
        """Encodes rows; those that cannot be used are in `dropped` with their reason.

        Raises:
            ValueError: something is wrong with the target, not with a row.
        """
        chunk = EncodedChunk()
        self.masker.notes = chunk.notes
        for raw in raw_rows:
            chunk.num_read += 1
            try:
                self._encode_row(raw, chunk)
                chunk.num_kept += 1
            except RowError as error:
                chunk.dropped.append(DroppedRow(raw.origin, error.reason, error.detail))
        return chunk

    def _encode_row(self, raw: RawRow, chunk: EncodedChunk) -> None:
        """Adds the training rows of one raw row to the chunk, all or none.

        Raises:
            RowError: the row cannot be used.
        """
        conversation = parse_conversation(
            raw.parse(), input_format=self.settings.input_format, origin=raw.origin
        )
        pieces: list[tuple[str, EncodedText]] = []
        num_answers = 0
        if conversation.text is not None:
            document = self.masker.encode_document(conversation.text)
            pieces.append((conversation.identity, document))
        else:
            texts = self.masker.masked_texts(conversation)
            num_answers = sum(len(masked.spans) for masked in texts)
            for masked in texts:
                part = "" if len(texts) == 1 else f"#{masked.turn}"
                pieces.append((conversation.identity + part, self.masker.encode(masked)))
        limit = self.settings.max_length
        rows = [
            TokenRow(name, conversation.category, e.input_ids[:limit], e.loss_mask[:limit])
            for name, e in pieces
            if any(e.loss_mask[:limit])
        ]
        if not rows:
            longest = max(len(e.input_ids) for _, e in pieces)
            if any(any(e.loss_mask) for _, e in pieces):
                raise RowError(TOO_LONG, f"the row has {longest} tokens, max_length is {limit}")
            raise RowError(NOTHING_SUPERVISED, "no token lies within an answer")
        num_cut = sum(len(e.input_ids) > limit for _, e in pieces)
        if num_cut:
            chunk.notes["training rows cut at max_length"] += num_cut
        chunk.num_answers += num_answers
        chunk.num_cut_answers += len(conversation.cut_turns)
        for _, encoded in pieces:
            chunk.end_ids.update(encoded.end_ids)
        chunk.rows += rows


_process_encoder: RowEncoder | None = None
"""The encoder of a worker process, made once when it starts."""


def _start_process(settings: EncoderSettings) -> None:
    global _process_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_encoder = RowEncoder(settings)


def _encode_in_process(raw_rows: Sequence[RawRow]) -> EncodedChunk:
    assert _process_encoder is not None, "the process was started without an encoder"
    return _process_encoder.encode_chunk(raw_rows)


def _chunks(source: RowSource, order: Sequence[int]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    for raw in source.read(order):
        chunk.append(raw)
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def encode_rows(
    source: RowSource, order: Sequence[int], settings: EncoderSettings, *, num_workers: int
) -> Iterator[EncodedChunk]:
    """Encodes the rows of `order`, and yields the chunks in that order.

    Args:
        source: where the rows are.
        order: indices into the source.
        settings: the same for every process.
        num_workers: 1 works in this process.
    """
    chunks = _chunks(source, order)
    if num_workers == 1:
        encoder = RowEncoder(settings)
        for chunk in chunks:
            yield encoder.encode_chunk(chunk)
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once by the server; the processes forked from it start at once.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_process, initargs=(settings,)
    ) as pool:
        under_way: deque[Future[EncodedChunk]] = deque()
        try:
            for chunk in chunks:
                under_way.append(pool.submit(_encode_in_process, chunk))
                if len(under_way) >= num_workers * CHUNKS_AHEAD:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
