"""What the training tests share: tiny inputs made by the real verbs, and short ways to run.

Test modules put this folder on sys.path to import it and linear_draft, which worker processes find
through PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from draftsmith.conf.entry import compose_settings
from draftsmith.train.config import TrainConfig, write_config

TESTS_FOLDER = Path(__file__).parent
SCHEMA = "draftsmith.train.config:TrainConfig"
WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "door", "one", "two", "three")


@dataclass(frozen=True)
class Inputs:
    """Folders that a training run reads."""

    target: Path
    prepared: Path
    cache: Path

    @property
    def overrides(self) -> list[str]:
        """Settings of a fast float32 run of the linear draft on the cache."""
        return [
            "target=local",
            f"target.name_or_path={self.target}",
            "target.dtype=float32",
            f"features.cache={self.cache}",
            "train.precision=fp32",
            "train.batch_tokens=256",
            "train.log_every=1",
            "train.lr=0.01",
            "train.save_every=100",
            "launch.device=cpu",
            "schedule.warmup_steps=2",
        ]


def write_chats(path: Path, *, rows: int = 40, seed: int = 0) -> Path:
    """A JSONL file of short conversations with answers of very different lengths."""
    draw = random.Random(seed)

    def text(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": text(5)},
                    {"role": "assistant", "content": text(draw.randint(3, 30))},
                ]
            }
        )
        for _ in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_inputs(root: Path, tiny: ModuleType, *, family: str = "llama", rows: int = 40) -> Inputs:
    """A tiny target, prepared rows and a float32 cache, made by the real code."""
    from draftsmith.data import capture, prepare

    target = tiny.save_tiny_target(root / "target", family)
    chats = write_chats(root / "chats.jsonl", rows=rows)
    inputs = Inputs(target, root / "prepared", root / "cache")
    common = ["target=local", f"target.name_or_path={target}", "target.dtype=float32"]
    common.append("target.device=cpu")
    prepare.run(
        compose_settings(
            "prepare",
            "draftsmith.conf.schema:PrepareConfig",
            [*common, f"input={chats}", f"output={inputs.prepared}"],
        )
    )
    capture.run(
        compose_settings(
            "cache",
            "draftsmith.conf.schema:CacheConfig",
            [
                *common,
                f"data={inputs.prepared}",
                f"cache={inputs.cache}",
                "dtype=float32",
                "aux_layer_ids=[0,1,2]",
                "shard_tokens=600",
            ],
        )
    )
    return inputs


LINEAR = {"_target_": "linear_draft.LinearMethod", "aux_layer_ids": [0, 1, 2]}


def compose(inputs: Inputs, *overrides: str, method: dict[str, Any] | None = None) -> TrainConfig:
    """Settings of a run; the method node is put in afterwards (it is no preset of draftsmith)."""
    settings = compose_settings("train", SCHEMA, [*inputs.overrides, *overrides])
    settings.method = dict(LINEAR if method is None else method)
    return settings


def run_in_process(settings: TrainConfig, run_dir: Path) -> list[dict[str, Any]]:
    """Trains in this process; returns the rows of metrics.jsonl."""
    from draftsmith.train.worker import train_run_folder

    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(settings, run_dir, exclusive=False)
    train_run_folder(run_dir)
    return read_metrics(run_dir)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    """Training losses by step."""
    return [row["loss"] for row in rows if "loss" in row]


def environment(**extra: str) -> dict[str, str]:
    """For child processes: no launcher's leftovers, this folder importable, one thread."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    kept = {key: value for key, value in kept.items() if not key.startswith("ACCELERATE_")}
    path = os.pathsep.join(filter(None, [str(TESTS_FOLDER), os.environ.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def train_command(folder: Path, inputs: Inputs, *overrides: str) -> list[str]:
    """The command line of a run with the linear draft as a preset of the user's own.

    Args:
        folder: where the preset is written.
        inputs: what to train on.
        overrides: further settings and Hydra flags.
    """
    presets = folder / "presets"
    (presets / "method").mkdir(parents=True, exist_ok=True)
    (presets / "method" / "linear.yaml").write_text(
        "_target_: linear_draft.LinearMethod\naux_layer_ids: [0, 1, 2]\nnoise: 0.0\n"
    )
    words = ["--config-dir", str(presets), "method=linear", *inputs.overrides, *overrides]
    return [sys.executable, "-P", "-m", "draftsmith.train", *words]


def run_command(
    command: list[str], folder: Path, *, timeout: float = 240.0, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, its output captured."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
