"""Verification lengths in the engine: the text stays the target's own, whatever is cut or paused.

Negative controls: confidences that have read the token they decide about must change the law.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.length_policies import (
    AsyncPrefixScheduler,
    FixedLength,
    LengthPolicy,
    PausingDrafts,
    PrefixScheduler,
    StaticThreshold,
)
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy
from draftsmith.inference.sampling import target_probs
from draftsmith.inference.scheduler import Chains
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings, TrainBatch
from draftsmith.models.small_model import SmallModelDraft

CURVE = [1.0 / (1.0 + 0.3 * tokens) for tokens in range(40)]
"""A token costs 0.3 of a step's floor: likely tokens pay, unlikely ones do not."""


@dataclass
class InTurns:
    """Drafts in two steps and leaves it out in three, cutting to two tokens."""

    name = "in turns"
    longest = None
    reads_confidences = False
    step: int = 0

    @property
    def drafts(self) -> bool:
        return self.step % 5 < 2

    def lengths(self, confidences: Chains) -> list[int]:
        self.step += 1
        return [min(2, len(chain)) for chain in confidences]


def policies() -> list[LengthPolicy]:
    return [
        FixedLength(0),
        FixedLength(2),
        StaticThreshold(0.4),
        PrefixScheduler(CURVE),
        AsyncPrefixScheduler(CURVE),
        PausingDrafts(PrefixScheduler(CURVE), CURVE, [2 * rate for rate in CURVE]),
        InTurns(),
    ]


def eagle3(target: Any) -> Eagle3Draft:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = Eagle3Draft(
            Eagle3Config(
                hidden_size=target.hidden_size,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=target.vocab_size,
                draft_vocab_size=target.vocab_size,
                max_position_embeddings=256,
                aux_layer_ids=[0, 1],
            )
        )
    draft.attach_target(embed_tokens=target.embed_tokens)
    return draft.eval()


def dspark(target: Any, **settings: Any) -> Any:
    """Confidences that differ widely with the token before."""
    usual: dict[str, Any] = {"block_size": 4, "markov_rank": 6}
    draft = support.make_draft(DSparkMethod, target, **(usual | settings)).eval()
    draft.markov_head.markov_w1.weight.data.normal_()
    draft.confidence_head.proj.weight.data.normal_(std=0.5)
    return draft


DRAFTS: dict[str, Callable[[Any], Any]] = {
    "dspark": dspark,
    "dflash": lambda target: support.make_draft(DFlashMethod, target, block_size=5).eval(),
    "eagle3": eagle3,
}


def prompts(count: int) -> list[list[int]]:
    return [
        torch.randint(
            4, 300, (3 + 4 * (i % 3),), generator=torch.Generator().manual_seed(i)
        ).tolist()
        for i in range(count)
    ]


def requests(count: int = 4, *, tokens: int = 9) -> list[Request]:
    return [Request(text, tokens + 3 * (i % 3)) for i, text in enumerate(prompts(count))]


@pytest.mark.lossless
@pytest.mark.parametrize("name", [*DRAFTS, "copy"])
def test_every_policy_writes_the_targets_own_text(
    name: str, tiny_target: Callable[..., Any], noisy_copy: Any
) -> None:
    """For several numbers of requests in flight and waiting; the copy checks its kept rows too."""
    target = tiny_target("llama")
    draft = noisy_copy(target, 1.0) if name == "copy" else DRAFTS[name](target)
    work = requests()
    plain = [one.token_ids for one in Engine(target, None, ChainPolicy(), batch_size=4).run(work)]
    seen = set()
    for policy in policies():
        size = 1 if isinstance(policy, InTurns) else 3
        found = Engine(target, draft, ChainPolicy(4), batch_size=size, lengths=policy).run(work)
        assert [one.token_ids for one in found] == plain, policy.name
        seen |= {(one.proposed, one.unverified) for text in found for one in text.rounds}
    for size in (1, 2, 4):
        engine = Engine(
            target, draft, ChainPolicy(4), batch_size=size, lengths=PrefixScheduler(CURVE)
        )
        assert [one.token_ids for one in engine.run(work)] == plain, size
    assert len({verified for verified, _ in seen}) > 2, "lengths must differ here"
    assert any(left_out for _, left_out in seen), "something must be cut here"


def test_a_forward_reads_the_roots_and_what_was_admitted(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cost follows the number of tokens; the records say what was drafted, cut and believed."""
    target = tiny_target("llama")
    widths: list[int] = []
    real = target.forward

    def counting(input_ids: Any, **settings: Any) -> Any:
        widths.append(input_ids.shape[1])
        return real(input_ids, **settings)

    engine = Engine(
        target, dspark(target), ChainPolicy(4), batch_size=3, lengths=PrefixScheduler(CURVE)
    )
    monkeypatch.setattr(target, "forward", counting)
    serving = engine.serve()
    for request in requests(3):
        serving.submit(request)
    steps = []
    while serving.busy:
        steps.append(serving.step())
    assert widths[0] == 3 + 7 + 11
    assert widths[1:] == [step.num_requests + step.verified for step in steps[1:]]
    rounds = [one for step in steps for text in step.finished.values() for one in text.rounds]
    assert sum(one.proposed for one in rounds) == sum(step.verified for step in steps)
    assert sum(one.drafted for one in rounds) == sum(step.drafted for step in steps)
    assert sum(one.unverified for one in rounds) > 0
    for one in rounds:
        assert len(one.confidences) == one.proposed
        assert all(0 <= chance <= 1 for chance in one.confidences)


def test_threshold_0_records_every_drafted_token(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = dspark(target)
    (text,) = Engine(target, draft, ChainPolicy(4), lengths=StaticThreshold(0.0)).run(requests(1))
    assert {one.unverified for one in text.rounds} == {0}
    assert [len(one.confidences) for one in text.rounds] == [one.proposed for one in text.rounds]
    # A fixed length drafts no more than it verifies, and asks for no confidences.
    (text,) = Engine(target, draft, ChainPolicy(4), lengths=FixedLength(2)).run(requests(1))
    assert {(one.drafted <= 2, one.unverified, one.confidences) for one in text.rounds} == {
        (True, 0, ())
    }


# ---- leaving the draft model out ------------------------------------------------------------


@dataclass
class Noting:
    """A chain policy, or a block draft around another, that keeps what was told and drafted."""

    inner: Any
    contexts: list[DraftContext] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def draft(self, model: Any, asked: Sequence[Any]) -> list[Draft]:
        return self._note([one.context for one in asked], self.inner.draft(model, asked))

    def propose(self, contexts: Sequence[DraftContext], *rest: Any, **how: Any) -> list[Draft]:
        return self._note(contexts, self.inner.propose(contexts, *rest, **how))

    def _note(self, contexts: Sequence[DraftContext], drafts: list[Draft]) -> list[Draft]:
        self.contexts += contexts
        self.drafts += drafts
        return drafts


@pytest.mark.parametrize("name", ["dspark", "eagle3", "small model"])
def test_after_a_pause_the_draft_model_knows_all_that_was_committed(
    name: str,
    tiny_target: Callable[..., Any],
    tiny_folder: Callable[..., Path],
    draft_chain: Callable[..., Draft],
) -> None:
    """Features of every position once and in order; drafts as from a state that was never paused.

    Greedy texts alone would not show it: they are right whatever is drafted.
    """
    target = tiny_target("llama")
    if name == "small model":
        draft = SmallModelDraft.load(str(tiny_folder("llama", seed=3)), dtype=torch.float32)
        draft.attach_target(embed_tokens=target.embed_tokens)
    else:
        draft = DRAFTS[name](target)
    notes = Noting(draft if name == "dspark" else ChainPolicy(3))
    given = (notes, ChainPolicy(3)) if name == "dspark" else (draft, notes)
    request = Request(prompts(1)[0], 24)
    (text,) = Engine(target, *given, lengths=InTurns()).run([request])
    assert len(notes.contexts) < len(text.rounds) - 3, "some rounds must draft nothing"
    told = 0
    for context, made in zip(notes.contexts, notes.drafts, strict=True):
        length, new = context.token_ids.shape[1], context.final_hidden_states.shape[1]
        assert length - 1 - new == told
        told = length - 1
        states = target.forward(context.token_ids[:, :-1], aux_layer_ids=draft.aux_layer_ids)
        whole = DraftContext(
            context.token_ids, states.aux_hidden_states, states.final_hidden_states
        )
        torch.testing.assert_close(
            context.final_hidden_states, states.final_hidden_states[:, -new:], rtol=1e-3, atol=1e-4
        )
        count = len(made.tokens)
        if name == "dspark":
            fresh = support.propose_once(draft, whole, draft.start(length + 9), count)
        else:
            fresh = draft_chain(draft, whole, count)
        assert torch.equal(made.tokens, fresh.tokens)


def test_a_paused_step_does_not_call_the_draft_model(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    never = replace(InTurns(), step=2)
    notes = Noting(dspark(target))
    serving = Engine(target, notes, ChainPolicy(4), batch_size=2, lengths=never).serve()
    for request in requests(2):
        serving.submit(request)
    steps = [serving.step() for _ in range(4)]
    assert not notes.contexts
    assert [step.drafted for step in steps] == [0] * 4
    serving.step()
    assert [one.final_hidden_states.shape[1] for one in notes.contexts] == [3 + 3, 7 + 3]


# ---- what is refused ------------------------------------------------------------------------


class Silent:
    """A block draft that reports nothing but tokens."""

    def __init__(self, inner: Any, *, parents: list[int] | None = None) -> None:
        self.inner, self.parents = inner, parents
        self.aux_layer_ids, self.start = inner.aux_layer_ids, inner.start

    def propose(self, *arguments: Any, **settings: Any) -> list[Draft]:
        return [
            Draft(one.tokens, parents=self.parents and self.parents[: len(one.tokens)])
            for one in self.inner.propose(*arguments, **settings)
        ]


def test_what_cannot_decide_is_refused(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = DRAFTS["dflash"](target)
    chain, scheduler = ChainPolicy(3), PrefixScheduler(CURVE)
    with pytest.raises(ValueError, match="'scheduler', but there is no draft model"):
        Engine(target, None, chain, lengths=scheduler)
    with pytest.raises(ValueError, match="trees of 9 tokens, which are not cut"):
        Engine(target, eagle3(target), DynamicTreePolicy(10, 2, 3), lengths=FixedLength(2))
    assert Engine(target, draft, chain, lengths=FixedLength(0)).draft is None
    sampled = [replace(requests(1)[0], sampling=SamplingSettings(temperature=1.0))]
    for model, work, message in (
        (Silent(draft), requests(1), "neither confidences nor"),
        (Silent(draft, parents=[-1, -1, 0]), requests(1), "gave a tree of 3 tokens"),
        (draft, sampled, "depend on the very tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(target, model, chain, lengths=scheduler).run(work)
    # A fixed length asks for no confidences: it needs none.
    for model, work in ((Silent(draft), requests(1)), (draft, sampled)):
        Engine(target, model, chain, lengths=FixedLength(2)).run(work)


def test_a_cut_draft_keeps_what_is_known_of_its_tokens() -> None:
    chain = Draft(
        tokens=torch.tensor([5, 6, 7]),
        probs=torch.eye(3),
        confidences=torch.tensor([0.9, 0.8, 0.7]),
        token_probs=torch.tensor([0.5, 0.4, 0.3]),
        state_rows=[1, 2, -1],
    )
    cut = chain.first(2)
    assert cut.tokens.tolist() == [5, 6]
    assert cut.probs is not None
    assert cut.probs.shape == (2, 3)
    assert (cut.confidences, cut.token_probs) != (None, None)
    assert cut.confidences.tolist() == pytest.approx([0.9, 0.8])  # type: ignore[union-attr]
    assert cut.state_rows == [1, 2]
    assert chain.first(3) is chain
    assert len(chain.first(0).tokens) == 0
    assert chain.first(0).kind == "drawn"
    with pytest.raises(ValueError, match="chain of 3 .* cut to 4"):
        chain.first(4)
    with pytest.raises(ValueError, match="tree of 3"):
        replace(chain, parents=[-1, -1, 0]).first(2)


# ---- requests that come as they come --------------------------------------------------------


def test_requests_may_be_submitted_between_steps(tiny_target: Callable[..., Any]) -> None:
    """Texts as ever; waiting, first tokens and latencies are recorded from the arrival on."""
    target = tiny_target("llama")
    work = requests(4)
    plain = [one.token_ids for one in Engine(target, None, ChainPolicy(), batch_size=4).run(work)]
    engine = Engine(
        target, dspark(target), ChainPolicy(4), batch_size=2, lengths=PrefixScheduler(CURVE)
    )
    serving = engine.serve()
    assert not serving.busy
    with pytest.raises(ValueError, match="submit one first"):
        serving.step()
    found: dict[int, Any] = {}
    for request in work[:3]:
        serving.submit(request)
    first = serving.step()
    assert (first.reads_prompts, first.num_requests, first.emitted) == (True, 2, 2)
    assert (serving.num_active, serving.num_waiting) == (2, 1)
    found |= first.finished | serving.step().finished
    assert serving.submit(work[3]) == 3
    while serving.busy:
        found |= serving.step().finished
    assert [found[index].token_ids for index in range(4)] == plain
    for one in found.values():
        assert 0 <= one.waited_seconds < one.first_token_seconds <= one.latency_seconds
        assert one.latency_seconds == one.waited_seconds + one.seconds
    assert found[2].waited_seconds > found[0].waited_seconds


def test_a_request_that_came_earlier_than_it_was_submitted_has_waited(
    tiny_target: Callable[..., Any],
) -> None:
    import time

    serving = Engine(tiny_target("llama"), None, ChainPolicy()).serve()
    serving.submit(requests(1)[0], arrived=time.perf_counter() - 50.0)
    found: dict[int, Any] = {}
    while serving.busy:
        found |= serving.step().finished
    assert 50.0 <= found[0].waited_seconds <= found[0].first_token_seconds
    with pytest.raises(ValueError, match="leaves no room"):
        serving.submit(Request(list(range(4, 60)) * 10, 5))


# ---- the law of sampled texts ---------------------------------------------------------------

SAMPLING = SamplingSettings(temperature=2.0, top_k=2)
RANK = 40
"""Of the sequential head: so many tokens can have confidences of their own."""


def text_law(target: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `length` tokens (fewer at an end of text)."""
    finished: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        ids = torch.tensor([[*prompt, *text] for text in going])
        laws = target_probs(
            target.model(input_ids=ids, use_cache=False).logits[:, -1].double(), SAMPLING
        )
        for (text, chance), law in zip(going.items(), laws, strict=True):
            for token in law.nonzero().flatten().tolist():
                ended = token in target.eos_token_ids
                (finished if ended else grown)[(*text, token)] = chance * float(law[token])
        going = grown
    return finished | going


class Peeking:
    """Believes in a token where the draft model does: it has looked at the token's own q."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.aux_layer_ids, self.start = inner.aux_layer_ids, inner.start

    def propose(self, *arguments: Any, **settings: Any) -> list[Draft]:
        drafts = self.inner.propose(*arguments, **settings)
        return [
            replace(draft, confidences=(draft.token_probs >= 0.5).float())
            if len(draft.tokens)
            else draft
            for draft in drafts
        ]


def p_value(found: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square over whole texts; those with an expected count below 5 share a bin."""
    common = [text for text, chance in law.items() if chance * len(found) >= 5]
    expected = [law[text] * len(found) for text in common]
    observed = [float(found.count(text)) for text in common]
    assert set(found) <= set(law), "an impossible text"
    if len(common) < len(law):
        expected.append(len(found) - sum(expected))
        observed.append(len(found) - sum(observed))
    return float(chisquare(observed, expected).pvalue)


def decisive_dspark(target: Any, texts: list[list[int]]) -> Any:
    """Right now and then, after a few updates on the target's own texts; its confidences are high
    or low according to the token before.
    """
    torch.manual_seed(0)
    method = DSparkMethod(
        num_hidden_layers=1, mask_token_id=support.MASK, block_size=3, markov_rank=RANK
    )
    draft = method.build(target.head(), None, (0,)).train()
    ids = torch.tensor(texts)
    states = target.forward(ids, aux_layer_ids=[0])
    batch = TrainBatch(
        input_ids=ids,
        supervised_mask=torch.arange(ids.shape[1])[None].expand_as(ids) >= 5,
        keep_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        aux_hidden_states=states.aux_hidden_states,
        final_hidden_states=states.final_hidden_states,
    )
    support.overfit(draft, target, batch, updates=12)
    # Every other token, place by place, makes the next one likely.
    tokens = list(dict.fromkeys(token for place in ids[:, 5:].T.tolist() for token in place))
    wanted = torch.tensor([3.0 if row % 2 else -0.5 for row in range(len(tokens))])
    before = draft.markov_head.markov_w1.weight.data[tokens]
    weight = draft.confidence_head.proj.weight.data.zero_()
    draft.confidence_head.proj.bias.data.zero_()
    weight[0, -RANK:] = torch.linalg.lstsq(before, wanted[:, None]).solution[:, 0]
    return draft.eval()


@pytest.mark.lossless
def test_scheduled_requests_keep_the_targets_law(tiny_target: Callable[..., Any]) -> None:
    """Requests share every forward and compete; the control decides with the token known."""
    target = tiny_target("llama", num_hidden_layers=2)
    source = torch.Generator().manual_seed(8)
    pair = [torch.randint(4, 300, (5,), generator=source).tolist() for _ in range(2)]
    laws = [text_law(target, prompt, 4) for prompt in pair]
    learnt = [[*pair[row], *text] for row in (0, 1) for text in laws[row] if len(text) == 4]
    draft = decisive_dspark(target, learnt)
    curve = [1.0 / (1.0 + 0.1 * tokens) for tokens in range(24)]
    values = {}
    for kind, model in (("honest", draft), ("peeking", Peeking(draft))):
        generator = torch.Generator().manual_seed(3)
        work = [Request(pair[row % 2], 4, SAMPLING, generator=generator) for row in range(480)]
        engine = Engine(target, model, ChainPolicy(2), batch_size=8, lengths=PrefixScheduler(curve))
        texts = engine.run(work)
        rounds = [one for text in texts for one in text.rounds]
        seen = {(one.proposed, one.unverified) for one in rounds}
        share = sum(one.accepted for one in rounds) / sum(one.proposed for one in rounds)
        assert 0.1 < share < 0.9, "the test needs tokens of both kinds"
        values[kind] = [
            p_value([tuple(text.token_ids) for text in texts[row::2]], laws[row]) for row in (0, 1)
        ]
        assert {(0, 2), (1, 1), (2, 0)} <= seen, "lengths must differ here"
    assert min(values["honest"]) > 1e-3, values
    assert min(values["peeking"]) < 1e-6, values
