"""EAGLE-1: training against an uncached reference, cached drafting against training, the loss, the
noise, decoding with every policy, any target family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import (
    ChainPolicy,
    DynamicTreePolicy,
    SampledTreePolicy,
    StaticTreePolicy,
)
from draftsmith.models.eagle import FEATURE_NOISES, EagleConfig, EagleDraft, EagleMethod
from draftsmith.models.protocols import DraftContext, Frontier, Predictions, TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective

SEQ = 16


def make_draft(target: TargetModel, *, seed: int = 0, **settings: Any) -> EagleDraft:
    """A random draft for a loaded target, norm weights away from 1, in training mode."""
    torch.manual_seed(seed)
    draft = EagleMethod(**({"feature_noise": "none"} | settings)).build(target.head(), None, [])
    for parameter in draft.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return draft.train()


def make_batch(target: TargetModel, lengths: list[int] | None = None) -> TrainBatch:
    """Random tokens with the target's own states, supervised from the fifth on."""
    lengths = lengths or [SEQ, 11]
    seq = max(lengths)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 300, (len(lengths), seq), generator=generator)
    keep = torch.arange(seq)[None] < torch.tensor(lengths)[:, None]
    final = target.forward(ids).final_hidden_states
    return TrainBatch(
        input_ids=ids * keep,
        supervised_mask=keep & (torch.arange(seq)[None] >= 4),
        keep_mask=keep,
        position_ids=torch.arange(seq).expand(len(lengths), seq),
        aux_hidden_states=final[..., :0],
        final_hidden_states=final * keep[..., None],
    )


class Recording:
    """An objective that keeps what it was given and what came out."""

    predictions: Predictions

    def __init__(self, name: str = "kl") -> None:
        self.objective = make_objective(name)

    def __call__(self, predictions: Predictions, target_head: Any) -> Any:
        self.predictions = predictions
        self.output = self.objective(predictions, target_head)
        return self.output


def run(draft: EagleDraft, target: TargetModel, batch: TrainBatch) -> tuple[Recording, Any]:
    recording = Recording()
    return recording, draft(batch, target_head=target.head(), objective=recording)


# Training against the formulas.


def test_every_unrolled_step_equals_an_uncached_chain(
    tiny_target: Callable[..., Any], eagle1_reference: Any
) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=3)
    batch = make_batch(target)
    recording, _ = run(draft, target, batch)
    config = draft.config.to_dict() | {"rope_theta": draft.config.rope_parameters["rope_theta"]}
    weights = {name: weight.detach() for name, weight in draft.state_dict().items()}
    weights["embed_tokens.weight"] = target.embed_tokens.weight
    reference = eagle1_reference(config, weights, target.head().weight)
    supervised = batch.supervised_mask[:, 2:].nonzero() + torch.tensor([0, 1])
    checked = 0
    for row, (sample, place) in enumerate(supervised.tolist()):
        for step in range(3):
            slot = place - 1 - step
            if slot < 0:
                continue
            ids = batch.input_ids[sample : sample + 1]
            state = reference.start(SEQ)
            features = batch.final_hidden_states[sample : sample + 1, : slot + 1]
            reference.read([DraftContext(ids[:, : slot + 2], features, features)], [state])
            for j in range(step):
                token = ids[0, slot + 2 + j]
                reference.extend([state], [Frontier(token[None], torch.tensor([j]), True)])
            torch.testing.assert_close(
                recording.predictions.draft_hidden[step, row], state.row_hidden[-1],
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip
            checked += 1
    assert checked > 30


@pytest.mark.parametrize("feature_loss", ["mse", "smooth_l1"])
def test_the_loss_is_the_weighted_sum_of_regression_and_objective(
    tiny_target: Callable[..., Any], feature_loss: str
) -> None:
    target = tiny_target("llama")
    settings = {"feature_weight": 0.7, "objective_weight": 0.3, "num_steps": 2}
    draft = make_draft(target, feature_loss=feature_loss, **settings)
    batch = make_batch(target)
    recording, output = run(draft, target, batch)
    made = recording.predictions
    wanted = torch.zeros((), dtype=torch.float64)
    errors = torch.zeros(2, dtype=torch.float64)
    for step, row in made.supervised.nonzero().tolist():
        difference = (made.draft_hidden[step, row] - made.target_hidden[row]).double()
        size = difference.abs()
        each = difference**2
        if feature_loss == "smooth_l1":
            each = torch.where(size < 1, 0.5 * difference**2, size - 0.5)
        wanted = wanted + 0.7 * 0.8**step * each.mean()
        errors[step] += each.mean().detach()
    wanted = wanted + 0.3 * recording.output.loss_sum
    torch.testing.assert_close(output.loss_sum.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.sums["feature_error"], errors, rtol=1e-5, atol=1e-6)
    assert float(output.sums["loss"].sum()) == pytest.approx(float(output.loss_sum), rel=1e-5)


def test_only_the_draft_learns(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = make_draft(target)
    names = [name for name, _ in draft.named_parameters()]
    assert not any("embed" in name or "head" in name or name == "norm.weight" for name in names)
    assert "layers.0.input_layernorm.weight" not in names
    _, output = run(draft, target, make_batch(target))
    output.loss_sum.backward()
    assert all(weight.grad is not None for weight in draft.parameters())
    assert target.head().weight.grad is None
    assert draft.state_dict().keys() == set(names)


def test_a_padded_batch_equals_its_rows(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=2)
    batch = make_batch(target)
    _, whole = run(draft, target, batch)
    parts = []
    for row, length in enumerate([SEQ, 11]):
        one = TrainBatch(
            **{
                entry.name: getattr(batch, entry.name)[row : row + 1, :length]
                for entry in dataclasses.fields(batch)
            }
        )
        parts.append(run(draft, target, one)[1])
    total = sum(float(part.loss_sum.detach()) for part in parts)
    assert float(whole.loss_sum.detach()) == pytest.approx(total, rel=1e-5)


# Noise.


def noises(target: TargetModel, name: str, amplitude: float = 0.1) -> Tensor:
    draft = make_draft(target, feature_noise=name, noise_amplitude=amplitude)
    batch = make_batch(target, [SEQ, 8])
    torch.manual_seed(7)
    return draft._features(batch) - batch.final_hidden_states


def test_noise_has_the_published_amplitudes_and_is_off_outside_training(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    assert float(noises(target, "none").abs().max()) == 0.0
    uniform = noises(target, "uniform")
    assert 0.095 < float(uniform.abs().max()) <= 0.1001
    # The code: (rand - 0.5) * 0.2 * 512 / length.
    by_length = noises(target, "uniform_by_length")
    assert 0.095 * 512 / SEQ < float(by_length[0].abs().max()) <= 0.1001 * 512 / SEQ
    assert 0.09 * 512 / 8 < float(by_length[1].abs().max()) <= 0.1001 * 512 / 8
    gaussian = noises(target, "gaussian")
    assert float(gaussian.std()) == pytest.approx(0.1, rel=0.1)
    assert float(gaussian.abs().max()) > 0.25
    draft = make_draft(target, feature_noise="gaussian").eval()
    batch = make_batch(target)
    assert torch.equal(draft._features(batch), batch.final_hidden_states)


def test_the_regression_aims_at_features_without_noise(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    batch = make_batch(target)
    recording, _ = run(make_draft(target, feature_noise="uniform"), target, batch)
    places = (batch.supervised_mask[:, 2:].nonzero() + torch.tensor([0, 1])).unbind(-1)
    assert torch.equal(recording.predictions.target_hidden, batch.final_hidden_states[places])


# Drafting.


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_hidden_layers": 2}, {"qk_norm": True, "attention_bias": True, "fc_bias": True}],
)
def test_cached_drafting_equals_the_training_forward(
    tiny_target: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """I18: positions of drafted pairs are those of training."""
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=4, **settings).eval()
    batch = make_batch(target, [SEQ])
    batch.supervised_mask = torch.ones_like(batch.supervised_mask)
    recording, _ = run(draft, target, batch)
    trained = recording.predictions.draft_hidden  # Row r is place r + 1.
    state, length = draft.start(64), 0
    for stop in (6, 7, 10):
        ids = batch.input_ids[:, :stop]
        new = batch.final_hidden_states[:, length : stop - 1]
        logits = draft.read([DraftContext(ids, new[..., :0], new)], [state])
        slot = stop - 2
        for step in range(4):
            wanted = trained[step, slot + step]
            torch.testing.assert_close(state.hidden[-1], wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(logits[-1], target.logits(wanted), rtol=1e-4, atol=1e-4)
            token = batch.input_ids[0, slot + 2 + step]
            frontier = Frontier(token[None], torch.tensor([step]), is_chain=True)
            logits = draft.extend([state], [frontier])
        length = stop - 1


POLICIES: dict[str, Any] = {
    "chain": ChainPolicy(3),
    "static": StaticTreePolicy(),
    "dynamic": DynamicTreePolicy(total_tokens=10, depth=2, top_k=3),
    "sampled": SampledTreePolicy((2, 2, 1)),
}


@pytest.mark.lossless
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_greedy_text_is_the_targets_own(
    tiny_target: Callable[..., Any], family: str, policy: str
) -> None:
    target = tiny_target(family)
    draft = make_draft(target, draft_vocab_size=None).eval()
    prompt = torch.randint(4, 300, (1, 9), generator=torch.Generator().manual_seed(2))
    own = generate(target, None, prompt, max_new_tokens=14)
    made = generate(target, draft, prompt, max_new_tokens=14, policy=POLICIES[policy])
    assert made.token_ids == own.token_ids
    assert sum(record.proposed for record in made.rounds) > 0


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gemma2", "gemma3"])
def test_every_family_of_targets_gets_a_draft_that_trains(
    tiny_target: Callable[..., Any], family: str
) -> None:
    target = tiny_target(family)
    draft = make_draft(target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    batch, losses = make_batch(target), []
    for _ in range(40):
        _, output = run(draft, target, batch)
        (output.loss_sum / draft.normaliser(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss_sum.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_training_logits_are_the_targets_head_with_its_soft_cap(
    tiny_target: Callable[..., Any],
) -> None:
    """M08: what training believes of a draft's acceptance is what drafting computes."""
    target = tiny_target("gemma2")
    assert not target.head().is_plain
    draft = make_draft(target)
    recording, _ = run(draft, target, make_batch(target))
    made = recording.predictions
    logits = target.head()(made.draft_hidden[0])
    assert float(logits.abs().max()) <= float(target.head().config.final_logit_softcapping)
    wanted = torch.minimum(logits.softmax(-1), target.head()(made.target_hidden).softmax(-1))
    torch.testing.assert_close(recording.output.acceptance[0], wanted.sum(-1))
    assert torch.equal(
        recording.output.correct[0],
        logits.argmax(-1) == target.head()(made.target_hidden).argmax(-1),
    )


def test_a_reduced_vocabulary_takes_the_heads_rows(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    ids = torch.tensor([1, 3, 5, 8, 20, 33, 100, 319])

    @dataclasses.dataclass
    class Vocabulary:
        draft_to_target: Tensor

    torch.manual_seed(0)
    method = EagleMethod(feature_noise="none", draft_vocab_size=8)
    draft = method.build(target.head(), Vocabulary(ids), [])
    assert torch.equal(draft.draft_to_target, ids)
    hidden = torch.randn(3, draft.config.hidden_size)
    torch.testing.assert_close(draft._logits(hidden), target.logits(hidden)[:, ids])
    recording, _ = run(draft, target, make_batch(target))
    assert torch.equal(recording.predictions.draft_head_weight, target.head().weight[ids])


def test_a_draft_without_its_target_or_with_another_one_is_refused(
    tiny_target: Callable[..., Any],
) -> None:
    target, other = tiny_target("llama"), tiny_target("llama", hidden_size=48, head_dim=12)
    draft = make_draft(target)
    with pytest.raises(ValueError, match="predicts with the target's head"):
        draft.attach_target(embed_tokens=target.embed_tokens)
    with pytest.raises(ValueError, match="belongs to another target"):
        draft.attach_target(embed_tokens=other.embed_tokens, head=other.head())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_loss": "l1"}, "smooth_l1"),
        ({"feature_noise": "unifrom"}, "Did you mean 'uniform'"),
        ({"noise_amplitude": 0.0}, "noise_amplitude"),
        ({"feature_weight": 0.0, "objective_weight": 0.0}, "at least one"),
        ({"feature_weight": -1.0}, ">= 0"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagleMethod(**settings)


def test_the_preset_holds_exactly_the_defaults_of_the_method() -> None:
    from omegaconf import OmegaConf

    import draftsmith.conf

    folder = Path(draftsmith.conf.__path__[0]) / "method"
    node: Any = OmegaConf.to_container(OmegaConf.load(folder / "eagle.yaml"))
    assert node.pop("_target_") == "draftsmith.models.eagle.EagleMethod"
    defaults = dataclasses.asdict(EagleMethod())
    assert defaults.pop("aux_layer_ids") == []
    assert node == defaults
    published: Any = OmegaConf.to_container(OmegaConf.load(folder / "eagle_published.yaml"))
    del published["defaults"]
    made = EagleMethod(**(node | published))
    assert (made.feature_loss, made.objective_weight) == ("smooth_l1", 0.1)
    assert made.feature_noise in FEATURE_NOISES
    assert EagleConfig().step_weights == [1.0]
