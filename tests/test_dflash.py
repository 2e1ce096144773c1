"""DFlash: blocks against an uncached reference, anchors and what they may look at, the mask token,
drafting against training, decoding, the loop, and a text learnt by heart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import block_support as support
import train_support

from draftsmith.inference.decode import generate
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy
from draftsmith.models.block_anchors import anchor_candidates, draw_anchors, plan_blocks
from draftsmith.models.block_attention import block_attention
from draftsmith.models.dflash import DFlashDraft, DFlashMethod
from draftsmith.models.protocols import SamplingSettings, TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective

SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "sliding": SLIDING,
    "plain": {"qk_norm": False, "attention_bias": True},
}


def make_draft(target: TargetModel, **settings: Any) -> DFlashDraft:
    return support.make_draft(DFlashMethod, target, **({"block_size": 5} | settings))


def run(draft: Any, target: TargetModel, batch: TrainBatch, objective: str = "ce") -> Any:
    return draft(batch, target_head=target.head(), objective=make_objective(objective))


@pytest.fixture
def llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama")


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["published", "sliding"])
def test_every_block_of_a_batch_equals_an_uncached_one(llama: Any, variant: str) -> None:
    draft = make_draft(llama, **VARIANTS[variant])
    batch = support.make_batch(llama)
    plan = plan_blocks(batch, anchor_candidates(batch), num_steps=4, cumulative=False)
    assert len(plan.anchors) == 18 + 11
    found = draft._backbone(batch, plan)
    for index, flat in enumerate(plan.anchors.tolist()):
        row, anchor = divmod(flat, 24)
        wanted = support.reference_block(
            draft, batch.aux_hidden_states[row, :anchor], int(batch.input_ids[row, anchor])
        )
        torch.testing.assert_close(found[index], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["dense", "grouped"])
@pytest.mark.parametrize("window", [None, 3, 9])
def test_attention_equals_its_definition(window: int | None, path: str) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros(3, 20, dtype=torch.long)
    whole = torch.ones_like(ids, dtype=torch.bool)
    batch = TrainBatch(ids, whole, whole, ids, ids[..., None].float(), ids[..., None].float())
    # An anchor without context, a row without blocks, more blocks than one group holds.
    anchors = torch.tensor([0, 4, 5, 17, *range(40, 52)])
    plan = plan_blocks(batch, anchors, num_steps=3, cumulative=False)
    assert len(plan.context) == 17 + 11

    def drawn(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    parts = [drawn(16, 3, 4, 8), drawn(16, 3, 2, 8), drawn(16, 3, 2, 8)]
    parts += [drawn(28, 2, 8), drawn(28, 2, 8)]
    found = block_attention(*parts, plan=plan, window=window, path=path)
    wanted = dense_attention(*parts, anchors=anchors, seq=20, window=window)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, parts, upstream),
        torch.autograd.grad(wanted, parts, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    *,
    anchors: Tensor,
    seq: int,
    window: int | None,
) -> Tensor:
    """The definition, with the scores of all slots and the whole context in memory."""
    blocks, slots = query.shape[:2]
    lasts = {int(flat) // seq: int(flat) % seq for flat in anchors}
    entries = [row * seq + place for row, last in lasts.items() for place in range(last)]
    places = torch.tensor(entries)
    owner = torch.arange(blocks).repeat_interleave(slots)
    at = anchors[owner] + torch.arange(slots).repeat(blocks)
    sees = (places // seq == anchors[owner, None] // seq) & (places < anchors[owner, None])
    own = owner[:, None] == owner
    if window is not None:
        sees &= places > at[:, None] - window
        own &= (at <= at[:, None]) & (at > at[:, None] - window)
    keys = torch.cat([context_key, key.flatten(0, 1)]).repeat_interleave(2, 1)
    values = torch.cat([context_value, value.flatten(0, 1)]).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", query.flatten(0, 1), keys) * query.shape[-1] ** -0.5
    probs = scores.masked_fill(~torch.cat([sees, own], 1), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, values).unflatten(0, (blocks, slots))


def test_inputs_and_labels_of_a_block_on_readable_ids(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T07: ids 10..19, anchor 3, block 4."""
    draft = make_draft(llama, block_size=4)
    batch = support.make_batch(llama, (10,), start=3)
    batch.input_ids = torch.arange(10, 20)[None]
    read: list[Tensor] = []
    embed = draft._embed
    monkeypatch.setattr(draft, "_embed", lambda ids: read.append(ids) or embed(ids))
    draft.choose_anchors = lambda _batch: torch.tensor([3, 8])  # type: ignore[method-assign]
    plan = draft._plan_for(batch, "forward")
    draft._backbone(batch, plan)
    mask = support.MASK
    assert read[0].view(2, 4).tolist() == [[13, mask, mask, mask], [18, mask, mask, mask]]
    # Slot k predicts the token of its own position; slot 0, the anchor's, predicts nothing.
    assert plan.labels.tolist() == [[14, 15, 16], [19, -1, -1]]
    assert plan.supervised.tolist() == [[True] * 3, [True, False, False]]
    assert plan.places.tolist() == [[3, 4, 5], [8, 8, 8]]
    assert draft.config.num_steps == 3


def test_an_untrained_draft_is_unsure(tiny_target: Callable[..., Any]) -> None:
    for family in ("llama", "gemma3"):
        target = tiny_target(family)
        head = target.head()
        torch.manual_seed(0)
        draft = DFlashMethod(num_hidden_layers=2, mask_token_id=support.MASK).build(
            head, None, support.LAYERS
        )
        batch = support.make_batch(target)
        plan = plan_blocks(batch, torch.tensor([8, 12]), num_steps=15, cumulative=False)
        raw = draft._backbone(batch, plan) @ head.weight.T
        assert 0.6 < float(raw.detach().std()) < 1.6


def test_a_gap_in_the_mask_does_not_end_a_block(llama: Any) -> None:
    batch = support.make_batch(llama, (12,), start=2)
    batch.supervised_mask[0, 5] = False
    anchors = torch.tensor([3])
    for cumulative, wanted in ((False, [True, False, True, True]), (True, [True] + [False] * 3)):
        plan = plan_blocks(batch, anchors, num_steps=4, cumulative=cumulative)
        assert plan.supervised[0].tolist() == wanted


# --- anchors --------------------------------------------------------------------------------------


def test_anchors_stand_where_the_target_wrote_two_tokens(llama: Any) -> None:
    batch = support.make_batch(llama, (10, 7), start=4)
    batch.supervised_mask[0, 6] = False
    candidates = anchor_candidates(batch)
    assert candidates.tolist() == [4, 7, 8, 14, 15]


def test_anchors_are_drawn_anew_for_every_step_and_repeat_with_the_generator() -> None:
    candidates = torch.arange(100, 200)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = (draw_anchors(candidates, 9) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(draw_anchors(candidates, 9), first)
    assert not torch.equal(first, second)
    assert first.tolist() == sorted(set(first.tolist()))
    torch.manual_seed(8)  # Another micro-batch.
    assert not torch.equal(draw_anchors(candidates, 9), first)
    assert torch.equal(draw_anchors(candidates, 200), candidates)


def test_a_validation_takes_every_candidate_and_draws_nothing(llama: Any) -> None:
    draft = make_draft(llama, num_anchors=3).eval()
    batch = support.make_batch(llama)
    before = torch.get_rng_state()
    assert torch.equal(draft.choose_anchors(batch), anchor_candidates(batch))
    assert torch.equal(before, torch.get_rng_state())
    sums = run(draft, llama, batch).sums
    assert float(sums["chains"]) == len(anchor_candidates(batch))
    assert float(sums["rounds"]) > 0
    assert "rounds" not in run(draft.train(), llama, batch).sums


def test_every_candidate_becomes_an_anchor_in_the_end() -> None:
    torch.manual_seed(0)
    drawn = torch.cat([draw_anchors(torch.arange(20), 4) for _ in range(200)])
    counts = torch.bincount(drawn, minlength=20)
    assert int(counts.min()) > 20
    assert int(counts.max()) < 65  # 40 expected.


def test_the_normaliser_counts_the_blocks_that_the_forward_trains_on(llama: Any) -> None:
    draft = make_draft(llama, num_anchors=3)
    batch = support.make_batch(llama)
    weights = draft.step_weights.double()
    assert weights.tolist() == pytest.approx([1.0, 0.86688, 0.75148, 0.65144], abs=1e-5)
    divisors = set()
    for first in ("normaliser", "forward") * 4:
        if first == "normaliser":
            divisor = draft.normaliser(batch)
            sums = run(draft, llama, batch).sums
        else:
            sums = run(draft, llama, batch).sums
            divisor = draft.normaliser(batch)
        assert float(sums["chains"]) == 3
        assert float(divisor) == pytest.approx(float((sums["supervised"] * weights).sum()))
        divisors.add(round(float(divisor), 6))
    assert len(divisors) > 1, "a batch that comes again gets new anchors"
    draft.eval()
    assert len({float(draft.normaliser(batch)) for _ in range(3)}) == 1


# --- what contributes -----------------------------------------------------------------------------


def test_a_padded_batch_is_the_sum_of_its_rows(llama: Any) -> None:
    draft = make_draft(llama)
    batch = support.make_batch(llama)

    def results(part: TrainBatch) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        output = run(draft, llama, part)
        gradients = torch.autograd.grad(output.loss_sum, list(draft.parameters()))
        return output.loss_sum.detach(), output.sums, list(gradients)

    whole = results(batch)
    rows = []
    for row, length in enumerate((24, 17)):
        cut = {name: value[row : row + 1, :length] for name, value in vars(batch).items()}
        rows.append(results(TrainBatch(**cut)))
    torch.testing.assert_close(whole[0], rows[0][0] + rows[1][0])
    for name, value in whole[1].items():
        torch.testing.assert_close(value, rows[0][1][name] + rows[1][1][name])
    for one, first, second in zip(whole[2], rows[0][2], rows[1][2], strict=True):
        torch.testing.assert_close(one, first + second, rtol=1e-4, atol=1e-5)


def test_gradient_comes_from_chosen_blocks_and_what_they_see_only(llama: Any) -> None:
    """T36, T12: nothing behind an anchor, nothing of dropped blocks, nothing of other rows."""
    draft = make_draft(llama)
    batch = support.make_batch(llama)
    batch.aux_hidden_states = batch.aux_hidden_states.detach().requires_grad_()
    draft.choose_anchors = lambda _batch: torch.tensor([9])  # type: ignore[method-assign]
    run(draft, llama, batch).loss_sum.backward()
    gradient = batch.aux_hidden_states.grad
    assert gradient is not None
    assert bool((gradient[0, :9].abs().sum(-1) > 0).all())
    assert float(gradient[0, 9:].abs().max()) == 0.0
    assert float(gradient[1].abs().max()) == 0.0


def test_one_rows_loss_does_not_depend_on_another_row(llama: Any) -> None:
    """T12: labels, positions and attention stay within their row."""
    draft = make_draft(llama)
    batch = support.make_batch(llama, (24, 24))
    second = torch.arange(24 + 5, 24 + 23)
    draft.choose_anchors = lambda _batch: second  # type: ignore[method-assign]
    before = run(draft, llama, batch).loss_sum
    batch.input_ids[0] = 7
    batch.aux_hidden_states[0] += 1.0
    batch.final_hidden_states[0] += 1.0
    assert torch.equal(run(draft, llama, batch).loss_sum, before)
    # No label beyond the end: the last anchor has one label left.
    plan = plan_blocks(batch, second, num_steps=4, cumulative=False)
    assert plan.labels[-1].tolist()[1:] == [-1, -1, -1]


def test_a_batch_without_a_candidate_gives_a_loss_of_zero_and_zero_gradients(llama: Any) -> None:
    draft = make_draft(llama)
    batch = support.make_batch(llama)
    batch.supervised_mask[:] = False
    output = run(draft, llama, batch)
    assert float(output.loss_sum.detach()) == float(draft.normaliser(batch)) == 0.0
    output.loss_sum.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0.0
    assert float(output.sums["chains"]) == 0.0


def test_sums_by_step_are_those_of_the_blocks_written_out(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama)
    output = run(draft, llama, batch, "kl")
    head = llama.head()
    for name in ("rounds", "round_tokens"):  # tests/test_monitoring.py
        del output.sums[name]
    wanted = {name: torch.zeros(4, dtype=torch.float64) for name in output.sums}
    loss = 0.0
    for flat in anchor_candidates(batch).tolist():
        row, anchor = divmod(flat, 24)
        states = support.reference_block(
            draft, batch.aux_hidden_states[row, :anchor], int(batch.input_ids[row, anchor])
        )
        greedy = sampled = 1.0
        for step in range(4):
            label = anchor + 1 + step
            if label >= 24 or not batch.supervised_mask[row, label]:
                break
            q = head(states[step + 1]).double().softmax(-1)
            p = head(batch.final_hidden_states[row, label - 1]).double().softmax(-1)
            greedy *= float(q.argmax() == p.argmax())
            sampled *= float(torch.minimum(p, q).sum())
            weight = float(torch.exp(torch.tensor(-step / 7.0)))
            wanted["loss"][step] += weight * float(-(p * q.log()).sum())
            wanted["supervised"][step] += 1
            wanted["correct"][step] += float(q.argmax() == p.argmax())
            wanted["acceptance"][step] += float(torch.minimum(p, q).sum())
            wanted["greedy_joint"][step] += greedy
            wanted["sampled_joint"][step] += sampled
        loss += 1
    wanted["in_vocabulary"] = wanted["supervised"]
    wanted["chains"] = torch.tensor(loss, dtype=torch.float64)
    for name, value in output.sums.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4)
    assert float(output.loss_sum.detach()) == pytest.approx(float(wanted["loss"].sum()), rel=1e-4)


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "granite", "phi", "qwen3"])
def test_any_target_family_is_trained_on_with_its_own_head(
    tiny_target: Callable[..., Any], family: str
) -> None:
    target = tiny_target(family)
    draft = make_draft(target)
    batch = support.make_batch(target)
    run(draft, target, batch, "kl").loss_sum.backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())
    prompt = torch.randint(4, 300, (1, 9), generator=torch.Generator().manual_seed(3))
    plain = generate(target, None, prompt, max_new_tokens=16).token_ids
    made = generate(target, draft.eval(), prompt, max_new_tokens=16, policy=ChainPolicy(4))
    assert made.token_ids == plain


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_config_says_what_engines_would_guess(llama: Any, tmp_path: Path) -> None:
    draft = make_draft(llama, **SLIDING)
    loaded = support.saved_and_loaded(draft, llama, tmp_path / "draft")
    text = (tmp_path / "draft" / "config.json").read_text()
    for name in ("sample_from_anchor", "mask_token_id", "aux_layer_ids", "block_size",
                 "layer_types", "sliding_window"):  # fmt: skip
        assert f'"{name}"' in text
    assert loaded.config.sample_from_anchor is False
    assert loaded.config.windows == [None, 6]
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_head_of_another_target_is_refused(llama: Any, tiny_target: Callable[..., Any]) -> None:
    draft = make_draft(llama)
    other = tiny_target("llama", vocab_size=352)
    with pytest.raises(ValueError, match="belongs to another target"):
        draft.attach_target(embed_tokens=other.embed_tokens, head=other.head())
    with pytest.raises(ValueError, match="head=TargetHead"):
        draft.attach_target(embed_tokens=other.embed_tokens)


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_drafting_equals_the_training_forward(
    llama: Any, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T08, I18, X13: same states for the same anchor, also beyond a hundred positions."""
    draft = make_draft(llama, **VARIANTS[variant]).eval()
    batch = support.make_batch(llama, (140,))
    anchors = [8, 9, 12, 17, 120, 134]
    plan = plan_blocks(batch, torch.tensor(anchors), num_steps=4, cumulative=False)
    trained = draft._backbone(batch, plan)
    found: list[Tensor] = []
    norm = draft.norm.forward
    monkeypatch.setattr(
        draft.norm, "forward", lambda states: found.append(norm(states)) or found[-1]
    )
    state = draft.start(16)  # Too short: the cache grows.
    for context, wanted in zip(support.contexts_of(batch, 0, anchors), trained, strict=True):
        block = support.propose_once(draft, context, state, 4)
        torch.testing.assert_close(found[-1], wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(block.tokens, llama.head()(wanted[1:]).argmax(-1))
        assert state.cache.committed == context.token_ids.shape[1] - 1, "accepted features only"


def test_several_sequences_draft_as_each_would_alone(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama, (30, 30, 30))
    anchors = [[8, 12, 20], [11, 13, 15], [6, 16, 26]]
    alone = []
    for row in range(3):
        state = draft.start(40)
        contexts = support.contexts_of(batch, row, anchors[row])
        alone.append([support.propose_once(draft, one, state, (0, 2, 3)[row]) for one in contexts])
    states = [draft.start(40) for _ in range(3)]
    rows = [support.contexts_of(batch, row, anchors[row]) for row in range(3)]
    for turn in range(3):
        together = draft.propose(
            [contexts[turn] for contexts in rows],
            states,
            num_draft_tokens=[0, 2, 3],
            sampling=[SamplingSettings()] * 3,
            generators=[None] * 3,
        )
        for row, block in enumerate(together):
            assert torch.equal(block.tokens, alone[row][turn].tokens)
            torch.testing.assert_close(block.token_probs, alone[row][turn].token_probs)


def test_a_block_that_would_pass_the_last_position_is_not_drafted(llama: Any) -> None:
    draft = make_draft(llama, max_position_embeddings=20).eval()
    batch = support.make_batch(llama, (24,))
    state = draft.start(30)
    first, last, beyond = support.contexts_of(batch, 0, [10, 15, 16])
    assert len(support.propose_once(draft, first, state, 9).tokens) == 4
    assert len(support.propose_once(draft, last, state, 9).tokens) == 4
    assert len(support.propose_once(draft, beyond, state, 9).tokens) == 0
    prompt = torch.randint(4, 300, (1, 9), generator=torch.Generator().manual_seed(3))
    plain = generate(llama, None, prompt, max_new_tokens=20).token_ids
    made = generate(llama, draft, prompt, max_new_tokens=20, policy=ChainPolicy(4))
    assert made.token_ids == plain


def test_a_context_that_leaves_a_gap_is_refused(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama, (24,))
    state = draft.start(30)
    first, _, last = support.contexts_of(batch, 0, [10, 12, 15])
    support.propose_once(draft, first, state, 4)
    with pytest.raises(ValueError, match="holds 10 committed positions.*12 to 14"):
        support.propose_once(draft, last, state, 4)


def test_sampled_proposals_report_the_distribution_that_they_were_drawn_from(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama, (24,))
    (context,) = support.contexts_of(batch, 0, [10])
    sampling = SamplingSettings(temperature=1.5, top_k=4)
    states = support.reference_block(
        draft, context.aux_hidden_states[0], int(batch.input_ids[0, 10])
    )
    logits = llama.head()(states[1:]) / 1.5
    kept = logits >= logits.topk(4).values[:, -1:]
    wanted = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    counts = torch.zeros_like(wanted)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        block = support.propose_once(
            draft, context, draft.start(30), 4, sampling=sampling, generator=generator
        )
        torch.testing.assert_close(block.probs, wanted, rtol=1e-3, atol=1e-5)
        counts[torch.arange(4), block.tokens] += 1
    assert float((counts / 300 - wanted).abs().max()) < 0.12


def test_a_repetition_penalty_acts_from_left_to_right(llama: Any) -> None:
    draft = make_draft(llama).eval()
    batch = support.make_batch(llama, (24,))
    (context,) = support.contexts_of(batch, 0, [10])
    states = support.reference_block(
        draft, context.aux_hidden_states[0], int(batch.input_ids[0, 10])
    )
    seen = set(batch.input_ids[0, :11].tolist())
    wanted = []
    for logits in llama.head()(states[1:]):
        for token in seen:
            logits[token] = logits[token] / 3.0 if logits[token] > 0 else logits[token] * 3.0
        wanted.append(int(logits.argmax()))
        seen.add(wanted[-1])
    sampling = SamplingSettings(repetition_penalty=3.0)
    block = support.propose_once(draft, context, draft.start(30), 4, sampling=sampling)
    assert block.tokens.tolist() == wanted


@pytest.mark.lossless
def test_greedy_text_is_the_targets_own(llama: Any) -> None:
    draft = make_draft(llama).eval()
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(4, 300, (n,), generator=draw).tolist() for n in (3, 9, 14, 30)]
    requests = [Request(prompt, max_new_tokens=20) for prompt in prompts]
    plain = Engine(llama, None, ChainPolicy()).run(requests)
    for policy in (ChainPolicy(4), ChainPolicy(2), DynamicTreePolicy(depth=3)):
        made = Engine(llama, draft, policy, batch_size=3).run(requests)
        assert [one.token_ids for one in made] == [one.token_ids for one in plain]


# --- the whole way --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> train_support.Inputs:
    return train_support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


def test_a_resumed_run_trains_on_the_same_anchors(
    inputs: train_support.Inputs, tmp_path: Path
) -> None:
    method = {
        "_target_": "draftsmith.models.dflash.DFlashMethod",
        "num_hidden_layers": 1,
        "block_size": 4,
        "num_anchors": 8,
        "aux_layer_ids": [0, 1, 2],
    }

    def settings(*overrides: str) -> Any:
        return train_support.compose(inputs, "train.save_every=3", *overrides, method=method)

    whole = train_support.run_in_process(settings("train.max_steps=6"), tmp_path / "whole")
    short = train_support.run_in_process(settings("train.max_steps=3"), tmp_path / "parts")
    resumed = train_support.run_in_process(settings("train.max_steps=6"), tmp_path / "parts")
    losses = train_support.losses(whole)
    assert len(losses) == 6
    assert losses[:3] == train_support.losses(short)[:3]
    assert losses[3:] == train_support.losses(resumed)[-3:]
    assert len(whole[0]["acceptance_greedy"]) == 3
    # The tokenizer's 312 entries leave an unused id.
    assert '"mask_token_id": 312' in (tmp_path / "whole" / "draft" / "config.json").read_text()


def test_a_text_learnt_by_heart_is_accepted_in_full_after_saving_and_reloading(
    sharp: Any, tmp_path: Path
) -> None:
    """T34: the best single end-to-end check."""
    draft = make_draft(sharp.target, num_hidden_layers=1, decay=4.0)
    learnt = support.overfit(draft, sharp.target, sharp.batch, updates=200)
    assert min(learnt) == 1.0, learnt
    loaded = support.saved_and_loaded(draft, sharp.target, tmp_path / "draft")
    made = generate(sharp.target, loaded, sharp.prompt, max_new_tokens=32, policy=ChainPolicy(4))
    assert made.token_ids == sharp.text
    rounds = made.rounds[:-1]
    assert [one.accepted for one in rounds] == [one.proposed for one in rounds]
    assert {one.proposed for one in rounds} == {4}


@pytest.fixture(scope="module")
def sharp(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return support.sharp_target(tiny, tmp_path_factory.mktemp("sharp-target"))
