"""A tree from a block: the best-scored paths through its slots, as EAGLE-2 chooses among a tree.

A node at depth d is a candidate of slot d - 1. Its score is its cumulative log-probability, in
which a child's logits are its slot's plus the head's correction for the token before it (DSpark);
without a head every path has the same logits at a slot (DFlash). The tree is the `num_nodes` best
nodes among all paths that take one of the `top_k` best children at every step.

Level by level: a candidate that is not among the `num_nodes` best so far cannot be among them
later, and neither can what lies below it, so only the others are expanded. That gives exactly the
nodes of an expansion by best score first (tests/test_block_tree.py enumerates all paths), with one
call of the head and one transfer to the host per level, for all sequences together. Where the
logits depend on slot and token before alone, parents with the same token share a row.

Proposals are one-hot (arXiv 2406.16858): the tree is decided by the draft alone. Scores are those
of the softmax at temperature 1, as in `DynamicTreePolicy`; a repetition penalty acts on the logits
of each path.

Axes: sequences, steps, rows (parents that are expanded), vocab, k (children).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.models.block_proposal import Proposal
from draftsmith.models.protocols import BlockTree, Draft, DraftContext, SamplingSettings
from draftsmith.models.sampling import process_logits


def propose_trees(
    proposal: Proposal,
    contexts: Sequence[DraftContext],
    *,
    counts: Sequence[int],
    sampling: Sequence[SamplingSettings],
    tree: BlockTree,
) -> list[Draft]:
    """One tree per sequence.

    Args:
        proposal: Of these sequences.
        contexts: Committed tokens, the anchor last.
        counts: Deepest drafted token per sequence, at most the steps of the logits; 0: none.
        sampling: Of each sequence; its repetition penalty is read.
        tree: How many nodes and children.

    Returns:
        Nodes parents first, siblings by falling probability; no confidences, which are of a slot's
        one token and not of several.
    """
    trees = [
        _Tree(row, *arguments, tree)
        for row, arguments in enumerate(zip(contexts, counts, sampling, strict=True))
    ]
    memory: Tensor | None = None
    for step in range(max(counts)):
        parents = [(one, node) for one in trees for node in one.frontier(step)]
        if not parents:
            break
        rows, places = _distinct_rows(proposal, parents)
        logits, memory = _row_logits(proposal, step, [parents[row] for row in rows], memory)
        chances, tokens = _best_children(logits, tree.top_k)
        found = list(zip(chances.tolist(), tokens.tolist(), strict=True))  # The one transfer.
        for (one, node), place in zip(parents, places, strict=True):
            one.add_children(node, *found[place], memory_row=place)
        for one in trees:
            one.prune()
    return [one.finish() for one in trees]


def _distinct_rows(
    proposal: Proposal, parents: Sequence[tuple[_Tree, int]]
) -> tuple[list[int], list[int]]:
    """Parents whose logits have to be computed, and for each parent its place among them."""
    rows: dict[tuple[int, ...], int] = {}
    first, places = [], []
    for index, (one, node) in enumerate(parents):
        key: tuple[int, ...] = (one.row,)
        if one.sampling.penalised or (proposal.head is not None and proposal.head.remembers):
            key = (one.row, 0, index)
        elif proposal.head is not None:
            key = (one.row, one.token(node))
        if key not in rows:
            rows[key] = len(rows)
            first.append(index)
        places.append(rows[key])
    return first, places


def _row_logits(
    proposal: Proposal, step: int, parents: Sequence[tuple[_Tree, int]], memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[rows, vocab] logits of the children, and the head's memory [rows, ...] for the next step."""
    device = proposal.logits.device
    sequences = torch.tensor([one.row for one, _ in parents], device=device)
    logits = proposal.logits[sequences, step]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if proposal.head is not None:
        before = torch.tensor([one.token(node) for one, node in parents], device=device)
        if memory is not None:
            memory = memory[[one.memory_rows[node] for one, node in parents]]
        said = proposal.head.step(step, before, sequences=sequences, memory=memory)
        memory = said.memory
        if said.correction is not None:
            logits = logits + said.correction
    penalised = [
        (row, one, node) for row, (one, node) in enumerate(parents) if one.sampling.penalised
    ]
    for row, one, node in penalised:
        logits[row] = process_logits(logits[row][None], one.sampling, seen=one.seen(node))[0]
    return logits, memory


def _best_children(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row: log-probabilities and ids, [rows, k] each."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    if top_k == 1:
        # torch's argmax returns the first of equal maxima, as greedy decoding of the target does.
        tokens = logits.argmax(-1, keepdim=True)
        top = logits.gather(-1, tokens)
    else:
        top, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return top - normaliser, tokens


class _Tree:
    """One sequence's tree in the making; nodes are numbered as they are found, -1 is the root."""

    def __init__(
        self,
        row: int,
        context: DraftContext,
        depth: int,
        sampling: SamplingSettings,
        shape: BlockTree,
    ) -> None:
        self.row = row
        self.committed = context.token_ids  # [1, length]
        self.depth = depth
        self.sampling = sampling
        self.num_nodes = shape.num_nodes
        self.anchor = int(self.committed[0, -1])
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.chances: list[float] = []
        """Log-probability of each node given its parent."""
        self.memory_rows: dict[int, int] = {}
        """Node of the last level -> the row of the head's memory that was made for it."""
        self.kept: list[int] = []
        """The best nodes so far, in the order in which they were found."""

    def token(self, node: int) -> int:
        return self.anchor if node < 0 else self.tokens[node]

    def seen(self, node: int) -> Tensor:
        """[1, length + depth] committed tokens and the path to a node."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.tokens[node])
            node = self.parents[node]
        drafted = torch.tensor([path], dtype=torch.long, device=self.committed.device)
        return torch.cat([self.committed, drafted], dim=1)

    def frontier(self, step: int) -> list[int]:
        """Nodes whose children are candidates of slot `step`."""
        if step >= self.depth:
            return []
        return [-1] if step == 0 else [node for node in self.kept if self.depths[node] == step]

    def add_children(
        self, node: int, chances: Sequence[float], tokens: Sequence[int], *, memory_row: int
    ) -> None:
        """Adds the children of a node, the most likely first."""
        score = 0.0 if node < 0 else self.scores[node]
        for chance, token in zip(chances, tokens, strict=True):
            if chance == float("-inf"):
                break  # Not a token of the draft's vocabulary: nothing more likely follows.
            # Rounding must not lift a child above its parent, or the tree could fall apart.
            chance = min(chance, 0.0)
            self.memory_rows[len(self.tokens)] = memory_row
            self.kept.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(1 if node < 0 else self.depths[node] + 1)
            self.scores.append(score + chance)
            self.chances.append(chance)

    def prune(self) -> None:
        """Leaves the best nodes; of equal scores the first found, so a parent before its child."""
        best = sorted(self.kept, key=lambda node: (-self.scores[node], node))
        self.kept = sorted(best[: self.num_nodes])

    def finish(self) -> Draft:
        if not self.kept:
            return Draft.nothing(self.committed)
        place = {node: index for index, node in enumerate(self.kept)} | {-1: -1}
        parents = [place[self.parents[node]] for node in self.kept]
        is_chain = parents == list(range(-1, len(parents) - 1))
        device = self.committed.device
        return Draft(
            tokens=torch.tensor([self.tokens[node] for node in self.kept], device=device),
            parents=None if is_chain else parents,
            token_probs=torch.tensor([self.chances[node] for node in self.kept], device=device)
            .float()
            .exp(),
        )
