"""Parallel heads: training against the formula, no look at drafted tokens, decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import ChainPolicy, DynamicTreePolicy
from draftsmith.models.load import load_drafter
from draftsmith.models.parallel_heads import ParallelHeadsDraft, ParallelHeadsMethod
from draftsmith.models.protocols import DraftContext, Frontier, TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.checkpoint import save_draft
from draftsmith.train.objectives import make_objective

SEQ = 12


def make_draft(target: TargetModel, **settings: Any) -> ParallelHeadsDraft:
    torch.manual_seed(0)
    draft = ParallelHeadsMethod(**settings).build(target.head(), None, [])
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.3)
    return draft


def make_batch(target: TargetModel) -> TrainBatch:
    ids = torch.randint(4, 300, (1, SEQ), generator=torch.Generator().manual_seed(1))
    final = target.forward(ids).final_hidden_states
    everything = torch.ones_like(ids, dtype=torch.bool)
    return TrainBatch(
        ids, everything, everything, torch.arange(SEQ)[None], final[..., :0], final
    )  # fmt: skip


def test_every_head_predicts_its_token_from_one_state(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft, batch = make_draft(target), make_batch(target)
    output = draft(batch, target_head=target.head(), objective=make_objective("ce"))
    total = torch.zeros(())
    for k, head in enumerate(draft.heads):
        for slot in range(SEQ - 2 - k):
            f = batch.final_hidden_states[0, slot]
            state = f + F.silu(head.weight @ f + head.bias)
            label = batch.input_ids[0, slot + 2 + k]
            total = total - 0.8**k * target.logits(state).log_softmax(-1)[label]
    assert output.sums["supervised"].tolist() == [10, 9, 8]
    torch.testing.assert_close(output.loss_sum, total, rtol=1e-5, atol=1e-4)
    output.loss_sum.backward()
    assert all(weight.grad is not None for weight in draft.parameters())


def test_fresh_heads_are_the_targets_own_prediction(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = ParallelHeadsMethod().build(target.head(), None, [])
    final = make_batch(target).final_hidden_states
    context = DraftContext(make_batch(target).input_ids[:, :6], final[:, :5, :0], final[:, :5])
    torch.testing.assert_close(
        draft.read([context], [draft.start(20)])[0], target.logits(final[0, 4])
    )


def test_drafting_is_what_was_trained_and_ignores_the_drafted_tokens(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    draft, batch = make_draft(target), make_batch(target)
    state, final = draft.start(20), batch.final_hidden_states
    context = DraftContext(batch.input_ids[:, :6], final[:, :5, :0], final[:, :5])
    found = [draft.read([context], [state])]
    found.append(draft.extend([state], [Frontier(torch.tensor([7, 9]), torch.tensor([0, 0]))]))
    found.append(draft.extend([state], [Frontier(torch.tensor([8]), torch.tensor([2]))]))
    assert torch.equal(found[1][0], found[1][1])
    for k, head in enumerate(draft.heads):
        f = final[0, 4]
        wanted = target.logits(f + F.silu(head.weight @ f + head.bias))
        torch.testing.assert_close(found[k][0], wanted, rtol=1e-4, atol=1e-4)
    assert draft.max_depth(6) == 3
    with pytest.raises(ValueError, match="seen 5 positions"):
        draft.read([context], [state])


@pytest.mark.lossless
@pytest.mark.parametrize("policy", [ChainPolicy(5), DynamicTreePolicy(10, 2, 3)], ids=str)
def test_greedy_text_is_the_targets_own(
    tiny_target: Callable[..., Any], policy: Any, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    draft = make_draft(target)
    save_draft(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "draft", target)
    prompt = torch.tensor([[5, 6, 7, 8]])
    own = generate(target, None, prompt, max_new_tokens=12)
    made = generate(target, loaded, prompt, max_new_tokens=12, policy=policy)
    assert made.token_ids == own.token_ids
    assert max(record.depth for record in made.rounds) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"step_weights": [1.0]}, "one per head"),
        ({"step_decay": 1.5}, "step_decay"),
        ({"objective": "ce"}, "mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelHeadsMethod(**settings)


def test_the_preset_holds_exactly_the_defaults() -> None:
    from omegaconf import OmegaConf

    import draftsmith.conf

    folder = Path(draftsmith.conf.__path__[0]) / "method"
    node: Any = OmegaConf.to_container(OmegaConf.load(folder / "parallel_heads.yaml"))
    assert node.pop("_target_") == "draftsmith.models.parallel_heads.ParallelHeadsMethod"
    defaults = dataclasses.asdict(ParallelHeadsMethod())
    assert defaults.pop("aux_layer_ids") == []
    assert node == defaults
