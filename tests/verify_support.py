"""What the exactness tests share: tiny models as tables, their laws, and the judgement of samples.

Test modules put this folder on sys.path to import it.
"""

from __future__ import annotations

import itertools

import torch
from scipy.stats import chisquare
from torch import Tensor

Table = dict[tuple[int, ...], Tensor]
"""Distribution of the next token for every prefix."""


def random_table(vocab: int, depth: int, seed: int, *, sharpness: float = 2.0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for length in range(depth):
        for prefix in itertools.product(range(vocab), repeat=length):
            logits = sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64)
            table[prefix] = logits.softmax(-1)
    return table


def without_tokens(table: Table, removed: tuple[int, ...]) -> Table:
    """The same table with some tokens impossible (top-k, or a smaller draft vocabulary)."""
    result = {}
    for prefix, probs in table.items():
        kept = probs.clone()
        kept[list(removed)] = 0.0
        result[prefix] = kept / kept.sum()
    return result


def argmax_table(table: Table) -> Table:
    return {
        prefix: torch.nn.functional.one_hot(probs.argmax(), len(probs)).double()
        for prefix, probs in table.items()
    }


def joint_law(table: Table, vocab: int, length: int) -> Tensor:
    """[vocab] * length: probability of every text of `length` tokens under the target alone."""
    joint = torch.zeros([vocab] * length, dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=length):
        joint[text] = torch.stack([table[text[:i]][t] for i, t in enumerate(text)]).prod()
    return joint


def law_p_value(counts: Tensor, law: Tensor) -> float:
    """Chi-square p-value; impossible texts that occur give 0, rare ones share a bin."""
    expected = law.flatten() * counts.sum()
    observed = counts.flatten().double()
    if observed[expected == 0].sum() > 0:
        return 0.0
    common = expected >= 5
    bins_expected = [*expected[common].tolist(), float(expected[~common].sum())]
    bins_observed = [*observed[common].tolist(), float(observed[~common].sum())]
    if bins_expected[-1] < 1e-9:
        bins_expected, bins_observed = bins_expected[:-1], bins_observed[:-1]
    return float(chisquare(bins_observed, bins_expected).pvalue)
