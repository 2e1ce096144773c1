"""Chains and trees: shape, order, connectedness, and each node's own path in the draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import (
    ChainPolicy,
    DraftRequest,
    DynamicTreePolicy,
    Policy,
    SampledTreePolicy,
    StaticTreePolicy,
    make_policy,
)
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import Draft, DraftContext, Frontier, SamplingSettings

VOCAB = 40
GREEDY = SamplingSettings()


class TableDraft:
    """Next-token logits by the number of tokens above and the last one: a table, no model."""

    aux_layer_ids = ()
    draft_to_target: Tensor | None = None

    def __init__(self, table: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.table = table

    def start(self, max_length: int) -> list[tuple[int, ...]]:  # noqa: ARG002
        return []

    def max_depth(self, length: int) -> int:
        return 1000 - length

    def read(self, contexts: Sequence[DraftContext], states: Sequence[Any]) -> Tensor:
        for context, state in zip(contexts, states, strict=True):
            state[:] = [tuple(context.token_ids[0].tolist())]
        return torch.stack([self.table(state[0]) for state in states])

    def extend(self, states: Sequence[Any], frontiers: Sequence[Frontier]) -> Tensor:
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            pairs = zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
            new = [(*state[parent], token) for token, parent in pairs]
            state += new
            rows += [self.table(text) for text in new]
        return torch.stack(rows)


def random_table(seed: int, vocab: int = VOCAB) -> Callable[[tuple[int, ...]], Tensor]:
    def table(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
        return 2 * torch.randn(vocab, generator=generator)

    return table


def draft_once(
    model: Any,
    policy: Policy,
    *,
    text: Sequence[int] = (5, 6, 7),
    sampling: SamplingSettings = GREEDY,
    max_depth: int = 99,
    seed: int = 0,
    vocab: int = VOCAB,
) -> Draft:
    context = DraftContext(torch.tensor([text]), torch.empty(1, 0, 0), torch.empty(1, 0, 0))
    generator = torch.Generator().manual_seed(seed)
    request = DraftRequest(context, model.start(64), max_depth, sampling, generator, vocab)
    return policy.draft(model, [request])[0]


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Tokens from the root's child down to each node."""
    tokens, paths = draft.tokens.tolist(), []
    for node, parent in enumerate(draft.parent_list):
        assert parent < node, "parents come first"
        above: tuple[int, ...] = () if parent < 0 else paths[parent]
        paths.append((*above, tokens[node]))
    return paths


def test_a_chain_takes_the_most_likely_token_each_time() -> None:
    table = random_table(0)
    draft = draft_once(TableDraft(table), ChainPolicy(5))
    text: tuple[int, ...] = (5, 6, 7)
    for token, prob in zip(draft.tokens.tolist(), draft.token_probs, strict=True):
        assert token == int(table(text).argmax())
        assert float(prob) == pytest.approx(float(table(text).softmax(-1)[token]), rel=1e-5)
        text = (*text, token)
    assert draft.is_chain
    assert draft.state_rows == [1, 2, 3, 4, -1]


def test_a_static_tree_has_the_shape_and_the_ranks_it_was_given() -> None:
    table = random_table(1)
    policy = StaticTreePolicy(paths=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 1)))
    draft = draft_once(TableDraft(table), policy)
    expected = []
    for path in sorted(policy.paths, key=lambda path: (len(path), path)):
        text: tuple[int, ...] = (5, 6, 7)
        for rank in path:
            text = (*text, int(table(text).topk(rank + 1).indices[rank]))
        expected.append(text[3:])
    assert paths_of(draft) == expected
    assert draft.depths == [len(path) for path in expected]
    assert draft.probs is None


def test_a_depth_limit_cuts_every_policy() -> None:
    model = TableDraft(random_table(2))
    for policy in (
        ChainPolicy(6), StaticTreePolicy(), SampledTreePolicy((2, 2, 2)),
        DynamicTreePolicy(20, 4, 3),
    ):  # fmt: skip
        for limit in (1, 2):
            draft = draft_once(model, policy, max_depth=limit)
            assert max(draft.depths) == limit
        deepest = max(draft_once(model, policy).depths)
        assert 2 < deepest <= policy.max_depth
        assert len(draft_once(model, policy).tokens) <= policy.max_nodes


@pytest.mark.parametrize("settings", [(10, 3, 4), (30, 4, 5), (60, 5, 10), (6, 1, 2), (2, 0, 1)])
def test_a_dynamic_tree_holds_the_best_candidates_of_those_that_were_expanded(
    settings: tuple[int, int, int],
) -> None:
    """Against a slow version written from EAGLE-2's description."""
    total, depth, top_k = settings
    table = random_table(sum(settings))
    draft = draft_once(TableDraft(table), DynamicTreePolicy(*settings))
    root = (5, 6, 7)

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        log_probs = table((*root, *path)).log_softmax(-1)
        best = log_probs.topk(top_k).indices.tolist()
        return [(score + float(log_probs[token]), (*path, token)) for token in best]

    pool = frontier = children((), 0.0)
    for _ in range(depth):
        frontier = sorted(frontier, reverse=True)[:top_k]
        frontier = [child for score, path in frontier for child in children(path, score)]
        pool = pool + frontier
    kept = {path for _, path in sorted(pool, reverse=True)[: total - 1]}
    assert set(paths_of(draft)) == kept
    for node, row in enumerate(draft.state_rows or []):
        has_children = node in draft.parent_list
        assert row > 0 or not has_children, "a parent was read by the draft model"


def test_a_dynamic_tree_of_a_certain_draft_model_is_connected() -> None:
    """Every probability is 1 or 0: parent and child have the same score."""

    def certain(text: tuple[int, ...]) -> Tensor:
        return torch.full((VOCAB,), -1e4).index_fill(0, torch.tensor([len(text) % VOCAB]), 0.0)

    for total in range(2, 12):
        draft = draft_once(TableDraft(certain), DynamicTreePolicy(total, 6, 4))
        paths = set(paths_of(draft))
        assert all(len(path) == 1 or path[:-1] in paths for path in paths)
        assert len(paths) == len(draft.tokens) == total - 1


def test_sampled_children_are_distinct_and_report_their_law() -> None:
    sampling = SamplingSettings(temperature=0.9, top_k=12)
    table = random_table(3)
    draft = draft_once(TableDraft(table), SampledTreePolicy((3, 2)), sampling=sampling)
    assert draft.kind == "drawn"
    assert draft.probs is not None
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths) == 9
    for path, probs in zip(paths, draft.probs, strict=True):
        logits = table((5, 6, 7, *path[:-1])) / 0.9
        kept = logits >= logits.topk(12).values[-1]
        expected = logits.masked_fill(~kept, float("-inf")).softmax(-1)
        torch.testing.assert_close(probs, expected)
        assert probs[path[-1]] > 0


def test_tokens_without_mass_are_never_proposed() -> None:
    """top_k 2 leaves two tokens: a third child would have to be one that cannot be drawn."""
    sampling = SamplingSettings(temperature=1.0, top_k=2)
    draft = draft_once(TableDraft(random_table(4)), SampledTreePolicy((3, 3)), sampling=sampling)
    assert draft.parent_list.count(-1) == 2
    assert draft.probs is not None
    assert (draft.probs.gather(1, draft.tokens[:, None]) > 0).all()


def test_sampled_siblings_come_in_the_order_of_drawing_without_replacement() -> None:
    """The law of ordered pairs is q(x) q(y) / (1 - q(x)), chi-square over 4000 draws."""
    table = random_table(5, vocab=5)
    q = table((5, 6, 7)).softmax(-1)
    counts = torch.zeros(5, 5)
    model = TableDraft(table)
    sampling = SamplingSettings(temperature=1.0)
    policy = SampledTreePolicy((2,))
    for seed in range(4000):
        x, y = draft_once(model, policy, sampling=sampling, seed=seed, vocab=5).tokens.tolist()
        counts[x, y] += 1
    law = q[:, None] * q[None] / (1 - q[:, None])
    law.fill_diagonal_(0.0)
    assert counts.diagonal().sum() == 0
    expected = (law * 4000)[law > 0]
    observed = counts[law > 0]
    common = expected >= 5
    bins_expected = [*expected[common].tolist(), float(expected[~common].sum())]
    bins_observed = [*observed[common].tolist(), float(observed[~common].sum())]
    scale = sum(bins_observed) / sum(bins_expected)
    p_value = chisquare(bins_observed, [scale * value for value in bins_expected]).pvalue
    assert p_value > 1e-3


def test_a_reduced_draft_vocabulary_is_spread_over_the_targets() -> None:
    class Narrow(TableDraft):
        draft_to_target = torch.arange(0, VOCAB, 4)

    narrow = Narrow(random_table(6, vocab=10))
    for policy in (ChainPolicy(3), StaticTreePolicy(), DynamicTreePolicy(12, 2, 3)):
        assert (draft_once(narrow, policy).tokens % 4 == 0).all()
    sampled = draft_once(
        narrow, SampledTreePolicy((3, 2)), sampling=SamplingSettings(temperature=1.0)
    )
    assert sampled.probs is not None
    assert sampled.probs.shape[1] == VOCAB
    assert not sampled.probs[:, torch.arange(VOCAB) % 4 != 0].any()


def test_sequences_of_a_batch_draft_as_they_would_alone() -> None:
    model = TableDraft(random_table(7))
    texts = [(5, 6, 7), (8,), (9, 10, 11, 12)]
    for policy in (
        ChainPolicy(4), StaticTreePolicy(), SampledTreePolicy((2, 2)), DynamicTreePolicy(9, 3, 3)
    ):  # fmt: skip
        requests = [
            DraftRequest(
                DraftContext(torch.tensor([text]), torch.empty(1, 0, 0), torch.empty(1, 0, 0)),
                model.start(64), limit, SamplingSettings(temperature=1.0),
                torch.Generator().manual_seed(limit), VOCAB,
            )
            for text, limit in zip(texts, (2, 9, 3), strict=True)
        ]  # fmt: skip
        together = policy.draft(model, requests)
        for text, limit, draft in zip(texts, (2, 9, 3), together, strict=True):
            alone = draft_once(
                model, policy, text=text, max_depth=limit, seed=limit,
                sampling=SamplingSettings(temperature=1.0),
            )  # fmt: skip
            assert torch.equal(draft.tokens, alone.tokens)
            assert draft.parent_list == alone.parent_list
            assert draft.state_rows == alone.state_rows


@pytest.mark.parametrize("layers", [1, 2])
def test_every_node_of_an_eagle3_tree_is_read_as_in_a_chain_of_its_path(layers: int) -> None:
    """I12, M11: logits below each node equal those after a chain run of the same tokens."""
    torch.manual_seed(0)
    draft = Eagle3Draft(
        Eagle3Config(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCAB, num_hidden_layers=layers, aux_layer_ids=[0, 1],
        )
    ).eval()  # fmt: skip
    draft.attach_target(embed_tokens=torch.nn.Embedding(VOCAB, 32))
    ids, features = torch.randint(0, VOCAB, (1, 9)), torch.randn(1, 8, 64)
    context = DraftContext(ids, features, features[..., :32])

    def read(state: Any, tokens: list[int], parents: list[int]) -> Tensor:
        return draft.extend([state], [Frontier(torch.tensor(tokens), torch.tensor(parents))])

    state = draft.start(40)
    draft.read([context], [state])
    # Three children of the root, then five below them, then two below those.
    levels = [([3, 8, 5], [0, 0, 0]), ([1, 2, 1, 9, 4], [1, 1, 2, 3, 3]), ([7, 7], [4, 8])]
    logits = torch.cat([read(state, *level) for level in levels])
    paths: list[list[int]] = [[]]
    for tokens, parents in levels:
        paths += [[*paths[parent], t] for t, parent in zip(tokens, parents, strict=True)]
    for row, path in enumerate(paths[1:]):
        chain = draft.start(40)
        found = draft.read([context], [chain])
        for depth, token in enumerate(path):
            frontier = Frontier(torch.tensor([token]), torch.tensor([depth]), is_chain=True)
            found = draft.extend([chain], [frontier])
        torch.testing.assert_close(logits[row : row + 1], found, rtol=1e-5, atol=1e-5)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "policy",
    [ChainPolicy(2), StaticTreePolicy(((0,), (1,), (0, 0))), SampledTreePolicy((2, 2)),
     DynamicTreePolicy(6, 1, 2)],
    ids=lambda policy: policy.name,
)  # fmt: skip
def test_sampled_texts_of_every_policy_have_the_targets_law(
    policy: Policy, tiny_target: Callable[..., Any], noisy_copy: Any
) -> None:
    """The whole decoder, caches and all: chi-square of the first three tokens, top_k 3."""
    target = tiny_target("llama")
    sampling = SamplingSettings(temperature=2.0, top_k=3)
    model = noisy_copy(target, 2.0)
    text = [5, 9, 21]
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for path, chance in law.items():
            ended = bool(path) and path[-1] in target.eos_token_ids
            if ended:
                grown[path] = chance
                continue
            logits = target.forward(torch.tensor([[*text, *path]]), logits="last").logits
            top = (logits[0, -1] / 2.0).topk(3)
            for token, prob in zip(
                top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True
            ):
                grown[(*path, token)] = chance * prob
        law = grown
    counts = dict.fromkeys(law, 0)
    samples = 1200
    engine = Engine(target, model, policy, batch_size=8)
    work = [
        Request(text, 3, sampling, generator=torch.Generator().manual_seed(seed))
        for seed in range(samples)
    ]
    for answer in engine.run(work):
        counts[tuple(answer.token_ids)] += 1  # A text outside the law is a KeyError.
    expected = torch.tensor([law[path] * samples for path in law])
    observed = torch.tensor([float(counts[path]) for path in law])
    common = expected >= 5
    bins_expected = [*expected[common].tolist(), float(expected[~common].sum())]
    bins_observed = [*observed[common].tolist(), float(observed[~common].sum())]
    if bins_expected[-1] < 1e-6:
        bins_expected, bins_observed = bins_expected[:-1], bins_observed[:-1]
    scale = sum(bins_observed) / sum(bins_expected)
    assert chisquare(bins_observed, [scale * x for x in bins_expected]).pvalue > 1e-3


def test_settings_that_make_no_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="not its parent"):
        StaticTreePolicy(((0,), (1, 0)))
    with pytest.raises(ValueError, match="distinct"):
        StaticTreePolicy(((0,), (0,)))
    with pytest.raises(ValueError, match="total_tokens is 1"):
        DynamicTreePolicy(1)
    with pytest.raises(ValueError, match="widths is empty"):
        SampledTreePolicy(())
    with pytest.raises(ValueError, match="num_draft_tokens is -1"):
        ChainPolicy(-1)
    with pytest.raises(ValueError, match="choose one of chain, static_tree"):
        make_policy("tree")
    assert make_policy("static_tree", paths=[[0], [0, 1]]).max_nodes == 2
    assert make_policy("sampled_tree", widths=[2, 2]).max_nodes == 6
