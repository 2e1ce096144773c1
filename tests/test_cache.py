"""The cache format: what is written is read back, and whatever is damaged is named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from draftsmith.data import cache as cache_module
from draftsmith.data import shards
from draftsmith.data.cache import CacheSettings, HiddenStateCache, begin_cache, finish_cache
from draftsmith.data.shards import ShardTensors, SkippedRow, plan_shards
from draftsmith.data.verify_cache import verify_command
from draftsmith.data.write_lock import LOCK_NAME, STALE_AFTER_SECONDS, WriteLock

VOCAB = 64
FINGERPRINT = {"weights": "w" * 64, "tokenizer": "t" * 64, "chat_template": "c" * 64}


def make_settings(**changes: object) -> CacheSettings:
    settings = CacheSettings(
        target_fingerprint=FINGERPRINT,
        data_sha256="d" * 64,
        aux_layer_ids=(1, 2, 3),
        hidden_size=8,
        vocab_size=VOCAB,
        dtype="bfloat16",
        target_dtype="float32",
        attn_implementation="sdpa",
        shard_tokens=16,
        batch_tokens=32,
    )
    return replace(settings, **changes)


def make_rows(
    lengths: Sequence[int], settings: CacheSettings, *, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Random (input_ids, loss_mask, states) per row; the last token of each is supervised."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(VOCAB, (length,), generator=draw, dtype=torch.int32)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[-1] = 1
        shape = (length, len(settings.slots), settings.hidden_size)
        states = torch.randn(shape, generator=draw).to(shards.STATE_DTYPES[settings.dtype])
        rows.append((ids, mask, states))
    return rows


def join_rows(rows: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> ShardTensors:
    lengths = torch.tensor([0, *(len(ids) for ids, _, _ in rows)])
    return ShardTensors(
        sample_offsets=lengths.cumsum(0),
        input_ids=torch.cat([ids for ids, _, _ in rows]),
        hidden_states=torch.cat([states for _, _, states in rows]),
        loss_mask=torch.cat([mask for _, mask, _ in rows]),
    )


def write_cache(
    folder: Path, lengths: Sequence[int], settings: CacheSettings | None = None, *, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    settings = settings or make_settings()
    rows = make_rows(lengths, settings, seed=seed)
    plans = plan_shards(lengths, settings.shard_tokens)
    begin_cache(folder, settings, plans, created={})
    for plan in plans:
        tensors = join_rows(rows[plan.first_row : plan.end_row])
        shards.write_shard(folder / plan.file_name, tensors, plan=plan)
    finish_cache(folder, settings, plans, target_name="toy", created={}, max_bad_share=0.0)
    return rows


def damage(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = write_cache(tmp_path, [5, 1, 9, 16, 3, 20, 2])
    cache = HiddenStateCache.open(tmp_path)
    assert len(cache) == 7
    assert cache.lengths.tolist() == [5, 1, 9, 16, 3, 20, 2]
    assert cache.supervised_counts.tolist() == [1] * 7
    assert cache.rows.tolist() == list(range(7))
    for sample, (ids, mask, states) in zip(cache, rows, strict=True):
        assert torch.equal(sample.input_ids, ids.long())
        assert torch.equal(sample.supervised_mask, mask.bool())
        assert torch.equal(sample.aux_hidden_states, states[:, :3].flatten(1))
        assert torch.equal(sample.final_hidden_states, states[:, 3])


def test_manifest_names_every_slot_and_counts_everything(tmp_path: Path) -> None:
    rows = write_cache(tmp_path, [5, 1, 9, 16, 3, 20, 2])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["slots"] == ["layer.1", "layer.2", "layer.3", "final"]
    assert manifest["num_tokens"] == 56
    assert manifest["num_supervised"] == 7
    assert [entry["num_tokens"] for entry in manifest["shards"]] == [15, 16, 3, 20, 2]
    for entry in manifest["shards"]:
        path = tmp_path / entry["file"]
        assert path.stat().st_size == entry["num_bytes"]
        assert shards.file_sha256(path) == entry["sha256"]
    low = min(states.min().item() for _, _, states in rows)
    assert min(entry["min_value"] for entry in manifest["shards"]) == low
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for ids, mask, _ in rows:
        counts += torch.bincount(ids[mask.bool()], minlength=VOCAB)
    assert torch.equal(HiddenStateCache.open(tmp_path).token_counts, counts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_shards_are_plain_safetensors_of_the_predicted_size(tmp_path: Path, dtype: str) -> None:
    settings = make_settings(dtype=dtype, hidden_size=5)
    rows = write_cache(tmp_path, [7, 6], settings)
    path = tmp_path / "shard-00000.safetensors"
    assert path.stat().st_size == shards.shard_bytes(2, 13, **settings.shard_layout)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("sample_offsets"), torch.tensor([0, 7, 13]))
        assert torch.equal(
            file.get_tensor("hidden_states"), torch.cat([states for _, _, states in rows])
        )
        assert torch.equal(file.get_tensor("input_ids"), torch.cat([ids for ids, _, _ in rows]))
        assert torch.equal(file.get_tensor("loss_mask"), torch.cat([mask for _, mask, _ in rows]))


def test_states_are_views_of_the_mapped_file_and_never_write_to_it(tmp_path: Path) -> None:
    rows = write_cache(tmp_path, [5, 6])
    cache = HiddenStateCache.open(tmp_path)
    sample = cache[1]
    mapped = cache._mapped[0].hidden_states
    storage = mapped.untyped_storage().data_ptr()
    assert sample.aux_hidden_states.untyped_storage().data_ptr() == storage
    assert sample.final_hidden_states.untyped_storage().data_ptr() == storage
    mapped.zero_()
    assert torch.equal(HiddenStateCache.open(tmp_path)[1].final_hidden_states, rows[1][2][:, 3])


def test_shard_plan_depends_on_lengths_only_and_keeps_long_rows_whole() -> None:
    plans = plan_shards([4, 4, 4, 30, 1], 8)
    assert [(plan.first_row, plan.end_row, plan.num_tokens) for plan in plans] == [
        (0, 2, 8),
        (2, 3, 4),
        (3, 4, 30),
        (4, 5, 1),
    ]
    assert plan_shards(torch.tensor([4, 4, 4, 30, 1]), 8) == plans
    assert plan_shards([], 8) == []


def test_part_of_the_layers_can_be_used_and_unknown_ones_are_named(tmp_path: Path) -> None:
    rows = write_cache(tmp_path, [5, 6])
    cache = HiddenStateCache.open(tmp_path)
    for layers, places in (((1, 3), [0, 2]), ((2,), [1]), ((), []), ((1, 2, 3), [0, 1, 2])):
        cache.require(FINGERPRINT, layers)
        states = cache[1].aux_hidden_states
        assert torch.equal(states, rows[1][2][:, places].flatten(1))
        assert torch.equal(cache[1].final_hidden_states, rows[1][2][:, -1])
    with pytest.raises(ValueError, match=r"no layer 0, 7: it holds layers 1, 2, 3 and the final"):
        cache.require(FINGERPRINT, (0, 2, 7))


@pytest.mark.parametrize(
    ("part", "word"),
    [("weights", "weights"), ("tokenizer", "tokenizer"), ("chat_template", "template")],
)
def test_another_target_is_refused_and_the_differing_part_is_named(
    tmp_path: Path, part: str, word: str
) -> None:
    write_cache(tmp_path, [5])
    other = FINGERPRINT | {part: "x" * 64}
    with pytest.raises(ValueError, match=f"{word}: the cache has .*, this target has xxxxxxxxxxxx"):
        HiddenStateCache.open(tmp_path).require(other, (1, 2, 3))


def test_fingerprint_without_a_part_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path, [5])
    with pytest.raises(ValueError, match="no chat_template"):
        HiddenStateCache.open(tmp_path).require({"weights": "w", "tokenizer": "t"}, (1,))


def test_shard_cut_to_half_is_named_by_the_reader_and_by_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cache(tmp_path, [10, 10, 10])
    path = tmp_path / "shard-00001.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    cache = HiddenStateCache.open(tmp_path)
    assert len(cache[0].input_ids) == 10
    with pytest.raises(ValueError, match=r"shard-00001.* is broken.*Run draftsmith-cache again"):
        cache[1]
    assert verify_command([f"cache={tmp_path}"]) == 1
    assert "3 shards, 1 broken" in capsys.readouterr().out
    assert not shards.is_intact(tmp_path, plan_shards([10] * 3, 16)[1])


def test_flipped_byte_is_found_by_verify_wherever_it_is(tmp_path: Path) -> None:
    write_cache(tmp_path, [10, 4])
    path = tmp_path / "shard-00000.safetensors"
    whole = path.read_bytes()
    assert verify_command([f"cache={tmp_path}"]) == 0
    for place in (3, 30, len(whole) // 2, len(whole) - 1):
        damage(path, place)
        problems = [check.problem for check in HiddenStateCache.open(tmp_path).verify()]
        assert problems[0] is not None, f"byte {place}"
        path.write_bytes(whole)


def test_missing_shard_and_missing_or_damaged_index_are_named(tmp_path: Path) -> None:
    write_cache(tmp_path, [10, 10])
    (tmp_path / "shard-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors is missing"):
        HiddenStateCache.open(tmp_path)[0]
    damage(tmp_path / "index.safetensors", -1)
    with pytest.raises(ValueError, match=r"index\.safetensors is damaged"):
        HiddenStateCache.open(tmp_path)
    (tmp_path / "index.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.safetensors is missing"):
        HiddenStateCache.open(tmp_path)


def test_non_finite_state_is_found_when_it_is_read_and_its_row_is_named(tmp_path: Path) -> None:
    settings = make_settings()
    rows = make_rows([4, 5, 6], settings)
    rows[1][2][3, 2, 0] = float("nan")
    plans = plan_shards([4, 5, 6], settings.shard_tokens)
    begin_cache(tmp_path, settings, plans, created={})
    path = tmp_path / plans[0].file_name
    shards.write_shard(path, join_rows(rows), plan=plans[0])
    finish_cache(tmp_path, settings, plans, target_name="toy", created={}, max_bad_share=0.0)
    cache = HiddenStateCache.open(tmp_path)
    assert torch.isfinite(cache[0].aux_hidden_states).all()
    with pytest.raises(ValueError, match=r"non-finite value in layer\.3 at token 3 .*\(row 1 of"):
        cache[1]
    assert [check.problem for check in cache.verify()] == ["non-finite value in layer.3 at token 7"]


def test_length_that_differs_from_the_index_is_an_error(tmp_path: Path) -> None:
    """The states of a sample are as many as its tokens, also when a shard was swapped."""
    write_cache(tmp_path / "a", [6, 4])
    write_cache(tmp_path / "b", [4, 6])
    name = "shard-00000.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ValueError, match="other lengths than the index"):
        HiddenStateCache.open(tmp_path / "a")[0]


def test_skipped_rows_are_counted_and_too_many_stop_the_cache(tmp_path: Path) -> None:
    settings = make_settings()
    rows = make_rows([4, 5, 6], settings)
    plans = plan_shards([4, 5, 6], settings.shard_tokens)
    begin_cache(tmp_path, settings, plans, created={})
    shards.write_shard(
        tmp_path / plans[0].file_name,
        join_rows([rows[0], rows[2]]),
        plan=plans[0],
        skipped=[SkippedRow(1, "non-finite value in final at token 0")],
    )
    finish = {"target_name": "toy", "created": {}}
    with pytest.raises(ValueError, match=r"1 of 3 rows .*max_bad_share=0\.1"):
        finish_cache(tmp_path, settings, plans, max_bad_share=0.1, **finish)
    finish_cache(tmp_path, settings, plans, max_bad_share=0.5, **finish)
    cache = HiddenStateCache.open(tmp_path)
    assert cache.rows.tolist() == [0, 2]
    assert torch.equal(cache[1].final_hidden_states, rows[2][2][:, -1])
    assert [entry.row for entry in cache.manifest.skipped] == [1]


def test_cache_without_a_supervised_token_is_refused(tmp_path: Path) -> None:
    settings = make_settings()
    rows = [(ids, mask * 0, states) for ids, mask, states in make_rows([4, 5], settings)]
    plans = plan_shards([4, 5], settings.shard_tokens)
    begin_cache(tmp_path, settings, plans, created={})
    shards.write_shard(tmp_path / plans[0].file_name, join_rows(rows), plan=plans[0])
    with pytest.raises(ValueError, match="No token in .* is supervised"):
        finish_cache(tmp_path, settings, plans, target_name="t", created={}, max_bad_share=0.0)


def test_shard_whose_rows_were_all_skipped_is_a_valid_empty_one(tmp_path: Path) -> None:
    settings = make_settings()
    rows = make_rows([10, 10], settings)
    plans = plan_shards([10, 10], settings.shard_tokens)
    begin_cache(tmp_path, settings, plans, created={})
    empty = ShardTensors(
        torch.zeros(1, dtype=torch.int64), rows[0][0][:0], rows[0][2][:0], rows[0][1][:0]
    )
    skipped = [SkippedRow(0, "non-finite")]
    shards.write_shard(tmp_path / plans[0].file_name, empty, plan=plans[0], skipped=skipped)
    shards.write_shard(tmp_path / plans[1].file_name, join_rows(rows[1:]), plan=plans[1])
    finish_cache(tmp_path, settings, plans, target_name="t", created={}, max_bad_share=0.5)
    cache = HiddenStateCache.open(tmp_path)
    assert len(cache) == 1
    assert torch.equal(cache[0].final_hidden_states, rows[1][2][:, -1])
    assert all(check.problem is None for check in cache.verify())


def test_going_on_with_other_settings_says_what_differs(tmp_path: Path) -> None:
    settings = make_settings()
    plans = plan_shards([4], 16)
    begin_cache(tmp_path, settings, plans, created={})
    begin_cache(tmp_path, settings, plans, created={})
    other_template = FINGERPRINT | {"chat_template": "x" * 64}
    for changes, expected in (
        ({"dtype": "float32"}, "dtype: the folder has bfloat16, this run has float32"),
        ({"aux_layer_ids": (0, 2)}, "aux_layer_ids: the folder has 1, 2, 3, this run has 0, 2"),
        ({"target_fingerprint": other_template}, "target template: the folder has cccccccccccc"),
        ({"data_sha256": "e" * 64}, "data_sha256"),
    ):
        with pytest.raises(ValueError, match=expected):
            begin_cache(tmp_path, make_settings(**changes), plans, created={})


def test_folder_with_something_else_in_it_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(ValueError, match=r"not a cache and not empty \(it has thesis\.tex\)"):
        begin_cache(tmp_path, make_settings(), plan_shards([4], 16), created={})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_unfinished_absent_damaged_and_newer_caches_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a cache"):
        HiddenStateCache.open(tmp_path / "nowhere")
    rows = write_cache(tmp_path, [10, 10])
    assert rows
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:200])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        HiddenStateCache.open(tmp_path)
    manifest.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format version 2"):
        HiddenStateCache.open(tmp_path)
    manifest.write_text(text.replace(f'"format": "{cache_module.FORMAT}"', '"format": "other"'))
    with pytest.raises(ValueError, match="not of a draftsmith cache"):
        HiddenStateCache.open(tmp_path)
    manifest.write_text(text.replace('"num_tokens": 20', '"tokens": 20'))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        HiddenStateCache.open(tmp_path)
    manifest.unlink()
    with pytest.raises(ValueError, match="not finished: 2 of 2 shards"):
        HiddenStateCache.open(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    for use in (
        lambda: HiddenStateCache.open(tmp_path),
        lambda: begin_cache(tmp_path, make_settings(), plan_shards([10, 10], 16), created={}),
    ):
        with pytest.raises(ValueError, match=r"plan\.json is damaged .*Delete the folder"):
            use()


def test_failed_write_leaves_the_old_file_and_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    shards.write_file(path, [b"old"])

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        shards.write_file(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


OPEN_MANY = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from draftsmith.data.cache import HiddenStateCache, MAX_MAPPED_SHARDS
started = time.perf_counter()
cache = HiddenStateCache.open(sys.argv[1])
assert time.perf_counter() - started < 5
assert len(cache._mapped) == 0
kept = [cache[i].final_hidden_states for i in range(len(cache))]
assert len(cache) == 2000 and len(cache._mapped) == MAX_MAPPED_SHARDS
assert all(bool(states.isfinite().all()) for states in kept)
"""


def test_two_thousand_shards_open_lazily_with_256_file_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write_cache(tmp_path, [3] * 2000, make_settings(shard_tokens=3))
    command = [sys.executable, "-P", "-c", OPEN_MANY, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)


def test_cache_travels_to_worker_processes_without_its_mappings(tmp_path: Path) -> None:
    rows = write_cache(tmp_path, [5, 6])
    cache = HiddenStateCache.open(tmp_path)
    cache.require(FINGERPRINT, (1, 3))
    assert len(cache[0].input_ids) == 5
    copy = pickle.loads(pickle.dumps(cache))
    assert len(copy._mapped) == 0
    assert copy.aux_layer_ids == (1, 3)
    assert torch.equal(copy[1].final_hidden_states, rows[1][2][:, -1])


def test_index_out_of_range_ends_iteration(tmp_path: Path) -> None:
    write_cache(tmp_path, [5, 6])
    cache = HiddenStateCache.open(tmp_path)
    assert len(list(cache)) == 2
    for sample in (2, -1):
        with pytest.raises(IndexError):
            cache[sample]


def test_verify_explains_its_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean cache"):
        verify_command([f"cahce={tmp_path}"])
    with pytest.raises(ValueError, match="Usage: draftsmith-cache verify cache=FOLDER"):
        verify_command([])


def test_second_writer_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with WriteLock(tmp_path) as lock:
        with pytest.raises(ValueError, match=rf"written by process {os.getpid()} on .*delete"):
            WriteLock(tmp_path).__enter__()
        lock.check()
    assert list(tmp_path.iterdir()) == []
    with WriteLock(tmp_path):
        pass


def test_lock_needs_no_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with WriteLock(tmp_path):
        write_cache(tmp_path, [5])
        with pytest.raises(ValueError, match="is being written by"):
            WriteLock(tmp_path).__enter__()
    assert len(HiddenStateCache.open(tmp_path)[0].input_ids) == 5


def make_foreign_lock(folder: Path, **changes: object) -> Path:
    path = folder / LOCK_NAME
    with WriteLock(folder):
        holder = json.loads(path.read_text())
    path.write_text(json.dumps(holder | {"token": "feed"} | changes))
    return path


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = make_foreign_lock(tmp_path, pid=dead.pid)
    with WriteLock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_lock_of_an_earlier_process_with_the_same_id_is_taken_over(tmp_path: Path) -> None:
    make_foreign_lock(tmp_path, process_start=1)
    with WriteLock(tmp_path) as lock:
        lock.check()


def test_lock_from_another_machine_is_taken_over_only_when_untouched_for_long(
    tmp_path: Path,
) -> None:
    path = make_foreign_lock(tmp_path, host="elsewhere")
    with pytest.raises(ValueError, match="on elsewhere since"):
        WriteLock(tmp_path).__enter__()
    old = path.stat().st_mtime - STALE_AFTER_SECONDS - 1
    os.utime(path, (old, old))
    with WriteLock(tmp_path) as lock:
        lock.check()


def test_run_that_lost_its_lock_stops_and_leaves_the_new_lock_alone(tmp_path: Path) -> None:
    lock = WriteLock(tmp_path)
    lock.__enter__()
    path = make_foreign_lock_in_place(tmp_path)
    with pytest.raises(ValueError, match="no longer this run's"):
        lock.check()
    lock.__exit__(None, None, None)
    assert json.loads(path.read_text())["token"] == "feed"


def make_foreign_lock_in_place(folder: Path) -> Path:
    path = folder / LOCK_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"token": "feed"}))
    return path


def test_leftovers_of_a_killed_writer_are_removed_on_resume(tmp_path: Path) -> None:
    settings = make_settings()
    plans = plan_shards([4], 16)
    begin_cache(tmp_path, settings, plans, created={})
    leftover = shards.temporary_path(tmp_path / "shard-00000.safetensors")
    leftover.write_bytes(b"half")
    begin_cache(tmp_path, settings, plans, created={})
    assert not leftover.exists()


def test_slot_names_of_final_states_only() -> None:
    assert cache_module.slot_names(()) == ("final",)
    assert cache_module.slot_names((-1, 4)) == ("layer.-1", "layer.4", "final")


@pytest.mark.parametrize("dtype", list(shards.STATE_DTYPES.values()))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_wherever_it_stands(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 16, 33, 100):
        states = torch.ones(size, dtype=dtype)
        assert shards.is_finite(states)
        for place in range(size):
            states[place] = bad
            assert not shards.is_finite(states)
            states[place] = 1.0
