"""What decoding would make of a text whose predictions are known: a walk from round to round.

The mean over all places where a draft could start flatters a draft model: decoding starts a round
right behind a token that the draft got wrong, and such places come in runs. The walk starts rounds
only where decoding would. With the target's own greedy text it gives the very rounds of greedy
chain decoding (tests/test_monitoring.py compares them one by one).

A *start* is a place whose next token the draft may predict (models/ttt_slots.py). The first one of
an answer is passed over: its next token comes from prefill.

    answer  a b c d e f g, of which a chain of two gets   b c right, then e, then g
    rounds  [b c d] [e f] [g]                             tokens 3 + 2 + 1, rounds 3

Axes: batch, seq.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def simulated_rounds(starts: Tensor, accepted: Tensor) -> dict[str, Tensor]:
    """Sums of one batch: `rounds`, and the `round_tokens` that they emit.

    Args:
        starts: [batch, seq] bool, supervised places.
        accepted: [batch, seq] leading right predictions of the chain that starts there.
    """
    batch, seq = starts.shape
    before = torch.zeros_like(starts)
    before[:, 1:] = starts[:, :-1]
    opening = starts & ~before
    # [batch, seq] places from here to the end of the run, this one included.
    left = torch.zeros(batch, seq + 1, dtype=torch.int64, device=starts.device)
    for place in range(seq - 1, -1, -1):
        left[:, place] = (left[:, place + 1] + 1) * starts[:, place]
    tokens = torch.minimum(accepted.long() + 1, left[:, :seq])
    due = torch.zeros(batch, dtype=torch.int64, device=starts.device)
    rounds, emitted = torch.zeros_like(due), torch.zeros_like(due)
    for place in range(seq):
        due = torch.where(opening[:, place], place + 1, due)
        is_round = starts[:, place] & (due == place)
        rounds += is_round
        emitted += is_round * tokens[:, place]
        due = torch.where(is_round, place + tokens[:, place], due)
    return {"rounds": rounds.sum().double(), "round_tokens": emitted.sum().double()}
