"""draftsmith-train: composes the settings, checks them, chooses the folder, starts the processes.

    draftsmith-train recipe=eagle3_quickstart                        one process
    draftsmith-train recipe=eagle3_qwen3_8b launch=zero2             starts its own processes
    accelerate launch -m draftsmith.train recipe=eagle3_qwen3_8b     runs in accelerate's
    draftsmith-train --multirun recipe=... train.lr=1e-4,2e-4        one folder and process per job

`--cfg job` prints the composed settings, `--info defaults` the presets behind them. The parent
imports no torch before the settings are known to be right, so help and mistakes come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.conf.entry import fail, run_verb
from draftsmith.train import launch
from draftsmith.train.config import (
    CONFIG_FILE,
    TrainConfig,
    changed_settings,
    read_config,
    write_config,
)

FIXED_IN_A_RUN = ("method", "target", "init_from", "init_vocabulary")
"""Settings whose checkpoints fit no others."""


def sweep_folder() -> str | None:
    """The folder that Hydra made for this job of a sweep; None outside of sweeps."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return str(HydraConfig.get().runtime.output_dir)


def open_run_folder(settings: TrainConfig, sweep: str | None) -> Path:
    """Chooses the run folder once and writes config.yaml and command.txt into it.

    With resume=auto an existing run folder is gone on with; its config.yaml is rewritten, and what
    changed in it is printed.

    Raises:
        ValueError: the folder belongs to another run, or the method or target was changed.
    """
    run_dir = launch.choose_run_folder(settings, sweep)
    if settings.resume == "auto" and (run_dir / CONFIG_FILE).is_file():
        changes = changed_settings(read_config(run_dir), settings)
        fixed = [key for key in changes if key.split(".")[0] in FIXED_IN_A_RUN]
        if fixed:
            key = fixed[0]
            raise ValueError(
                f"{run_dir} was trained with {key}={changes[key][0]}, now it is {changes[key][1]}; "
                "its checkpoints do not fit that. Start a new run: another run_dir."
            )
        for key, (before, after) in changes.items():
            sys.stderr.write(f"draftsmith: {key} changes from {before} to {after}\n")
        write_config(settings, run_dir, exclusive=False)
    else:
        launch.claim_run_folder(run_dir, may_be_there=sweep is not None)
        write_config(settings, run_dir)
    launch.write_provenance(run_dir, sys.argv)
    return run_dir


def run(settings: TrainConfig) -> None:
    """Checks the settings against their surroundings, then trains or starts what trains."""
    from draftsmith.train.preflight import check_before_start

    sweep = sweep_folder()
    if launch.launched_world_size() is not None:
        if sweep is not None:
            launch.check_launcher(["--multirun"])
        preflight = check_before_start(settings)
        from draftsmith.train.worker import train_under_launcher

        train_under_launcher(settings, preflight, lambda: open_run_folder(settings, sweep))
        return
    launch.resolve_num_processes(settings.launch)
    preflight = check_before_start(settings)
    run_dir = open_run_folder(settings, sweep)
    if settings.launch.name == "single" and sweep is None:
        from draftsmith.train.worker import train_run_folder

        train_run_folder(run_dir, preflight)
    else:
        launch.run_children(settings, run_dir)


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Puts -m / --multirun first: Hydra takes it before or after the overrides, not between."""
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]
    return flags + [argument for argument in arguments if argument not in flags]


def main() -> None:
    """Entry point of draftsmith-train and of python -m draftsmith.train."""
    sys.argv[1:] = flags_first(sys.argv[1:])
    try:
        launch.check_launcher(sys.argv[1:])
    except ValueError as error:
        fail(str(error))
    try:
        run_verb(run, root="train", schema="draftsmith.train.config:TrainConfig")
    except launch.ProcessesFailedError as error:
        sys.stderr.write(f"draftsmith: {error}\n")
        raise SystemExit(error.exit_code) from None
    except FloatingPointError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
