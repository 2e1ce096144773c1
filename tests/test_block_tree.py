"""Trees from a block: all paths enumerated, connected, lossless, and chains as a special case."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import block_support as support
from test_dspark import HEADS, make_draft
from verify_support import joint_law, law_p_value, random_table

from draftsmith.conf.entry import compose_settings
from draftsmith.eval.settings import policy_from_config
from draftsmith.inference.block_policy import BlockTreePolicy
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.verify import verify_tree
from draftsmith.models.block_proposal import HeadStep, Proposal, propose_tokens
from draftsmith.models.block_tree import propose_trees
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.protocols import BlockTree, Draft, DraftContext, SamplingSettings

VOCAB, STEPS = 5, 3


class TableHead:
    """Corrections from a table of random numbers; `remembers`: of the sum of all tokens so far."""

    def __init__(self, sequences: int, *, remembers: bool) -> None:
        draw = torch.Generator().manual_seed(3)
        size = (sequences, STEPS, STEPS * VOCAB, VOCAB)
        self.table = 2.0 * torch.randn(size, generator=draw)
        self.remembers = remembers
        self.rows: list[int] = []

    def correction(self, sequence: int, step: int, path: tuple[int, ...]) -> Tensor:
        """[vocab] after the drafted path, the anchor first."""
        return self.table[sequence, step, sum(path) if self.remembers else path[-1]]

    def step(
        self, step: int, before: Tensor, *, sequences: Tensor | None, memory: Tensor | None
    ) -> HeadStep:
        self.rows.append(len(before))
        if sequences is None:
            sequences = torch.arange(len(before))
        key = before
        if self.remembers:
            key = memory = before if memory is None else memory + before
        return HeadStep(self.table[sequences, step, key], None, memory)


def made_up(sequences: int, *, remembers: bool) -> tuple[Proposal, list[DraftContext]]:
    logits = torch.randn(sequences, STEPS, VOCAB, generator=torch.Generator().manual_seed(4))
    contexts = [
        DraftContext(torch.tensor([[4, 4, row % VOCAB]]), torch.empty(0), torch.empty(0))
        for row in range(sequences)
    ]
    return Proposal(logits, TableHead(sequences, remembers=remembers)), contexts


def grow(proposal: Proposal, contexts: list[DraftContext], tree: BlockTree, **how: Any) -> Any:
    sampling = [how.get("sampling", SamplingSettings())] * len(contexts)
    counts = how.get("counts", [STEPS] * len(contexts))
    return propose_trees(proposal, contexts, counts=counts, sampling=sampling, tree=tree)


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parent_list, strict=True):
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
    return paths


def all_scores(
    proposal: Proposal, sequence: int, *, depth: int = STEPS, penalty: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Cumulative log-probability of every path through the slots, one by one."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    anchor = sequence % VOCAB
    for length in range(1, depth + 1):
        for path in product(range(VOCAB), repeat=length):
            logits = proposal.logits[sequence, length - 1].clone()
            if isinstance(proposal.head, TableHead):
                logits += proposal.head.correction(sequence, length - 1, (anchor, *path[:-1]))
            for token in {4, anchor, *path[:-1]}:
                logits[token] = (
                    logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
                )
            scores[path] = scores[path[:-1]] + float(logits.log_softmax(-1)[path[-1]])
    del scores[()]
    return scores


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 30])
@pytest.mark.parametrize("head", ["memoryless", "remembers", "none"])
def test_the_nodes_are_the_best_of_all_paths(head: str, num_nodes: int) -> None:
    proposal, contexts = made_up(3, remembers=head == "remembers")
    if head == "none":
        proposal.head = None
    drafts = grow(proposal, contexts, BlockTree(num_nodes, VOCAB))
    for sequence, draft in enumerate(drafts):
        scores = all_scores(proposal, sequence)
        best = sorted(scores, key=lambda path: -scores[path])[:num_nodes]
        assert sorted(paths_of(draft)) == sorted(best)
        own = [scores[path] - scores.get(path[:-1], 0.0) for path in paths_of(draft)]
        assert draft.token_probs.log().tolist() == pytest.approx(own, abs=1e-5)
        assert draft.probs is None
        assert draft.confidences is None


def test_top_k_bounds_the_children_and_counts_the_depth() -> None:
    proposal, contexts = made_up(3, remembers=True)
    drafts = grow(proposal, contexts, BlockTree(30, 2), counts=[2, 0, 3])
    assert [len(draft.tokens) for draft in drafts] == [2 + 4, 0, 2 + 4 + 8]
    scores = all_scores(proposal, 0, depth=2)
    for path in paths_of(drafts[0]):
        siblings = sorted((scores[(*path[:-1], t)] for t in range(VOCAB)), reverse=True)
        assert scores[path] >= siblings[1]


def test_nodes_are_connected_and_siblings_fall_even_between_equal_scores() -> None:
    certain = torch.full((1, STEPS, VOCAB), -1e9)
    certain[0, :, 2] = 0.0  # Probability 1 at every step: parent and child score the same.
    level = torch.zeros(1, STEPS, VOCAB)
    proposal, contexts = made_up(1, remembers=False)
    for logits in (certain, level, proposal.logits):
        for num_nodes in (1, 2, 3, 4, 9):
            (draft,) = grow(Proposal(logits), contexts, BlockTree(num_nodes, 3))
            paths = paths_of(draft)
            assert len(set(paths)) == len(paths) == num_nodes
            assert all(parent < node for node, parent in enumerate(draft.parent_list))
            families: dict[int, list[float]] = {}
            chances = zip(draft.parent_list, draft.token_probs.tolist(), strict=True)
            for parent, chance in chances:
                families.setdefault(parent, []).append(chance)
            assert all(one == sorted(one, reverse=True) for one in families.values())
    (draft,) = grow(Proposal(certain), contexts, BlockTree(3, 3))
    assert paths_of(draft) == [(2,), (2, 2), (2, 2, 2)]
    assert draft.is_chain


def test_tokens_that_cannot_be_are_no_nodes() -> None:
    proposal, contexts = made_up(1, remembers=False)
    proposal.logits[:, :, 1:] = float("-inf")
    (draft,) = grow(proposal, contexts, BlockTree(9, 3))
    assert paths_of(draft) == [(0,), (0, 0), (0, 0, 0)]


def test_parents_with_the_same_token_share_a_row_unless_the_head_remembers() -> None:
    for remembers, most in ((False, VOCAB), (True, VOCAB**2)):
        proposal, contexts = made_up(1, remembers=remembers)
        grow(proposal, contexts, BlockTree(1000, VOCAB))
        assert isinstance(proposal.head, TableHead)
        assert proposal.head.rows == [1, VOCAB, most]


def test_a_repetition_penalty_acts_on_every_path() -> None:
    proposal, contexts = made_up(2, remembers=False)
    how = SamplingSettings(repetition_penalty=1.7)
    drafts = grow(proposal, contexts, BlockTree(12, VOCAB), sampling=how)
    for sequence, draft in enumerate(drafts):
        scores = all_scores(proposal, sequence, penalty=1.7)
        best = sorted(scores, key=lambda path: -scores[path])[:12]
        assert sorted(paths_of(draft)) == sorted(best)


@pytest.mark.parametrize("head", HEADS)
def test_one_child_per_node_is_the_greedy_chain(tiny_target: Callable[..., Any], head: str) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, **HEADS[head]).eval()
    batch = support.make_batch(target, (24,))
    (context,) = support.contexts_of(batch, 0, [10])
    chain = support.propose_once(draft, context, draft.start(30), 4)
    (tree,) = draft.propose(
        [context],
        [draft.start(30)],
        num_draft_tokens=[4],
        sampling=[SamplingSettings()],
        generators=[None],
        tree=BlockTree(9, 1),
    )
    assert tree.is_chain
    assert torch.equal(tree.tokens, chain.tokens)
    torch.testing.assert_close(tree.token_probs, chain.token_probs)


def test_a_wider_tree_holds_the_chain_where_it_is_likely() -> None:
    """And a tree of all paths holds any chain."""
    proposal, contexts = made_up(2, remembers=True)
    chains = propose_tokens(
        proposal, contexts, counts=[STEPS] * 2, sampling=[SamplingSettings()] * 2,
        generators=[None] * 2,
    )  # fmt: skip
    for draft, chain in zip(grow(proposal, contexts, BlockTree(999, VOCAB)), chains, strict=True):
        assert tuple(chain.tokens.tolist()) in paths_of(draft)


# --- decoding -------------------------------------------------------------------------------------


class Asked:
    """Passes a policy's tree on, and keeps what was proposed."""

    def __init__(self, draft: Any, tree: BlockTree) -> None:
        self.draft, self.tree = draft, tree
        self.aux_layer_ids, self.start = draft.aux_layer_ids, draft.start
        self.made: list[Draft] = []

    def propose(self, *arguments: Any, **settings: Any) -> list[Draft]:
        assert settings.pop("tree", self.tree) == self.tree
        found = self.draft.propose(*arguments, **settings, tree=self.tree)
        self.made += found
        return found


class Knowing:
    """Has read the answers: their tokens are likely, more or less, among random ones."""

    aux_layer_ids = ()

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.draw = torch.Generator().manual_seed(9)

    def start(self, max_length: int) -> None:
        del max_length

    def propose(self, contexts: Any, states: Any, **asked: Any) -> list[Draft]:
        if not contexts:
            return []
        logits = torch.randn(len(states), 4, 320, generator=self.draw)
        for row, context in enumerate(contexts):
            seen = context.token_ids[0].tolist()
            (text,) = [one for one in self.texts if one[: len(seen)] == seen]
            for step, token in enumerate(text[len(seen) : len(seen) + 4]):
                logits[row, step, token] += 3.0
        return propose_trees(
            Proposal(logits), contexts, counts=asked["num_draft_tokens"],
            sampling=asked["sampling"], tree=asked["tree"],
        )  # fmt: skip


@pytest.mark.lossless
@pytest.mark.parametrize("head", ["markov", "rnn", "dflash", "knowing"])
def test_greedy_text_is_the_targets_own(tiny_target: Callable[..., Any], head: str) -> None:
    target = tiny_target("llama")
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 300, (n,), generator=draw).tolist() for n in (3, 9, 30)]
    requests = [Request(prompt, max_new_tokens=16) for prompt in prompts]
    plain = Engine(target, None, ChainPolicy()).run(requests)
    draft: Any
    if head == "knowing":
        texts = zip(prompts, plain, strict=True)
        draft = Knowing([[*prompt, *answer.token_ids] for prompt, answer in texts])
    elif head == "dflash":
        draft = support.make_draft(DFlashMethod, target, block_size=5).eval()
    else:
        draft = make_draft(target, sequential_head=head).eval()
    policy = BlockTreePolicy(num_nodes=20, top_k=6, num_draft_tokens=4)
    asked = Asked(draft, policy.block_tree)
    made = Engine(target, asked, policy, batch_size=2).run(requests)
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert any(not one.is_chain for one in asked.made)
    assert max(len(one.tokens) for one in asked.made) == 20
    if head == "knowing":
        accepted = {record.accepted for one in made for record in one.rounds}
        assert {0, 1, 2} <= accepted, "the test needs paths of several lengths"


@pytest.mark.lossless
@pytest.mark.parametrize("remembers", [False, True])
def test_sampled_text_has_the_targets_law_and_a_wrong_order_is_seen(remembers: bool) -> None:
    """Two tokens of a target that is a table; the control has its siblings' order decided by the
    target's own draw, as a decoder would that looked first."""
    table = random_table(VOCAB, 3, seed=8)
    proposal, contexts = made_up(1, remembers=remembers)
    (draft,) = grow(proposal, contexts, BlockTree(6, 3), counts=[2])
    paths = paths_of(draft)
    law = joint_law(table, VOCAB, 2)
    probs = torch.stack([table[()], *(table[path] for path in paths)])
    generator = torch.Generator().manual_seed(2)

    def text(path: list[int], token: int) -> list[int]:
        found = [int(draft.tokens[node]) for node in path] + [token]
        while len(found) < 2:
            rest = torch.multinomial(table[tuple(found)], 1, generator=generator)
            found.append(int(rest))
        return found[:2]

    right, wrong = torch.zeros(VOCAB, VOCAB), torch.zeros(VOCAB, VOCAB)
    for _ in range(4000):
        first, second = text(*verify_tree(draft, probs, generator))
        right[first, second] += 1
        path, token = verify_tree(draft, probs, generator)
        if not path:  # Tests the rejected children a second time.
            path, token = verify_tree(draft, probs, generator)
        first, second = text(path, token)
        wrong[first, second] += 1
    assert law_p_value(right, law) > 1e-3
    assert law_p_value(wrong, law) < 1e-6


def test_an_autoregressive_draft_is_told_to_take_the_dynamic_tree() -> None:
    with pytest.raises(ValueError, match="drafting=dynamic_tree"):
        BlockTreePolicy().draft(object(), [object()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_nodes is 0"):
        BlockTreePolicy(num_nodes=0)


def test_the_preset_gives_the_policy() -> None:
    settings = compose_settings(
        "evaluate",
        "draftsmith.conf.schema:EvaluateConfig",
        ["target.name_or_path=t", "output=o", "drafting=block_tree", "drafting.num_nodes=24"],
    )
    assert policy_from_config(settings.drafting) == BlockTreePolicy(24, 4, 7)
