"""Verification of a drafted chain: which tokens stay, and which token the target adds.

Speculative sampling as in Leviathan et al. (arXiv 2211.17192, algorithm 1 and theorem 3.5) and Chen
et al. (arXiv 2302.01318, algorithm 2): a drafted x ~ q stays with probability min(1, p(x) / q(x));
the first one that does not is replaced by a draw from normalise(max(p - q, 0)); if all stay, the
target adds one more token from its own p. The emitted text then has exactly the target's law.

Axes: n drafted tokens, vocab (target). Row i of `target_probs` is the target's distribution given
the context and the first i drafted tokens; row n is that of the bonus token. Temperature, top-k and
top-p are already in both p and q. q covers the whole target vocabulary: a draft with a smaller
vocabulary has zeros elsewhere, so the residual can reach every target token.

The two pure pieces (`acceptance_probabilities`, `replacement_probs`) hold the whole law;
tests/test_verify.py sums their outcomes exactly for every draft and every decision.
"""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot_probs(draft_tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The proposal distribution of tokens that were not drawn but chosen: all mass on one token.

    Args:
        draft_tokens: [n] int64.
        vocab_size: size of the target vocabulary.
        dtype: dtype of the result.

    Returns:
        [n, vocab].
    """
    probs = torch.zeros(len(draft_tokens), vocab_size, dtype=dtype, device=draft_tokens.device)
    return probs.scatter_(1, draft_tokens[:, None], 1.0)


def acceptance_probabilities(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor
) -> Tensor:
    """min(1, p(x) / q(x)) of every drafted token, given that those before it stay.

    Args:
        draft_tokens: [n] int64.
        draft_probs: [n, vocab].
        target_probs: [n + 1, vocab].

    Returns:
        [n].
    """
    chosen = draft_tokens[:, None]
    p = target_probs[:-1].gather(1, chosen).squeeze(1)
    q = draft_probs.gather(1, chosen).squeeze(1)
    return (p / q).clamp(max=1.0)


def replacement_probs(draft_probs: Tensor, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """The distribution of the token that the target adds after `num_accepted` drafted ones.

    Args:
        draft_probs: [n, vocab].
        target_probs: [n + 1, vocab].
        num_accepted: [] int64, 0 to n; n asks for the bonus token.

    Returns:
        [vocab], sums to 1.
    """
    # A row of zeros as the proposal of the bonus token turns its residual into p itself.
    draft_rows = torch.cat([draft_probs, torch.zeros_like(target_probs[:1])])
    p = target_probs.index_select(0, num_accepted.view(1)).squeeze(0)  # [vocab]
    q = draft_rows.index_select(0, num_accepted.view(1)).squeeze(0)
    residual = (p - q).clamp(min=0.0)
    mass = residual.sum()
    # Where p equals q up to rounding, a rejection is itself a rounding error and the residual is
    # noise: p is the right law then.
    return torch.where(mass > torch.finfo(p.dtype).eps, residual / mass, p)


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None = None,
) -> tuple[int, int]:
    """Tests a drafted chain against the target's distributions (one transfer to the host).

    Args:
        draft_tokens: [n] int64 target ids; n may be 0 (a plain step).
        draft_probs: [n, vocab] the distribution that each token was drawn from, or None when every
            token was chosen with certainty (greedy draft, n-gram): then p(x) is the chance to stay
            and the replacement comes from p without x.
        target_probs: [n + 1, vocab] float32 or float64.
        generator: source of randomness on the same device; None takes torch's global one.

    Returns:
        (num_accepted, next_token): drafted tokens that stay, and the token the target adds.
    """
    if draft_probs is None:
        draft_probs = one_hot_probs(draft_tokens, target_probs.shape[-1], target_probs.dtype)
    draft_probs = draft_probs.to(target_probs.dtype)
    chances = acceptance_probabilities(draft_tokens, draft_probs, target_probs)
    uniforms = torch.rand(
        chances.shape, dtype=chances.dtype, device=chances.device, generator=generator
    )
    num_accepted = (uniforms < chances).long().cumprod(dim=0).sum()
    added_probs = replacement_probs(draft_probs, target_probs, num_accepted)
    next_token = torch.multinomial(added_probs, 1, generator=generator)
    accepted, token = torch.cat([num_accepted.view(1), next_token]).tolist()
    return accepted, token


def verify_chain_greedy(draft_tokens: Tensor, target_logits: Tensor) -> tuple[int, int]:
    """Greedy verification: a drafted token stays while it is the target's first maximum.

    Args:
        draft_tokens: [n] int64 target ids; n may be 0.
        target_logits: [n + 1, vocab] raw logits (no softmax is needed for an argmax).

    Returns:
        (num_accepted, next_token) as `verify_chain`.
    """
    choices = target_logits.argmax(dim=-1)  # [n + 1]; torch returns the first of equal maxima
    num_accepted = (choices[:-1] == draft_tokens).long().cumprod(dim=0).sum()
    next_token = choices.index_select(0, num_accepted.view(1))
    accepted, token = torch.cat([num_accepted.view(1), next_token]).tolist()
    return accepted, token
