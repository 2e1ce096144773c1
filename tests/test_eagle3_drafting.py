"""EAGLE-3 drafting through the cache against the training forward; sampling; limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.inference.policies import ChainPolicy, DraftRequest
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import (
    Draft,
    DraftContext,
    ObjectiveOutput,
    Predictions,
    SamplingSettings,
    TrainBatch,
)
from draftsmith.models.sampling import warp_logits
from draftsmith.models.vocabulary_map import set_draft_vocabulary
from draftsmith.train.objectives import make_objective

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 40, 24, 32, 2
GREEDY = SamplingSettings()


def make_draft(*, seed: int = 0, **overrides: Any) -> Eagle3Draft:
    """A random float32 draft over three of five tokens, with random embeddings."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 128,
        "aux_layer_ids": list(range(LAYERS)),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(Eagle3Config(**(settings | overrides)))
        for parameter in draft.parameters():
            if parameter.ndim == 1:  # A forgotten norm weight must show.
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        embeddings = nn.Embedding(VOCAB, HIDDEN)
    if draft.config.draft_vocab_size < VOCAB:
        ids = [token for token in range(VOCAB) if token % 5 not in (1, 4)]
        set_draft_vocabulary(draft, torch.tensor(ids))
    draft.attach_target(embed_tokens=embeddings.requires_grad_(False))
    return draft.eval()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_layers": {"num_hidden_layers": 2},
    "qk_norm_and_bias": {"qk_norm": True, "attention_bias": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "rope_at_the_token": {"rope_offset": 1},
    "own_head_dim": {"head_dim": 16},
    "full_vocabulary": {"draft_vocab_size": VOCAB},
}


def make_context(length: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random committed tokens [1, length] and features of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, length), generator=generator)
    return ids, torch.randn(1, length - 1, LAYERS * HIDDEN, generator=generator)


def context_of(ids: Tensor, features: Tensor, new: int) -> DraftContext:
    """The context of a round that commits the last `new` features."""
    aux = features[:, features.shape[1] - new :]
    return DraftContext(ids, aux, aux[..., :HIDDEN])


def propose(
    draft: Eagle3Draft,
    context: DraftContext,
    state: Any,
    *,
    num_draft_tokens: int,
    sampling: SamplingSettings,
    generator: torch.Generator | None = None,
) -> Draft:
    """A chain, as the decoder asks for it."""
    depth = min(num_draft_tokens, draft.max_depth(context.token_ids.shape[1]))
    if depth < 1:
        return Draft.nothing(context.token_ids)
    request = DraftRequest(context, state, depth, sampling, generator, VOCAB)
    return ChainPolicy(num_draft_tokens).draft(draft, [request])[0]


def simulated_logits(draft: Eagle3Draft, read: list[int], features: Tensor, steps: int) -> Tensor:
    """What the training forward computes for the last slot: [steps, vocab], -inf if not drafted.

    Args:
        read: Tokens of all positions: the committed ones, then `steps` drafted ones.
        features: [1, committed - 1, layers * hidden].
    """
    ids = torch.tensor([read])
    everything = torch.ones_like(ids, dtype=torch.bool)
    aux = torch.zeros(1, len(read), features.shape[-1])
    aux[:, : features.shape[1]] = features
    batch = TrainBatch(
        input_ids=ids,
        supervised_mask=everything,
        keep_mask=everything,
        position_ids=torch.arange(len(read))[None],
        aux_hidden_states=aux,
        final_hidden_states=torch.zeros(1, len(read), HIDDEN),
    )
    made: list[Predictions] = []

    def record(predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        made.append(predictions)
        return make_objective("kl")(predictions, target_head)

    draft(batch, target_head=nn.Linear(HIDDEN, VOCAB), objective=record)
    slot = features.shape[1] - 1
    # Places, and so rows, start at 1: slot t is taught at places t + 1, t + 2, ...
    states = torch.stack([made[0].draft_hidden[step, slot + step] for step in range(steps)])
    narrow = (states @ draft.lm_head.weight.T).detach()
    logits = torch.full((steps, VOCAB), float("-inf"))
    ids_drafted = torch.arange(VOCAB)
    if draft.config.draft_vocab_size < VOCAB:
        ids_drafted = draft.t2d.nonzero().squeeze(-1)
    logits[:, ids_drafted] = narrow
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_greedy_drafting_equals_the_uncached_training_forward(variant: str) -> None:
    """I18: positions of drafted pairs are those of training, at contexts of 6 to 80 tokens."""
    draft = make_draft(**VARIANTS[variant])
    ids, features = make_context(90)
    state, length = draft.start(128), 0
    # Rounds that commit 5, 1, 3 and 70 tokens: rejected entries are overwritten, the cache grows.
    for stop in (6, 7, 10, 80):
        context = context_of(ids[:, :stop], features[:, : stop - 1], stop - 1 - length)
        found = propose(draft, context, state, num_draft_tokens=5, sampling=GREEDY)
        assert found.probs is None
        tokens = found.tokens.tolist()
        read = ids[0, :stop].tolist() + tokens
        logits = simulated_logits(draft, read, features[:, : stop - 1], 5)
        assert logits.argmax(-1).tolist() == tokens
        length = stop - 1


def test_a_sampled_chain_reports_the_distribution_it_was_drawn_from() -> None:
    draft = make_draft()
    sampling = SamplingSettings(temperature=0.7, top_k=6, top_p=0.9)
    ids, features = make_context(7)
    generator = torch.Generator().manual_seed(5)
    made = propose(
        draft, context_of(ids, features, 6), draft.start(128), num_draft_tokens=4,
        sampling=sampling, generator=generator,
    )  # fmt: skip
    assert made.probs is not None
    assert made.probs.shape == (4, VOCAB)
    torch.testing.assert_close(made.probs.sum(-1), torch.ones(4))
    assert not made.probs[:, ~draft.t2d].any()
    assert (made.probs.gather(1, made.tokens[:, None]) > 0).all()
    logits = simulated_logits(draft, ids[0].tolist() + made.tokens.tolist(), features, 4)
    expected = warp_logits(logits, sampling).softmax(-1)
    torch.testing.assert_close(made.probs, expected, rtol=1e-4, atol=1e-5)
    assert ((made.probs > 0).sum(-1) <= 6).all()


def test_sampled_tokens_follow_the_reported_distribution() -> None:
    draft = make_draft()
    ids, features = make_context(5)
    generator = torch.Generator().manual_seed(5)
    counts = torch.zeros(VOCAB)
    rounds = 600
    for _ in range(rounds):
        made = propose(
            draft, context_of(ids, features, 4), draft.start(128), num_draft_tokens=1,
            sampling=SamplingSettings(temperature=1.0), generator=generator,
        )  # fmt: skip
        counts[made.tokens] += 1
    assert made.probs is not None
    expected = made.probs[0] * rounds
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic < 3 * common.sum()


def test_drafting_stops_at_the_position_limit_and_stays_off_behind_it() -> None:
    draft = make_draft(max_position_embeddings=12)
    ids, features = make_context(20)
    state, before, drafted = draft.start(128), 0, []
    for stop in (9, 10, 12, 13, 14, 20):
        context = context_of(ids[:, :stop], features[:, : stop - 1], stop - 1 - before)
        drafted.append(
            len(propose(draft, context, state, num_draft_tokens=4, sampling=GREEDY).tokens)
        )
        before = stop - 1
    # The pair that predicts token n sits at position n - 2 or later; 11 is the last position.
    assert drafted == [4, 4, 2, 1, 0, 0]


def test_a_round_without_a_draft_loses_nothing_when_the_model_is_asked_again() -> None:
    draft = make_draft()
    ids, features = make_context(5)
    state = draft.start(8)
    propose(
        draft, context_of(ids[:, :4], features[:, :3], 3), state, num_draft_tokens=1,
        sampling=GREEDY,
    )  # fmt: skip
    context = context_of(ids, features, 1)
    later = propose(draft, context, state, num_draft_tokens=2, sampling=GREEDY)
    whole = context_of(ids, features, 4)
    again = propose(draft, whole, draft.start(8), num_draft_tokens=2, sampling=GREEDY)
    assert torch.equal(later.tokens, again.tokens)


def test_a_context_that_skips_a_position_is_refused() -> None:
    draft = make_draft()
    ids, features = make_context(6)
    with pytest.raises(ValueError, match="holds 0 committed pairs"):
        propose(
            draft,
            context_of(ids, features, 2),
            draft.start(128),
            num_draft_tokens=1,
            sampling=GREEDY,
        )


def test_warping_equals_transformers_generate_and_refuses_greedy() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 3
    sampling = SamplingSettings(temperature=0.5, top_k=20, top_p=0.8)
    found = warp_logits(logits, sampling)
    assert found.shape == logits.shape
    scaled = logits / 0.5
    kept = scaled >= scaled.topk(20).values[..., -1:]
    probs = scaled.masked_fill(~kept, float("-inf")).softmax(-1)
    order = probs.argsort(-1, descending=True)
    ahead = probs.gather(-1, order).cumsum(-1) - probs.gather(-1, order)
    expected = torch.zeros_like(kept).scatter(-1, order, ahead < 0.8)
    assert torch.equal(found.isfinite(), expected & kept)
    torch.testing.assert_close(found[found.isfinite()], scaled[found.isfinite()])
    assert torch.equal(warp_logits(logits, SamplingSettings(temperature=1.0)), logits)
    with pytest.raises(ValueError, match="temperature is 0"):
        warp_logits(logits, GREEDY)
