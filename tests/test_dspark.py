"""DSpark: anchor-first pairs, the sequential heads against loops written out, the confidence head,
drafting against training, the target's law, and a text learnt by heart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import block_support as support

from draftsmith.inference.decode import generate
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.sampling import target_probs
from draftsmith.models.block_anchors import plan_blocks
from draftsmith.models.dspark import SEQUENTIAL_HEADS, DSparkConfig, DSparkDraft, DSparkMethod
from draftsmith.models.protocols import (
    Draft,
    LogitCorrection,
    ObjectiveOutput,
    Predictions,
    SamplingSettings,
    TrainBatch,
)
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective

HEADS: dict[str, dict[str, Any]] = {
    "markov": {},
    "gated": {"sequential_head": "gated"},
    "rnn": {"sequential_head": "rnn"},
    "none": {"sequential_head": "none", "confidence_with_markov": False},
    "markov, confidence apart": {"confidence_with_markov": False},
    "markov alone": {"confidence_head": False},
    "none at all": {
        "sequential_head": "none", "confidence_head": False, "confidence_with_markov": False,
    },
}  # fmt: skip


def make_draft(target: TargetModel, **settings: Any) -> DSparkDraft:
    usual = {"block_size": 4, "markov_rank": 6}
    draft = support.make_draft(DSparkMethod, target, **(usual | settings))
    if draft.has_sequential_head:
        # Strong enough that every token before changes what is proposed.
        draft.markov_head.markov_w1.weight.data.normal_()
        draft.markov_head.markov_w2.weight.data.normal_(std=2.0)
    return draft


def run(draft: Any, target: TargetModel, batch: TrainBatch, name: str = "ce_l1") -> Any:
    return draft(batch, target_head=target.head(), objective=make_objective(name))


@pytest.fixture
def llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama")


def written_out(
    draft: DSparkDraft, states: Tensor, tokens: list[int]
) -> tuple[list[Tensor], list[float]]:
    """Corrections of the logits and confidences of one block, from the formulas.

    Args:
        draft: Whose weights are read.
        states: [steps, hidden] of the slots.
        tokens: [steps] the token before each step.
    """
    weights = {name: weight.detach() for name, weight in draft.state_dict().items()}
    kind = draft.config.sequential_head
    corrections, confidences = [], []
    memory = torch.zeros(draft.config.markov_rank)
    for state, token in zip(states, tokens, strict=True):
        read = [state]
        correction = torch.zeros(draft.config.vocab_size)
        if kind != "none":
            before = weights["markov_head.markov_w1.weight"][token]
            feature = before
            if kind == "gated":
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat([state, before])
                feature = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * before
            if kind == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat(
                    [memory, before, state]
                )
                g, c, o = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                feature = torch.tanh(o)
            correction = weights["markov_head.markov_w2.weight"] @ feature
            if draft.config.confidence_with_markov:
                read.append(before)
        corrections.append(correction)
        if draft.config.confidence_head:
            logit = weights["confidence_head.proj.weight"][0] @ torch.cat(read)
            confidences.append(float(torch.sigmoid(logit + weights["confidence_head.proj.bias"])))
    return corrections, confidences


# --- training -------------------------------------------------------------------------------------


def test_inputs_labels_and_tokens_before_on_readable_ids(llama: Any) -> None:
    """T07, T10: anchor-first block [13, M, M, M] predicts 14, 15, 16, 17 after 13, 14, 15, 16."""
    draft = make_draft(llama)
    batch = support.make_batch(llama, (10,), start=3)
    batch.input_ids = torch.arange(10, 20)[None]
    draft.choose_anchors = lambda _batch: torch.tensor([3, 7])  # type: ignore[method-assign]
    plan = draft._plan_for(batch, "forward")
    assert plan.labels.tolist() == [[14, 15, 16, 17], [18, 19, -1, -1]]
    assert draft._tokens_before(batch, plan)[0].tolist() == [13, 14, 15, 16]
    assert draft._tokens_before(batch, plan)[1, :2].tolist() == [17, 18]
    assert plan.supervised.tolist() == [[True] * 4, [True, True, False, False]]
    assert draft.config.first_slot == 0
    assert draft.config.num_steps == 4
    # The first unsupervised label ends a block.
    batch.supervised_mask[0, 5] = False
    plan = draft._plan_for(batch, "forward")
    assert plan.supervised[0].tolist() == [True, False, False, False]


def test_the_fill_in_layout_conditions_on_the_token_before_too(llama: Any) -> None:
    """T10: without `sample_from_anchor` the step is one slot on, its token before the same."""
    first = make_draft(llama)
    settings = first.config.to_dict() | {"sample_from_anchor": False, "block_size": 5}
    second = DSparkDraft(DSparkConfig(**settings)).train()
    second.load_state_dict(first.state_dict())
    head = llama.head()
    second.attach_target(embed_tokens=head.embed_tokens, head=head)
    batch = support.make_batch(llama)
    plans = [draft._plan_for(batch, "forward") for draft in (first, second)]
    assert torch.equal(plans[0].labels, plans[1].labels)
    before = first._tokens_before(batch, plans[0])
    assert torch.equal(before, second._tokens_before(batch, plans[1]))
    # A block's prediction j is made by slot j, or by slot j + 1.
    states = second._backbone(batch, plans[1])
    made: list[Predictions] = []
    second(batch, target_head=head, objective=recording(made))
    assert torch.equal(made[0].draft_hidden[0], states[:, 1:][plans[1].supervised])


def recording(made: list[Predictions]) -> Any:
    def objective(predictions: Predictions, target_head: Any) -> ObjectiveOutput:
        made.append(predictions)
        return make_objective("ce_l1")(predictions, target_head)

    return objective


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_that_of_the_formulas(llama: Any, head: str) -> None:
    draft = make_draft(llama, **HEADS[head])
    batch = support.make_batch(llama)
    target_head = llama.head()
    plan = draft._plan_for(batch, "normaliser")
    output = run(draft, llama, batch)
    total, weight_sum, error = 0.0, 0.0, torch.zeros(4, dtype=torch.float64)
    for index, flat in enumerate(plan.anchors.tolist()):
        row, anchor = divmod(flat, 24)
        ids = batch.input_ids[row].tolist()
        states = support.reference_block(draft, batch.aux_hidden_states[row, :anchor], ids[anchor])
        steps = int(plan.supervised[index].sum())
        corrections, confidences = written_out(draft, states[:steps], ids[anchor : anchor + steps])
        for step in range(steps):
            place = anchor + step
            q = (target_head(states[step]) + corrections[step]).double().softmax(-1)
            p = target_head(batch.final_hidden_states[row, place]).double().softmax(-1)
            distance = (p - q).abs().sum()
            loss = 0.1 * -q[ids[place + 1]].log() + 0.9 * distance
            if draft.config.confidence_head:
                accepted, said = 1 - distance / 2, torch.tensor(confidences[step]).double()
                loss -= accepted * said.log() + (1 - accepted) * (1 - said).log()
                error[step] += (said - accepted).abs()
            weight = torch.exp(torch.tensor(-step / 4.0))
            total += float(weight * loss)
            weight_sum += float(weight)
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    assert float(output.sums["loss"].sum()) == pytest.approx(total, rel=1e-5)
    assert float(draft.normaliser(batch)) == pytest.approx(weight_sum, rel=1e-6)
    if draft.config.confidence_head:
        torch.testing.assert_close(output.sums["confidence_error"], error, rtol=1e-3, atol=1e-3)
    assert ("confidence" in output.sums) == draft.config.confidence_head


def test_the_first_slot_counts_in_full_and_equal_losses_have_their_own_mean(llama: Any) -> None:
    """T09: block 4, every loss 1."""
    draft = make_draft(llama, confidence_head=False)
    batch = support.make_batch(llama)

    def ones(predictions: Predictions, target_head: Any) -> ObjectiveOutput:  # noqa: ARG001
        shape = predictions.weights.shape
        flags = torch.ones(shape, dtype=torch.bool)
        loss = predictions.weights.sum()
        return ObjectiveOutput(
            loss, loss[None], flags, torch.ones(shape), flags[0], torch.ones(shape)
        )

    output = draft(batch, target_head=llama.head(), objective=ones)
    assert float(output.loss_sum / draft.normaliser(batch)) == pytest.approx(1.0, rel=1e-6)
    assert draft.step_weights.tolist() == pytest.approx([1.0, 0.7788008, 0.6065307, 0.4723666])
    assert float(output.sums["loss"][0]) == float(output.sums["chains"])


@pytest.mark.parametrize("detached", [False, True])
def test_the_confidence_loss_reaches_the_backbone_unless_detached(
    llama: Any, detached: bool
) -> None:
    """T31."""
    gradients = []
    for weight in (1.0, 5.0):
        draft = make_draft(llama, confidence_weight=weight, confidence_detached=detached)
        run(draft, llama, support.make_batch(llama)).loss_sum.backward()
        gradients.append({name: one.grad for name, one in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        same = torch.equal(gradient, gradients[1][name])
        own = name.startswith("confidence_head")
        reached = own or not (detached or name.startswith(("markov_head.markov_w2",)))
        assert same != reached, name


def test_a_batch_without_a_candidate_gives_zero_gradients_to_every_weight(llama: Any) -> None:
    for kind in SEQUENTIAL_HEADS[:3]:
        draft = make_draft(llama, sequential_head=kind)
        batch = support.make_batch(llama)
        batch.supervised_mask[:] = False
        run(draft, llama, batch).loss_sum.backward()
        for name, parameter in draft.named_parameters():
            assert parameter.grad is not None, (kind, name)
            assert float(parameter.grad.abs().max()) == 0.0


def test_one_batch_of_two_rows_is_the_sum_of_both(llama: Any) -> None:
    draft = make_draft(llama, sequential_head="rnn")
    batch = support.make_batch(llama)

    def results(part: TrainBatch) -> list[Tensor]:
        output = run(draft, llama, part)
        gradients = torch.autograd.grad(output.loss_sum, list(draft.parameters()))
        return [output.loss_sum.detach(), *output.sums.values(), *gradients]

    parts = [
        TrainBatch(**{name: value[row : row + 1, :length] for name, value in vars(batch).items()})
        for row, length in enumerate((24, 17))
    ]
    for whole, first, second in zip(
        results(batch), results(parts[0]), results(parts[1]), strict=True
    ):
        torch.testing.assert_close(whole, first + second, rtol=1e-4, atol=1e-4)


def test_a_soft_capped_target_is_corrected_after_its_soft_capping(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("gemma3")
    draft = make_draft(target).eval()
    batch = support.make_batch(target)
    made: list[Predictions] = []
    draft(batch, target_head=target.head(), objective=recording(made))
    correction = made[0].correction
    assert isinstance(correction, LogitCorrection)
    wanted = target.head()(made[0].draft_hidden[0]) + correction.hidden[0] @ correction.weight.T
    (context,) = support.contexts_of(batch, 0, [8])
    block = support.propose_once(draft, context, draft.start(40), 1)
    plan = plan_blocks(batch, torch.tensor([8]), num_steps=4, cumulative=True)
    states = draft._backbone(batch, plan)
    row = (made[0].draft_hidden[0] - states[0, 0]).abs().sum(-1).argmin()
    assert int(block.tokens) == int(wanted[row].argmax())
    assert float(block.token_probs) == pytest.approx(
        float(wanted[row].detach().softmax(-1).max()), rel=1e-4
    )


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_drafting_goes_from_left_to_right_through_the_heads(llama: Any, head: str) -> None:
    """T08, T10: the same states as in training, each step after the token that was drafted."""
    draft = make_draft(llama, **HEADS[head]).eval()
    batch = support.make_batch(llama, (40,))
    state = draft.start(50)
    anchors = [8, 9, 14, 30]
    for anchor, context in zip(anchors, support.contexts_of(batch, 0, anchors), strict=True):
        block = support.propose_once(draft, context, state, 4)
        ids = batch.input_ids[0].tolist()
        states = support.reference_block(draft, batch.aux_hidden_states[0, :anchor], ids[anchor])
        before = [ids[anchor], *block.tokens.tolist()[:-1]]
        corrections, confidences = written_out(draft, states, before)
        logits = llama.head()(states) + torch.stack(corrections)
        assert torch.equal(block.tokens, logits.argmax(-1))
        torch.testing.assert_close(
            block.token_probs, logits.softmax(-1).amax(-1), rtol=1e-3, atol=1e-5
        )
        if confidences:
            assert block.confidences is not None
            assert block.confidences.tolist() == pytest.approx(confidences, rel=1e-4)
        else:
            assert block.confidences is None


def test_several_sequences_draft_as_each_would_alone(llama: Any) -> None:
    draft = make_draft(llama, sequential_head="rnn").eval()
    batch = support.make_batch(llama, (30, 30, 30))
    contexts = [support.contexts_of(batch, row, [9 + 5 * row])[0] for row in range(3)]
    counts = [4, 0, 3]
    sampling = [SamplingSettings(), SamplingSettings(1.0), SamplingSettings(0.7, top_k=5)]
    alone = [
        support.propose_once(
            draft, context, draft.start(40), count, sampling=how,
            generator=torch.Generator().manual_seed(4),
        )
        for context, count, how in zip(contexts, counts, sampling, strict=True)
    ]  # fmt: skip
    together = draft.propose(
        contexts,
        [draft.start(40) for _ in contexts],
        num_draft_tokens=counts,
        sampling=sampling,
        generators=[torch.Generator().manual_seed(4) for _ in contexts],
    )
    for one, other, count in zip(together, alone, counts, strict=True):
        assert len(one.tokens) == count
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.confidences, other.confidences)
        assert (one.probs is None) == (other.probs is None)


def test_a_sampled_step_depends_on_the_token_drawn_before_it(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama, (24,))
    (context,) = support.contexts_of(batch, 0, [10])
    ids = batch.input_ids[0].tolist()
    states = support.reference_block(draft, context.aux_hidden_states[0], ids[10])
    seen = set()
    for seed in range(6):
        block = support.propose_once(
            draft, context, draft.start(30), 4,
            sampling=SamplingSettings(temperature=3.0),
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        before = [ids[10], *block.tokens.tolist()[:-1]]
        corrections, _ = written_out(draft, states, before)
        wanted = ((llama.head()(states) + torch.stack(corrections)) / 3.0).softmax(-1)
        torch.testing.assert_close(block.probs, wanted, rtol=1e-3, atol=1e-6)
        seen.add(tuple(block.tokens.tolist()))
    assert len(seen) > 1


@pytest.mark.lossless
@pytest.mark.parametrize("head", HEADS)
def test_greedy_text_is_the_targets_own(llama: Any, head: str) -> None:
    draft = make_draft(llama, **HEADS[head]).eval()
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 300, (n,), generator=draw).tolist() for n in (3, 9, 30)]
    requests = [Request(prompt, max_new_tokens=16) for prompt in prompts]
    plain = Engine(llama, None, ChainPolicy()).run(requests)
    made = Engine(llama, draft, ChainPolicy(4), batch_size=2).run(requests)
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]


SAMPLING = SamplingSettings(temperature=2.0, top_k=3, top_p=0.98)


def text_law(target: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `length` tokens (fewer at an end of text)."""
    finished: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, chance in going.items():
            ids = torch.tensor([[*prompt, *text]])
            logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
            law = target_probs(logits.double(), SAMPLING)
            for token in law.nonzero().flatten().tolist():
                ended = token in target.eos_token_ids
                (finished if ended else grown)[(*text, token)] = chance * float(law[token])
        going = grown
    return finished | going


def p_value(target: Any, draft: Any, prompt: list[int], law: dict[Any, float]) -> float:
    """Chi-square over whole texts; those with an expected count below 5 share a bin."""
    samples, counts = 500, dict.fromkeys(law, 0)
    generator = torch.Generator().manual_seed(17)
    request = Request(prompt, max_new_tokens=3, sampling=SAMPLING, generator=generator)
    accepted = drafted = 0
    for made in Engine(target, draft, ChainPolicy(3), batch_size=20).run([request] * samples):
        counts[tuple(made.token_ids)] += 1
        drafted += sum(one.proposed for one in made.rounds)
        accepted += sum(one.accepted for one in made.rounds)
    assert 0.2 < accepted / drafted < 0.95, "the test needs tokens of both kinds"
    common = [text for text, chance in law.items() if chance * samples >= 5]
    expected = [law[text] * samples for text in common]
    observed = [float(counts[text]) for text in common]
    if len(common) < len(law):
        expected.append(samples - sum(expected))
        observed.append(samples - sum(observed))
    return float(chisquare(observed, expected).pvalue)


def trained_on_answers(draft: DSparkDraft, target: Any, prompt: list[int], law: Any) -> Any:
    """A draft that is right now and then: a few updates on some of the target's own answers."""
    answers = [text for text in law if len(text) == 3][:40]
    ids = torch.tensor([[*prompt, *text] for text in answers])
    output = target.forward(ids, aux_layer_ids=[0])
    everything = torch.ones_like(ids, dtype=torch.bool)
    batch = TrainBatch(
        input_ids=ids,
        supervised_mask=torch.arange(ids.shape[1])[None].expand_as(ids) >= len(prompt),
        keep_mask=everything,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        aux_hidden_states=output.aux_hidden_states,
        final_hidden_states=output.final_hidden_states,
    )
    support.overfit(draft.train(), target, batch, updates=8)
    return draft.eval()


class Overconfident:
    """Takes the most likely tokens and says that it drew them."""

    def __init__(self, draft: DSparkDraft) -> None:
        self.draft = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.start = draft.start

    def propose(self, *arguments: Any, **settings: Any) -> list[Draft]:
        blocks = self.draft.propose(*arguments, **settings)
        return [replace(block, tokens=block.probs.argmax(-1)) for block in blocks]


@pytest.mark.lossless
def test_sampled_text_has_the_targets_law(tiny_target: Callable[..., Any]) -> None:
    """With a negative control, which must be seen."""
    target = tiny_target("llama", num_hidden_layers=2)
    prompt = torch.randint(4, 300, (5,), generator=torch.Generator().manual_seed(8)).tolist()
    law = text_law(target, prompt, 3)
    torch.manual_seed(0)
    method = DSparkMethod(num_hidden_layers=1, mask_token_id=support.MASK, block_size=4)
    draft = method.build(target.head(), None, (0,))
    draft = trained_on_answers(draft, target, prompt, law)
    assert p_value(target, draft, prompt, law) > 1e-3
    assert p_value(target, Overconfident(draft), prompt, law) < 1e-6


# --- the whole way --------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_a_text_learnt_by_heart_is_accepted_in_full_after_saving_and_reloading(
    tiny: Any, tmp_path: Path, head: str
) -> None:
    """T34; and the confidence head says so."""
    sharp = support.sharp_target(tiny, tmp_path / "target")
    torch.manual_seed(0)
    method = DSparkMethod(
        num_hidden_layers=1, mask_token_id=support.MASK, block_size=4, markov_rank=8,
        sequential_head=head,
    )  # fmt: skip
    draft = method.build(sharp.target.head(), None, support.LAYERS).train()
    learnt = support.overfit(draft, sharp.target, sharp.batch, updates=200)
    assert min(learnt) == 1.0, learnt
    loaded = support.saved_and_loaded(draft, sharp.target, tmp_path / "draft")
    assert loaded.config.sample_from_anchor is True
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    made = generate(sharp.target, loaded, sharp.prompt, max_new_tokens=32, policy=ChainPolicy(4))
    assert made.token_ids == sharp.text
    rounds = made.rounds[:-1]
    assert [one.accepted for one in rounds] == [one.proposed for one in rounds]
    assert {one.proposed for one in rounds} == {4}
    (context,) = support.contexts_of(sharp.batch, 0, [12])
    block = support.propose_once(loaded, context, loaded.start(40), 4)
    assert block.confidences is not None
    assert float(block.confidences.min()) > 0.7
