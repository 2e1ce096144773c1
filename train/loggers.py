"""Where metrics go: always RUN_DIR/metrics.jsonl, and wandb or tensorboard when asked for.

Only the main process writes. A logger takes one flat row of numbers per record; lists (acceptance
per draft step) become one curve per entry in wandb and tensorboard and stay lists in the file.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from draftsmith.train.config import LoggerConfig

METRICS_FILE = "metrics.jsonl"


class Logger(Protocol):
    """Takes rows of metrics."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Takes one row; `step` is in it."""

    def finish(self) -> None:
        """Writes what is still held and closes."""


class MetricsFile:
    """metrics.jsonl: one JSON object per line, flushed at once."""

    def __init__(self, run_dir: Path, *, resumed_step: int) -> None:
        """Opens the file; rows after `resumed_step`, which will be written again, are dropped.

        Args:
            run_dir: the run folder.
            resumed_step: optimizer steps done in the checkpoint that the run goes on from.
        """
        path = run_dir / METRICS_FILE
        if path.is_file():
            rows = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in rows if json.loads(line)["step"] <= resumed_step]
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(f"{line}\n" for line in kept))
            aside.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


class WandbLogger:
    """Weights & Biases, online or offline."""

    def __init__(self, run_dir: Path, config: LoggerConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            mode=config.mode,  # type: ignore[arg-type]  # checked by LoggerConfig
            resume="allow",
            id=_run_id(run_dir),
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(flat(row), step=int(row["step"]))

    def finish(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """The wandb id of a run folder: made once, so that a resumed run goes on in the same one."""
    path = run_dir / "wandb_id.txt"
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


class TensorboardLogger:
    """TensorBoard event files in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path, *, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ValueError(
                "logger=tensorboard needs the tensorboard package: pip install 'draftsmith[report]'"
            ) from error

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))

    def finish(self) -> None:
        self._writer.close()


def flat(row: Mapping[str, Any]) -> dict[str, float]:
    """Numbers only: lists as name/1, name/2, ... (draft step 1 first); `step` and None left out."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, list):
            entries = enumerate(value, start=1)
            numbers |= {f"{name}/{place}": float(entry) for place, entry in entries}
        elif name != "step" and value is not None:
            numbers[name] = float(value)
    return numbers


def make_loggers(
    run_dir: Path, config: LoggerConfig, settings: Mapping[str, Any], *, resumed_step: int
) -> list[Logger]:
    """The metrics file and the logger asked for; call it in the main process only."""
    loggers: list[Logger] = [MetricsFile(run_dir, resumed_step=resumed_step)]
    if config.name == "wandb":
        loggers.append(WandbLogger(run_dir, config, settings))
    elif config.name == "tensorboard":
        loggers.append(TensorboardLogger(run_dir, resumed_step=resumed_step))
    return loggers
