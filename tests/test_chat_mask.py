"""The loss mask covers exactly what the target would generate, for any chat template.

Each template here is made up for one property; the tokenizer is byte-level BPE unless a test needs
another kind. `taught` gives the supervised text of each training row, one string per answer.
"""

from __future__ import annotations

import random
from itertools import groupby
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftsmith.data.chat_mask import ChatMasker
from draftsmith.data.chat_template import encode_prompt
from draftsmith.data.conversations import Conversation, RowError, parse_conversation

PLAIN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|im_end|>{% endfor %}"
"""No generation prompt, no generation tags."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}[/tools]{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDES_OLD_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reasoning is kept in the last turn only."""


@pytest.fixture
def make_tokenizer(tiny: ModuleType) -> Any:
    """Factory `make_tokenizer(template)`: byte-level BPE, eos <|im_end|> (3), bos <|bos|> (1)."""

    def make(template: str, *, adds_bos: bool = False, adds_eos: bool = False) -> Any:
        tokenizer = tiny.make_tiny_tokenizer(chat_template=template)
        before = "<|bos|> " if adds_bos else ""
        after = " <|im_end|>" if adds_eos else ""
        if before or after:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{before}$A{after}",
                special_tokens=[("<|bos|>", 1), ("<|im_end|>", 3)],
            )
        return tokenizer

    return make


def conversation(*turns: tuple[str, str] | dict[str, Any], **row: Any) -> Conversation:
    messages = [
        turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns
    ]
    return parse_conversation({"messages": messages, **row})


def taught(tokenizer: Any, chat: Conversation, **settings: Any) -> list[list[str]]:
    """The supervised stretches of each training row, decoded."""
    masker = ChatMasker(tokenizer, **settings)
    rows = []
    for masked in masker.masked_texts(chat):
        encoded = masker.encode(masked)
        assert len(encoded.input_ids) == len(encoded.loss_mask)
        pairs = groupby(
            zip(encoded.input_ids, encoded.loss_mask, strict=True), key=lambda pair: pair[1]
        )
        rows.append(
            [tokenizer.decode([i for i, _ in group]) for supervised, group in pairs if supervised]
        )
    return rows


HI = (("user", "hi"), ("assistant", "fine thanks"))


def test_template_without_generation_tags_or_prompt(make_tokenizer: Any) -> None:
    # The header's space is part of the answer's first token.
    assert taught(make_tokenizer(PLAIN), conversation(*HI)) == [[" fine thanks <|im_end|>"]]


def test_generation_prompt_and_trailing_line_break_are_left_out(make_tokenizer: Any) -> None:
    chat = conversation(*HI, ("user", "and?"), ("assistant", "ok"))
    assert taught(make_tokenizer(CHATML), chat) == [["fine thanks<|im_end|>", "ok<|im_end|>"]]


def test_mask_equals_the_one_of_generation_tags(make_tokenizer: Any, tiny: ModuleType) -> None:
    tokenizer = make_tokenizer(tiny.CHAT_TEMPLATE_WITH_GENERATION_TAGS)
    chat = conversation(*HI, ("user", "one two"), ("assistant", " three\n"))
    tagged = tokenizer.apply_chat_template(
        chat.messages, return_assistant_tokens_mask=True, return_dict=True
    )
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(chat)
    encoded = masker.encode(masked)
    length = len(encoded.input_ids)
    assert encoded.input_ids == tagged["input_ids"][:length]
    assert encoded.loss_mask == tagged["assistant_masks"][:length]
    assert not any(tagged["assistant_masks"][length:])


@pytest.mark.parametrize("answer", ["ok ", "ok\n", " ok", "\nok\n\n", "a  b \n c"])
def test_white_space_of_an_answer_is_kept_and_nothing_after_it(
    make_tokenizer: Any, answer: str
) -> None:
    chat = conversation(("user", "hi"), ("assistant", answer))
    # The header ends in a special token, so that no token can straddle the answer's start.
    template = CHATML.replace("\n{{ m.content }}", "<|bos|>{{ m.content }}").replace(
        "assistant\n", "assistant<|bos|>"
    )
    assert taught(make_tokenizer(template), chat) == [[f"{answer}<|im_end|>"]]


def test_assistant_at_character_zero(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    chat = conversation(("assistant", "welcome"), ("user", "hi"), ("assistant", "ok"))
    assert taught(tokenizer, chat) == [["welcome<|im_end|>", "ok<|im_end|>"]]


def test_template_that_trims_answers(make_tokenizer: Any) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    chat = conversation(("user", "hi"), ("assistant", " ok \n"), ("user", "x"), ("assistant", "y "))
    assert taught(make_tokenizer(template), chat) == [["ok<|im_end|>", "y<|im_end|>"]]


# BOS


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, CHATML])
def test_exactly_one_bos_whether_template_or_tokenizer_adds_it(
    make_tokenizer: Any, template: str
) -> None:
    tokenizer = make_tokenizer(template, adds_bos=True, adds_eos=True)
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(conversation(*HI))
    encoded = masker.encode(masked)
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
    assert encoded.loss_mask[0] == 0
    supervised = [i for i, m in zip(encoded.input_ids, encoded.loss_mask, strict=True) if m]
    assert supervised.count(tokenizer.eos_token_id) == 1


def test_no_bos_where_neither_template_nor_tokenizer_has_one(make_tokenizer: Any) -> None:
    masker = ChatMasker(make_tokenizer(CHATML))
    (masked,) = masker.masked_texts(conversation(*HI))
    assert 1 not in masker.encode(masked).input_ids


def test_training_row_starts_with_the_prompt_that_inference_reads(make_tokenizer: Any) -> None:
    for template, adds_bos in ((CHATML, True), ("{{ bos_token }}" + CHATML, True), (CHATML, False)):
        tokenizer = make_tokenizer(template, adds_bos=adds_bos)
        masker = ChatMasker(tokenizer)
        (masked,) = masker.masked_texts(conversation(*HI))
        encoded = masker.encode(masked)
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
        assert encoded.input_ids[: len(prompt)] == prompt
        assert encoded.loss_mask.index(1) == len(prompt)


def test_plain_text_keeps_the_tokenizers_own_bos_and_eos(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML, adds_bos=True, adds_eos=True)
    encoded = ChatMasker(tokenizer).encode_document("the cat")
    assert encoded.input_ids == tokenizer("the cat")["input_ids"]
    assert encoded.loss_mask == [0] + [1] * (len(encoded.input_ids) - 1)
    # Preformatted text that brings its own BOS and EOS gets no second ones.
    again = ChatMasker(tokenizer).encode_document("<|bos|>the cat<|im_end|>")
    assert again.input_ids == encoded.input_ids
    assert again.loss_mask == encoded.loss_mask


# Tokenizers whose pieces depend on the context


def sentencepiece_like(template: str) -> Any:
    """Writes "ok" as one piece with a space mark at the start of a text, without it elsewhere."""
    pieces = ["<unk>", "<|u|>", "<|a|>", "<|e|>", "\u2581", "\u2581ok", "ok", "\u2581hi", "hi"]
    scores = [0.0, 0.0, 0.0, 0.0, -4.0, -1.0, -1.5, -1.0, -1.5]
    backend = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|e|>",
        extra_special_tokens=["<|u|>", "<|a|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def test_spans_are_exact_where_pieces_differ_in_context() -> None:
    tokenizer = sentencepiece_like(
        "{% for m in messages %}{{ '<|u|>' if m.role == 'user' else '<|a|>' }}{{ m.content }}"
        "{{ '<|e|>' if m.role == 'assistant' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer("ok")["input_ids"]) == ["\u2581ok"]
    chat = conversation(*(("user", "hi"), ("assistant", "ok")) * 3)
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(chat)
    encoded = masker.encode(masked)
    pieces = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert pieces == ["<|u|>", "hi", "<|a|>", "ok", "<|e|>"] * 3
    assert encoded.loss_mask == [0, 0, 0, 1, 1] * 3


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_token_across_the_start_of_an_answer_is_counted_and_not_supervised(
    make_tokenizer: Any, trims_offsets: bool
) -> None:
    # The generation prompt ends in a space; in the full text the space is part of the next token.
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(template)
    if trims_offsets:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(conversation(("user", "hi"), ("assistant", "the cat")))
    encoded = masker.encode(masked)
    first = encoded.loss_mask.index(1)
    assert tokenizer.decode(encoded.input_ids[first - 1]) == " the"
    assert tokenizer.decode(encoded.input_ids[first:]) == " cat<|im_end|>"
    assert masker.notes == {"tokens across the edge of an answer, not supervised": 1}


def test_characters_of_several_tokens_are_covered_whole(make_tokenizer: Any) -> None:
    chat = conversation(("user", "hi"), ("assistant", "\u00e9\U0001f600 na\u00efve \u4f60\u597d"))
    assert taught(make_tokenizer(CHATML), chat) == [[f"{chat.messages[1]['content']}<|im_end|>"]]


def test_tokenizer_without_offsets_is_refused() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(ValueError, match="slow tokenizer .* no loss mask"):
        ChatMasker(SlowTokenizer())


# Reasoning


THINK_SCAFFOLD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think> </think> {% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}"
    "{% endif %}"
)


@pytest.mark.parametrize("template_kwargs", [{}, {"enable_thinking": False}])
def test_empty_reasoning_of_the_template_is_not_supervised(
    make_tokenizer: Any, template_kwargs: dict[str, Any]
) -> None:
    tokenizer = make_tokenizer(THINK_SCAFFOLD)
    chat = conversation(("user", "2+2"), ("assistant", "4"))
    assert taught(tokenizer, chat, template_kwargs=template_kwargs) == [["4<|im_end|>"]]


def test_empty_reasoning_that_the_target_wrote_itself_is_supervised(make_tokenizer: Any) -> None:
    chat = conversation(("user", "2+2"), ("assistant", "<think>\n\n</think>\n\n4"))
    expected = "<think>\n\n</think>\n\n4<|im_end|>"
    assert taught(make_tokenizer(CHATML), chat) == [[expected]]


def test_prompt_that_opens_reasoning_and_answer_without_any(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML.replace("assistant\n", "assistant\n<think>"))
    masker = ChatMasker(tokenizer)
    # The answer starts like the scaffold: a common prefix of characters would cut into it.
    (masked,) = masker.masked_texts(conversation(("user", "2+2"), ("assistant", "<thin> 4")))
    (span,) = masked.spans
    assert masked.text[span.start : span.end] == "<thin> 4<|im_end|>"
    assert masker.notes["answers without the scaffold that the generation prompt pre-fills"] == 1


@pytest.mark.parametrize("answer", ["steps </think> 4", "<think>steps </think> 4"])
@pytest.mark.parametrize("drops_reasoning", [False, True])
def test_answer_with_a_closing_tag_continues_the_prompts_opening_tag(
    make_tokenizer: Any, answer: str, drops_reasoning: bool
) -> None:
    template = CHATML.replace("assistant\n", "assistant\n<think>")
    if drops_reasoning:
        template = template.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    tokenizer = make_tokenizer(template)
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(conversation(("user", "2+2"), ("assistant", answer)))
    prompt = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>"
    assert masked.text == prompt + "steps </think> 4<|im_end|>\n"
    (span,) = masked.spans
    assert masked.text[span.start : span.end] == "steps </think> 4<|im_end|>"


def test_template_that_drops_reasoning_in_any_turn_still_teaches_it(make_tokenizer: Any) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    chat = conversation(("user", "2+2"), ("assistant", "<think>two</think>4"))
    expected = [["<think>two</think>4<|im_end|>"]]
    assert taught(make_tokenizer(template), chat) == expected


def test_template_that_rewrites_old_turns_gives_one_row_per_answer(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(HIDES_OLD_REASONING)
    chat = conversation(
        ("user", "a"),
        ("assistant", "<think>x</think>b"),
        ("user", "c"),
        ("assistant", "<think>y</think>d"),
    )
    masker = ChatMasker(tokenizer)
    rows = masker.masked_texts(chat)
    assert [row.turn for row in rows] == [1, 3]
    assert "<think>x</think>" in rows[0].text
    assert "<think>x</think>" not in rows[1].text
    assert taught(tokenizer, chat) == [
        ["<think>x</think>b<|im_end|>"],
        ["<think>y</think>d<|im_end|>"],
    ]
    # Turns without reasoning are not rewritten and share a row.
    plain = conversation(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert taught(tokenizer, plain) == [["b<|im_end|>", "d<|im_end|>"]]


def test_reasoning_field_is_supervised_or_the_row_is_refused(make_tokenizer: Any) -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}",
    )
    answer = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    chat = conversation(("user", "2+2"), answer)
    expected = [["<think>two and two</think>4<|im_end|>"]]
    assert taught(make_tokenizer(template), chat) == expected
    with pytest.raises(RowError, match="reasoning not rendered"):
        taught(make_tokenizer(CHATML), chat)


def test_reasoning_against_a_prompt_that_closed_it_is_refused(make_tokenizer: Any) -> None:
    template = THINK_SCAFFOLD.replace("<think> </think> {% endif %}{{", "{% endif %}{{")
    tokenizer = make_tokenizer(template)
    chat = conversation(("user", "2+2"), ("assistant", "<think>x</think> 4"))
    with pytest.raises(RowError, match="does not follow the generation prompt"):
        taught(tokenizer, chat, template_kwargs={"enable_thinking": False})
    # Without reasoning of its own, the answer is put where inference has it.
    masker = ChatMasker(tokenizer, template_kwargs={"enable_thinking": False})
    (masked,) = masker.masked_texts(conversation(("user", "2+2"), ("assistant", "4")))
    assert masked.text.endswith("assistant\n<think> </think> 4<|im_end|>\n")
    (span,) = masked.spans
    assert masked.text[span.start : span.end] == "4<|im_end|>"


# End of turn


def test_end_of_turn_token_that_is_not_the_eos(make_tokenizer: Any) -> None:
    template = CHATML.replace("<|im_end|>\n", "<|im_start|>\n")
    assert taught(make_tokenizer(template), conversation(*HI)) == [["fine thanks<|im_start|>"]]


def test_end_of_turn_written_in_ordinary_characters(make_tokenizer: Any) -> None:
    template = CHATML.replace("<|im_end|>\n{% endfor", "</s>\n{% endfor")
    assert taught(make_tokenizer(template), conversation(*HI)) == [["fine thanks</s>"]]


def test_answer_without_any_end_of_turn_ends_with_its_text(make_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}<|bos|>{{ m.role }}<|pad|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant<|pad|>{% endif %}"
    )
    chat = conversation(*HI, ("user", "x"), ("assistant", "ok"))
    tokenizer = make_tokenizer(template)
    assert taught(tokenizer, chat) == [["fine thanks", "ok"]]
    # Where the next header's token is one of the EOS ids, the target stops by writing it.
    assert taught(tokenizer, chat, eos_token_ids=[1]) == [["fine thanks<|bos|>", "ok"]]


def test_supervision_stops_at_the_first_end_token(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    chat = conversation(("user", "hi"), ("assistant", "ok<|im_end|>"))
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(chat)
    encoded = masker.encode(masked)
    supervised = [i for i, m in zip(encoded.input_ids, encoded.loss_mask, strict=True) if m]
    assert tokenizer.decode(supervised) == "ok<|im_end|>"
    assert masker.notes["answers that go on after an end token, cut there"] == 1


def test_template_that_ends_the_last_turn_differently(make_tokenizer: Any) -> None:
    template = CHATML.replace(
        "<|im_end|>\n{% endfor",
        "{{ '<|pad|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\n{% endfor",
    )
    chat = conversation(*HI, ("user", "x"), ("assistant", "ok"))
    assert taught(make_tokenizer(template), chat) == [["fine thanks<|pad|>"], ["ok<|pad|>"]]


def test_tool_turn_with_an_end_token_of_its_own(make_tokenizer: Any) -> None:
    template = TOOLS.replace(
        "<|im_end|>\n{% endfor", "{{ '<|pad|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor"
    )
    rows = taught(make_tokenizer(template), conversation(*tool_turns({"x": 1})))
    assert rows == [['<call>add {"x": 1}</call><|pad|>', "it is 1<|im_end|>"]]


def test_cut_answers_have_no_supervised_end_of_turn(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    turns = (*HI, ("user", "and?"), ("assistant", "ok"))
    whole, cut = "fine thanks<|im_end|>", "ok"
    assert taught(tokenizer, conversation(*turns, finish_reason="length")) == [[whole, cut]]
    reasons = ["length", "stop"]
    rows = taught(tokenizer, conversation(*turns, finish_reasons=reasons))
    assert rows == [["fine thanks", "ok<|im_end|>"]]
    marked = {"role": "assistant", "content": "so the", "finish_reason": "length"}
    assert taught(tokenizer, conversation(("user", "hi"), marked)) == [["so the"]]


def test_several_eos_ids_all_end_an_answer_and_stay_supervised(make_tokenizer: Any) -> None:
    template = CHATML.replace("<|im_end|>\n{% endfor", "<|pad|>\n{% endfor")
    rows = taught(make_tokenizer(template), conversation(*HI), eos_token_ids=[0, 3])
    assert rows == [["fine thanks<|pad|>"]]


# Tools, system turns, empty turns


def tool_turns(arguments: Any) -> tuple[Any, ...]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return (
        ("system", "be brief"),
        ("user", "compute"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "result 1", "name": "add"},
        ("assistant", "it is 1"),
    )


def test_system_and_tool_turns_are_context_and_both_answers_are_taught(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(TOOLS)
    chat = conversation(*tool_turns({"x": 1}))
    assert taught(tokenizer, chat) == [['<call>add {"x": 1}</call><|im_end|>', "it is 1<|im_end|>"]]
    masker = ChatMasker(tokenizer)
    (masked,) = masker.masked_texts(chat)
    assert "be brief" in masked.text
    assert "result 1" in masked.text
    assert not masker.notes


@pytest.mark.parametrize(
    "template",
    [
        TOOLS,
        # One that joins a string, and one that writes whatever it gets.
        TOOLS.replace(
            "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}",
            "{{ '<call>' + c.function.name + ' ' + c.function.arguments }}",
        ),
        TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"),
    ],
    ids=["mapping", "joined", "written"],
)
def test_arguments_as_json_text_and_as_mapping_give_the_same_ids(
    make_tokenizer: Any, template: str
) -> None:
    masker = ChatMasker(make_tokenizer(template))
    texts = [
        masker.masked_texts(conversation(*tool_turns(arguments)))
        for arguments in ('{"x": "two"}', {"x": "two"})
    ]
    assert texts[0] == texts[1]
    assert '<call>add {"x": "two"}</call>' in texts[0][0].text
    assert masker.encode(texts[0][0]).input_ids == masker.encode(texts[1][0]).input_ids


def test_tool_calls_that_the_template_leaves_out_are_refused(make_tokenizer: Any) -> None:
    with pytest.raises(RowError, match="tool call not rendered"):
        taught(make_tokenizer(CHATML), conversation(*tool_turns({"x": 1})))


def test_left_out_system_text_is_counted(make_tokenizer: Any) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}")
    masker = ChatMasker(make_tokenizer(template))
    masker.masked_texts(conversation(("system", "be brief"), *HI))
    assert masker.notes == {"system texts that the template leaves out or changes": 1}


def test_empty_answers_are_not_supervised(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(RowError, match="no assistant text"):
        taught(tokenizer, conversation(("user", "hi"), ("assistant", "")))
    chat = conversation(
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", ""), ("user", "d"),
        ("assistant", "e"),
    )  # fmt: skip
    assert taught(tokenizer, chat) == [["b<|im_end|>", "e<|im_end|>"]]


def test_answers_in_a_row_are_two_spans_without_the_header(make_tokenizer: Any) -> None:
    chat = conversation(*HI, ("assistant", "and you"))
    expected = [["fine thanks<|im_end|>", "and you<|im_end|>"]]
    assert taught(make_tokenizer(CHATML), chat) == expected
    # A template that adds no generation prompt after an answer.
    template = CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}",
    )
    assert taught(make_tokenizer(template), chat) == expected


def test_only_the_last_answer_is_taught_when_asked(make_tokenizer: Any) -> None:
    chat = conversation(*HI, ("user", "and?"), ("assistant", "ok"), ("user", "bye"))
    assert taught(make_tokenizer(CHATML), chat, train_on="last") == [["ok<|im_end|>"]]


def test_answers_of_weight_zero_are_context(make_tokenizer: Any) -> None:
    chat = conversation(
        ("user", "hi"),
        {"role": "assistant", "content": "bad", "weight": 0},
        ("user", "again"),
        {"role": "assistant", "content": "good", "weight": 1},
    )
    assert taught(make_tokenizer(CHATML), chat) == [["good<|im_end|>"]]


def test_opening_line_that_answers_no_prompt_is_context(make_tokenizer: Any) -> None:
    # A default system turn makes the empty prompt differ from the start of the conversation.
    template = "{% if messages %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}" + CHATML
    chat = conversation(("assistant", "welcome"), *HI)
    assert taught(make_tokenizer(template), chat) == [["fine thanks<|im_end|>"]]


def test_refusal_of_the_template_is_a_row_error_with_its_text(make_tokenizer: Any) -> None:
    template = (
        "{% if messages and messages[0].role == 'assistant' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
    ) + CHATML
    with pytest.raises(RowError, match="the chat template refused it.*roles must alternate"):
        taught(make_tokenizer(template), conversation(("assistant", "hi"), ("user", "x")))


def test_tokenizer_without_template_is_refused_with_what_to_do(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*chat_template\.jinja"):
        taught(tokenizer, conversation(*HI))


def test_random_conversations_are_masked_exactly_under_every_template(make_tokenizer: Any) -> None:
    generator = random.Random(0)
    words = ["the cat", "sat", "\n", "  ", "1 2 3", "def f():\n    return", "\u00e9", "<b>", "</b>"]
    header = "<|bos|>{{ m.role }}<|pad|>"
    templates = [
        # Headers that end in a special token: nothing can straddle.
        "{% for m in messages %}" + header + "{{ m.content }}<|im_end|>\n{% endfor %}",
        "{% for m in messages %}" + header + "{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant<|pad|>{% endif %}",
        "sys <|im_end|>{% for m in messages %}" + header + "{{ m.content }}<|im_end|>\n\n"
        "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant<|pad|>{% endif %}",
    ]
    for template in templates:
        tokenizer = make_tokenizer(template)
        for _ in range(30):
            turns, expected = [], []
            for _ in range(generator.randint(1, 4)):
                answer = "".join(generator.choices(words, k=generator.randint(1, 6)))
                turns += [("user", generator.choice(words)), ("assistant", answer)]
                if answer.strip():
                    expected.append(answer + "<|im_end|>")
            if expected:
                assert taught(tokenizer, conversation(*turns)) == [expected]
