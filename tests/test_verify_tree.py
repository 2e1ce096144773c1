"""Exactness of tree verification: every outcome summed in float64, then sampled and judged.

METHODS: recursive rejection sampling without replacement (EAGLE-1, arXiv 2401.15077; Jeon et al.,
arXiv 2402.14160), one-hot children (EAGLE-2, arXiv 2406.16858). The enumeration uses the very
functions that `verify_tree` is made of; the chi-square tests run `verify_tree` itself. Wrong
variants that other decoders have shipped must fail both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

from verify_support import (
    Table,
    joint_law,
    law_p_value,
    random_table,
    without_tokens,
)

from draftsmith.inference import verify
from draftsmith.inference.verify import (
    tree_chances,
    tree_residual,
    verify_chain,
    verify_tree,
    verify_tree_greedy,
)
from draftsmith.models.protocols import Draft

Text = tuple[int, ...]


class Rule(NamedTuple):
    """What verification is made of."""

    chances: Callable[[Draft, Tensor], Tensor]
    residual: Callable[[Draft, Tensor, int], Tensor]


EXACT = Rule(tree_chances, tree_residual)


# --- a slow reference, and the wrong rules --------------------------------------------------------


def step_by_step(
    draft: Draft, target_probs: Tensor, *, q_loses_the_rejected: bool = True
) -> tuple[list[float], list[Tensor]]:
    """Chances of all nodes and what is left at all rows, written from the rule, node by node."""
    chances = [0.0] * len(draft.tokens)
    residuals = []
    for row, start in enumerate(target_probs):
        children = [i for i, parent in enumerate(draft.parent_list) if parent == row - 1]
        p = start.double()
        q = None
        if children and draft.probs is not None:
            q = draft.probs[children[0]].double()
        for node in children:
            token = draft.tokens[node]
            proposal = torch.zeros_like(p).index_fill_(0, token, 1.0) if q is None else q
            chances[node] = min(1.0, float(p[token] / proposal[token]))
            p = (p - proposal).clamp(min=0.0)
            p = p / p.sum() if p.sum() > 0 else start.double()
            if q is not None and q_loses_the_rejected:
                q = q.index_fill(0, token, 0.0)
                q = q / q.sum()
        residuals.append(p)
    return chances, residuals


UNCONDITIONAL_Q = Rule(
    lambda draft, p: p.new_tensor(step_by_step(draft, p, q_loses_the_rejected=False)[0]),
    lambda draft, p, row: step_by_step(draft, p, q_loses_the_rejected=False)[1][row],
)
"""Children without replacement, judged as if each had been drawn from the whole q."""


def bare_probabilities(draft: Draft, target_probs: Tensor) -> Tensor:
    rows = torch.tensor(draft.parent_list) + 1
    return target_probs[rows, draft.tokens]


NOT_RENORMALISED = Rule(bare_probabilities, tree_residual)
"""I07: siblings are tested against p although earlier ones have been rejected."""

KEPT_AFTER_REJECTION = Rule(tree_chances, lambda _draft, p, row: p[row])
"""I07: what was rejected may still be drawn."""


# --- every draft, every decision ------------------------------------------------------------------


def drafts(
    proposal: Table,
    parents: Sequence[int],
    *,
    drawn: bool,
    claimed: Table | None = None,
    keep: Callable[[Text, int, Tensor], bool] = lambda _prefix, _token, _q: True,
) -> Iterator[tuple[float, Draft, list[Text]]]:
    """Every draft with its probability, and the texts at its rows (root first).

    Args:
        proposal: the draft model.
        parents: shape of the tree, -1 the root.
        drawn: children are drawn without replacement, in order (where nothing is left to draw, the
            smallest other ids); else the most likely ones are chosen.
        claimed: q that verification is told; default: the truth.
        keep: (prefix, token, q) -> whether the node is verified; the nodes below go with it.
    """

    def grow(
        index: int, weight: float, nodes: list[tuple[int, int] | None], texts: list[Text]
    ) -> Iterator[tuple[float, Draft, list[Text]]]:
        # nodes[i]: (place among the kept, token) of shape node i, None if dropped.
        if index == len(parents):
            yield weight, finish(nodes), texts
            return
        parent = parents[index]
        above = nodes[parent] if parent >= 0 else (-1, -1)
        if above is None:
            yield from grow(index + 1, weight, [*nodes, None], texts)
            return
        prefix = texts[above[0] + 1]
        q = proposal[prefix]
        used = [tokens_of[i] for i in range(index) if parents[i] == parent]
        left = q.clone()
        left[used] = 0.0
        if not drawn or left.sum() == 0:
            left[used] = -1.0
            choices = [(int(left.argmax()), 1.0)]
        else:
            left = left / left.sum()
            choices = [(token, chance) for token, chance in enumerate(left.tolist()) if chance > 0]
        for token, chance in choices:
            tokens_of[index] = token
            if keep(prefix, token, q):
                node = (len(texts) - 1, token)
                longer = [*texts, (*prefix, token)]
                yield from grow(index + 1, weight * chance, [*nodes, node], longer)
            else:
                yield from grow(index + 1, weight * chance, [*nodes, None], texts)

    def finish(nodes: list[tuple[int, int] | None]) -> Draft:
        kept = [(i, node) for i, node in enumerate(nodes) if node is not None]
        above = {-1: -1} | {i: node[0] for i, node in kept}
        table = claimed or proposal
        texts: list[Text] = [()]
        rows = []
        for i, (_, token) in kept:
            prefix = texts[above[parents[i]] + 1]
            rows.append(table[prefix])
            texts.append((*prefix, token))
        return Draft(
            tokens=torch.tensor([node[1] for _, node in kept], dtype=torch.long),
            probs=torch.stack(rows) if rows and (drawn or claimed is not None) else None,
            parents=[above[parents[i]] for i, _ in kept],
        )

    tokens_of = [0] * len(parents)
    yield from grow(0, 1.0, [], [()])


def continuations(target: Table, vocab: int, length: int) -> Callable[[Text], Tensor]:
    """Prefix -> law of the rest given each next token, [vocab] * (length - len(prefix))."""
    plain = joint_law(target, vocab, length)
    known: dict[Text, Tensor] = {}

    def rest(prefix: Text) -> Tensor:
        if prefix not in known:
            joint = plain[prefix]
            mass = joint.flatten(1).sum(1) if joint.dim() > 1 else joint
            mass = mass.view(-1, *[1] * (joint.dim() - 1))
            # What the target never writes has no continuation: emitting it loses mass and shows.
            known[prefix] = torch.where(mass > 0, joint / mass, 0.0)
        return known[prefix]

    return rest


def emitted_law(
    target: Table,
    outcomes: Iterator[tuple[float, Draft, list[Text]]],
    vocab: int,
    length: int,
    rule: Rule = EXACT,
) -> Tensor:
    """The law of `length` tokens when the first round is speculative and the rest is plain."""
    law = torch.zeros([vocab] * length, dtype=torch.float64)
    rest = continuations(target, vocab, length)
    for weight, draft, texts in outcomes:
        p = torch.stack([target[text] for text in texts])
        chances = rule.chances(draft, p).tolist()
        ends = [weight] + [0.0] * len(chances)
        for node, parent in enumerate(draft.parent_list):
            ends[node + 1] = ends[parent + 1] * chances[node]
            ends[parent + 1] *= 1.0 - chances[node]
        for row, chance in enumerate(ends):
            if chance > 0.0:
                added = chance * rule.residual(draft, p, row)
                following = rest(texts[row])
                law[texts[row]] += added.view(-1, *[1] * (following.dim() - 1)) * following
    return law


def error_of(law: Tensor, target: Table) -> float:
    return float((law - joint_law(target, law.shape[0], law.dim())).abs().max())


SHAPES = {
    "three": [-1, -1, -1],
    "two_by_two": [-1, -1, 0, 0, 1, 1],
    "three_then_two": [-1, -1, -1, 0, 0],
    "depth_first": [-1, 0, -1, 2, 2],
    "deep": [-1, -1, 0, 0, 2],
    "chain": [-1, 0, 1],
}
DEPTHS = {"three": 1, "two_by_two": 2, "three_then_two": 2, "depth_first": 2, "deep": 3, "chain": 3}
CASES = [
    *((3, shape) for shape in SHAPES),
    *((4, shape) for shape in ("three", "three_then_two", "depth_first")),
    *((5, shape) for shape in ("three", "depth_first")),
]


@pytest.mark.lossless
@pytest.mark.parametrize(("vocab", "shape"), CASES)
@pytest.mark.parametrize(
    "kind", ["drawn", "one_hot", "smaller_vocabulary", "one_hot_smaller", "top_k", "equal"]
)
def test_every_outcome_sums_to_the_targets_law(vocab: int, shape: str, kind: str) -> None:
    depth = DEPTHS[shape]
    target = random_table(vocab, depth + 1, 1)
    proposal = random_table(vocab, depth, 1001)
    if kind in ("smaller_vocabulary", "one_hot_smaller"):
        proposal = without_tokens(proposal, (0,))  # With three children, vocabulary 3: exhausted.
    elif kind == "top_k":
        target, proposal = without_tokens(target, (1,)), without_tokens(proposal, (0,))
    elif kind == "equal":
        proposal = target
    outcomes = drafts(proposal, SHAPES[shape], drawn=not kind.startswith("one_hot"))
    assert error_of(emitted_law(target, outcomes, vocab, depth + 1), target) < 1e-12


@pytest.mark.lossless
def test_more_outcomes_of_a_full_binary_tree_sum_to_the_targets_law() -> None:
    target, proposal = random_table(4, 3, 5), random_table(4, 2, 6)
    outcomes = list(drafts(proposal, SHAPES["two_by_two"], drawn=True))
    assert len(outcomes) == (4 * 3) ** 3
    assert sum(weight for weight, _, _ in outcomes) == pytest.approx(1.0)
    assert error_of(emitted_law(target, iter(outcomes), 4, 3), target) < 1e-12


FAULTS = {
    "judged_with_softmax": (EXACT, False, True),
    "unconditional_q": (UNCONDITIONAL_Q, True, False),
    "not_renormalised": (NOT_RENORMALISED, False, False),
    "kept_after_rejection": (KEPT_AFTER_REJECTION, False, False),
}
"""Name -> (rule, children are drawn, one-hot children are claimed to be drawn)."""


@pytest.mark.lossless
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rules_are_seen_by_the_enumeration(fault: str) -> None:
    rule, drawn, claims = FAULTS[fault]
    worst_token = worst_text = 0.0
    for seed in range(3):
        target = random_table(4, 3, seed, sharpness=1.0)
        proposal = random_table(4, 2, seed + 50, sharpness=1.0)
        told = proposal if claims else None
        outcomes = drafts(proposal, SHAPES["three_then_two"], drawn=drawn, claimed=told)
        law = emitted_law(target, outcomes, 4, 3, rule)
        worst_text = max(worst_text, error_of(law, target))
        worst_token = max(worst_token, float((law.sum((1, 2)) - target[()]).abs().max()))
    assert worst_token > 1e-2
    assert worst_text > 1e-2


# --- pruning: what a draft may look at ------------------------------------------------------------

OWN: Callable[[Text, int, Tensor], bool] = lambda _prefix, token, q: bool(q[token] >= 0.5)  # noqa: E731


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("q", "keep", "expected"),
    [((0.85, 0.15), OWN, 0.805), ((0.5, 0.5), lambda _prefix, token, _q: token == 0, 0.85)],
    ids=["own_probability", "dspark_appendix_a"],
)
def test_pruning_that_looks_at_the_drawn_token_gives_the_published_wrong_numbers(
    q: tuple[float, float], keep: Callable[[Text, int, Tensor], bool], expected: float
) -> None:
    """p = (.7, .3); a token that was drawn from q is only verified if it is likely, or is A."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    target = {(): p, (0,): p, (1,): p}
    proposal = {(): torch.tensor(q, dtype=torch.float64)}
    pruned = emitted_law(target, drafts(proposal, [-1], drawn=True, keep=keep), 2, 2)
    assert float(pruned[0].sum()) == pytest.approx(expected, abs=1e-12)
    whole = emitted_law(target, drafts(proposal, [-1], drawn=True), 2, 2)
    assert error_of(whole, target) < 1e-12


def parent_is_likely(proposal: Table) -> Callable[[Text, int, Tensor], bool]:
    def keep(prefix: Text, _token: int, _q: Tensor) -> bool:
        return not prefix or bool(proposal[prefix[:-1]][prefix[-1]] >= 0.3)

    return keep


@pytest.mark.lossless
def test_pruning_by_the_prefix_is_exact_and_so_is_any_pruning_of_chosen_children() -> None:
    target, proposal = random_table(4, 3, 8), random_table(4, 2, 9, sharpness=1.0)
    shape = SHAPES["three_then_two"]

    def law(*, drawn: bool, keep: Callable[[Text, int, Tensor], bool]) -> Tensor:
        return emitted_law(target, drafts(proposal, shape, drawn=drawn, keep=keep), 4, 3)

    assert error_of(law(drawn=True, keep=parent_is_likely(proposal)), target) < 1e-12
    assert error_of(law(drawn=False, keep=OWN), target) < 1e-12
    assert error_of(law(drawn=True, keep=OWN), target) > 1e-2


# --- sampled and judged ---------------------------------------------------------------------------

SAMPLES = 3000


def sample_pairs(
    *,
    drawn: bool,
    claims: bool = False,
    keep: Callable[[Text, int, Tensor], bool] = lambda _prefix, _token, _q: True,
) -> tuple[Tensor, Tensor]:
    """Counts [vocab, vocab] of two-token texts by `verify_tree`, and their target law.

    The target keeps its top 4 of 6 tokens; the draft is another table without token 5.
    """
    vocab, shape = 6, SHAPES["three_then_two"]
    raw = random_table(vocab, 4, 11, sharpness=1.0)
    target = {
        prefix: without_tokens({prefix: probs}, tuple(probs.argsort()[:2].tolist()))[prefix]
        for prefix, probs in raw.items()
    }
    proposal = without_tokens(random_table(vocab, 3, 12, sharpness=1.0), (5,))
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(vocab, vocab)
    for _ in range(SAMPLES):
        text: Text = ()
        while len(text) < 2:
            draft, texts = sample_draft(proposal, text, shape, drawn, claims, keep, generator)
            p = torch.stack([target[path] for path in texts])
            path, token = verify_tree(draft, p, generator)
            assert all(draft.parent_list[b] == a for a, b in zip([-1, *path], path, strict=False))
            text = (*texts[path[-1] + 1 if path else 0], token)
        counts[text[0], text[1]] += 1
    return counts, joint_law(target, vocab, 2)


def sample_draft(
    proposal: Table,
    root: Text,
    shape: Sequence[int],
    drawn: bool,
    claims: bool,
    keep: Callable[[Text, int, Tensor], bool],
    generator: torch.Generator,
) -> tuple[Draft, list[Text]]:
    """One draft of a shape below `root`, breadth first, and the texts at its rows."""
    places, texts = {-1: -1}, [root]
    tokens, parents, rows = [], [], []
    for above in dict.fromkeys(shape):
        if above not in places:
            continue
        children = [node for node, parent in enumerate(shape) if parent == above]
        prefix = texts[places[above] + 1]
        q = proposal[prefix]
        if drawn:
            ids = torch.multinomial(q, len(children), generator=generator)
        else:
            ids = q.topk(len(children)).indices
        for node, token in zip(children, ids.tolist(), strict=True):
            if keep(prefix, token, q):
                places[node] = len(tokens)
                tokens.append(token)
                parents.append(places[above])
                rows.append(q)
                texts.append((*prefix, token))
    return Draft(
        tokens=torch.tensor(tokens, dtype=torch.long),
        probs=torch.stack(rows) if rows and (drawn or claims) else None,
        parents=parents,
    ), texts


@pytest.mark.lossless
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "one_hot"])
def test_sampled_text_has_the_targets_law(drawn: bool) -> None:
    counts, law = sample_pairs(drawn=drawn)
    assert law_p_value(counts, law) > 1e-3
    assert law_p_value(counts.sum(1), law.sum(1)) > 1e-3


@pytest.mark.lossless
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rules_fail_the_same_judgement(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, drawn, claims = FAULTS[fault]
    monkeypatch.setattr(verify, "tree_chances", rule.chances)
    monkeypatch.setattr(verify, "tree_residual", rule.residual)
    counts, law = sample_pairs(drawn=drawn, claims=claims)
    assert law_p_value(counts, law) < 1e-6


@pytest.mark.lossless
def test_pruning_that_looks_at_the_drawn_token_fails_the_same_judgement() -> None:
    counts, law = sample_pairs(drawn=True, keep=lambda _prefix, token, q: bool(q[token] > 0.25))
    assert law_p_value(counts, law) < 1e-6


# --- single rules ---------------------------------------------------------------------------------


def random_draft(
    *, vocab: int, nodes: int, drawn: bool, seed: int, dtype: torch.dtype
) -> tuple[Draft, Tensor]:
    """A tree of a random shape, and target probabilities close to the draft's."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, i, (1,), generator=generator)) for i in range(nodes)]
    logits = torch.randn(nodes + 1, vocab, generator=generator, dtype=torch.float64) * 2
    p = (logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64)).softmax(-1)
    q = logits.softmax(-1)
    tokens = [0] * nodes
    for above in set(parents):
        children = [node for node, parent in enumerate(parents) if parent == above]
        row = q[above + 1]
        ids = torch.multinomial(row, len(children), generator=generator)
        for node, token in zip(children, ids.tolist(), strict=True):
            tokens[node] = token
    rows = q[torch.tensor(parents) + 1] if drawn else None
    return Draft(torch.tensor(tokens), None if rows is None else rows.to(dtype), parents), p.to(
        dtype
    )


@pytest.mark.lossless
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "one_hot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chances_and_residuals_equal_the_rule_step_by_step(drawn: bool, dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for seed in range(8):
        draft, p = random_draft(vocab=300, nodes=40, drawn=drawn, seed=seed, dtype=dtype)
        chances, residuals = step_by_step(draft, p)
        found = tree_chances(draft, p)
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(),
            torch.tensor(chances, dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
        )
        for row in range(len(p)):
            residual = tree_residual(draft, p, row)
            assert residual.dtype == dtype
            torch.testing.assert_close(
                residual.double(), residuals[row], rtol=tolerance, atol=tolerance
            )


def test_chosen_children_leave_p_without_themselves() -> None:
    """I07: p = (.5, .3, .2), children 2 and 1."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).repeat(3, 1)
    draft = Draft(torch.tensor([2, 1]), parents=[-1, -1])
    assert tree_chances(draft, p).tolist() == pytest.approx([0.2, 0.3 / 0.8])
    assert tree_residual(draft, p, 0).tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(tree_residual(draft, p, 1), p[1])
    target = {(): p[0], **{(token,): p[0] for token in range(3)}}
    law = emitted_law(target, iter([(1.0, draft, [(), (2,), (1,)])]), 3, 2)
    assert error_of(law, target) < 1e-12
    assert (
        error_of(
            emitted_law(target, iter([(1.0, draft, [(), (2,), (1,)])]), 3, 2, NOT_RENORMALISED),
            target,
        )
        > 1e-2
    )


def test_chosen_children_stay_with_the_mass_they_cover() -> None:
    for seed in range(5):
        draft, p = random_draft(vocab=50, nodes=12, drawn=False, seed=seed, dtype=torch.float64)
        chances = tree_chances(draft, p)
        for row in range(len(p)):
            children = [i for i, parent in enumerate(draft.parent_list) if parent == row - 1]
            stays = 1.0 - float((1.0 - chances[children]).prod())
            assert stays == pytest.approx(float(p[row, draft.tokens[children]].sum()))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "one_hot"])
@pytest.mark.parametrize("parents", [None, [-1, 0, 1]], ids=["chain", "explicit_parents"])
def test_a_chain_gives_what_verify_chain_gives(drawn: bool, parents: list[int] | None) -> None:
    tokens = torch.tensor([3, 1, 0])
    table, other = random_table(5, 4, 2, sharpness=0.3), random_table(5, 3, 3, sharpness=0.3)
    p = torch.stack([table[text] for text in ((), (3,), (3, 1), (3, 1, 0))])
    q = torch.stack([other[text] for text in ((), (3,), (3, 1))]) if drawn else None
    lengths = set()
    for seed in range(200):
        accepted, token = verify_chain(tokens, q, p, torch.Generator().manual_seed(seed))
        draft = Draft(tokens, q, parents)
        path, next_token = verify_tree(draft, p, torch.Generator().manual_seed(seed))
        assert (path, next_token) == (list(range(accepted)), token)
        lengths.add(accepted)
    assert len(lengths) > 2


def test_a_repeated_sibling_never_stays_and_changes_nothing() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).repeat(4, 1)
    draft = Draft(torch.tensor([2, 2, 1]), parents=[-1, -1, -1])
    assert tree_chances(draft, p).tolist() == pytest.approx([0.2, 0.0, 0.3 / 0.8])
    assert tree_residual(draft, p, 0).tolist() == [1.0, 0.0, 0.0]


def test_masses_without_content_stay_finite() -> None:
    """p equal to q up to rounding, children with all of p, q with less mass than children."""
    rows = {
        "equal": ([0.25, 0.75, 0.0], [0.25, 0.75, 0.0]),
        "nearly": ([0.25, 0.75, 0.0], [0.25 + 3e-8, 0.75 - 3e-8, 0.0]),
        "exhausted": ([0.2, 0.3, 0.5], [1.0, 0.0, 0.0]),
        "covered": ([0.4, 0.6, 0.0], None),
        "certain": ([1.0, 0.0, 0.0], None),
    }
    for name, (p_row, q_row) in rows.items():
        p = torch.tensor([p_row]).repeat(4, 1)
        q = None if q_row is None else torch.tensor([q_row]).repeat(3, 1)
        draft = Draft(torch.tensor([0, 1, 2]), q, [-1, -1, -1])
        chances, residual = tree_chances(draft, p), tree_residual(draft, p, 0)
        assert ((chances >= 0) & (chances <= 1)).all(), name
        assert (chances[p[0] == 0] == 0).all(), name
        assert float(residual.sum()) == pytest.approx(1.0), name
        assert (residual[p[0] == 0] == 0).all(), name
        for seed in range(50):
            path, token = verify_tree(draft, p, torch.Generator().manual_seed(seed))
            assert p[0, token] > 0, name
            assert all(p[0, draft.tokens[node]] > 0 for node in path), name


def test_no_nodes_is_a_plain_step() -> None:
    nothing = Draft.nothing(torch.empty(0))
    p = torch.tensor([[0.0, 1.0, 0.0]])
    assert verify_tree(nothing, p) == ([], 1)
    assert verify_tree_greedy(nothing, p.argmax(-1)) == ([], 1)
    drawn = Draft(nothing.tokens, torch.empty(0, 3), [])
    assert verify_tree(drawn, p) == ([], 1)


# --- greedy ---------------------------------------------------------------------------------------


def test_greedy_follows_the_children_that_are_the_targets_choice() -> None:
    draft = Draft(torch.tensor([4, 7, 7, 2, 9]), parents=[-1, -1, 1, 1, 2])
    assert verify_tree_greedy(draft, torch.tensor([7, 0, 7, 9, 1, 5])) == ([1, 2, 4], 5)
    assert verify_tree_greedy(draft, torch.tensor([7, 0, 2, 9, 1, 5])) == ([1, 3], 1)
    assert verify_tree_greedy(draft, torch.tensor([4, 6, 2, 9, 1, 5])) == ([0], 6)
    assert verify_tree_greedy(draft, torch.tensor([3, 6, 2, 9, 1, 5])) == ([], 3)


def test_greedy_takes_the_first_of_equal_siblings_and_of_tied_logits() -> None:
    """I03: ids 2 and 5 are tied; the later one must not be accepted."""
    logits = torch.zeros(4, 8)
    logits[:, [2, 5]] = 1.0
    draft = Draft(torch.tensor([5, 2, 2]), parents=[-1, -1, -1])
    assert verify_tree_greedy(draft, logits.argmax(-1)) == ([1], 2)


def test_greedy_is_the_limit_of_sampling_at_low_temperature() -> None:
    for seed in range(20):
        draft, p = random_draft(vocab=6, nodes=12, drawn=False, seed=seed, dtype=torch.float32)
        certain = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
        assert verify_tree(draft, certain) == verify_tree_greedy(draft, p.argmax(-1))


def test_greedy_walks_a_chain() -> None:
    draft = Draft(torch.tensor([2, 0, 3]))
    assert verify_tree_greedy(draft, torch.tensor([2, 0, 3, 1])) == ([0, 1, 2], 1)
    assert verify_tree_greedy(draft, torch.tensor([2, 0, 1, 3])) == ([0, 1], 1)
    assert verify_tree_greedy(draft, torch.tensor([1, 0, 3, 1])) == ([], 1)
