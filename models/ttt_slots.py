"""Which slot of the training-time test predicts which place: index arithmetic, no weights.

Slot t of a conversation is the pair (feature of position t, token t+1). At step j = 0, 1, ... it

    reads      token t+1+j, at rotary position t+j
    predicts   token t+2+j
    is taught  by the target's logits at position t+1+j.

The *place* of a prediction is q = t+1+j: the position whose token is read and whose final hidden
state teaches. A place has the same teacher and the same supervision for every step, so predictions
are arranged by place: at step j place q is predicted from slot q-1-j.

Two alignments of the loss mask m (True: the target wrote this token):

    label     place q is supervised where its label token q+1 exists and m[q+1]
    feature   place q is supervised where m[q-1], except at the last real token, whose mask is
              cleared. This is what EAGLE (cb7e084), SpecForge (a6b6b02) and DeepSpec (afdfa7c) do:
              the mask stays with the feature while ids and teacher move. The first prediction of a
              reply is not taught and two beyond its end are.

Check: tests/test_eagle3.py writes the table out on readable ids.

Axes: batch, seq, steps, rows (supervised places), active (slots with a supervised step), pairs
(slots whose token t+1 is real). Flat indices are batch_index * seq + position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.protocols import ObjectiveOutput
from draftsmith.models.simulated_rounds import simulated_rounds

MASK_ALIGNMENTS = ("label", "feature")


def supervised_places(supervised_mask: Tensor, keep_mask: Tensor, alignment: str) -> Tensor:
    """Places that are taught; place 0 never is, because no slot precedes it.

    Args:
        supervised_mask: [batch, seq] bool, True on tokens that the target wrote.
        keep_mask: [batch, seq] bool, True on real tokens (padding on the right).
        alignment: "label" or "feature", see the module text.

    Returns:
        [batch, seq] bool.
    """
    places = torch.zeros_like(keep_mask)
    if alignment == "label":
        places[:, 1:-1] = (supervised_mask & keep_mask)[:, 2:]
    elif alignment == "feature":
        places[:, 1:] = supervised_mask[:, :-1] & keep_mask[:, 1:]
    else:
        raise ValueError(f"mask_alignment is {alignment!r}, expected one of {MASK_ALIGNMENTS}.")
    return places


@dataclass
class SlotPlan:
    """Index tensors for one batch."""

    pairs: Tensor
    """[pairs] flat slots that others may attend to."""
    active: Tensor
    """[active] flat slots that are unrolled."""
    active_pairs: Tensor
    """[active] where those are in `pairs`."""
    step_positions: Tensor
    """[steps, active] flat position t+1+j of the token read; clamped to the row's end, where the
    prediction is not supervised."""
    places: Tensor
    """[rows] flat supervised places."""
    row_slots: Tensor
    """[steps, rows] where the predicting slot is in `active` (0 where there is none)."""
    supervised: Tensor
    """[steps, rows] bool: there is such a slot."""


def plan_slots(places_mask: Tensor, keep_mask: Tensor, *, num_steps: int) -> SlotPlan:
    """Lays out a batch's training-time test.

    Args:
        places_mask: [batch, seq] bool from `supervised_places`.
        keep_mask: [batch, seq] bool, True on real tokens.
        num_steps: Draft steps that are unrolled.
    """
    seq, device = keep_mask.shape[1], keep_mask.device
    has_pair = torch.zeros_like(keep_mask)
    has_pair[:, :-1] = keep_mask[:, 1:]
    pairs = _indices(has_pair)
    places = _indices(places_mask)
    steps = torch.arange(num_steps, device=device)[:, None]
    slots = places - 1 - steps  # [steps, rows] flat
    supervised = places % seq - 1 - steps >= 0
    is_active = torch.zeros(keep_mask.numel(), dtype=torch.bool, device=device)
    is_active[slots[supervised]] = True
    active = _indices(is_active)
    within_row = (active % seq + 1 + steps).clamp_max(seq - 1)
    return SlotPlan(
        pairs=pairs,
        active=active,
        active_pairs=torch.searchsorted(pairs, active),
        step_positions=active - active % seq + within_row,
        places=places,
        row_slots=torch.where(supervised, torch.searchsorted(active, slots), 0),
        supervised=supervised,
    )


def _indices(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().squeeze(-1)


def prediction_sums(
    plan: SlotPlan, output: ObjectiveOutput, *, grid: torch.Size | None = None
) -> dict[str, Tensor]:
    """The sums of `TrainOutput`: per step, and joint along each chain.

    A chain starts at a slot whose step 0 is supervised and ends before its first unsupervised step.

    Args:
        plan: Of the batch.
        output: What the objective found.
        grid: (batch, seq), to walk through the rounds too (models/simulated_rounds.py).
    """
    steps, rows = plan.supervised.shape
    acceptance = output.acceptance.double() * plan.supervised
    # Predictions by place -> by slot: [steps, active].
    shape = (steps, max(len(plan.active), 1))
    step, row = plan.supervised.nonzero(as_tuple=True)
    slot = plan.row_slots[step, row]
    correct_chain = acceptance.new_zeros(shape)
    correct_chain[step, slot] = output.correct[step, row].double()
    accepted_chain = acceptance.new_zeros(shape)
    accepted_chain[step, slot] = acceptance[step, row]
    greedy_chain = correct_chain.cumprod(0)
    rounds: dict[str, Tensor] = {}
    if grid is not None:
        starts = torch.zeros(grid.numel(), dtype=torch.bool, device=acceptance.device)
        accepted = acceptance.new_zeros(grid.numel())
        starts[plan.places[plan.supervised[0]]] = True
        accepted[plan.active + 1] = greedy_chain.sum(0)[: len(plan.active)]
        rounds = simulated_rounds(starts.view(grid), accepted.view(grid))
    return rounds | {
        "loss": output.step_loss_sums.double(),
        "supervised": plan.supervised.sum(-1).double(),
        "in_vocabulary": (plan.supervised & output.in_vocabulary).sum(-1).double(),
        "correct": output.correct.sum(-1).double(),
        "acceptance": acceptance.sum(-1),
        "chains": plan.supervised[0].sum().double(),
        # Zero where a step is not supervised, so that the products end there.
        "greedy_joint": greedy_chain.sum(-1),
        "sampled_joint": accepted_chain.cumprod(0).sum(-1),
    }
