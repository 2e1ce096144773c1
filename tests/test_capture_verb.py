"""The verb draftsmith-cache as a user meets it: messages, resuming, launchers, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch

from draftsmith.conf.schema import CacheConfig, PrepareConfig, TargetConfig
from draftsmith.data import cache_size
from draftsmith.data.cache import HiddenStateCache
from draftsmith.data.capture import run
from draftsmith.data.prepare import prepare
from draftsmith.data.processes import join_processes
from draftsmith.data.write_lock import WriteLock


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """accelerate keeps its process state in the class; each of these tests starts without one."""
    from accelerate import PartialState

    PartialState._reset_state()
    yield
    PartialState._reset_state()


@pytest.mark.usefixtures("fresh_processes")
def test_promised_processes_that_do_not_run_stop_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    state, device = join_processes("cpu")
    assert (state.num_processes, device) == (1, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, but 1 process takes part.*torchrun"):
        join_processes("cpu")


@pytest.fixture(scope="module")
def prepared_folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(12):
            messages = [
                {"role": "user", "content": "count " + "one " * number},
                {"role": "assistant", "content": "two three " * (12 - number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    target = TargetConfig(name_or_path=str(tiny_llama_folder), dtype="float32", device="cpu")
    output = str(folder / "data")
    prepare(PrepareConfig(target=target, input=str(folder / "chats.jsonl"), output=output))
    return folder / "data"


def make_config(target: Path, data: Path, folder: Path, **changes: Any) -> CacheConfig:
    values: dict[str, Any] = {"aux_layer_ids": [0, 1, 2], "shard_tokens": 150, "batch_tokens": 200}
    return CacheConfig(
        target=TargetConfig(name_or_path=str(target), dtype="float32", device="cpu"),
        data=str(data),
        cache=str(folder),
        **(values | changes),
    )


@pytest.mark.usefixtures("fresh_processes")
def test_verb_tells_what_it_will_do_does_it_and_goes_on_without_repeating_it(
    tmp_path: Path,
    tiny_llama_folder: Path,
    prepared_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tiny_llama_folder, prepared_folder, tmp_path / "cache")
    run(config)
    told = capsys.readouterr().out
    cache = HiddenStateCache.open(config.cache)
    total = sum(record.num_bytes for record in cache.manifest.shards)
    assert f"Size: {cache_size.format_bytes(total)} in {len(cache.manifest.shards)} shards" in told
    assert "12 rows" in told
    assert "1 process on cpu" in told
    assert re.search(r"First batch: [\d,]+ tokens/s, about .* left", told)
    assert "Done: 12 samples" in told
    rows = datasets.load_from_disk(str(prepared_folder / "dataset"))
    assert [sample.input_ids.tolist() for sample in cache] == rows["input_ids"]
    counts = torch.zeros(cache.manifest.vocab_size, dtype=torch.int64)
    for sample in cache:
        counts += torch.bincount(
            sample.input_ids[sample.supervised_mask], minlength=cache.manifest.vocab_size
        )
    assert torch.equal(cache.token_counts, counts)
    assert cache.manifest.num_supervised == int(counts.sum())
    before = {path.name: path.stat().st_mtime_ns for path in Path(config.cache).glob("shard*")}
    run(config)
    assert f"{len(cache.manifest.shards)} of {len(cache.manifest.shards)} shards are already" in (
        capsys.readouterr().out
    )
    after = {path.name: path.stat().st_mtime_ns for path in Path(config.cache).glob("shard*")}
    assert after == before
    config.dtype = "float32"
    with pytest.raises(ValueError, match="dtype: the folder has bfloat16, this run has float32"):
        run(config)


@pytest.mark.usefixtures("fresh_processes")
def test_dry_run_prints_size_time_and_space_and_writes_nothing(
    tmp_path: Path,
    tiny_llama_folder: Path,
    prepared_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(make_config(tiny_llama_folder, prepared_folder, tmp_path / "cache", dry_run=True))
    told = capsys.readouterr().out
    assert re.search(r"Size: .* free on that disk: .*GiB\)", told)
    assert re.search(r"Time: about .* at [\d,]+ tokens/s", told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_processes")
def test_cache_that_does_not_fit_is_refused_before_any_work(
    tmp_path: Path,
    tiny_llama_folder: Path,
    prepared_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"has 1\.0 kB .* free.*features=live"):
        run(make_config(tiny_llama_folder, prepared_folder, tmp_path / "cache"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("fresh_processes")
def test_verb_refuses_data_of_another_template_and_a_folder_in_use(
    tmp_path: Path, tiny_folder: Callable[..., Path], prepared_folder: Path
) -> None:
    other = tiny_folder("llama", chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="chat template: the data has"):
        run(make_config(other, prepared_folder, tmp_path / "cache"))
    with (
        WriteLock(tmp_path / "cache"),
        pytest.raises(ValueError, match=r"is being written by process \d+"),
    ):
        run(make_config(tiny_folder("llama"), prepared_folder, tmp_path / "cache"))


def run_command(*arguments: str, launcher: Sequence[str] = (), **settings: Any) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", *launcher, "draftsmith.data.capture", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, **settings
    )


@pytest.mark.slow
def test_torchrun_with_two_processes_writes_the_bytes_of_one(
    tmp_path: Path, tiny_llama_folder: Path, prepared_folder: Path
) -> None:
    settings = [
        "target=local", f"target.name_or_path={tiny_llama_folder}", "target.dtype=float32",
        f"data={prepared_folder}", "aux_layer_ids=[0,1,2]", "shard_tokens=150",
    ]  # fmt: skip
    one = run_command(*settings, f"cache={tmp_path / 'one'}")
    assert one.returncode == 0, one.stderr
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "-m"]
    two = run_command(*settings, f"cache={tmp_path / 'two'}", launcher=launcher)
    assert two.returncode == 0, two.stderr
    assert "2 processes on cpu" in two.stdout
    clash = run_command(*settings, f"cache={tmp_path / 'two'}", "dtype=float16", launcher=launcher)
    assert clash.returncode != 0
    assert clash.stderr.count("dtype: the folder has bfloat16, this run has float16") == 1
    assert "in capture" not in clash.stderr, "a trace of the waiting process"
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (tmp_path / "two").iterdir()}
    assert len(names) > 6
    for name in names - {"manifest.json", "plan.json"}:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    manifests = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("one", "two")]
    for manifest in manifests:
        # The command and the time it was run at are all that may differ.
        assert manifest.pop("created")["torch"] == torch.__version__
    assert manifests[0] == manifests[1]


@pytest.mark.slow
def test_command_line_exit_codes_tell_success_damage_and_misuse(
    tmp_path: Path, tiny_llama_folder: Path, prepared_folder: Path
) -> None:
    folder = tmp_path / "cache"
    settings = ["target=local", f"target.name_or_path={tiny_llama_folder}", "target.dtype=float32"]
    settings += [f"data={prepared_folder}", f"cache={folder}", "aux_layer_ids=[0,1,2]"]
    made = run_command(*settings)
    assert made.returncode == 0, made.stderr
    fine = run_command("verify", f"cache={folder}")
    assert (fine.returncode, "1 shards, 0 broken" in fine.stdout) == (0, True), fine.stderr
    shard = folder / "shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    broken = run_command("verify", f"cache={folder}")
    assert broken.returncode == 1
    assert "BROKEN" in broken.stdout
    repaired = run_command(*settings)
    assert repaired.returncode == 0, repaired.stderr
    assert run_command("verify", f"cache={folder}").returncode == 0
    for misuse in (["verify", "cahce=x"], ["verify", f"cache={tmp_path}"], [*settings, "dtyp=x"]):
        wrong = run_command(*misuse)
        assert wrong.returncode == 2
        assert "Traceback" not in wrong.stderr
