"""Exactness of chain verification: every outcome summed in float64, then sampled and judged.

METHODS: Leviathan et al. (arXiv 2211.17192), theorem 3.5. The enumeration uses the very functions
that `verify_chain` is made of; the chi-square tests run `verify_chain` itself. Wrong variants that
other decoders have shipped must fail both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from verify_support import (
    Table,
    argmax_table,
    joint_law,
    law_p_value,
    random_table,
    without_tokens,
)

from draftsmith.inference.verify import (
    acceptance_probabilities,
    one_hot_probs,
    replacement_probs,
    verify_chain,
    verify_chain_greedy,
)


def speculative_law(
    target: Table,
    proposal: Table,
    vocab: int,
    gamma: int,
    *,
    drawn_from: Table | None = None,
    chances_of: Callable[..., Tensor] = acceptance_probabilities,
) -> Tensor:
    """The law of gamma + 1 tokens when the first round is speculative and the rest is plain.

    Args:
        target: p for every prefix.
        proposal: q that verification is told.
        vocab: number of tokens.
        gamma: drafted tokens.
        drawn_from: q that the drafts really come from, when it is another one (a fault).
        chances_of: the acceptance rule.
    """
    plain = joint_law(target, vocab, gamma + 1)
    law = torch.zeros_like(plain)
    for drafted in itertools.product(range(vocab), repeat=gamma):
        prefixes = [drafted[:i] for i in range(gamma + 1)]
        source = drawn_from or proposal
        weight = float(torch.stack([source[drafted[:i]][t] for i, t in enumerate(drafted)]).prod())
        if weight == 0.0:
            continue
        tokens = torch.tensor(drafted)
        p = torch.stack([target[prefix] for prefix in prefixes])
        q = torch.stack([proposal[prefix] for prefix in prefixes[:-1]])
        chances = chances_of(tokens, q, p).tolist()
        for accepted in range(gamma + 1):
            stays = float(torch.tensor(chances[:accepted], dtype=torch.float64).prod())
            decision = stays * (1.0 - chances[accepted] if accepted < gamma else 1.0)
            if decision == 0.0:
                continue
            added = replacement_probs(q, p, torch.tensor(accepted)).tolist()
            for token, chance in enumerate(added):
                emitted = (*drafted[:accepted], token)
                if plain[emitted].sum() > 0:
                    rest = plain[emitted] / plain[emitted].sum()
                    law[emitted] += weight * decision * chance * rest
                else:
                    assert weight * decision * chance < 1e-12, "emits what the target never does"
    return law


CASES = [(vocab, gamma) for vocab in (3, 4, 5) for gamma in (1, 2, 3)]


@pytest.mark.lossless
@pytest.mark.parametrize(("vocab", "gamma"), CASES)
@pytest.mark.parametrize("kind", ["drawn", "one_hot", "smaller_vocabulary", "top_k", "equal"])
def test_every_outcome_sums_to_the_targets_law(vocab: int, gamma: int, kind: str) -> None:
    for seed in range(3 if vocab**gamma < 100 else 1):
        target = random_table(vocab, gamma + 1, seed)
        proposal = random_table(vocab, gamma, seed + 1000)
        if kind == "one_hot":
            proposal = argmax_table(proposal)
        elif kind == "smaller_vocabulary":
            proposal = without_tokens(proposal, (0,))
        elif kind == "top_k":
            target, proposal = without_tokens(target, (1,)), without_tokens(proposal, (0,))
        elif kind == "equal":
            proposal = target
        law = speculative_law(target, proposal, vocab, gamma)
        assert (law - joint_law(target, vocab, gamma + 1)).abs().max() < 1e-12


@pytest.mark.lossless
@pytest.mark.parametrize("fault", ["judged_with_softmax", "kept_unverified"])
def test_wrong_rules_are_seen_by_the_enumeration(fault: str) -> None:
    worst = 0.0
    for seed in range(3):
        target = random_table(4, 3, seed, sharpness=1.0)
        proposal = random_table(4, 2, seed + 50, sharpness=1.0)
        if fault == "judged_with_softmax":
            drawn = argmax_table(proposal)
            law = speculative_law(target, proposal, 4, 2, drawn_from=drawn)
        else:
            law = speculative_law(
                target, proposal, 4, 2, chances_of=lambda tokens, _q, _p: torch.ones(len(tokens))
            )
        worst = max(worst, float((law - joint_law(target, 4, 3)).abs().max()))
    assert worst > 1e-2


def test_softmax_judgement_of_a_greedy_draft_gives_the_published_wrong_number() -> None:
    """p = (.5, .5), draft always token 0 but judged with q = (.6, .4): P(0) = .833."""
    target = {(): torch.tensor([0.5, 0.5]).double(), (0,): torch.tensor([0.5, 0.5]).double()}
    target[(1,)] = target[(0,)]
    claimed, real = {(): torch.tensor([0.6, 0.4]).double()}, {(): torch.tensor([1.0, 0.0]).double()}
    law = speculative_law(target, claimed, 2, 1, drawn_from=real)
    assert law[0].sum() == pytest.approx(5 / 6)
    assert speculative_law(target, real, 2, 1)[0].sum() == pytest.approx(0.5)


Verify = Callable[[Tensor, Tensor, Tensor, Tensor, torch.Generator], tuple[int, int]]
"""(draft_tokens, q, p before filtering, p, generator) -> (accepted, next token)."""


def sample_pairs(verify: Verify, *, greedy_draft: bool, samples: int) -> tuple[Tensor, Tensor]:
    """Counts [vocab, vocab] of two-token texts, and their probabilities under the target.

    The target keeps its top 4 of 6 tokens; the draft is another table without token 5.
    """
    vocab, gamma = 6, 2
    raw = random_table(vocab, 4, 11, sharpness=1.0)
    target = {}
    for prefix, probs in raw.items():
        top = probs.topk(4).indices
        target[prefix] = torch.zeros_like(probs).index_copy_(0, top, probs[top] / probs[top].sum())
    proposal = without_tokens(random_table(vocab, 4, 12, sharpness=1.0), (5,))
    chosen = argmax_table(proposal) if greedy_draft else proposal
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(vocab, vocab)
    for _ in range(samples):
        text: tuple[int, ...] = ()
        while len(text) < 2:
            drafted: tuple[int, ...] = text
            for _ in range(gamma):
                step = torch.multinomial(chosen[drafted[:3]], 1, generator=generator)
                drafted += (int(step),)
            prefixes = [drafted[: len(text) + i][:3] for i in range(gamma + 1)]
            q = torch.stack([proposal[prefix] for prefix in prefixes[:-1]])
            p_raw = torch.stack([raw[prefix] for prefix in prefixes])
            p = torch.stack([target[prefix] for prefix in prefixes])
            tokens = torch.tensor(drafted[len(text) :])
            accepted, token = verify(tokens, q, p_raw, p, generator)
            text = (*text, *drafted[len(text) : len(text) + accepted], token)
        counts[text[0], text[1]] += 1
    return counts, joint_law(target, vocab, 2)


def exact(tokens: Tensor, q: Tensor, _raw: Tensor, p: Tensor, generator: torch.Generator):  # noqa: ANN201
    return verify_chain(tokens, q, p, generator)


def exact_one_hot(tokens: Tensor, _q: Tensor, _raw: Tensor, p: Tensor, generator: torch.Generator):  # noqa: ANN201
    return verify_chain(tokens, None, p, generator)


def kept_unverified(
    tokens: Tensor, q: Tensor, _raw: Tensor, p: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    accepted, token = verify_chain(tokens[1:], q[1:], p[1:], generator)
    return accepted + 1, token


def filtered_after_acceptance(
    tokens: Tensor, q: Tensor, raw: Tensor, p: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    chances = acceptance_probabilities(tokens, q, raw)
    uniforms = torch.rand(len(chances), generator=generator, dtype=torch.float64)
    accepted = (uniforms < chances).long().cumprod(0).sum()
    added = replacement_probs(q, p, accepted)
    return int(accepted), int(torch.multinomial(added, 1, generator=generator))


@pytest.mark.lossless
@pytest.mark.parametrize(("verify", "greedy_draft"), [(exact, False), (exact_one_hot, True)])
def test_sampled_text_has_the_targets_law(verify: Verify, greedy_draft: bool) -> None:
    counts, law = sample_pairs(verify, greedy_draft=greedy_draft, samples=5000)
    assert law_p_value(counts, law) > 1e-3
    assert law_p_value(counts.sum(1), law.sum(1)) > 1e-3


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("verify", "greedy_draft"),
    [(exact, True), (kept_unverified, False), (filtered_after_acceptance, False)],
    ids=["greedy_judged_with_softmax", "kept_unverified", "filtered_after_acceptance"],
)
def test_wrong_variants_fail_the_same_judgement(verify: Verify, greedy_draft: bool) -> None:
    counts, law = sample_pairs(verify, greedy_draft=greedy_draft, samples=5000)
    assert law_p_value(counts, law) < 1e-6


def test_share_of_accepted_drafts_is_one_minus_total_variation() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    q = torch.tensor([[0.2, 0.2, 0.5, 0.1]])
    rounds = 6000
    accepted = 0
    for _ in range(rounds):
        tokens = torch.multinomial(q[0], 1, generator=generator)
        accepted += verify_chain(tokens, q, p, generator)[0]
    alpha = float(torch.minimum(p[0], q[0]).sum())
    standard_error = (alpha * (1 - alpha) / rounds) ** 0.5
    assert abs(accepted / rounds - alpha) < 3.5 * standard_error


def test_one_hot_proposal_is_the_same_as_its_explicit_distribution() -> None:
    tokens = torch.tensor([3, 1, 0])
    p = random_table(5, 4, 2)
    rows = torch.stack([p[()], p[(3,)], p[(3, 1)], p[(3, 1, 0)]])
    for seed in range(50):
        first = verify_chain(tokens, None, rows, torch.Generator().manual_seed(seed))
        explicit = one_hot_probs(tokens, 5, torch.float64)
        assert first == verify_chain(tokens, explicit, rows, torch.Generator().manual_seed(seed))


def test_rejected_one_hot_token_is_never_the_replacement() -> None:
    p = torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]])
    for seed in range(300):
        accepted, token = verify_chain(
            torch.tensor([0]), None, p, torch.Generator().manual_seed(seed)
        )
        assert (accepted, token) in {(1, 0), (0, 1)}


def test_residual_without_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    added = replacement_probs(p[:1].clone(), p, torch.tensor(0))
    assert torch.equal(added, p[0])
    nearly = (p[:1] + torch.tensor([[3e-8, -3e-8]])).clone()
    assert torch.equal(replacement_probs(nearly, p, torch.tensor(0)), p[0])


def test_no_drafts_is_a_plain_step() -> None:
    empty = torch.empty(0, dtype=torch.long)
    assert verify_chain_greedy(empty, torch.tensor([[0.0, 2.0, 1.0]])) == (0, 1)
    assert verify_chain(empty, None, torch.tensor([[0.0, 1.0, 0.0]])) == (0, 1)


def test_greedy_keeps_the_longest_agreeing_prefix() -> None:
    logits = torch.eye(4)[[2, 0, 3, 1]]
    assert verify_chain_greedy(torch.tensor([2, 0, 3]), logits) == (3, 1)
    assert verify_chain_greedy(torch.tensor([2, 1, 3]), logits) == (1, 0)
    assert verify_chain_greedy(torch.tensor([0, 0, 3]), logits) == (0, 2)


def test_greedy_takes_the_first_of_tied_logits() -> None:
    """I03: ids 2 and 5 are tied; the later one must not be accepted."""
    logits = torch.zeros(2, 8)
    logits[:, [2, 5]] = 1.0
    assert verify_chain_greedy(torch.tensor([2]), logits) == (1, 2)
    assert verify_chain_greedy(torch.tensor([5]), logits) == (0, 2)


def test_draft_that_is_always_wrong_is_never_kept() -> None:
    """I04: the least likely token, one draft."""
    logits = torch.randn(200, 2, 16, generator=torch.Generator().manual_seed(0))
    for rows in logits:
        accepted, token = verify_chain_greedy(rows[0].argmin().view(1), rows)
        assert accepted == 0
        assert token == int(rows[0].argmax())
