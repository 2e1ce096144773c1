"""Typed settings of draftsmith-new-model; without torch, so help is instant.

Each field has its unit and origin below it. Values come from conf/new_model.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from draftsmith.conf.schema import require_at_least, require_choice


@dataclass
class NewModelConfig:
    """draftsmith-new-model: a tokenizer from local text, and a Llama-type model drawn at random."""

    input: str = MISSING
    """The text: what draftsmith-prepare reads (a .jsonl, .json or .parquet file, a folder, a glob);
    documents or conversations."""
    input_format: str = "auto"
    """auto, messages (OpenAI), sharegpt, alpaca, prompt_response or text."""
    split: str = "train"
    """Split of a `datasets` name."""
    output: str = MISSING
    """Folder to write; it must not exist."""
    vocab_size: int = 4096
    """Tokens: 256 bytes, three special ones, the rest learnt (our choice: small enough that
    embeddings do not outweigh the layers)."""
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    """The sizes give 3.2 M parameters (our choice: minutes per pass over a megabyte on a CPU)."""
    max_position_embeddings: int = 2048
    """Longest text in tokens."""
    tie_word_embeddings: bool = True
    """One matrix for embeddings and head."""
    initializer_range: float = 0.02
    """Standard deviation of the weights (Llama: 0.02)."""
    seed: int = 0
    """Of the weights."""

    def __post_init__(self) -> None:
        formats = ("auto", "messages", "sharegpt", "alpaca", "prompt_response", "text")
        require_choice("input_format", self.input_format, formats)
        require_at_least("vocab_size", self.vocab_size, 260)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        ):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("max_position_embeddings", self.max_position_embeddings, 2)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads or (self.hidden_size // heads) % 2 or heads % groups:
            raise ValueError(
                f"hidden_size is {self.hidden_size} with {heads} heads and {groups} key/value "
                "heads; expected heads of one even width, and as many or a multiple of the "
                "key/value heads. Change hidden_size, num_attention_heads or num_key_value_heads."
            )
        if not self.initializer_range > 0.0:
            raise ValueError(f"initializer_range is {self.initializer_range}; it must be above 0.")
