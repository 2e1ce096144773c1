"""draftsmith-new-model: a byte-level BPE tokenizer from local text, and a random Llama-type model.

What it writes is an ordinary transformers folder: training it (method=mtp_joint) is training from
scratch, and every verb takes it as a target. The tokenizer has a ChatML template, so conversations
can be prepared for it; every text round-trips, there is no unknown token.

Check: tests/test_new_model.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.conversations import RowError, parse_conversation
from draftsmith.data.row_files import RowSource, open_rows

if TYPE_CHECKING:
    from draftsmith.conf.schema_new_model import NewModelConfig

PAD, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
PIECES = r"\p{N}|\n+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
"""What merges never cross: a digit, line ends, a word or signs with the blank before them."""


def run(config: NewModelConfig) -> None:
    """Writes the folder and says what is in it.

    Raises:
        ValueError: the output exists, the input cannot be read, or it is too little text for the
            vocabulary.
    """
    output = Path(config.output).expanduser()
    if output.exists():
        raise ValueError(f"output={output} exists already. Name a new folder, or remove it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        source = open_rows(config.input, split=config.split, workspace=Path(scratch) / "rows")
        tokenizer = train_tokenizer(source, config)
        model = make_model(tokenizer, config)
        aside = Path(scratch) / "result"
        write_model(model, aside)
        tokenizer.save_pretrained(aside)
        aside.rename(output)
    parameters = sum(weight.numel() for weight in model.parameters())
    sys.stdout.write(
        f"{output}: {len(tokenizer)} tokens, {parameters / 1e6:.2f} M parameters, untrained\n"
    )


def train_tokenizer(source: RowSource, config: NewModelConfig) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; ids 0, 1, 2 are padding, start and end of a message.

    Raises:
        ValueError: a row cannot be read, or the text has too few pairs for `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(source, config.input_format), trainer)
    if tokenizer.get_vocab_size() < config.vocab_size:
        raise ValueError(
            f"vocab_size is {config.vocab_size}, but {config.input} gives only "
            f"{tokenizer.get_vocab_size()} tokens. Lower vocab_size, or give more text."
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        extra_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_position_embeddings,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def texts_of(source: RowSource, input_format: str) -> Iterator[str]:
    """Every document, and every message of every conversation.

    Raises:
        ValueError: a row cannot be read; names it.
    """
    for raw in source.read(range(len(source))):
        try:
            row = parse_conversation(raw.parse(), input_format=input_format, origin=raw.origin)
        except RowError as error:
            raise ValueError(f"{raw.origin}: {error}") from error
        if row.text is not None:
            yield row.text
        yield from (message["content"] for message in row.messages)


def make_model(tokenizer: PreTrainedTokenizerFast, config: NewModelConfig) -> LlamaForCausalLM:
    """A float32 model drawn from `seed`; the global random state is left as it was."""
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "initializer_range",
    )
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                bos_token_id=None,
                **ids,
                **{name: getattr(config, name) for name in sizes},
            )
        )
    model.generation_config = GenerationConfig(**ids)
    return model.float().eval()


def write_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes the files of `save_pretrained`, which imports DeepSpeed wherever that is installed."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Each shared weight has one name here.
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
