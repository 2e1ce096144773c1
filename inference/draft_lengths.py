"""From the drafts of a round to their verification lengths, as a `LengthPolicy` decides them.

What may decide. A discarded token is replaced by a draw of the target's, so the text keeps its law
only if the decision to verify token j knows nothing of token j (draftsmith.inference.scheduler):

    confidences    what the draft model reports. DSpark's confidence of slot j reads the slot's
                   state and the token before it, never its own.
    token_probs    the draft model's own probability of its token, uncalibrated. In a greedy chain
                   every token is a function of the committed text, and so is its probability:
                   there is nothing about a draw that it could give away. In a sampled chain it is
                   q(token), a function of the very token that it would decide about: refused.
                   (p = (0.7, 0.3), q = (0.85, 0.15), verifying only tokens with q >= 0.5: the first
                   token comes out in 0.85 * 0.7 / 0.85 + 0.15 * 0.7 = 80.5 % of the texts instead
                   of 70 %.)

Trees are not cut: a policy decides about prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.inference.length_policies import LengthPolicy
from draftsmith.inference.policies import Policy
from draftsmith.models.protocols import Draft


def check_length_policy(lengths: LengthPolicy, policy: Policy, *, has_draft: bool) -> None:
    """Refuses a length policy that has nothing to decide about.

    Raises:
        ValueError: trees are drafted, or nothing is.
    """
    if lengths.longest == 0:
        return
    if not has_draft:
        raise ValueError(
            f"Verification lengths are decided by {lengths.name!r}, but there is no draft model. "
            "Give one, or FixedLength(0)."
        )
    if policy.max_nodes != policy.max_depth:
        raise ValueError(
            f"Verification lengths are decided by {lengths.name!r}, but {policy.name} drafts trees "
            f"of {policy.max_nodes} tokens, which are not cut. Draft chains (ChainPolicy, "
            "drafting=chain)."
        )


def cut_to_lengths(
    drafts: Sequence[Draft], policy: LengthPolicy
) -> tuple[list[Draft], list[tuple[float, ...]]]:
    """Asks the policy once for all chains, and cuts each to its verification length.

    Args:
        drafts: of all active sequences; empty ones where nothing was drafted.
        policy: reads confidences, or only how many tokens there are.

    Returns:
        The cut drafts, and what the policy knew of each token that is left (empty where it does not
        read confidences).

    Raises:
        ValueError: a tree; confidences are needed, and there are none that may decide.
    """
    for draft in drafts:
        if not draft.is_chain:
            raise ValueError(
                f"Verification lengths are decided by {policy.name!r}, but the draft model gave a "
                f"tree of {len(draft.tokens)} tokens, which is not cut. Draft chains."
            )
    if policy.reads_confidences:
        known = read_confidences(drafts, policy.name)
    else:
        known = [[1.0] * len(draft.tokens) for draft in drafts]
    lengths = policy.lengths(known)
    cut = [draft.first(length) for draft, length in zip(drafts, lengths, strict=True)]
    if not policy.reads_confidences:
        return cut, [()] * len(cut)
    kept = [tuple(chain[:length]) for chain, length in zip(known, lengths, strict=True)]
    return cut, kept


def read_confidences(drafts: Sequence[Draft], policy_name: str) -> list[list[float]]:
    """The chance of each drafted token to stay, on the host, by one transfer.

    Raises:
        ValueError: a chain that has none that may decide; says why.
    """
    sources = [
        _deciding(draft, policy_name).detach().float() for draft in drafts if len(draft.tokens)
    ]
    # Softmax and sigmoid stay below 1 up to rounding.
    values = iter(torch.cat(sources).clamp(max=1.0).tolist() if sources else [])
    return [[next(values) for _ in range(len(draft.tokens))] for draft in drafts]


def _deciding(draft: Draft, policy_name: str) -> torch.Tensor:
    """[nodes] see the head of this file."""
    if draft.confidences is not None:
        return draft.confidences
    need = f"Verification lengths by {policy_name!r} need confidences, but the draft model reports"
    if draft.token_probs is None:
        raise ValueError(
            f"{need} neither confidences nor the probabilities of its tokens. Use a fixed length, "
            "or a draft with a confidence head (method=dspark)."
        )
    if draft.kind == "drawn":
        raise ValueError(
            f"{need} only its own probabilities of the tokens that it drew. They depend on the "
            "very tokens that they would decide about, which would change the law of sampled "
            "texts. Use a fixed length, a draft with a confidence head (method=dspark), or greedy "
            "decoding."
        )
    return draft.token_probs
