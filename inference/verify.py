"""Verification of drafted tokens: which of them stay, and which token the target adds.

Chains, as in Leviathan et al. (arXiv 2211.17192, algorithm 1 and theorem 3.5) and Chen et al.
(arXiv 2302.01318, algorithm 2): a drafted x ~ q stays with probability min(1, p(x) / q(x)); the
first one that does not is replaced by a draw from normalise(max(p - q, 0)); if all stay, the target
adds one more token from its own p. The emitted text then has exactly the target's law.

Trees: the children of a node are tested in order, each against what the rejected ones before it
left of p, and the first that stays is descended into, with a fresh p. Chosen children (one-hot, as
in EAGLE-2, arXiv 2406.16858) leave p without themselves; children drawn without replacement
(EAGLE-1, arXiv 2401.15077; recursive rejection sampling, Jeon et al., arXiv 2402.14160) leave
normalise(max(p - q, 0)), and q loses them. If none stays, the target draws from what is left.

Axes: n drafted tokens of a chain, nodes of a tree, vocab (target). Row i of a chain's
`target_probs` is the target's distribution given the context and the first i drafted tokens; of a
tree's, row 0 follows the root and row i + 1 follows node i. The processors (temperature, top-k,
...) are already in both p and q. q covers the whole target vocabulary: a draft with a smaller
vocabulary has zeros elsewhere, so the residual can reach every target token.

The pure pieces (`acceptance_probabilities`, `replacement_probs`; `tree_chances`, `tree_residual`)
hold the whole law; tests/test_verify.py and tests/test_verify_tree.py sum their outcomes exactly
for every draft and every decision. Chances depend on the draft and on p alone, never on a decision:
all of them are computed at once, and a round needs two small transfers to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.models.protocols import Draft
from draftsmith.models.sampling import draw_token


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
    return _chances_to_stay(draft_tokens, draft_probs, target_probs[:-1])


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
    return _normalise((p - q).clamp(min=0.0), otherwise=p)


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
    next_token = draw_token(added_probs, generator)
    accepted, token = torch.stack([num_accepted, next_token]).tolist()
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


def verify_tree(
    draft: Draft, target_probs: Tensor, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """Tests a drafted tree (or chain) against the target's distributions.

    On a chain this is the law of `verify_chain`, and the same result for the same generator.

    Args:
        draft: nodes parents first; siblings in the order in which they were drawn or chosen.
        target_probs: [nodes + 1, vocab] float32 or float64.
        generator: source of randomness on the same device; None takes torch's global one.

    Returns:
        (path, next_token): the nodes that stay, from the root down, and the token the target adds.
    """
    chances = tree_chances(draft, target_probs)
    uniforms = torch.rand(
        chances.shape, dtype=chances.dtype, device=chances.device, generator=generator
    )
    path = _walk(draft.parent_list, (uniforms < chances).tolist())
    row = path[-1] + 1 if path else 0
    return path, int(draw_token(tree_residual(draft, target_probs, row), generator))


def verify_tree_greedy(draft: Draft, choices: Tensor) -> tuple[list[int], int]:
    """Greedy verification of a tree: the child that is the target's choice stays.

    Args:
        draft: nodes parents first; of two equal siblings the first is taken.
        choices: [nodes + 1] int64: the target's first maximum after the root (0) and each node.

    Returns:
        (path, next_token) as `verify_tree`.
    """
    parents = draft.parent_list
    ids = torch.cat([choices, draft.tokens]).tolist()
    chosen, tokens = ids[: len(parents) + 1], ids[len(parents) + 1 :]
    stays = [token == chosen[parent + 1] for parent, token in zip(parents, tokens, strict=True)]
    path = _walk(parents, stays)
    return path, chosen[path[-1] + 1 if path else 0]


def tree_chances(draft: Draft, target_probs: Tensor) -> Tensor:
    """The chance of every node to stay, given that its parent did and no earlier sibling did.

    A repeated sibling, and one that q could no longer draw, never stays.

    Args:
        draft: a tree or chain, one-hot or drawn.
        target_probs: [nodes + 1, vocab].

    Returns:
        [nodes].
    """
    parents, tokens = draft.parent_list, draft.tokens
    rows = torch.tensor(parents, dtype=torch.long, device=tokens.device) + 1
    p_tokens = target_probs[rows, tokens]
    if draft.probs is None:
        return _one_hot_chances(rows, tokens, p_tokens)
    q_tokens = draft.probs.gather(1, tokens[:, None]).squeeze(1).to(p_tokens.dtype)
    chances = _ratios(p_tokens, q_tokens)  # right for first children
    # The largest families first, so that those with one more child are the first rows.
    families = sorted(_children(parents).values(), key=len, reverse=True)
    families = [family for family in families if len(family) > 1]
    p = target_probs[[parents[family[0]] + 1 for family in families]]  # [families, vocab]
    q = draft.probs[[family[0] for family in families]].to(p.dtype)
    for rank in range(1, max(map(len, families), default=0)):
        families = [family for family in families if len(family) > rank]
        p, q = p[: len(families)], q[: len(families)]
        p, q = _after_rejection(tokens[[family[rank - 1] for family in families]], q, p)
        nodes = [family[rank] for family in families]
        chances[nodes] = _chances_to_stay(tokens[nodes], q, p)
    return chances


def tree_residual(draft: Draft, target_probs: Tensor, row: int) -> Tensor:
    """The distribution of the token that the target adds where the walk ends.

    Args:
        draft: a tree or chain, one-hot or drawn.
        target_probs: [nodes + 1, vocab].
        row: 0 for the root, i + 1 for node i; all its children were rejected.

    Returns:
        [vocab], sums to 1: what they left of p, or p itself at a leaf.
    """
    children = [node for node, parent in enumerate(draft.parent_list) if parent == row - 1]
    p = target_probs[row]
    if draft.probs is None:
        left = p.index_fill(0, draft.tokens[children], 0.0)
        return _normalise(left, otherwise=p)
    p, q = p[None], draft.probs[children[:1]].to(p.dtype)  # [1, vocab]
    for node in children:
        p, q = _after_rejection(draft.tokens[node : node + 1], q, p)
    return p[0]


def _one_hot_chances(rows: Tensor, tokens: Tensor, p_tokens: Tensor) -> Tensor:
    """[nodes] p(x) over what the earlier siblings, children of the same row, left of p's mass."""
    earlier = (rows[:, None] == rows).tril(-1)  # [nodes, nodes]; row i marks siblings before i
    repeated = (earlier & (tokens[:, None] == tokens)).any(dim=1)
    p = p_tokens.masked_fill(repeated, 0.0)
    left = 1.0 - earlier.double() @ p.double()
    # Siblings that hold all the mass up to rounding are rejected by a rounding error only.
    left = left.clamp(min=torch.finfo(p.dtype).eps)
    return (p / left).clamp(max=1.0).to(p.dtype)


def _chances_to_stay(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """[rows] for one token of each row of q and p, [rows, vocab]."""
    chosen = tokens[:, None]
    return _ratios(p.gather(1, chosen).squeeze(1), q.gather(1, chosen).squeeze(1))


def _ratios(p_tokens: Tensor, q_tokens: Tensor) -> Tensor:
    """min(1, p(x) / q(x)); 0 where q(x) is 0: such an x was not drawn from q."""
    return torch.where(q_tokens > 0, (p_tokens / q_tokens).clamp(max=1.0), 0.0)


def _after_rejection(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, vocab] p and q for the next sibling: p loses q, q loses the token (at last all)."""
    left = _normalise((p - q).clamp(min=0.0), otherwise=p)
    rest = q.scatter(1, tokens[:, None], 0.0)
    return left, rest / rest.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _normalise(residual: Tensor, *, otherwise: Tensor) -> Tensor:
    """[..., vocab] residual over its mass.

    Where p equals q up to rounding, a rejection is itself a rounding error and the residual is
    noise: p is the right law then.
    """
    mass = residual.sum(dim=-1, keepdim=True)
    return torch.where(mass > torch.finfo(residual.dtype).eps, residual / mass, otherwise)


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Parent -> its children, in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def _walk(parents: Sequence[int], stays: Sequence[bool]) -> list[int]:
    """The nodes that stay, from the root down: nodes come parents first, siblings in order."""
    path, last = [], -1
    for node, parent in enumerate(parents):
        if parent == last and stays[node]:
            path.append(node)
            last = node
    return path
