"""MTP drafts whose block is a layer of the target's family: training, drafting, and what they are.

transformers' own runs of such modules: tests/test_golden_mtp_native.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GraniteConfig, Qwen3_5TextConfig

sys.path.append(str(Path(__file__).parent))

import mtp_support as support

from draftsmith.models.format_mtp_read import read_mtp
from draftsmith.models.load import load_draft
from draftsmith.models.mtp import DepthwiseMtpDraft, MtpConfig, MtpDraft
from draftsmith.models.mtp_native import (
    NativeMtpConfig,
    NativeMtpDraft,
    NativeMtpMethod,
    native_config,
)
from draftsmith.models.mtp_native_block import chosen_layer, norm_offset
from draftsmith.models.mtp_native_match import WIRING
from draftsmith.models.protocols import DraftContext, Frontier, TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.models.ttt_slots import plan_slots
from draftsmith.train.config import TargetConfig
from draftsmith.train.objectives import make_objective
from draftsmith.train.warm_start import apply_warm_start, read_warm_start

DECODED = ("deepseek_v3", "glm4_moe", "mimo")
LENGTH = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`target(family)`: folder and head of a tiny target; made once; read only."""
    made: dict[str, Any] = {}

    def make(family: str) -> tuple[Path, TargetHead]:
        if family not in made:
            folder = support.save_target(tmp_path_factory.mktemp(family) / "target", family)
            made[family] = folder, TargetHead.load(str(folder), dtype="float32")
        return made[family]

    return make


def attached(target: Any, family: str, **settings: Any) -> NativeMtpDraft:
    folder, head = target(family)
    draft = support.make_draft(folder, family, num_modules=1, **settings)
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    return draft


def make_batch(lengths: tuple[int, ...] = (LENGTH,), *, seed: int = 0) -> TrainBatch:
    draw = torch.Generator().manual_seed(seed)
    seq, shape = max(lengths), (len(lengths), max(lengths))
    at = torch.arange(seq).expand(shape)
    keep = at < torch.tensor(lengths)[:, None]
    final = torch.randn(*shape, 32, generator=draw)
    ids = torch.randint(320, shape, generator=draw)
    return TrainBatch(ids, keep, keep, at, final[..., :0], final)


def unrolled(draft: Any, batch: TrainBatch, steps: int) -> tuple[Tensor, Tensor]:
    """What the head reads per step, [steps, active, hidden], and the flat slots."""
    places = torch.zeros_like(batch.keep_mask)
    places[:, 1:-1] = batch.keep_mask[:, 2:]
    plan = plan_slots(places, batch.keep_mask, num_steps=steps)
    made = draft._unroll(batch, plan, nn.Identity())
    return torch.stack([draft._head_input(state) for state in made]), plan.active


@pytest.mark.parametrize("attention", ["chain", "full"])
@pytest.mark.parametrize("zero_first_slot", [False, True])
@pytest.mark.parametrize("recycle", ["after_norm", "before_norm"])
@torch.no_grad()
def test_the_same_weights_in_a_llama_type_block_train_alike(
    target: Any, attention: str, zero_first_slot: bool, recycle: str
) -> None:
    draft = attached(
        target, "hy3", depth_attention=attention, zero_first_slot=zero_first_slot,
        recycle=recycle, step_weights=[0.5, 0.3, 0.2],
    )  # fmt: skip
    kind = MtpDraft if attention == "chain" else DepthwiseMtpDraft
    shared = {name: getattr(draft.config, name) for name in WIRING}
    config = MtpConfig(
        **shared, qk_norm=True, depth_attention=attention, step_weights=[0.5, 0.3, 0.2]
    )
    other = kind(config).eval()
    other.load_state_dict(draft.state_dict(), strict=True)
    _, head = target("hy3")
    other.attach_target(embed_tokens=head.embed_tokens, head=head)
    batch = make_batch((LENGTH, 9))
    own, slots = unrolled(draft, batch, 3)
    wanted, _ = unrolled(other, batch, 3)
    lengths = batch.keep_mask.sum(1)[slots // LENGTH]
    for step in range(3):
        real = slots % LENGTH + 1 + step < lengths  # Its token is in the text.
        assert real.any()
        error = float((own[step] - wanted[step])[real].abs().max())
        assert error < 2e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("family", DECODED)
@pytest.mark.parametrize("attention", ["chain", "full"])
@torch.no_grad()
def test_cached_drafting_equals_training(target: Any, family: str, attention: str) -> None:
    """A text's own tokens as drafted ones: both see the same entries."""
    draft = attached(target, family, depth_attention=attention, step_weights=[0.5, 0.3, 0.2])
    _, head = target(family)
    batch = make_batch()
    states, slots = unrolled(draft, batch, 3)
    state = draft.start(LENGTH)
    ids, final = batch.input_ids, batch.final_hidden_states
    read = 0
    for length in (4, 5, 8, LENGTH - 3):
        context = DraftContext(ids[:, :length], final[..., :0], final[:, read : length - 1])
        read = length - 1
        found = [draft.read([context], [state])]
        for step in range(2):
            token = ids[0, length + step : length + step + 1]
            found.append(draft.extend([state], [Frontier(token, torch.tensor([step]), True)]))
        row = int((slots == length - 2).nonzero())
        # Step k of the newest slot is what predicts after k drafted tokens.
        wanted = head(states[:, row])
        assert torch.allclose(torch.cat(found), wanted, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("attention", ["chain", "full"])
@torch.no_grad()
def test_a_tree_is_drafted_as_its_chains_and_sequences_do_not_mix(
    target: Any, attention: str
) -> None:
    draft = attached(target, "deepseek_v3", depth_attention=attention, step_weights=[0.5, 0.5])
    batch = make_batch((LENGTH, LENGTH))
    ids, final = batch.input_ids, batch.final_hidden_states

    def context(row: int, length: int) -> DraftContext:
        own = final[row : row + 1, : length - 1]
        return DraftContext(ids[row : row + 1, :length], own[..., :0], own)

    contexts = [context(0, 6), context(1, 9)]
    states = [draft.start(32), draft.start(32)]
    roots = draft.read(contexts, states)
    first = Frontier(torch.tensor([5, 7]), torch.tensor([0, 0]))
    second = Frontier(torch.tensor([9]), torch.tensor([2]))
    found = draft.extend(states, [first, Frontier(torch.tensor([4]), torch.tensor([0]), True)])
    below = draft.extend(states[:1], [second])
    for row, (own, tokens, logits) in enumerate(
        [
            (0, [5], found[0:1]),
            (0, [7], found[1:2]),
            (0, [7, 9], below),
            (1, [4], found[2:3]),
        ]
    ):
        alone = draft.start(32)
        expected = draft.read([contexts[own]], [alone])
        assert torch.allclose(expected, roots[own : own + 1], atol=1e-4), row
        for step, token in enumerate(tokens):
            one = Frontier(torch.tensor([token]), torch.tensor([step]), True)
            expected = draft.extend([alone], [one])
        assert torch.allclose(expected, logits, atol=1e-4), row


@pytest.mark.parametrize("family", support.FAMILIES)
@torch.no_grad()
def test_a_saved_draft_loads_and_computes_the_same(tmp_path: Path, family: str) -> None:
    folder = support.save_target(tmp_path / "target", family)
    draft = support.make_draft(folder, family)
    draft.check_block()
    draft.save_pretrained(tmp_path / "draft")
    again = load_draft(tmp_path / "draft")
    embedded, states = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    own = draft.depth_over_texts(0, embedded, states)[0]
    assert torch.allclose(own, again.depth_over_texts(0, embedded, states)[0], atol=1e-6)
    assert type(again) is NativeMtpDraft


def test_which_layer_and_which_norms() -> None:
    sizes = support.SIZES | support.LINEAR
    hybrid = Qwen3_5TextConfig(**(sizes | {"num_hidden_layers": 6}))
    assert hybrid.layer_types[3] == "full_attention"
    assert chosen_layer(hybrid) == 3
    assert chosen_layer(support.FAMILIES["deepseek_v3"].config()) == 2
    draft = NativeMtpDraft(native_config(hybrid, num_modules=1))
    assert [norm_offset(norm) for norm in (draft.enorm[0], draft.norm[0])] == [1, 1]
    dense = NativeMtpDraft(native_config(support.FAMILIES["mimo"].config(), num_modules=1))
    assert norm_offset(dense.norm[0]) == 0


def test_the_block_of_a_mixed_target_is_of_the_last_layers_kind() -> None:
    """DeepSeek-V3's first layers are dense; a module's is routed, as the last ones."""
    draft = NativeMtpDraft(native_config(support.FAMILIES["deepseek_v3"].config(), num_modules=1))
    names = draft.state_dict().keys()
    assert "layers.0.mlp.experts.gate_up_proj" in names
    assert "layers.0.mlp.shared_experts.up_proj.weight" in names


def test_a_decoder_that_scales_its_inputs_is_refused() -> None:
    config = GraniteConfig(**support.SIZES, embedding_multiplier=3.0)
    with pytest.raises(ValueError, match="changes its inputs"):
        NativeMtpDraft(native_config(config, num_modules=1)).check_block()


# The method.


def test_a_new_draft_starts_at_the_targets_norm_and_learns(target: Any) -> None:
    _, head = target("deepseek_v3")
    method = NativeMtpMethod(num_steps=2, zero_first_slot=True)
    torch.manual_seed(0)
    draft = method.build(head, None, [])
    assert draft.is_chain
    assert head.final_norm_weight is not None
    assert torch.equal(draft.norm[0].weight, head.final_norm_weight)
    batch, objective = make_batch((LENGTH, 10)), make_objective("kl")
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        made = draft(batch, target_head=head, objective=objective)
        loss = made.loss_sum / draft.normaliser(batch)
        optimizer.zero_grad()
        loss.backward()
        without = [n for n, p in draft.named_parameters() if p.grad is None]
        assert not without
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_full_depths_of_two_modules_have_gradients(target: Any, checkpointed: bool) -> None:
    _, head = target("glm4_moe")
    torch.manual_seed(0)
    draft = NativeMtpMethod(num_modules=2, num_steps=2, checkpoint_steps=checkpointed).build(
        head, None, []
    )
    made = draft(make_batch(), target_head=head, objective=make_objective("ce"))
    made.loss_sum.backward()
    grads = [p.grad for p in draft.parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qk_norm": True}, r"method.qk_norm has no effect"),
        ({"num_experts": 4, "head_dim": 8}, r"method.head_dim, method.num_experts"),
        ({"checkpoint_steps": True}, "checkpoint_steps has no effect on a chain"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeMtpMethod(**settings)


def test_training_starts_from_the_modules_that_a_target_carries(
    target: Any, tmp_path: Path
) -> None:
    folder, head = target("glm4_moe")
    trained = support.make_draft(folder, "glm4_moe")
    trained.save_pretrained(tmp_path / "draft")
    support.stitched(tmp_path / "draft", folder, tmp_path / "native", layout="deepseek")
    native = str(tmp_path / "native")
    start = read_warm_start(native, TargetConfig(name_or_path=native), [])
    head = TargetHead.load(native, dtype="float32")
    draft = NativeMtpMethod(num_steps=3, recycle="before_norm").build(head, None, [])
    said = apply_warm_start(draft, start, vocabulary="same")
    assert native in said
    own = draft.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in trained.state_dict().items())
    assert draft.config.recycle == "before_norm"
    other = NativeMtpMethod(num_steps=3, concat="hidden_first").build(head, None, [])
    with pytest.raises(ValueError, match="concat"):
        apply_warm_start(other, start, vocabulary="same")


def test_a_llama_type_target_starts_method_mtp(target: Any, tmp_path: Path) -> None:
    from draftsmith.models.mtp import MtpMethod

    folder, _ = target("hy3")
    trained = support.make_draft(folder, "hy3")
    trained.save_pretrained(tmp_path / "draft")
    support.stitched(tmp_path / "draft", folder, tmp_path / "native", layout="hy3")
    native = str(tmp_path / "native")
    assert type(read_mtp(native).config) is MtpConfig
    start = read_warm_start(native, TargetConfig(name_or_path=native), [])
    head = TargetHead.load(native, dtype="float32")
    draft = MtpMethod(qk_norm=True).build(head, None, [])
    apply_warm_start(draft, start, vocabulary="same")
    assert torch.equal(
        draft.state_dict()["layers.0.self_attn.q_norm.weight"],
        trained.state_dict()["layers.0.self_attn.q_norm.weight"],
    )


def test_a_family_that_transformers_lacks_is_refused_by_name() -> None:
    config = AutoConfig.for_model("qwen2", **support.SIZES)
    foreign = type("Own", (type(config).__mro__[1],), {"model_type": "own_kind"})(**support.SIZES)
    with pytest.raises(ValueError, match="not in transformers"):
        native_config(foreign, num_modules=1)


def test_a_draft_without_its_targets_configuration_says_so() -> None:
    with pytest.raises(ValueError, match="has no block"):
        NativeMtpDraft(NativeMtpConfig(hidden_size=32))
