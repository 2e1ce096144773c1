"""How a draft model that proposes whole blocks is asked for a tree (models/block_tree.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.models.protocols import AutoregressiveDraft, BlockTree, Draft


@dataclass(frozen=True)
class BlockTreePolicy:
    """The best-scored nodes among the paths through a block's slots; one-hot proposals.

    For `BlockDrafter`s only: an autoregressive draft grows such trees itself (dynamic_tree).
    """

    num_nodes: int = 16
    """Drafted tokens of a round (our choice)."""
    top_k: int = 4
    """Children of a node, at most (our choice)."""
    num_draft_tokens: int = 7
    """Deepest drafted token; a shorter block ends the tree earlier (DSpark: 7)."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "top_k", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def name(self) -> str:
        return f"block tree of {self.num_nodes}, {self.top_k} children"

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def max_nodes(self) -> int:
        return self.num_nodes

    @property
    def block_tree(self) -> BlockTree:
        """What `BlockDrafter.propose` is given."""
        return BlockTree(self.num_nodes, self.top_k)

    def draft(self, model: AutoregressiveDraft, requests: Sequence[Any]) -> list[Draft]:
        """Refuses: `model` reads one drafted token to propose the next.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"drafting is block_tree for {len(requests)} request(s), but {type(model).__name__} "
            "drafts one token after the other and has no block. Use drafting=dynamic_tree."
        )
