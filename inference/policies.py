"""How an autoregressive draft model spends its budget: a chain, a static tree, a dynamic tree.

    ChainPolicy         one token after the other
    StaticTreePolicy    EAGLE-1 (arXiv 2401.15077): a fixed shape of the most likely tokens
    SampledTreePolicy   a fixed shape whose children are drawn without replacement (EAGLE-1, RSD)
    DynamicTreePolicy   EAGLE-2 (arXiv 2406.16858, section 4): expand, then rerank globally

A draft model that proposes whole blocks is asked for a tree by inference/block_policy.py.

A policy reads several sequences in lockstep: each step is one packed call of the draft model. It
knows the model only as an `AutoregressiveDraft`. What a policy decides depends on the draft model
alone, before any randomness of the target is drawn, so that verification stays exact.

Axes: sequences, rows (new tokens of all sequences), draft_vocab, vocab (target), k (children).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.inference.block_policy import BlockTreePolicy
from draftsmith.models.protocols import (
    AutoregressiveDraft,
    Draft,
    DraftContext,
    Frontier,
    SamplingSettings,
)
from draftsmith.models.sampling import draw_token, process_logits, warp_logits


@dataclass
class DraftRequest:
    """One sequence that wants a draft."""

    context: DraftContext
    state: Any
    """The draft model's own."""
    max_depth: int
    """Deepest drafted token that its text and the draft model's positions allow, at least 1."""
    sampling: SamplingSettings
    generator: torch.Generator | None
    vocab_size: int
    """The target's."""

    def seen(self, paths: Tensor) -> Tensor:
        """[rows, length + depth] committed tokens and each row's drafted path ([rows, depth])."""
        committed = self.context.token_ids.expand(len(paths), -1)
        return torch.cat([committed, paths], dim=1)


class Policy(Protocol):
    """A way to draft."""

    @property
    def name(self) -> str:
        """As reports show it."""

    @property
    def max_depth(self) -> int:
        """Deepest drafted token."""

    @property
    def max_nodes(self) -> int:
        """Most drafted tokens of a round."""

    def draft(self, model: AutoregressiveDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""


def _require(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}.")


def _in_target_vocabulary(logits: Tensor, model: AutoregressiveDraft, vocab_size: int) -> Tensor:
    """[rows, draft_vocab] -> [rows, vocab], -inf where the draft model has no token."""
    ids = model.draft_to_target
    if ids is None:
        return logits
    full = logits.new_full((len(logits), vocab_size), float("-inf"))
    return full.index_copy_(1, ids, logits)


def _own_logits(
    model: AutoregressiveDraft, request: DraftRequest, logits: Tensor, paths: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Logits whose largest are proposed, and the target ids of their columns (None: the same).

    A repetition penalty acts on the draft model as on the target, or it would propose what the
    target then rejects.
    """
    if not request.sampling.penalised:
        return logits, model.draft_to_target
    full = _in_target_vocabulary(logits.float(), model, request.vocab_size)
    return process_logits(full, request.sampling, seen=request.seen(paths)), None


def _best(
    model: AutoregressiveDraft, request: DraftRequest, logits: Tensor, paths: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k most likely children of each row: target ids and log-probabilities, [rows, k] each."""
    own, ids = _own_logits(model, request, logits, paths)
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    normaliser = own.logsumexp(-1, keepdim=True)
    if k == 1:
        # torch's argmax returns the first of equal maxima, as greedy decoding of the target does.
        best = own.argmax(-1, keepdim=True)
        top = own.gather(-1, best)
    else:
        top, best = own.topk(min(k, own.shape[-1]), dim=-1)
    return (best if ids is None else ids[best]), top - normaliser


def _distribution(
    model: AutoregressiveDraft, request: DraftRequest, logits: Tensor, paths: Tensor
) -> Tensor:
    """[rows, vocab] what children are drawn from: the target's processors on the draft's logits."""
    full = _in_target_vocabulary(logits.float(), model, request.vocab_size)
    seen = request.seen(paths) if request.sampling.penalised else None
    return warp_logits(full, request.sampling, seen=seen).softmax(-1)


def _draw(probs: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """[rows, k] children drawn one after the other without replacement.

    The k smallest of independent exponentials with rates probs, in order (the exponential races of
    Gumbel-top-k; Kool et al., arXiv 1903.06059). Where fewer than k tokens have mass, the last ones
    have none and must be left out.
    """
    waits = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / waits).topk(min(k, probs.shape[-1]), dim=-1).indices


def _no_paths(request: DraftRequest) -> Tensor:
    return request.context.token_ids.new_empty(1, 0)


@dataclass(frozen=True)
class ChainPolicy:
    """One token after the other: chosen when decoding is greedy, else drawn."""

    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        _require("num_draft_tokens", self.num_draft_tokens, 0)

    @property
    def name(self) -> str:
        return f"chain of {self.num_draft_tokens}"

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def max_nodes(self) -> int:
        return self.num_draft_tokens

    def draft(self, model: AutoregressiveDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = [_Chain(request) for request in requests]
        logits = model.read([r.context for r in requests], [r.state for r in requests])
        active = list(range(len(chains)))
        for depth in range(1, self.num_draft_tokens + 1):
            for row, index in enumerate(active):
                chains[index].grow(model, logits[row : row + 1])
            active = [i for i in active if depth < min(requests[i].max_depth, self.max_depth)]
            if not active:
                break
            frontiers = [chains[i].frontier(depth - 1) for i in active]
            logits = model.extend([requests[i].state for i in active], frontiers)
        return [chain.finish() for chain in chains]


class _Chain:
    """One sequence's chain in the making."""

    def __init__(self, request: DraftRequest) -> None:
        self.request = request
        self.tokens: list[Tensor] = []
        self.token_probs: list[Tensor] = []
        self.distributions: list[Tensor] = []

    def grow(self, model: AutoregressiveDraft, logits: Tensor) -> None:
        """Adds the token below the newest one, from its logits [1, draft_vocab]."""
        request = self.request
        path = _no_paths(request)
        if self.tokens and request.sampling.penalised:
            path = torch.cat(self.tokens)[None]
        if request.sampling.greedy:
            tokens, log_probs = _best(model, request, logits, path, 1)
            self.tokens.append(tokens[0])
            self.token_probs.append(log_probs[0].exp())
            return
        probs = _distribution(model, request, logits, path)
        token = draw_token(probs, request.generator)
        self.tokens.append(token)
        self.token_probs.append(probs[0, token])
        self.distributions.append(probs)

    def frontier(self, row: int) -> Frontier:
        """The newest token, below row `row`."""
        token = self.tokens[-1]
        return Frontier(token, torch.tensor([row], device=token.device), is_chain=True)

    def finish(self) -> Draft:
        count = len(self.tokens)
        return Draft(
            tokens=torch.cat(self.tokens),
            probs=torch.cat(self.distributions) if self.distributions else None,
            token_probs=torch.cat(self.token_probs),
            state_rows=[*range(1, count), -1],
        )


Path = tuple[int, ...]
"""A node of a static tree: the rank of the child at each level below the root, from 0."""


@dataclass(frozen=True)
class StaticTreePolicy:
    """A fixed shape; a path (0, 2) is the third best child of the best child of the root.

    Children are the draft model's most likely tokens (one-hot proposals).
    """

    paths: tuple[Path, ...] = (
        *((i,) for i in range(4)),
        *((0, i) for i in range(3)),
        (1, 0), (1, 1), (2, 0),
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
        (0, 0, 0, 0), (0, 0, 0, 1),
    )  # fmt: skip
    """Default (our choice): 16 nodes, the wider the nearer to the root."""

    def __post_init__(self) -> None:
        given = set(self.paths)
        if not given or len(given) != len(self.paths) or min(map(len, given)) == 0:
            raise ValueError(f"paths is {self.paths}; expected distinct non-empty paths.")
        for path in self.paths:
            if min(path) < 0 or (len(path) > 1 and path[:-1] not in given):
                raise ValueError(
                    f"paths has {path}, but not its parent {path[:-1]}; ranks count from 0 and a "
                    "tree must be connected."
                )

    @property
    def name(self) -> str:
        return f"static tree of {len(self.paths)}"

    @property
    def max_depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def max_nodes(self) -> int:
        return len(self.paths)

    def draft(self, model: AutoregressiveDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
        return _grow_shape(model, requests, self.paths, drawn=False)


@dataclass(frozen=True)
class SampledTreePolicy:
    """A fixed shape whose children are drawn without replacement: widths[d] below each node of
    depth d.

    Greedy decoding has nothing to draw: children are then the most likely tokens.
    """

    widths: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("widths is empty; expected the number of children per level.")
        for width in self.widths:
            _require("widths", width, 1)

    @property
    def paths(self) -> tuple[Path, ...]:
        levels: list[list[Path]] = [[()]]
        for width in self.widths:
            levels.append([(*path, rank) for path in levels[-1] for rank in range(width)])
        return tuple(path for level in levels[1:] for path in level)

    @property
    def name(self) -> str:
        return f"sampled tree of widths {', '.join(map(str, self.widths))}"

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @property
    def max_nodes(self) -> int:
        return len(self.paths)

    def draft(self, model: AutoregressiveDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
        return _grow_shape(model, requests, self.paths, drawn=True)


def _grow_shape(
    model: AutoregressiveDraft,
    requests: Sequence[DraftRequest],
    paths: Sequence[Path],
    *,
    drawn: bool,
) -> list[Draft]:
    """Grows a fixed shape level by level, all sequences in one packed call per level."""
    trees = [_ShapedTree(request, paths, drawn=drawn) for request in requests]
    logits = model.read([r.context for r in requests], [r.state for r in requests])
    active = list(trees)
    counts = [1] * len(trees)
    while active:
        first = 0
        for tree, count in zip(active, counts, strict=True):
            tree.grow(model, logits[first : first + count])
            first += count
        going = [(tree, frontier) for tree in active if (frontier := tree.frontier()) is not None]
        if not going:
            break
        active = [tree for tree, _ in going]
        frontiers = [frontier for _, frontier in going]
        counts = [len(frontier.tokens) for frontier in frontiers]
        logits = model.extend([tree.request.state for tree in active], frontiers)
    return [tree.finish() for tree in trees]


class _ShapedTree:
    """One sequence's tree of a fixed shape in the making, level by level."""

    def __init__(self, request: DraftRequest, paths: Sequence[Path], *, drawn: bool) -> None:
        self.request = request
        self.drawn = drawn and not request.sampling.greedy
        self.ranks: dict[Path, list[int]] = {}
        """Ranks of the children of each path that has some."""
        for path in sorted(paths, key=lambda path: (len(path), path)):
            if len(path) <= request.max_depth:
                self.ranks.setdefault(path[:-1], []).append(path[-1])
        self.frontier_paths: list[Path] = [()]
        self.frontier_rows = [0]
        self.nodes: dict[Path, int] = {}
        self.tokens: list[Tensor] = []
        self.token_probs: list[Tensor] = []
        self.distributions: list[Tensor] = []
        self.parents: list[int] = []
        self.state_rows: list[int] = []
        self.rows_read = 1
        self.drafted = _no_paths(request)
        """[frontier, depth] drafted tokens above and at each node of the frontier."""

    def grow(self, model: AutoregressiveDraft, logits: Tensor) -> None:
        """Adds the children of the frontier, from its logits [frontier, draft_vocab]."""
        width = max(max(self.ranks[path]) + 1 for path in self.frontier_paths)
        if self.drawn:
            probs = _distribution(model, self.request, logits, self.drafted)
            children = _draw(probs, width, self.request.generator)
            child_probs = probs.gather(-1, children)
            possible = (child_probs > 0).tolist()
        else:
            children, log_probs = _best(model, self.request, logits, self.drafted, width)
            child_probs = log_probs.exp()
            possible = [[True] * children.shape[1]] * len(children)
        for row, path in enumerate(self.frontier_paths):
            # A child without mass was not drawn: fewer tokens than children have any.
            ranks = [r for r in self.ranks[path] if r < children.shape[1] and possible[row][r]]
            for rank in ranks:
                self.nodes[(*path, rank)] = len(self.parents)
                self.parents.append(self.nodes.get(path, -1))
                self.state_rows.append(-1)
            self.tokens.append(children[row, ranks])
            self.token_probs.append(child_probs[row, ranks])
            if self.drawn:
                self.distributions.append(probs[row].expand(len(ranks), -1))

    def frontier(self) -> Frontier | None:
        """The nodes of the newest level that have children; None when the tree is complete."""
        depth = len(self.frontier_paths[0]) + 1
        chosen = [path for path in self.nodes if len(path) == depth and path in self.ranks]
        if not chosen:
            return None
        rows = dict(zip(self.frontier_paths, self.frontier_rows, strict=True))
        parents = [rows[path[:-1]] for path in chosen]
        self.frontier_rows = list(range(self.rows_read, self.rows_read + len(chosen)))
        self.rows_read += len(chosen)
        indices = [self.nodes[path] for path in chosen]
        tokens = torch.cat(self.tokens)[indices]
        if self.request.sampling.penalised:
            above = self.drafted[[self.frontier_paths.index(path[:-1]) for path in chosen]]
            self.drafted = torch.cat([above, tokens[:, None]], dim=1)
        self.frontier_paths = chosen
        for index, row in zip(indices, self.frontier_rows, strict=True):
            self.state_rows[index] = row
        is_chain = len(chosen) == 1 and self.rows_read == depth + 1
        return Frontier(tokens, torch.tensor(parents, device=tokens.device), is_chain)

    def finish(self) -> Draft:
        return Draft(
            tokens=torch.cat(self.tokens),
            probs=torch.cat(self.distributions) if self.drawn else None,
            parents=self.parents,
            token_probs=torch.cat(self.token_probs),
            state_rows=self.state_rows,
        )


@dataclass(frozen=True)
class DynamicTreePolicy:
    """EAGLE-2's tree: expand the most likely nodes level by level, then keep the best of all.

    A node's score is the draft model's cumulative log-probability. Children are one-hot proposals.
    """

    total_tokens: int = 60
    """Tokens that the target reads in a round, the root included (EAGLE: 60)."""
    depth: int = 5
    """Expansions after the first level; the deepest node is one deeper (EAGLE: 5)."""
    top_k: int = 10
    """Nodes expanded per level, and children of each (EAGLE: 10)."""

    def __post_init__(self) -> None:
        _require("total_tokens", self.total_tokens, 2)
        _require("depth", self.depth, 0)
        _require("top_k", self.top_k, 1)

    @property
    def name(self) -> str:
        return f"dynamic tree {self.total_tokens}/{self.depth}/{self.top_k}"

    @property
    def max_depth(self) -> int:
        return self.depth + 1

    @property
    def max_nodes(self) -> int:
        return self.total_tokens - 1

    def draft(self, model: AutoregressiveDraft, requests: Sequence[DraftRequest]) -> list[Draft]:
        pools = [_CandidatePool(request, self.top_k) for request in requests]
        logits = model.read([r.context for r in requests], [r.state for r in requests])
        active, counts = list(pools), [1] * len(pools)
        for level in range(1, self.max_depth + 1):
            first = 0
            for pool, count in zip(active, counts, strict=True):
                pool.add_children(model, logits[first : first + count])
                first += count
            active = [
                pool for pool in active if level < min(self.max_depth, pool.request.max_depth)
            ]
            if not active:
                break
            frontiers = [pool.expand() for pool in active]
            counts = [len(frontier.tokens) for frontier in frontiers]
            logits = model.extend([pool.request.state for pool in active], frontiers)
        return [pool.rerank(self.max_nodes) for pool in pools]


class _CandidatePool:
    """All candidates of one sequence: children of every node that was expanded."""

    def __init__(self, request: DraftRequest, top_k: int) -> None:
        self.request = request
        self.top_k = top_k
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.parents: list[Tensor] = []
        """Index of each candidate's parent in the pool, -1 for the root."""
        self.size = 0
        device = request.context.token_ids.device
        self.expanded = torch.tensor([-1], device=device)
        """[frontier] pool indices of the nodes that were expanded last."""
        self.expanded_scores = torch.zeros(1, 1, device=device)
        self.first_row = 0
        """Row of the draft model's state that read the first of them."""
        self.rows: list[Tensor] = []
        """Pool indices in the order in which the draft model read them (row 1 is the first)."""
        self.drafted = _no_paths(request)
        """[frontier, depth] drafted tokens above and at each expanded node."""

    def add_children(self, model: AutoregressiveDraft, logits: Tensor) -> None:
        """Adds top_k children of every node that was expanded last."""
        tokens, log_probs = _best(model, self.request, logits, self.drafted, self.top_k)
        self.newest = self.size
        self.width = tokens.shape[1]
        self.tokens.append(tokens.flatten())
        self.probs.append(log_probs.exp().flatten())
        self.scores.append((self.expanded_scores + log_probs).flatten())
        self.parents.append(self.expanded.repeat_interleave(self.width))
        self.size += tokens.numel()

    def expand(self) -> Frontier:
        """Chooses the top_k newest candidates by score."""
        scores = self.scores[-1]
        best = scores.topk(min(self.top_k, len(scores))).indices
        tokens = self.tokens[-1][best]
        above = best // self.width
        parents = above + self.first_row
        self.first_row += int(len(self.expanded))
        self.expanded = best + self.newest
        self.expanded_scores = scores[best][:, None]
        self.rows.append(self.expanded)
        if self.request.sampling.penalised:
            self.drafted = torch.cat([self.drafted[above], tokens[:, None]], dim=1)
        return Frontier(tokens, parents, is_chain=self.top_k == 1)

    def rerank(self, num_nodes: int) -> Draft:
        """The `num_nodes` best of all candidates, parents before children.

        A stable sort over the pool's order keeps a parent before a child of equal score, so that
        the chosen nodes are connected even when the draft model is certain.
        """
        scores, parents = torch.cat(self.scores), torch.cat(self.parents)
        order = scores.sort(descending=True, stable=True).indices[:num_nodes]
        chosen = order.sort().values
        place = torch.searchsorted(chosen, parents[chosen].clamp(min=0))
        place = torch.where(parents[chosen] < 0, -1, place)
        rows = torch.full_like(parents, -1)
        if self.rows:
            read = torch.cat(self.rows)
            rows[read] = torch.arange(1, len(read) + 1, device=rows.device)
        placed, read_rows = torch.stack([place, rows[chosen]]).tolist()  # The one transfer.
        return Draft(
            tokens=torch.cat(self.tokens)[chosen],
            parents=placed,
            token_probs=torch.cat(self.probs)[chosen],
            state_rows=read_rows,
        )


POLICIES: dict[str, Any] = {
    "chain": ChainPolicy,
    "static_tree": StaticTreePolicy,
    "sampled_tree": SampledTreePolicy,
    "dynamic_tree": DynamicTreePolicy,
    "block_tree": BlockTreePolicy,
}
"""Name in a configuration -> policy."""


def make_policy(name: str, **options: Any) -> Policy:
    """Builds a policy from a configuration; lists become tuples.

    Raises:
        ValueError: an unknown name, or options that do not fit.
    """
    if name not in POLICIES:
        raise ValueError(f"policy is {name!r}; choose one of {', '.join(POLICIES)}.")
    fixed = {key: _tuples(value) for key, value in options.items() if value is not None}
    return POLICIES[name](**fixed)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, (list, tuple)) else value
