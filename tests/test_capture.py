"""Capturing: stored states are the target's own, whoever computes them and wherever it stopped."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn

from draftsmith.data import cache as cache_format
from draftsmith.data import cache_size, shards
from draftsmith.data.cache import CacheSettings, HiddenStateCache
from draftsmith.data.capture import (
    capture_features,
    check_prepared_for,
    write_shards,
)
from draftsmith.data.prepared_rows import length_batches, scan_rows
from draftsmith.data.shards import ShardPlan, plan_shards

LENGTHS = (5, 3, 17, 9, 1, 12, 30, 7, 3, 21)
MakeTarget = Callable[..., Any]


def make_dataset(lengths: Sequence[int] = LENGTHS, *, vocab_size: int = 300) -> datasets.Dataset:
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(4, vocab_size, (n,), generator=draw).tolist() for n in lengths]
    masks = [[int(place >= n // 2) for place in range(n)] for n in lengths]
    columns = {"input_ids": ids, "loss_mask": masks}
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("uint8")),
        }
    )
    return datasets.Dataset.from_dict(columns, features=features)


def make_settings(target: Any, dataset: datasets.Dataset, **changes: Any) -> CacheSettings:
    scan = scan_rows(dataset, vocab_size=target.vocab_size, max_positions=target.max_positions)
    values: dict[str, Any] = {
        "target_fingerprint": cache_format.fingerprint_parts(target.fingerprint),
        "data_sha256": scan.sha256,
        "aux_layer_ids": (0, 1, 2),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "dtype": "float32",
        "target_dtype": "float32",
        "attn_implementation": "sdpa",
        "shard_tokens": 40,
        "batch_tokens": 64,
    }
    return CacheSettings(**(values | changes))


def fill_cache(
    folder: Path,
    target: Any,
    dataset: datasets.Dataset,
    settings: CacheSettings,
    *,
    world_size: int = 1,
    max_bad_share: float = 0.0,
) -> HiddenStateCache:
    """What the verb does, `world_size` processes one after the other."""
    plans = plan_shards([len(ids) for ids in dataset["input_ids"]], settings.shard_tokens)
    cache_format.begin_cache(folder, settings, plans, created={})
    for rank in range(world_size):
        todo = [plan for plan in plans[rank::world_size] if not shards.is_intact(folder, plan)]
        write_shards(target, dataset, settings, todo, folder, max_bad_share=max_bad_share)
    cache_format.finish_cache(
        folder,
        settings,
        plans,
        target_name=target.name_or_path,
        created={},
        max_bad_share=max_bad_share,
    )
    return HiddenStateCache.open(folder)


def assert_same_states(found: Tensor, expected: Tensor, *, tolerance: float = 1e-5) -> None:
    """Equal but for the order of float32 sums: 1e-5 of the largest value."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass
class AlteredTarget:
    """A real target whose outputs are altered on the way out."""

    target: Any
    alter: Callable[[Tensor, Tensor, Any], None]
    """Called with input_ids, and states to change in place: (input_ids, aux, output)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, input_ids: Tensor, **settings: Any) -> Any:
        output = self.target.forward(input_ids, **settings)
        self.alter(input_ids, output.aux_hidden_states, output)
        return output


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "qwen3_moe", "qwen3_next", "qwen3_5"]
)
def test_cached_states_are_those_of_transformers_for_every_row(
    tmp_path: Path, tiny_target: MakeTarget, family: str
) -> None:
    target = tiny_target(family)
    tolerance = 1e-4 if target.mixers else 1e-5  # A state sums over the whole text.
    dataset = make_dataset()
    cache = fill_cache(tmp_path, target, dataset, make_settings(target, dataset))
    assert cache.lengths.tolist() == list(LENGTHS)
    for row, sample in zip(dataset, cache, strict=True):
        ids = torch.tensor([row["input_ids"]])
        assert sample.input_ids.tolist() == row["input_ids"]
        assert sample.supervised_mask.tolist() == [bool(value) for value in row["loss_mask"]]
        with torch.no_grad():
            output = target.model(ids, output_hidden_states=True)
        # Entry l + 1 is the output of layer l; the last entry has passed the final norm.
        aux = torch.cat(output.hidden_states[1:4], -1)[0]
        assert_same_states(sample.aux_hidden_states, aux, tolerance=tolerance)
        final = output.hidden_states[-1][0]
        assert_same_states(sample.final_hidden_states, final, tolerance=tolerance)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_head_on_cached_final_states_gives_the_targets_own_logits(
    tmp_path: Path, tiny_target: MakeTarget, family: str
) -> None:
    """Also for a cache of final states only: they are projected, never taken for logits."""
    target = tiny_target(family)
    dataset = make_dataset((40,))
    settings = make_settings(target, dataset, aux_layer_ids=())
    sample = fill_cache(tmp_path, target, dataset, settings)[0]
    assert sample.aux_hidden_states.shape == (40, 0)
    with torch.no_grad():
        expected = target.model(sample.input_ids[None]).logits[0]
    logits = target.head()(sample.final_hidden_states)
    assert_same_states(logits, expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_states_do_not_depend_on_the_batch_or_the_padding_side(
    tiny_target: MakeTarget, family: str, side: str
) -> None:
    target = tiny_target(family)
    rows = [torch.tensor(row["input_ids"]) for row in make_dataset((3, 7, 5))]
    padded = torch.zeros(3, 7, dtype=torch.long)
    keep_mask = torch.zeros(3, 7, dtype=torch.bool)
    for line, ids in enumerate(rows):
        place = slice(0, len(ids)) if side == "right" else slice(7 - len(ids), 7)
        padded[line, place] = ids
        keep_mask[line, place] = True
    batched = capture_features(target, padded, keep_mask, (0, 2))
    for line in (2, 0, 1):
        alone = capture_features(target, rows[line][None], None, (0, 2))
        for states, own in zip(batched, alone, strict=True):
            assert_same_states(states[line][keep_mask[line]], own[0])


def test_one_and_three_processes_write_the_same_bytes(
    tmp_path: Path, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    dataset = make_dataset()
    settings = make_settings(target, dataset, dtype="bfloat16")
    fill_cache(tmp_path / "one", target, dataset, settings)
    fill_cache(tmp_path / "three", target, dataset, settings, world_size=3)
    one = contents(tmp_path / "one")
    assert len([name for name in one if name.endswith(".safetensors")]) >= 4
    assert one == contents(tmp_path / "three")


def test_resume_rewrites_only_missing_and_broken_shards(
    tmp_path: Path, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    dataset = make_dataset()
    settings = make_settings(target, dataset)
    fill_cache(tmp_path, target, dataset, settings)
    before = contents(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("shard-*.safetensors"))
    os.truncate(tmp_path / names[0], 100)
    flipped = bytearray(before[names[1]])
    flipped[-1] ^= 1
    (tmp_path / names[1]).write_bytes(flipped)
    (tmp_path / names[2].replace("safetensors", "json")).unlink()
    kept = (tmp_path / names[3]).stat().st_mtime_ns
    fill_cache(tmp_path, target, dataset, settings)
    assert contents(tmp_path) == before
    assert (tmp_path / names[3]).stat().st_mtime_ns == kept


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
import importlib.util
spec = importlib.util.spec_from_file_location("writer", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
sys.modules["writer"] = tests
spec.loader.exec_module(tests)
from draftsmith.models.target import TargetModel
target = TargetModel.load(sys.argv[2], dtype="float32")
dataset = tests.make_dataset()
real, calls = os.fsync, []
def fsync(file):
    # Called before each rename: kill -9 with the third shard half on the disk.
    temporary = list(Path(sys.argv[3]).glob(".shard-00002.safetensors*"))
    if temporary:
        os.truncate(temporary[0], temporary[0].stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    real(file)
os.fsync = fsync
tests.fill_cache(Path(sys.argv[3]), target, dataset, tests.make_settings(target, dataset))
"""


def test_killed_writer_leaves_nothing_that_looks_finished_and_is_resumed(
    tmp_path: Path, tiny_target: MakeTarget, tiny_llama_folder: Path
) -> None:
    folder = tmp_path / "cache"
    command = [sys.executable, "-P", "-c", KILLED_WRITER, __file__, str(tiny_llama_folder)]
    command += [str(folder), str(Path(__file__).parent)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    assert list(folder.glob(".shard-00002*"))
    assert not (folder / "shard-00002.safetensors").exists()
    with pytest.raises(ValueError, match=r"not finished: 2 of \d shards"):
        HiddenStateCache.open(folder)
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    target, dataset = tiny_target("llama"), make_dataset()
    settings = make_settings(target, dataset)
    cache = fill_cache(folder, target, dataset, settings)
    assert all(check.problem is None for check in cache.verify())
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert not list(folder.glob(".*"))
    fill_cache(tmp_path / "whole", target, dataset, settings)
    assert contents(folder) == contents(tmp_path / "whole")


def test_live_features_equal_cached_ones_in_the_caches_dtype(
    tmp_path: Path, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    dataset = make_dataset((12,))
    sample = fill_cache(
        tmp_path, target, dataset, make_settings(target, dataset, dtype="bfloat16")
    )[0]
    aux, final = capture_features(
        target, sample.input_ids[None], None, (0, 1, 2), dtype=torch.bfloat16
    )
    assert torch.equal(aux[0], sample.aux_hidden_states)
    assert torch.equal(final[0], sample.final_hidden_states)
    exact, _ = capture_features(target, sample.input_ids[None], None, (0, 1, 2))
    assert exact.dtype == torch.float32
    assert not torch.equal(exact[0], sample.aux_hidden_states.float())


def test_live_features_can_be_inputs_of_a_training_step(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    aux, _ = capture_features(target, torch.tensor([[5, 6, 7]]), None, (0, 2))
    layer = nn.Linear(aux.shape[-1], 2)
    layer(aux).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


def test_states_of_fewer_positions_than_tokens_are_an_error(tiny_target: MakeTarget) -> None:
    """A prefix cache gives back the new positions only; nothing is padded or cut to fit."""

    def drop_shared_prefix(_: Tensor, __: Tensor, output: Any) -> None:
        output.aux_hidden_states = output.aux_hidden_states[:, 16:]
        output.final_hidden_states = output.final_hidden_states[:, 16:]

    target = AlteredTarget(tiny_target("llama"), drop_shared_prefix)
    ids = torch.arange(4, 24).repeat(2, 1)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 64\); 2 rows of 20 tokens need"):
        capture_features(target, ids, None, (0, 2))


def spoil(token: int, value: float, *, slot: int = 1) -> Callable[[Tensor, Tensor, Any], None]:
    """Puts `value` into one slot wherever `token` stands."""

    def alter(input_ids: Tensor, aux: Tensor, _: Any) -> None:
        aux[input_ids == token, slot * 32] = value

    return alter


def test_rows_with_non_finite_states_are_skipped_counted_and_limited(
    tmp_path: Path, tiny_target: MakeTarget
) -> None:
    dataset = make_dataset()
    token = dataset[3]["input_ids"][4]
    holders = [row for row, ids in enumerate(dataset["input_ids"]) if token in ids]
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        target = AlteredTarget(tiny_target("llama"), spoil(token, value))
        settings = make_settings(target, dataset)
        folder = tmp_path / name
        with pytest.raises(
            ValueError, match=r"(?s)\d of 10 rows .*row 3: non-finite value in layer.1 at token 4"
        ):
            fill_cache(folder, target, dataset, settings, max_bad_share=0.05)
        cache = fill_cache(folder, target, dataset, settings, max_bad_share=0.5)
        assert [entry.row for entry in cache.manifest.skipped] == holders
        assert cache.rows.tolist() == [row for row in range(10) if row not in holders]
        clean = fill_cache(tmp_path / f"{name}-clean", tiny_target("llama"), dataset, settings)
        for place, row in enumerate(cache.rows.tolist()):
            assert torch.equal(cache[place].aux_hidden_states, clean[row].aux_hidden_states)


def test_float16_is_refused_when_a_state_would_overflow_and_bfloat16_holds_it(
    tmp_path: Path, tiny_target: MakeTarget
) -> None:
    dataset = make_dataset()
    token = dataset[3]["input_ids"][4]
    target = AlteredTarget(tiny_target("llama"), spoil(token, 1e5))
    with pytest.raises(ValueError, match=r"reaches 100000, float16 ends at 65504.*dtype=bfloat16"):
        fill_cache(
            tmp_path / "half", target, dataset, make_settings(target, dataset, dtype="float16")
        )
    assert not (tmp_path / "half" / "manifest.json").exists()
    cache = fill_cache(
        tmp_path / "brain", target, dataset, make_settings(target, dataset, dtype="bfloat16")
    )
    assert cache[3].aux_hidden_states.max() > 9e4
    plain = tiny_target("llama")
    stored = fill_cache(
        tmp_path / "fits", plain, dataset, make_settings(plain, dataset, dtype="float16")
    )
    assert stored[0].final_hidden_states.dtype == torch.float16


def test_overflow_on_padding_does_not_matter(tiny_target: MakeTarget) -> None:
    target = AlteredTarget(tiny_target("llama"), spoil(0, 1e5))
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    aux, _ = capture_features(target, ids, ids != 0, (0, 1), dtype=torch.float16)
    assert torch.isfinite(aux[ids != 0]).all()


def test_batches_hold_each_row_once_and_keep_to_the_limit() -> None:
    batches = length_batches(LENGTHS, 40)
    assert sorted(row for batch in batches for row in batch) == list(range(len(LENGTHS)))
    assert all(max(LENGTHS[row] for row in batch) * len(batch) <= 40 for batch in batches)
    assert length_batches([100, 1], 40) == [[0], [1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[5, 6], [7]], "loss_mask": [[0, 0], [0]]}, "None of the 2 prepared rows"),
        ({"input_ids": [[5, 6], [64]], "loss_mask": [[0, 1], [1]]}, "Row 1 .* token id 64"),
        ({"input_ids": [[5, 6], [-1]], "loss_mask": [[0, 1], [1]]}, "Row 1 .* token id -1"),
        ({"input_ids": [[5], [6] * 9], "loss_mask": [[1], [1] * 9]}, "Row 1 .* 9 tokens.*1 to 8"),
        ({"input_ids": [[5], []], "loss_mask": [[1], []]}, "Row 1 of the prepared data has 0"),
        ({"input_ids": [[5], [6, 7]], "loss_mask": [[1], [1]]}, "Row 1 .* loss mask of 1"),
        ({"input_ids": [], "loss_mask": []}, "no rows"),
    ],
)
def test_rows_that_the_target_cannot_use_are_named(
    columns: dict[str, list[list[int]]], message: str
) -> None:
    dataset = datasets.Dataset.from_dict(columns)
    with pytest.raises(ValueError, match=message):
        scan_rows(dataset, vocab_size=64, max_positions=8)


def test_identity_of_the_data_covers_ids_masks_and_row_borders() -> None:
    def identity(ids: list[list[int]], masks: list[list[int]]) -> str:
        dataset = datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks})
        return scan_rows(dataset, vocab_size=64, max_positions=8).sha256

    base = identity([[5, 6], [7]], [[0, 1], [1]])
    assert base == identity([[5, 6], [7]], [[0, 1], [1]])
    assert base != identity([[5, 6], [8]], [[0, 1], [1]])
    assert base != identity([[5, 6], [7]], [[1, 1], [1]])
    assert base != identity([[5], [6, 7]], [[0], [1, 1]])


def test_data_prepared_for_another_template_or_tokenizer_is_refused(
    tiny_target: MakeTarget,
) -> None:
    target = tiny_target("llama")
    parts = cache_format.fingerprint_parts(target.fingerprint)
    check_prepared_for(target, SimpleNamespace(**parts), "data")
    other = SimpleNamespace(**(parts | {"chat_template": "x" * 64}))
    with pytest.raises(ValueError, match="chat template: the data has xxxxxxxxxxxx"):
        check_prepared_for(target, other, "data")
    other = SimpleNamespace(**(parts | {"tokenizer": "x" * 64}))
    with pytest.raises(ValueError, match="tokenizer: the data has xxxxxxxxxxxx"):
        check_prepared_for(target, other, "data")


def test_size_of_a_large_cache_is_told_exactly(tmp_path: Path) -> None:
    settings = CacheSettings(
        target_fingerprint={}, data_sha256="", aux_layer_ids=(2, 18, 33), hidden_size=4096,
        vocab_size=1000, dtype="bfloat16", target_dtype="bfloat16", attn_implementation="sdpa",
        shard_tokens=16384, batch_tokens=4096,
    )  # fmt: skip
    needed = cache_size.cache_bytes(plan_shards([2048] * 1000, 16384), settings)
    assert cache_size.format_bytes(needed) == "67.1 GB (62.5 GiB)"
    states = 1000 * 2048 * 4 * 4096 * 2
    assert states < needed < states * 1.001
    cache_size.refuse_short_disk(1, tmp_path / "not" / "yet")
    with pytest.raises(ValueError, match=r"needs 1000\.0 PB|needs \d.*free.*features=live"):
        cache_size.refuse_short_disk(10**15, tmp_path / "not" / "yet")


def test_written_bytes_equal_the_estimate(tmp_path: Path, tiny_target: MakeTarget) -> None:
    target, dataset = tiny_target("llama"), make_dataset()
    settings = make_settings(target, dataset)
    cache = fill_cache(tmp_path, target, dataset, settings)
    plans = plan_shards(list(LENGTHS), settings.shard_tokens)
    written = sum(path.stat().st_size for path in tmp_path.glob("shard-*.safetensors"))
    assert written == cache_size.cache_bytes(plans, settings)
    assert cache.manifest.num_tokens == sum(LENGTHS)


def test_full_disk_is_explained_and_finished_shards_are_kept(
    tmp_path: Path, tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, dataset = tiny_target("llama"), make_dataset()
    settings = make_settings(target, dataset)
    real = shards.write_shard

    def fills_up(path: Path, *arguments: Any, plan: ShardPlan, **settings: Any) -> Any:
        if plan.index == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments, plan=plan, **settings)

    monkeypatch.setattr(shards, "write_shard", fills_up)
    with pytest.raises(ValueError, match="disk is full .* Finished shards are kept"):
        fill_cache(tmp_path, target, dataset, settings)
    monkeypatch.setattr(shards, "write_shard", real)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 2
    assert len(fill_cache(tmp_path, target, dataset, settings)) == len(LENGTHS)
