"""Learning-rate schedules as pure functions of the step.

The rate is a function of (step, total steps) alone and the loop sets it before each optimizer step.
So a schedule has no state: nothing of it can be lost or doubled when a run is resumed.

A reader can check a shape by printing `share(schedule, step, total)` for all steps; the tests do.
"""

from __future__ import annotations

import math

from draftsmith.train.config import ScheduleConfig


def warmup_length(schedule: ScheduleConfig, total_steps: int) -> int:
    """Optimizer steps of warm-up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return math.ceil(schedule.warmup_share * total_steps)


def share(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The share of the peak learning rate that optimizer step `step` (0-based) takes.

    Warm-up is linear and its first step takes 1 / warm-up steps, not 0: a step of rate 0 would
    spend a batch on nothing. The first step after the warm-up takes the full rate; the last step of
    a falling schedule lies one step before `min_share` would be reached.

    Args:
        schedule: shape and its settings.
        step: 0-based optimizer step.
        total_steps: optimizer steps of the whole run.

    Returns:
        A number between 0 and 1.
    """
    warmup = warmup_length(schedule, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "wsd":
        decay = min(math.ceil(schedule.decay_share * total_steps), total_steps - warmup)
    else:
        decay = total_steps - warmup
    done = step - (total_steps - decay)
    if decay <= 0 or done <= 0:
        return 1.0
    progress = min(done / decay, 1.0)
    if schedule.name == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        height = 1.0 - progress
    return schedule.min_share + (1.0 - schedule.min_share) * height
