"""What users of DFlash and DSpark ran into; rows of faults that no other file has.

T11 (the mask token: chosen or explicit, saved) and C05 are in tests/test_block_method.py; T12, T36
and I18 have their short forms in tests/test_dflash.py and tests/test_dspark.py; X.. rows are in
tests/test_formats_block.py. Here: the mask token from a run's command line to its export, gradients
of rows and dropped blocks in both methods, and positions at a context of 400.
"""

from __future__ import annotations

import json
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

from draftsmith.conf.schema import ExportConfig, TargetConfig
from draftsmith.models.block_anchors import anchor_candidates, plan_blocks
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.export import export_draft
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (DFlashMethod, {"block_size": 5}),
    "dspark": (DSparkMethod, {"block_size": 4, "markov_rank": 6, "sequential_head": "rnn"}),
}


def make_draft(kind: str, target: TargetModel) -> Any:
    method, settings = METHODS[kind]
    return support.make_draft(method, target, **settings)


def gradients(draft: Any, target: TargetModel, batch: TrainBatch) -> list[Tensor]:
    """Of the loss sum, one per parameter."""
    name = "ce_l1" if draft.config.sample_from_anchor else "ce"
    output = draft(batch, target_head=target.head(), objective=make_objective(name))
    return list(torch.autograd.grad(output.loss_sum, list(draft.parameters())))


@pytest.fixture
def llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama")


@pytest.mark.parametrize("kind", METHODS)
def test_t12_a_rows_gradient_does_not_depend_on_another_row(kind: str, llama: Any) -> None:
    """T12: two rows of one length, all tokens and states of the first one changed."""
    draft = make_draft(kind, llama)
    batch = support.make_batch(llama, (24, 24))
    second = torch.arange(24 + 5, 24 + 23)
    draft.choose_anchors = lambda _batch: second
    before = gradients(draft, llama, batch)
    alone = TrainBatch(**{name: value[1:] for name, value in vars(batch).items()})
    batch.input_ids[0] = 7
    batch.aux_hidden_states[0] += 1.0
    batch.final_hidden_states[0] += 1.0
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(draft, llama, batch), before, strict=True)
    )
    draft.choose_anchors = lambda _batch: second - 24
    for one, other in zip(gradients(draft, llama, alone), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # The control: a change in the row itself is seen.
    batch.aux_hidden_states[1] += 1.0
    draft.choose_anchors = lambda _batch: second
    after = gradients(draft, llama, batch)
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True) if b.any())


@pytest.mark.parametrize("kind", METHODS)
def test_t12_no_label_and_no_context_crosses_a_row(kind: str, llama: Any) -> None:
    """T12: positions restart, the last block's labels end with its row, anchors are per row."""
    draft = make_draft(kind, llama)
    batch = support.make_batch(llama, (12, 12))
    anchors = anchor_candidates(batch)
    assert anchors.tolist() == [*range(5, 11), *range(17, 23)]
    plan = plan_blocks(batch, anchors, num_steps=4, cumulative=draft.cumulative_supervision)
    assert plan.positions.tolist() == [*range(5, 11)] * 2
    ids = batch.input_ids
    for block, flat in enumerate(anchors.tolist()):
        row, anchor = divmod(flat, 12)
        text = ids[row, anchor + 1 : anchor + 5].tolist()
        assert plan.labels[block].tolist() == text + [-1] * (4 - len(text))
        assert plan.supervised[block].tolist() == [True] * len(text) + [False] * (4 - len(text))


@pytest.mark.parametrize("kind", METHODS)
def test_t36_a_dropped_block_has_no_gradient_and_no_metric(kind: str, llama: Any) -> None:
    """T36: what is left of a dropped block is what a batch without it has, exactly nothing."""
    draft = make_draft(kind, llama)
    batch = support.make_batch(llama, (24, 24))
    batch.aux_hidden_states = batch.aux_hidden_states.detach().requires_grad_()
    draft.choose_anchors = lambda _batch: torch.tensor([9])  # Of row 0; row 1's block is dropped.
    name = "ce_l1" if draft.config.sample_from_anchor else "ce"
    output = draft(batch, target_head=llama.head(), objective=make_objective(name))
    output.loss_sum.backward()
    gradient = batch.aux_hidden_states.grad
    assert gradient is not None
    assert float(gradient[1].abs().max()) == 0.0
    assert float(gradient[0, 9:].abs().max()) == 0.0
    assert bool((gradient[0, :9].abs().sum(-1) > 0).all())
    assert float(output.sums["chains"]) == 1.0
    assert int(output.sums["supervised"].sum()) == 4
    own = {name: one.grad.clone() for name, one in draft.named_parameters()}
    alone = TrainBatch(**{name: value[:1].detach() for name, value in vars(batch).items()})
    draft.zero_grad()
    draft(alone, target_head=llama.head(), objective=make_objective(name)).loss_sum.backward()
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter.grad, own[name]), name


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("anchor", [8, 400])
def test_i18_a_blocks_first_position_is_its_anchors_in_training_and_drafting(
    kind: str, anchor: int, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I18: one behind, and acceptance falls with the length of the context."""
    draft = make_draft(kind, llama).eval()
    batch = support.make_batch(llama, (420,))
    steps = draft.config.num_steps
    plan = plan_blocks(batch, torch.tensor([anchor]), num_steps=steps, cumulative=False)
    trained = draft._backbone(batch, plan)[0]
    drafted: list[Tensor] = []
    draft.norm.register_forward_hook(lambda *call: drafted.append(call[2].detach()))
    (context,) = support.contexts_of(batch, 0, [anchor])
    support.propose_once(draft, context, draft.start(430), steps)

    def written_out() -> Tensor:
        """The block from the formulas: slot k at position anchor + k."""
        states = batch.aux_hidden_states[0, :anchor]
        return support.reference_block(draft, states, int(batch.input_ids[0, anchor]))

    torch.testing.assert_close(trained, written_out(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(drafted[0].reshape(trained.shape), trained, rtol=1e-3, atol=1e-4)
    # The control: the slots one position behind, the context where it is.
    rotated = support.rotated
    monkeypatch.setattr(
        support,
        "rotated",
        lambda states, position, theta: rotated(states, position - (position >= anchor), theta),
    )
    assert not torch.allclose(trained, written_out(), atol=1e-3)


# T11, from the command line to the export.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> train_support.Inputs:
    return train_support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny)


def node(**settings: Any) -> dict[str, Any]:
    return {
        "_target_": "draftsmith.models.dflash.DFlashMethod", "num_hidden_layers": 1,
        "block_size": 4, "num_anchors": 8, "aux_layer_ids": [0, 1, 2],
    } | settings  # fmt: skip


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (320, r"mask_token_id is 320, but the target has embeddings for the ids 0 to 319"),
        (3, r"mask_token_id is 3, the target's eos_token_id"),
        (0, r"mask_token_id is 0, the target's pad_token_id"),
        (100, "the ordinary token"),
    ],
)
def test_t11_a_mask_token_that_texts_contain_stops_the_run(
    token: int, message: str, inputs: train_support.Inputs, tmp_path: Path
) -> None:
    settings = train_support.compose(inputs, "train.max_steps=1", method=node(mask_token_id=token))
    with pytest.raises(ValueError, match=message):
        train_support.run_in_process(settings, tmp_path / "run")


@pytest.mark.parametrize(("given", "wanted"), [(None, 312), (315, 315)])
def test_t11_the_mask_token_is_saved_and_exported_at_both_levels(
    given: int | None, wanted: int, inputs: train_support.Inputs, tmp_path: Path
) -> None:
    """T11: nothing given, the first id behind the tokenizer's 312 entries."""
    settings = train_support.compose(inputs, "train.max_steps=1", method=node(mask_token_id=given))
    train_support.run_in_process(settings, tmp_path / "run")
    assert load_draft(tmp_path / "run" / "draft").config.mask_token_id == wanted
    export_draft(
        ExportConfig(
            draft=str(tmp_path / "run"),
            format="vllm",
            output=str(tmp_path / "out"),
            target=TargetConfig(name_or_path=str(inputs.target)),
        )
    )
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["mask_token_id"] == raw["dflash_config"]["mask_token_id"] == wanted
