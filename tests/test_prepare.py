"""draftsmith-prepare from files to a dataset: nothing lost in silence, nothing stale reused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.conf.schema import PrepareConfig, TargetConfig
from draftsmith.conf.verbs import prepare as main
from draftsmith.data.prepare import PreparedData, load_prepared, prepare, split_indices

EOS = 3  # <|im_end|> of the tiny tokenizer


def chat(prompt: str, answer: str, **row: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **row}


def write_lines(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run_prepare(tmp_path: Path, tiny_llama_folder: Path) -> Callable[..., PreparedData]:
    """Factory `run_prepare(input, **settings)`; output is tmp_path / "out" unless given."""

    def run(source: Path | str, *, target: Path = tiny_llama_folder, **settings: Any) -> Any:
        settings.setdefault("output", str(tmp_path / "out"))
        settings.setdefault("max_dropped_share", 1.0)
        config = PrepareConfig(
            target=TargetConfig(name_or_path=str(target)), input=str(source), **settings
        )
        return prepare(config)

    return run


def supervised_ids(row: dict[str, Any]) -> list[int]:
    return [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]


def decoded(data: PreparedData, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(supervised_ids(row)) for row in data.dataset]


def test_prepared_folder_holds_what_its_readers_expect(
    tmp_path: Path, run_prepare: Any, tiny_tokenizer: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok", id="x", category="chat"))
    data = run_prepare(path)
    assert data.dataset.features["input_ids"] == datasets.List(datasets.Value("int32"))
    assert data.dataset.features["loss_mask"] == datasets.List(datasets.Value("uint8"))
    row = data.dataset[0]
    assert (row["id"], row["category"]) == ("x", "chat")
    assert decoded(data, tiny_tokenizer) == ["ok<|im_end|>"]
    assert tiny_tokenizer.decode(row["input_ids"]).startswith("<|im_start|>user\nhi<|im_end|>\n")
    counts = data.token_counts
    assert (counts.shape, counts.dtype) == ((320,), torch.int64)
    assert torch.equal(counts, torch.bincount(torch.tensor(supervised_ids(row)), minlength=320))
    info = load_prepared(tmp_path / "out").info
    assert info == data.info
    assert info.tokens == len(row["input_ids"])
    assert info.supervised_tokens == sum(row["loss_mask"]) == int(counts.sum())
    assert (info.vocab_size, info.tokenizer_size, info.eos_token_ids) == (320, 312, [EOS])
    saved = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert saved["tokenizer"] == info.tokenizer
    assert len(saved["chat_template"]) == 64
    assert "[[ok<|im_end|>]]" in (tmp_path / "out" / "report.txt").read_text()


def test_fingerprints_are_those_of_the_loaded_target(
    tmp_path: Path, run_prepare: Any, tiny_target: Any
) -> None:
    info = run_prepare(write_lines(tmp_path / "a.jsonl", chat("hi", "ok"))).info
    fingerprint = tiny_target("llama").fingerprint
    assert (info.tokenizer, info.chat_template) == (
        fingerprint.tokenizer,
        fingerprint.chat_template,
    )


# Reading


def test_bad_line_is_named_with_file_and_line_and_the_rest_is_kept(
    tmp_path: Path, run_prepare: Any
) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(chat("hi", "ok"))
    lines = [good, good, '{"messages": [', good, ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n")
    data = run_prepare(path)
    assert (data.info.rows_read, data.info.rows_kept) == (4, 3)
    assert data.info.dropped == {"bad JSON": 1}
    assert [row["id"] for row in data.dataset] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4"]
    assert "a.jsonl:3: Expecting value at column" in (data.path / "report.txt").read_text()
    with pytest.raises(ValueError, match=r"a\.jsonl:3: bad JSON(?s:.*)on_bad_row=skip"):
        run_prepare(path, on_bad_row="strict", output=str(tmp_path / "strict"))
    assert not (tmp_path / "strict").exists()


def test_half_of_a_surrogate_pair_costs_one_row_only(tmp_path: Path, run_prepare: Any) -> None:
    whole = '{"prompt": "hi", "response": "\\ud83d\\ude00"}'
    half = '{"prompt": "hi", "response": "\\ud83d"}'
    data = run_prepare(write_lines(tmp_path / "a.jsonl", whole, half))
    assert data.info.rows_kept == 1
    assert data.info.dropped == {"broken character": 1}


def test_fields_may_change_their_type_from_row_to_row(tmp_path: Path, run_prepare: Any) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [
        chat("hi", "ok", tools=None, arguments=3),
        chat("hi", "ok", tools=json.dumps([tool]), arguments="three"),
        chat("hi", "ok", tools=[tool], arguments={"n": [3, "three"]}),
    ]
    data = run_prepare(write_lines(tmp_path / "a.jsonl", *rows))
    assert data.info.rows_kept == 3


def test_rows_that_the_template_refuses_are_counted(
    tmp_path: Path, run_prepare: Any, tiny: Any, tiny_folder: Any
) -> None:
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    ) + tiny.CHAT_TEMPLATE
    target = tiny_folder("llama", chat_template=template)
    reverse = {"messages": chat("hi", "ok")["messages"][::-1]}
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"), reverse, chat("hi", "ok"))
    data = run_prepare(path, target=target)
    assert data.info.rows_kept == 2
    assert data.info.dropped == {"the chat template refused it": 1}
    assert "roles must alternate" in (data.path / "report.txt").read_text()
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*roles must alternate"):
        run_prepare(path, target=target, on_bad_row="strict", output=str(tmp_path / "strict"))


def test_too_many_dropped_rows_stop_the_run_with_the_reasons(
    tmp_path: Path, run_prepare: Any
) -> None:
    bad = {"messages": [{"role": "narrator", "content": "once"}]}
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"), chat("hi", "ok"), bad)
    with pytest.raises(ValueError, match=r"1 of 3 rows.*33\.3 %.*0\.2(?s:.*)a\.jsonl:3.*narrator"):
        run_prepare(path, max_dropped_share=0.2)
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out")]
    assert run_prepare(path, max_dropped_share=0.34).info.rows_kept == 2


def test_data_that_teach_nothing_stop_the_run_and_name_the_template(
    tmp_path: Path, run_prepare: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("hi", ""), {"id": "p", "turns": ["hi"]})
    with pytest.raises(ValueError, match="0 supervised tokens in 2 rows") as error:
        run_prepare(path)
    for part in ("no assistant text", "draftsmith-regenerate", "<|im_start|>"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="the input is empty"):
        run_prepare(write_lines(tmp_path / "empty.jsonl", ""))


def test_preformatted_text_given_as_messages_is_refused_before_training(
    tmp_path: Path, run_prepare: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[{"text": "<|u|> hi <|e|> <|a|> ok <|e|>"}] * 3)
    with pytest.raises(ValueError, match="0 supervised tokens in 3 rows") as error:
        run_prepare(path, input_format="messages")
    assert "3 x unknown layout" in str(error.value)


def test_target_without_template_takes_text_and_refuses_conversations(
    tmp_path: Path, run_prepare: Any, tiny_folder: Any
) -> None:
    target = tiny_folder("llama", chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        run_prepare(write_lines(tmp_path / "a.jsonl", chat("hi", "ok")), target=target)
    text = write_lines(tmp_path / "b.jsonl", {"text": "the cat"})
    data = run_prepare(text, target=target)
    assert all(data.dataset[0]["loss_mask"])
    assert data.info.chat_template == "none"


@pytest.mark.parametrize("kind", ["json", "parquet", "folder", "glob", "saved", "saved_dict"])
def test_every_kind_of_input_gives_the_same_rows(
    tmp_path: Path, run_prepare: Any, kind: str
) -> None:
    rows = [chat(f"hi {n}", f"ok {n}", id=str(n)) for n in range(4)]
    expected = run_prepare(write_lines(tmp_path / "a.jsonl", *rows), output=str(tmp_path / "ref"))
    source: Path | str = tmp_path / "source"
    Path(source).mkdir()
    if kind == "json":
        source = tmp_path / "source" / "rows.json"
        source.write_text(json.dumps(rows))
    elif kind == "parquet":
        source = tmp_path / "source" / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
    elif kind in ("folder", "glob"):
        write_lines(tmp_path / "source" / "1.jsonl", *rows[:2])
        pq.write_table(pa.Table.from_pylist(rows[2:]), tmp_path / "source" / "2.parquet")
        source = tmp_path / "source" / "*.*" if kind == "glob" else source
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(source))
    else:
        saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
        saved.save_to_disk(str(source))
        with pytest.raises(ValueError, match="split=test, but .* has train"):
            run_prepare(source, split="test")
    data = run_prepare(source)
    assert data.dataset.to_list() == expected.dataset.to_list()


def test_absent_fields_of_arrow_rows_do_not_reach_the_template(
    tmp_path: Path, run_prepare: Any, tiny: Any, tiny_folder: Any
) -> None:
    # Arrow fills the fields that only other rows have with null: here the other tool's argument.
    template = tiny.CHAT_TEMPLATE.replace(
        "message['content'] +", "message['content'] + (message.tool_calls | default([]) | tojson) +"
    )
    target = tiny_folder("llama", chat_template=template)
    rows = []
    for arguments in ({"x": 1}, {"y": "two"}):
        row = chat("hi", "")
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        row["messages"][1]["tool_calls"] = [call]
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_lines = run_prepare(write_lines(tmp_path / "a.jsonl", *rows), target=target)
    from_arrow = run_prepare(tmp_path / "a.parquet", target=target, output=str(tmp_path / "b"))
    assert from_arrow.dataset["input_ids"][:] == from_lines.dataset["input_ids"][:]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("*.jsonl", "matches no file"),
        ("no-such-name-at-all", "could not be loaded as a datasets name"),
        ("note.txt", r"ending \.txt; expected \.jsonl, \.json or \.parquet"),
        ("folder", "without .jsonl, .json or .parquet files"),
        ("broken.json", "broken.json is not JSON"),
    ],
)
def test_input_that_cannot_be_read_says_what_is_wrong(
    tmp_path: Path, run_prepare: Any, source: str, message: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").write_text("x")
    Path("folder").mkdir()
    Path("broken.json").write_text("[{")
    with pytest.raises(ValueError, match=message):
        run_prepare(source)


# Length, order, processes


def test_row_keeps_the_supervised_tokens_that_survive_the_cut(
    tmp_path: Path, run_prepare: Any
) -> None:
    ids = run_prepare(
        write_lines(tmp_path / "a.jsonl", chat("the cat sat on the mat", "ok then"))
    ).dataset[0]
    prompt_length = ids["loss_mask"].index(1)
    path = write_lines(
        tmp_path / "b.jsonl",
        chat("the cat sat on the mat and the dog ran to the door", "ok then", id="too long"),
        chat("the cat sat on the mat", "ok then", id="one survives"),
    )
    data = run_prepare(path, max_length=prompt_length + 1, output=str(tmp_path / "b"))
    assert [row["id"] for row in data.dataset] == ["one survives"]
    assert sum(data.dataset[0]["loss_mask"]) == 1
    assert data.dataset[0]["input_ids"] == ids["input_ids"][: prompt_length + 1]
    assert data.info.dropped == {"no supervised token within max_length": 1}
    assert data.info.notes == {"training rows cut at max_length": 1}


def test_limit_takes_the_first_rows_and_a_seed_shuffles_before_it(
    tmp_path: Path, run_prepare: Any
) -> None:
    rows = [chat("hi", "ok", id=str(n)) for n in range(200)]
    path = write_lines(tmp_path / "a.jsonl", *rows)

    def ids(name: str, **settings: Any) -> list[str]:
        return run_prepare(path, output=str(tmp_path / name), **settings).dataset["id"][:]

    assert ids("a", limit=70) == [str(n) for n in range(70)]
    shuffled = ids("b", limit=70, shuffle_seed=1)
    assert shuffled == ids("c", shuffle_seed=1)[:70]
    assert len(set(shuffled)) == 70
    assert max(map(int, shuffled)) >= 70
    assert shuffled != ids("d", limit=70, shuffle_seed=2)


def test_one_process_and_four_give_the_same_output(tmp_path: Path, run_prepare: Any) -> None:
    rows = [
        chat(f"count {n}", "one two " * (n % 7 + 1), finish_reason="length" if n % 3 else "stop")
        for n in range(300)
    ]
    rows[100] = chat("hi", "")
    path = write_lines(tmp_path / "a.jsonl", *rows)
    one = run_prepare(path, num_workers=1, output=str(tmp_path / "one"))
    four = run_prepare(path, num_workers=4, output=str(tmp_path / "four"))
    assert four.dataset.to_list() == one.dataset.to_list()
    assert four.info == one.info
    assert torch.equal(four.token_counts, one.token_counts)
    assert (four.path / "report.txt").read_text() == (one.path / "report.txt").read_text()


def test_error_in_a_process_reaches_the_user(
    tmp_path: Path, run_prepare: Any, tiny_folder: Any
) -> None:
    target = tiny_folder("llama", chat_template=None)
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"))
    with pytest.raises(ValueError, match="no chat template"):
        run_prepare(path, target=target, num_workers=2)


# Reuse


def test_equal_settings_reuse_the_output_and_say_so(
    tmp_path: Path, run_prepare: Any, capsys: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"))
    run_prepare(path)
    stamp = (tmp_path / "out" / "prepare.json").stat().st_mtime_ns
    assert "reused" not in capsys.readouterr().out
    run_prepare(path)
    assert "reused" in capsys.readouterr().out
    assert (tmp_path / "out" / "prepare.json").stat().st_mtime_ns == stamp


def test_other_settings_input_or_template_never_reuse_the_output(
    tmp_path: Path, run_prepare: Any, tiny: Any, tiny_folder: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "the cat sat on the mat"))
    first = run_prepare(path, max_length=16)
    with pytest.raises(ValueError, match=r"other settings \(max_length\).*overwrite=true"):
        run_prepare(path, max_length=64)
    longer = run_prepare(path, max_length=64, overwrite=True)
    assert len(longer.dataset[0]["input_ids"]) > 16
    assert longer.info.settings_hash != first.info.settings_hash
    template = tiny.CHAT_TEMPLATE.replace("<|im_start|>", "<|bos|>")
    target = tiny_folder("llama", chat_template=template)
    with pytest.raises(ValueError, match=r"\(chat_template\)"):
        run_prepare(path, target=target, max_length=64)
    write_lines(path, chat("hi", "another answer"))
    with pytest.raises(ValueError, match=r"\(input_content\)"):
        run_prepare(path, max_length=64)
    write_lines(path, chat("hi", "the cat sat on the mat"))
    with pytest.raises(ValueError, match=r"\(template_kwargs\)"):
        run_prepare(path, max_length=64, template_kwargs={"enable_thinking": False})
    # The number of processes decides nothing.
    assert run_prepare(path, max_length=64, num_workers=2).info == longer.info


def test_folder_with_other_files_is_never_replaced(tmp_path: Path, run_prepare: Any) -> None:
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"))
    precious = tmp_path / "out" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("x")
    for _ in range(2):
        with pytest.raises(ValueError, match="left as it is"):
            run_prepare(path, overwrite=True)
        assert precious.read_text() == "x"
    precious.unlink()
    run_prepare(path)  # an empty folder is fine
    precious.write_text("x")
    with pytest.raises(ValueError, match="left as it is"):
        run_prepare(path, overwrite=True)


def test_folder_that_is_not_prepared_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks dataset, prepare.json.*not a folder written by"):
        load_prepared(tmp_path)


# The verb


def test_command_line_prepares_and_shows_the_report(
    tmp_path: Path, tiny_llama_folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", chat("hi", "ok [bold]"))
    words = ["target=local", f"target.name_or_path={tiny_llama_folder}", "input=a.jsonl"]
    monkeypatch.setattr("sys.argv", ["draftsmith-prepare", *words, "output=out"])
    main()
    # The data's own brackets are shown as they are.
    assert "[[ok [bold]<|im_end|>]]" in capsys.readouterr().out
    assert load_prepared("out").info.rows_kept == 1
    monkeypatch.setattr("sys.argv", ["draftsmith-prepare", *words, "output=out", "max_length=8"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "other settings (max_length)" in capsys.readouterr().err


# Contents


def test_cut_answers_are_counted_and_their_end_is_not_supervised(
    tmp_path: Path, run_prepare: Any, tiny_tokenizer: Any
) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        chat("hi", "ok", finish_reasons=["stop"]),
        chat("hi", "so the", finish_reasons=["length"]),
    )
    data = run_prepare(path)
    assert decoded(data, tiny_tokenizer) == ["ok<|im_end|>", "so the"]
    assert (data.info.cut_answers, data.info.answers) == (1, 2)
    assert data.token_counts[EOS] == 1
    assert "cut answers       1 of 2 (50.0 %)" in (data.path / "report.txt").read_text()


def test_alpaca_input_is_in_the_prompt(
    tmp_path: Path, run_prepare: Any, tiny_tokenizer: Any
) -> None:
    row = {"instruction": "Add", "input": "2 3", "output": "5"}
    data = run_prepare(write_lines(tmp_path / "a.jsonl", row))
    ids, mask = data.dataset[0]["input_ids"], data.dataset[0]["loss_mask"]
    prompt = [i for i, m in zip(ids, mask, strict=True) if not m]
    assert "2 3" in tiny_tokenizer.decode(prompt)


def test_several_eos_ids_and_no_padding(
    tmp_path: Path, run_prepare: Any, tiny: Any, tiny_folder: Any
) -> None:
    template = tiny.CHAT_TEMPLATE.replace("<|im_end|>", "<|bos|>")
    target = tiny_folder("llama", chat_template=template, eos_token_id=[1, 3])
    path = write_lines(tmp_path / "a.jsonl", chat("hi", "ok"), chat("hi", "the cat sat on the mat"))
    data = run_prepare(path, target=target)
    assert data.info.eos_token_ids == [1, 3]
    for row in data.dataset:
        assert supervised_ids(row)[-1] == 1
        assert 0 not in row["input_ids"]
    assert len({len(row["input_ids"]) for row in data.dataset}) == 2


def test_rewritten_earlier_answers_become_rows_of_their_own(
    tmp_path: Path, run_prepare: Any, tiny: Any, tiny_folder: Any, tiny_tokenizer: Any
) -> None:
    template = tiny.CHAT_TEMPLATE.replace(
        "message['content'] +",
        "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +",
    )
    target = tiny_folder("llama", chat_template=template)
    messages = [*chat("a", "<think>x</think>b")["messages"], *chat("c", "d")["messages"]]
    path = write_lines(tmp_path / "a.jsonl", {"id": "r", "messages": messages})
    data = run_prepare(path, target=target)
    assert data.dataset["id"][:] == ["r#1", "r#3"]
    assert decoded(data, tiny_tokenizer) == ["<think>x</think>b<|im_end|>", "d<|im_end|>"]
    assert (data.info.rows_kept, data.info.training_rows) == (1, 2)


@pytest.mark.parametrize(("count", "share"), [(12501, 0.2), (3, 0.1), (1, 0.5), (0, 0.1), (10, 0)])
def test_splits_are_disjoint_and_complete(count: int, share: float) -> None:
    train, validation = split_indices(count, share, seed=0)
    assert sorted(train + validation) == list(range(count))
    assert len(validation) == (max(int(count * share), share > 0) if count > 1 else 0)
    assert split_indices(count, share, seed=0) == (train, validation)


def test_splits_differ_by_seed_and_refuse_a_share_of_one() -> None:
    assert split_indices(100, 0.2, seed=0) != split_indices(100, 0.2, seed=1)
    with pytest.raises(ValueError, match="expected 0 to below 1"):
        split_indices(10, 1.0, seed=0)


@pytest.mark.slow
def test_many_rows_take_flat_memory(tmp_path: Path, run_prepare: Any) -> None:
    import resource

    generator = np.random.default_rng(0)
    rows = [chat("count", "one two " * int(n)) for n in generator.integers(1, 20, size=50_000)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    del rows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = run_prepare(path, num_workers=2)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert data.info.rows_kept == 50_000
    assert grown_mib < 300
