"""Options of EAGLE-3 beyond the published layout: norms, what a step reads, memory, positions.

The norms' arithmetic is in the uncached reference of tests/test_eagle3.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Method
from draftsmith.models.protocols import ObjectiveOutput, Predictions, TrainBatch
from draftsmith.models.vocabulary_map import set_draft_vocabulary
from draftsmith.train.objectives import make_objective

VOCAB, HIDDEN, LAYERS, SEQ = 40, 16, 3, 14
DRAFT_IDS = torch.tensor([0, 2, 3, 5, 6, 9, 11, 17, 20, 21, 30, 39])


def make_draft(**overrides: Any) -> Eagle3Draft:
    """A random float32 draft over twelve of forty tokens."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(DRAFT_IDS),
        "max_position_embeddings": 64,
        "aux_layer_ids": list(range(LAYERS)),
        "step_weights": [1.0, 0.8, 0.6],
    }
    torch.manual_seed(0)
    draft = Eagle3Draft(Eagle3Config(**(settings | overrides)))
    set_draft_vocabulary(draft, DRAFT_IDS)
    embeddings = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    draft.attach_target(embed_tokens=embeddings)
    return draft


def make_batch() -> TrainBatch:
    """Two rows of 14 and 10 tokens, supervised from the fifth on."""
    generator = torch.Generator().manual_seed(1)
    keep = torch.arange(SEQ)[None] < torch.tensor([[SEQ], [10]])
    return TrainBatch(
        input_ids=torch.randint(0, VOCAB, (2, SEQ), generator=generator) * keep,
        supervised_mask=keep & (torch.arange(SEQ)[None] >= 4),
        keep_mask=keep,
        position_ids=torch.arange(SEQ).expand(2, SEQ),
        aux_hidden_states=torch.randn(2, SEQ, LAYERS * HIDDEN, generator=generator),
        final_hidden_states=torch.randn(2, SEQ, HIDDEN, generator=generator),
    )


def make_head() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
    return head


class Recording:
    """The KL objective; keeps what it was given."""

    predictions: Predictions

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        self.predictions = predictions
        return make_objective("kl")(predictions, target_head)


def gradients(draft: Eagle3Draft) -> dict[str, Tensor]:
    draft.zero_grad()
    draft(make_batch(), target_head=make_head(), objective=Recording()).loss_sum.backward()
    return {name: weight.grad.clone() for name, weight in draft.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("norm_output", [False, True])
def test_recomputing_the_steps_changes_no_gradient(layers: int, norm_output: bool) -> None:
    options = {"num_hidden_layers": layers, "norm_output": norm_output}
    plain = make_draft(**options)
    recomputed = make_draft(**options, checkpoint_steps=True)
    recomputed.load_state_dict(plain.state_dict())
    wanted, found = gradients(plain), gradients(recomputed)
    for name, gradient in wanted.items():
        assert float(gradient.abs().max()) > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def kept_bytes(draft: Eagle3Draft) -> int:
    """Bytes that the forward pass keeps for the backward pass, without the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in draft.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = draft(make_batch(), target_head=make_head(), objective=Recording())
    assert output.loss_sum.requires_grad
    return sum(kept.values())


def test_a_recomputed_step_keeps_little() -> None:
    weights = [1.0] * 7
    plain = kept_bytes(make_draft(step_weights=weights, intermediate_size=256))
    recomputed = kept_bytes(
        make_draft(step_weights=weights, intermediate_size=256, checkpoint_steps=True)
    )
    assert recomputed < 0.25 * plain


def embedded_ids(draft: Eagle3Draft, objective: Any) -> list[Tensor]:
    """What was looked up in the embeddings, in order: the batch, then each step's own tokens."""
    looked_up: list[Tensor] = []
    embeddings = draft._target_embeddings[0]
    hook = embeddings.register_forward_pre_hook(lambda _, args: looked_up.append(args[0].clone()))
    draft(make_batch(), target_head=make_head(), objective=objective)
    hook.remove()
    return looked_up


def test_steps_read_the_true_tokens_unless_told_otherwise() -> None:
    """T05: own states are fed back, the text's tokens are read."""
    looked_up = embedded_ids(make_draft(), Recording())
    assert len(looked_up) == 1
    assert torch.equal(looked_up[0], make_batch().input_ids.flatten())


def test_an_own_token_is_the_most_likely_one_of_the_step_before() -> None:
    recording = Recording()
    draft = make_draft(step_tokens=["true", "own", "true"])
    looked_up = embedded_ids(draft, recording)
    assert len(looked_up) == 2
    made = recording.predictions
    chosen = DRAFT_IDS[(made.draft_hidden[0] @ draft.lm_head.weight.T).argmax(-1)]
    # Step 0 predicts every supervised place from the slot before it: the active slots, in order,
    # are those plus the ones in front of the first place of a row, which begin with step 1 or 2.
    own = looked_up[1].tolist()
    assert set(own) <= set(DRAFT_IDS.tolist())
    remaining = iter(own)
    assert all(token in remaining for token in chosen.tolist())


def test_reading_own_tokens_changes_the_later_steps_only() -> None:
    true, own = Recording(), Recording()
    draft = make_draft()
    draft(make_batch(), target_head=make_head(), objective=true)
    draft.config.step_tokens = ["true", "true", "own"]
    draft(make_batch(), target_head=make_head(), objective=own)
    before, after = true.predictions.draft_hidden, own.predictions.draft_hidden
    assert torch.equal(before[:2], after[:2])
    assert not torch.allclose(before[2], after[2])


def test_layers_of_any_scale_weigh_the_same_under_one_norm_per_layer() -> None:
    """T30: one norm over all features is blind to a common factor, one per layer to each."""
    draft = make_draft(fc_norm=True)
    batch, scaled = make_batch(), make_batch()
    factors = torch.tensor([1.0, 100.0, 10_000.0]).repeat_interleave(HIDDEN)
    scaled.aux_hidden_states = scaled.aux_hidden_states * factors
    objective = make_objective("kl")

    def loss(draft: Eagle3Draft, batch: TrainBatch) -> float:
        return float(draft(batch, target_head=make_head(), objective=objective).loss_sum.detach())

    assert loss(draft, scaled) == pytest.approx(loss(draft, batch), rel=1e-4)
    together = make_draft(norm_before_fc=True)
    assert loss(together, scaled) != pytest.approx(loss(together, batch), rel=1e-2)
    scaled.aux_hidden_states = batch.aux_hidden_states * 100.0
    assert loss(together, scaled) == pytest.approx(loss(together, batch), rel=1e-4)
    without = make_draft()
    assert loss(without, scaled) != pytest.approx(loss(without, batch), rel=1e-2)


def test_a_common_shift_of_positions_changes_nothing_with_a_plain_rope() -> None:
    feature, token = Recording(), Recording()
    draft, shifted = make_draft(), make_draft(rope_offset=1)
    shifted.load_state_dict(draft.state_dict())
    draft(make_batch(), target_head=make_head(), objective=feature)
    shifted(make_batch(), target_head=make_head(), objective=token)
    torch.testing.assert_close(
        feature.predictions.draft_hidden, token.predictions.draft_hidden, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "not both"),
        ({"step_tokens": ["true", "own"]}, "7 entries"),
        ({"num_steps": 2, "step_tokens": ["own", "own"]}, "the first one true"),
        ({"num_steps": 2, "step_tokens": ["true", "onw"]}, "Did you mean 'own'"),
        ({"rope_position": "tokens"}, "Did you mean 'token'"),
        ({"checkpoint_steps": 1}, "true or false"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3Method(**settings)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_tokens_projected_once_add_up_to_the_whole_projection(qk_norm: bool, bias: bool) -> None:
    attention = make_draft(qk_norm=qk_norm, attention_bias=bias).layers[0].self_attn
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    tokens, features = torch.randn(2, 9, HIDDEN)
    angles = torch.rand(9, 1, attention.head_dim)
    rope = angles.cos(), angles.sin()
    whole = torch.cat([tokens, features], dim=-1)
    read = attention.project_tokens(tokens)
    expected = attention.queries(whole, rope), *attention.keys_values(whole, rope)
    found = attention.queries(features, rope, read), *attention.keys_values(features, rope, read)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="other columns"):
        attention.queries(features, rope)
