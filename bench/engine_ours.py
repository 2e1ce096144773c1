"""draftsmith's side of `make engine-check`: texts with their rounds, and losses on given states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engine_compare import Answer, Parting, first_difference, rounds_until, rounds_with_limit
from torch import Tensor

from draftsmith.eval.metrics import AcceptanceSummary, summarise_rounds
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import RoundRecord
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.features import pad_tokens
from draftsmith.train.objectives import make_objective

LOSS_STEPS = 3
"""Draft steps of EAGLE-3 unrolled for the loss."""
BLOCK_DECAY = 4.0
"""Of a block's loss: its step j weighs exp(-j / this), as speculators does by default."""


def decode_ours(
    target: TargetModel, draft: Any, prompts: Sequence[list[int]], *, tokens: int, depth: int
) -> tuple[list[Answer], AcceptanceSummary]:
    """Our answers by vLLM's rules, and the summary of their rounds as evaluation reports it."""
    engine = Engine(target, draft, ChainPolicy(depth))
    answers: list[Answer] = []
    reported: list[RoundRecord] = []
    for generation in engine.run([Request(prompt, tokens + depth) for prompt in prompts]):
        rounds = rounds_until(generation.rounds, tokens)
        limited = rounds_with_limit(rounds, tokens)
        reported += limited
        drafting = [record.accepted for record in rounds if record.proposed]
        by_position = [
            sum(accepted >= position for accepted in drafting) for position in range(1, depth + 1)
        ]
        matches = [record.emitted - 1 for record in limited]
        answers.append(Answer(generation.token_ids[:tokens], len(drafting), by_position, matches))
    return answers, summarise_rounds(reported)


def find_partings(
    target: TargetModel, prompts: Sequence[list[int]], *texts: Sequence[Answer]
) -> list[Parting]:
    """Where two sets of texts part, and how close the target's choice was there."""
    partings = []
    for index, (prompt, *pair) in enumerate(zip(prompts, *texts, strict=True)):
        ours, theirs = (answer.token_ids for answer in pair)
        place = first_difference(ours, theirs)
        if place is None:
            continue
        gap = float("inf")
        if place < min(len(ours), len(theirs)):
            ids = torch.tensor([[*prompt, *ours[:place]]], device=target.device)
            logits = target.forward(ids, logits="last").logits
            assert logits is not None, "logits were asked for"
            gap = float((logits[0, -1, ours[place]] - logits[0, -1, theirs[place]]).abs())
        partings.append(Parting(index, place, gap))
    return partings


@torch.no_grad()
def make_batch(
    target: TargetModel,
    layer_ids: Sequence[int],
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
) -> tuple[TrainBatch, Tensor]:
    """Prompts with their answers and states, and [documents, seq, hidden]: the last layer's output
    before the final norm."""
    rows = [
        (torch.tensor(prompt), torch.tensor(answer.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    batch = pad_tokens(
        [torch.cat(row) for row in rows],
        [torch.arange(len(prompt) + len(text)) >= len(prompt) for prompt, text in rows],
    )
    layers = (*layer_ids, target.num_layers - 1)
    output = target.forward(batch.input_ids, attention_mask=batch.keep_mask, aux_layer_ids=layers)
    width = len(layer_ids) * target.hidden_size
    batch.aux_hidden_states = output.aux_hidden_states[..., :width]
    batch.final_hidden_states = output.final_hidden_states
    return batch, output.aux_hidden_states[..., width:]


@torch.no_grad()
def our_losses(target: TargetModel, draft: Any, batch: TrainBatch) -> tuple[list[float], Tensor]:
    """Mean KL divergence per draft step, and [documents, seq] bool: the places that it is over.

    A place is a token whose logits teach: the target's best token after it is in the draft
    vocabulary, and the text goes on with a supervised token. Our objective reports the soft cross
    entropy, which exceeds the divergence by the entropy of the target's part in the draft
    vocabulary; all steps have the same places, because prompts are longer than the chain.
    """
    draft.config.mask_alignment = "label"
    draft.config.step_weights = [1.0] * LOSS_STEPS
    sums = draft(batch, target_head=target.head(), objective=make_objective("kl")).sums
    logits = target.logits(batch.final_hidden_states)  # [documents, seq, vocab]
    ids = draft.draft_to_target
    ids = torch.arange(logits.shape[-1]) if ids is None else ids
    places = torch.zeros_like(batch.keep_mask)
    places[:, :-1] = batch.supervised_mask[:, 1:]
    places &= torch.isin(logits.argmax(-1), ids)
    taught = torch.log_softmax(logits[places][:, ids].double(), -1)
    entropy = -float((taught.exp() * taught).sum())
    count = int(places.sum())
    assert sums["in_vocabulary"].tolist() == [count] * LOSS_STEPS, "every step has all places"
    return [(loss - entropy) / count for loss in sums["loss"].tolist()], places


@torch.no_grad()
def block_loss(
    target: TargetModel, draft: Any, batch: TrainBatch
) -> tuple[float, int, int, Tensor]:
    """Mean weighted KL divergence of a block draft, its predictions, the number of anchors, and
    [documents, seq] bool: what speculators is given as its mask.

    speculators asks the mask at a slot's own position, whichever token the slot predicts. So where
    the anchor's slot predicts too, the mask says which token is followed by a supervised one.
    Anchors are all of its positions but those in the last block_size of the packed documents, as
    speculators draws them. Our objective reports the soft cross entropy, which exceeds the
    divergence by the entropy of the target; speculators divides the weighted sum by the number of
    predictions.
    """
    mask = batch.supervised_mask
    if draft.config.sample_from_anchor:
        mask = torch.zeros_like(mask)
        mask[:, :-1] = batch.supervised_mask[:, 1:]
    draft.config.decay = BLOCK_DECAY
    if hasattr(draft.config, "confidence_weight"):
        draft.config.confidence_weight = 0.0  # Its loss is another term there.
    packed = batch.keep_mask.flatten().cumsum(0) - 1
    last = int(packed[-1]) + 1 - draft.config.block_size
    anchors = (mask.flatten() & (packed < last)).nonzero().squeeze(-1)
    draft.choose_anchors = lambda _batch: anchors
    plan = draft._plan_for(batch, "entropy")
    places = plan.places[plan.supervised]
    taught = target.logits(batch.final_hidden_states.flatten(0, 1)[places])
    taught = torch.log_softmax(taught.double(), -1)
    entropy = -(taught.exp() * taught).sum(-1)
    weights = draft.step_weights.expand(plan.supervised.shape)[plan.supervised].double()
    sums = draft(batch, target_head=target.head(), objective=make_objective("kl")).sums
    count = int(plan.supervised.sum())
    assert int(sums["supervised"].sum()) == count, "the same blocks"
    loss = float(sums["loss"].sum() - (weights * entropy).sum()) / count
    return loss, count, len(anchors), mask
