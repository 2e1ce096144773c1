"""Which drafted tokens a draft model has read in this round, and which descend from which.

Row 0 is the root, which counts as committed; rows 1, 2, ... are drafted tokens in reading order
(`draftsmith.models.protocols.Frontier`). Autoregressive draft models keep one of these per
sequence: it tells the positions of new rows and what they may attend to.

Axes: rows (root included), new (rows being added).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.protocols import Frontier


@dataclass
class DraftRows:
    """The rows of one sequence in one round."""

    count: int = 0
    """Rows read besides the root."""
    depths: Tensor | None = None
    """[count + 1] distance from the root; None while the rows are a chain (then row i is at i)."""
    ancestors: Tensor | None = None
    """[count + 1, count] bool: a row sees itself and the rows above it; None for a chain."""

    def clear(self) -> None:
        """Forgets the round."""
        self.count, self.depths, self.ancestors = 0, None, None

    def add(self, frontier: Frontier) -> None:
        """Notes new rows, the last `len(frontier.tokens)` from now on."""
        new = len(frontier.tokens)
        if frontier.is_chain and self.depths is None:
            self.count += 1
            return
        if self.depths is None or self.ancestors is None:
            self._spell_out(frontier.parents.device)
        assert self.depths is not None, "spelled out"
        assert self.ancestors is not None, "spelled out"
        parents = frontier.parents
        self.depths = torch.cat([self.depths, self.depths[parents] + 1])
        grown = self.ancestors.new_zeros(self.count + 1 + new, self.count + new)
        grown[: self.count + 1, : self.count] = self.ancestors
        grown[self.count + 1 :, : self.count] = self.ancestors[parents]
        grown[self.count + 1 :, self.count :].fill_diagonal_(True)
        self.ancestors = grown
        self.count += new

    def new_depths(self, new: int, device: torch.device) -> Tensor:
        """[new] distances of the newest rows from the root."""
        if self.depths is None:
            return torch.arange(self.count + 1 - new, self.count + 1, device=device)
        return self.depths[-new:]

    def all_depths(self) -> Tensor | None:
        """[count] distances of all rows but the root; None for a chain (consecutive)."""
        return None if self.depths is None else self.depths[1:]

    def new_ancestors(self, new: int) -> Tensor | None:
        """[new, count] bool, what each of the newest rows sees of the round; None: all before."""
        return None if self.ancestors is None else self.ancestors[-new:]

    def _spell_out(self, device: torch.device) -> None:
        """A chain so far (or nothing) as depths and ancestors."""
        self.depths = torch.arange(self.count + 1, device=device)
        everything = torch.ones(self.count + 1, self.count, dtype=torch.bool, device=device)
        self.ancestors = everything.tril(-1)
