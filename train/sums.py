"""Sums over micro-batches and processes, and the numbers made of them.

Everything that is reported is a ratio of two sums over the same predictions. Sums may be added over
micro-batches, steps and processes; ratios are taken last, so no number is a mean of means.

    simulated accepted length = 1 + sum_j joint_j / chains

where a chain starts at every place a draft could start, joint_j counts (greedy) or adds up
(sampled) the chains whose first j + 1 draft steps were all accepted, and the 1 is the token that
the target adds in each round.

A reader can check it with steps accepted at rates .8, .6, .5: 1 + .8 + .48 + .24 = 2.52 (the tests
do).
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.models.protocols import TrainBatch, TrainOutput
from draftsmith.train.strategy import sum_over_ranks

COMMON_SUMS = (
    "loss",
    "supervised",
    "in_vocabulary",
    "correct",
    "acceptance",
    "chains",
    "greedy_joint",
    "sampled_joint",
    "rounds",
    "round_tokens",
)
"""The sums of every method (`TrainOutput`); others are a method's own."""
COUNT_SUFFIX = "_count"
"""Ends the name of what a method's own sum is to be divided by."""


class Sums:
    """What has been summed since the last `reduced`; it stays on the device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(
        self, output: TrainOutput, batch: TrainBatch, normaliser: Tensor, *, counted: bool
    ) -> None:
        """Adds one micro-batch.

        Args:
            output: of its forward.
            batch: itself.
            normaliser: [] what its loss_sum is divided by.
            counted: False for a repeat that kept an idle process in step: all of it counts 0.
        """
        entries = {
            "loss_sum": output.loss_sum,
            "normaliser": normaliser,
            "tokens": batch.keep_mask.sum(),
            "supervised_tokens": batch.supervised_mask.sum(),
        } | {f"sums.{name}": value for name, value in output.sums.items()}
        for name, value in entries.items():
            value = value.detach().double() if counted else torch.zeros_like(value).double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduced(self, accelerator: Accelerator) -> dict[str, Tensor]:
        """The sums over all processes, on the CPU, in one exchange; starts again from zero.

        Every process must call it, each having added at least one micro-batch.
        """
        names = sorted(self._sums)
        flat = torch.cat([self._sums[name].reshape(-1) for name in names])
        flat = sum_over_ranks(accelerator, flat).cpu()
        counts = [self._sums[name].numel() for name in names]
        shapes = [self._sums[name].shape for name in names]
        self._sums = {}
        parts = zip(names, flat.split(counts), shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in parts}


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where nothing was counted."""
    return torch.where(whole > 0, part / whole.clamp(min=1e-12), torch.zeros_like(part))


def accepted_length(joint: Tensor, chains: Tensor) -> float:
    """1 + sum_j joint_j / chains.

    Args:
        joint: [steps] accepted chains up to each draft step (a count or a sum of probabilities).
        chains: [] places where a draft could start.
    """
    return 1.0 + float(_ratio(joint, chains.expand_as(joint)).sum())


def conditional(joint: Tensor, chains: Tensor) -> list[float]:
    """[steps] share of the chains accepted up to the step before that this step accepts too."""
    before = torch.cat((chains.reshape(1), joint[:-1]))
    return _ratio(joint, before).tolist()


def as_metrics(sums: dict[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """The row of metrics that reduced sums stand for.

    Args:
        sums: result of `Sums.reduced`.
        prefix: put before every name, for example "validation_".
    """
    chains = sums["sums.chains"]
    supervised = sums["sums.supervised"]
    row: dict[str, Any] = {"loss": float(_ratio(sums["loss_sum"], sums["normaliser"]))}
    for kind in ("greedy", "sampled"):
        joint = sums[f"sums.{kind}_joint"]
        row[f"simulated_accepted_length_{kind}"] = accepted_length(joint, chains)
        row[f"acceptance_{kind}"] = conditional(joint, chains)
    if "sums.rounds" in sums:
        # Where decoding would start its rounds, not everywhere: models/simulated_rounds.py.
        length = _ratio(sums["sums.round_tokens"], sums["sums.rounds"])
        row["simulated_accepted_length_rounds"] = float(length)
    row["accuracy"] = _ratio(sums["sums.correct"], supervised).tolist()
    row["in_draft_vocabulary"] = float(_ratio(sums["sums.in_vocabulary"].sum(), supervised.sum()))
    for name in sums:
        short = name.removeprefix("sums.")
        is_own = short != name and short not in COMMON_SUMS
        if is_own and not short.endswith(COUNT_SUFFIX):
            row[short] = _ratio(sums[name], sums.get(f"{name}{COUNT_SUFFIX}", supervised)).tolist()
    return {f"{prefix}{name}": value for name, value in row.items()}
