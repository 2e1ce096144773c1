"""Reading prompts and turning conversations into token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from draftsmith.eval.prompts import Prompt, encode_turn, load_prompts, template_mode


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return str(path)


def test_bundled_prompts_are_eight_categories_of_twelve() -> None:
    prompts = load_prompts("bundled")
    assert len({prompt.id for prompt in prompts}) == 96
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) == 8
    assert set(counts.values()) == {12}
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def test_limit_keeps_the_first_of_every_category() -> None:
    limited = load_prompts("bundled", limit_per_category=2)
    assert set(Counter(prompt.category for prompt in limited).values()) == {2}
    assert [p for p in load_prompts("bundled") if p in limited] == limited


def test_plain_and_benchmark_rows_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Say hello."},
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": []},
        {"question_id": 161, "category": "translation", "turns": ["A line\u2028break."]},
    ]
    plain, mt_bench, spec_bench = load_prompts(write_rows(tmp_path / "question.jsonl", rows))
    assert (plain.id, plain.category, plain.turns) == ("line-1", "all", ("Say hello.",))
    assert (mt_bench.id, mt_bench.category) == ("81", "writing")
    assert mt_bench.turns == ("One?", "Two?")
    assert spec_bench.turns == ("A line\u2028break.",)


def test_line_separators_of_unicode_do_not_break_a_row(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert load_prompts(str(path))[0].turns == ("a\u2028b",)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def read_messages(tmp_path: Path, *messages: dict[str, Any]) -> Prompt:
    (prompt,) = load_prompts(write_rows(tmp_path / "m.jsonl", [{"messages": list(messages)}]))
    return prompt


def test_system_message_and_given_answers_are_kept(tmp_path: Path) -> None:
    prompt = read_messages(
        tmp_path,
        message("developer", "Be brief."),
        message("user", "A"),
        message("assistant", "a"),
        message("user", [{"type": "text", "text": "B"}, {"type": "text", "text": "!"}]),
    )
    assert prompt.turns == ("B!",)
    assert prompt.messages([]) == [
        message("system", "Be brief."),
        message("user", "A"),
        message("assistant", "a"),
        message("user", "B!"),
    ]


def test_user_messages_without_answers_are_fed_one_after_the_other(tmp_path: Path) -> None:
    prompt = read_messages(
        tmp_path,
        message("user", "A"),
        message("user", "B"),
        message("assistant", "b"),
        message("user", "C"),
    )
    assert prompt.turns == ("A", "C")
    assert prompt.messages([]) == [message("user", "A")]
    assert prompt.messages(["mine"]) == [
        message("user", "A"),
        message("assistant", "mine"),
        message("user", "B"),
        message("assistant", "b"),
        message("user", "C"),
    ]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages is empty"),
        ([message("tool", "x")], "role 'tool'"),
        ([message("user", "a"), message("assistant", "b")], "the last message is from the assi"),
        ([message("user", " ")], "last message is from the user and empty"),
        ([message("assistant", "b"), message("user", "a")], "message 1 is an assistant's"),
        (
            [message("user", "a"), message("assistant", "b"), message("assistant", "c")]
            + [message("user", "d")],
            "message 3 is an assistant's",
        ),
        ([message("user", [{"type": "image_url"}])], "content is list"),
    ],
)
def test_messages_that_cannot_be_answered_are_named(
    tmp_path: Path, messages: list[Any], expected: str
) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{"messages": messages}])
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 1: .*{expected}"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "line 1: keys text; expected one of 'prompt'"),
        ('{"prompt": "x", "turns": ["y"]}', "both 'prompt' and 'turns' filled"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"turns": []}', "turns is empty"),
        ('{"turns": ["a", 3]}', "empty or not text"),
        ("[1]", "found list"),
        ("{oops", "not JSON"),
        ("", "has no prompts"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}', "used twice"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match="No prompt file at nowhere.jsonl"):
        load_prompts("nowhere.jsonl")
    with pytest.raises(ValueError, match="bundled is no data set"):
        load_prompts("bundled", split="test")


def test_a_column_of_ones_own_is_read_in_any_form(tmp_path: Path) -> None:
    rows = [
        {"question": "A?"},
        {"question": ["B?", "C?"]},
        {"question": [message("system", "s"), message("user", "D?")]},
    ]
    path = write_rows(tmp_path / "q.jsonl", rows)
    prompts = load_prompts(path, column="question")
    assert [prompt.turns for prompt in prompts] == [("A?",), ("B?", "C?"), ("D?",)]
    assert prompts[2].given == ((message("system", "s"),),)
    with pytest.raises(ValueError, match="prompts_column is 'text', but the keys are question"):
        load_prompts(path, column="text")


@pytest.fixture
def saved_dataset(tmp_path: Path) -> str:
    """Columns of all three forms; a row fills one of them."""
    columns = {
        "question_id": [7, 8],
        "category": ["maths", None],
        "turns": [["One?", "Two?"], None],
        "messages": [None, [message("system", "s"), message("user", "Three?")]],
    }
    folder = tmp_path / "saved"
    datasets.DatasetDict(
        {"test": datasets.Dataset.from_dict(columns), "dev": datasets.Dataset.from_dict(columns)}
    ).save_to_disk(str(folder))
    return str(folder)


def test_a_saved_data_set_is_read_by_split(saved_dataset: str, tmp_path: Path) -> None:
    first, second = load_prompts(saved_dataset, split="test")
    assert (first.id, first.category, first.turns) == ("7", "maths", ("One?", "Two?"))
    assert (second.category, second.turns) == ("all", ("Three?",))
    assert second.messages([])[0] == message("system", "s")
    with pytest.raises(ValueError, match="splits test, dev. Set prompts_split"):
        load_prompts(saved_dataset)
    with pytest.raises(ValueError, match="splits test, dev, but not train"):
        load_prompts(saved_dataset, split="train")
    with pytest.raises(ValueError, match="prompts_subset is 'main'"):
        load_prompts(saved_dataset, subset="main")
    single = tmp_path / "single"
    datasets.Dataset.from_dict({"q": ["One?"]}).save_to_disk(str(single))
    assert load_prompts(str(single), column="q")[0].turns == ("One?",)
    with pytest.raises(ValueError, match="prompts_column is 'x', but data set .* has q"):
        load_prompts(str(single), column="x")


def test_a_datasets_name_with_subset_and_split_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    folder.mkdir()
    for name in ("main", "other"):
        write_rows(folder / f"{name}.jsonl", [{"question": f"{name}?"}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n  - split: test\n    path: main.jsonl\n"
        "- config_name: other\n  data_files:\n  - split: test\n    path: other.jsonl\n---\n"
    )
    found = load_prompts(str(folder), subset="main", split="test", column="question")
    assert [prompt.turns for prompt in found] == [("main?",)]
    assert load_prompts(str(folder), subset="other", column="question")[0].turns == ("other?",)
    with pytest.raises(ValueError, match="cannot load prompts=.*prompts_subset None"):
        load_prompts(str(folder), column="question")
    with pytest.raises(ValueError, match="cannot load prompts=nobody/nothing"):
        load_prompts("nobody/nothing")


def test_datasets_is_loaded_only_for_a_data_set() -> None:
    script = (
        "import sys\nfrom draftsmith.eval.prompts import load_prompts\n"
        "load_prompts('bundled')\nassert 'datasets' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_second_prompt_contains_the_first_answer(tiny_tokenizer: Any) -> None:
    """E04."""
    prompt = Prompt("p", "c", ("the cat?", "the dog?"))
    ids = encode_turn(tiny_tokenizer, prompt, ["on the mat"], template_kwargs={})
    assert tiny_tokenizer.decode(ids) == (
        "<|im_start|>user\nthe cat?<|im_end|>\n<|im_start|>assistant\non the mat<|im_end|>\n"
        "<|im_start|>user\nthe dog?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_settings_reach_the_template(tiny_tokenizer: Any) -> None:
    """E08: a thinking switch changes the prompt."""
    tiny_tokenizer.chat_template += "{% if thinking %}think{% endif %}"
    prompt = Prompt("p", "c", ("a",))
    plain = encode_turn(tiny_tokenizer, prompt, [], template_kwargs={"thinking": False})
    thinking = encode_turn(tiny_tokenizer, prompt, [], template_kwargs={"thinking": True})
    assert tiny_tokenizer.decode(thinking) == tiny_tokenizer.decode(plain) + "think"
    assert template_mode(tiny_tokenizer) == "chat template of the tokenizer"


def test_a_base_model_gets_plain_text(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = None
    system = ({"role": "system", "content": "be brief"},)
    prompt = Prompt("p", "c", ("one", "two"), given=(system, ()))
    ids = encode_turn(tiny_tokenizer, prompt, ["answer"], template_kwargs={})
    assert tiny_tokenizer.decode(ids) == "be brief\n\none\n\nanswer\n\ntwo"
    assert template_mode(tiny_tokenizer) == "plain text"
    with pytest.raises(ValueError, match="no chat template"):
        encode_turn(tiny_tokenizer, prompt, [], template_kwargs={"thinking": True})


def test_the_template_comes_from_the_tokenizer_and_not_from_the_path(
    tmp_path: Path, tiny: Any, tiny_folder: Callable[..., Path]
) -> None:
    """E12: a folder named after other models' families."""
    misleading = tmp_path / "my-llama-2-vicuna-qwen"
    tiny.make_tiny_tokenizer().save_pretrained(misleading)
    prompt = Prompt("p", "c", ("the cat?",))
    ids = [
        encode_turn(AutoTokenizer.from_pretrained(folder), prompt, [], template_kwargs={})
        for folder in (misleading, tiny_folder("llama"))
    ]
    assert ids[0] == ids[1]
    assert tiny.make_tiny_tokenizer().decode(ids[0]).startswith("<|im_start|>user\nthe cat?")
