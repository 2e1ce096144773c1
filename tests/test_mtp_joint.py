"""The joint loss: against the formula written out, its masks, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.load import load_drafter
from draftsmith.models.mtp import MtpMethod
from draftsmith.models.mtp_joint import (
    JointMtp,
    JointMtpMethod,
    documents_as_rows,
    weight_schedule,
)
from draftsmith.models.protocols import TrainBatch, TrainOutput
from draftsmith.models.target import Fingerprint, TargetHead, TargetModel
from draftsmith.models.ttt_slots import plan_slots
from draftsmith.train.checkpoint import save_models
from draftsmith.train.objectives import make_objective

CE = make_objective("ce")


@pytest.fixture(scope="module")
def folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny.save_tiny_target(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def build(folder: Path, *, seed: int = 0, **settings: Any) -> JointMtp:
    """A joint model of a tiny target, its modules shaken so that nothing in them is 0 or 1."""
    target = {
        "name_or_path": str(folder),
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
        "revision": None,
        "dtype": "bfloat16",
        "device": "auto",
    }
    head = TargetHead.load(str(folder), dtype="float32")
    torch.manual_seed(seed)
    draft = JointMtpMethod(**settings).build(head, None, (), target=target)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in draft.mtp.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=draw))
    return draft.train()


def make_batch(*texts: list[int], supervised_from: int = 0) -> TrainBatch:
    """Texts padded to one batch; the first `supervised_from` tokens of each are a prompt."""
    seq = max(map(len, texts))
    ids = torch.tensor([text + [0] * (seq - len(text)) for text in texts])
    positions = torch.arange(seq).expand_as(ids).contiguous()
    keep = positions < torch.tensor([len(text) for text in texts])[:, None]
    return TrainBatch(
        input_ids=ids,
        supervised_mask=keep & (positions >= supervised_from),
        keep_mask=keep,
        position_ids=positions,
        aux_hidden_states=torch.zeros(*ids.shape, 0),
        final_hidden_states=torch.zeros(*ids.shape, 0),
    )


def draw_text(length: int, seed: int) -> list[int]:
    return torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(draft: JointMtp, batch: TrainBatch) -> TrainOutput:
    return draft(batch, target_head=draft._head[0], objective=CE)


def gradients(draft: JointMtp, loss: Tensor) -> dict[str, Tensor | None]:
    draft.zero_grad()
    loss.backward()
    return {
        name: None if weight.grad is None else weight.grad.clone()
        for name, weight in draft.named_parameters()
    }


# --- the formula ----------------------------------------------------------------------------------


def written_out(draft: JointMtp, text: list[int], first: int, depths: int) -> tuple[Tensor, ...]:
    """Main loss and loss of each depth of one text, summed, from the equations: full attention.

    `first`: position of the first supervised token.
    """
    model, mtp = draft.trunk, draft.mtp
    ids = torch.tensor([text])
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]  # [seq, hidden]
    embedded = model.model.embed_tokens(ids)[0]
    head = model.lm_head

    def term(logits: Tensor, label: int) -> Tensor:
        return -logits.log_softmax(-1)[label]

    taught = [q for q in range(len(text) - 1) if q + 1 >= first]
    terms = [torch.stack([term(head(states[q]), text[q + 1]) for q in taught]).sum()]
    below = states
    for depth in range(depths):
        module = min(depth, mtp.config.num_modules - 1)
        slots = len(text) - 1 - depth
        read = torch.cat(
            [
                mtp.enorm[module](embedded[depth + 1 : depth + 1 + slots]),
                mtp.hnorm[module](below[:slots]),
            ],
            dim=-1,
        )
        hidden = block(mtp.layers[module], mtp.eh_proj[module](read), mtp)
        below = mtp.norm[module](hidden)
        total = torch.zeros(())
        for slot in range(slots):
            label = slot + 2 + depth
            if first <= label < len(text):
                total = total + term(head(below[slot]), text[label])
        terms.append(total)
    return tuple(terms)


def block(layer: Any, hidden: Tensor, mtp: Any) -> Tensor:
    """A Llama decoder block on one text, scores written out."""
    attention, count = layer.self_attn, len(hidden)
    config, normed = mtp.config, layer.input_layernorm(hidden)
    cos, sin = mtp.rotary_emb(hidden, torch.arange(count)[None])
    cos, sin = cos[0, :, None], sin[0, :, None]

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def heads(projection: Any, number: int) -> Tensor:
        return projection(normed).view(count, number, config.head_dim)

    groups = config.num_attention_heads // config.num_key_value_heads
    query = turned(heads(attention.q_proj, config.num_attention_heads))
    key = turned(heads(attention.k_proj, config.num_key_value_heads)).repeat_interleave(groups, 1)
    value = heads(attention.v_proj, config.num_key_value_heads).repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
    future = torch.ones(count, count).triu(1).bool()
    probs = scores.masked_fill(future, float("-inf")).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", probs, value).flatten(1)
    hidden = hidden + attention.o_proj(mixed)
    mlp, normed = layer.mlp, layer.post_attention_layernorm(hidden)
    return hidden + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


@pytest.mark.parametrize(
    ("family", "depths", "settings"),
    [
        ("llama", 1, {}),
        ("llama_tied", 1, {"mtp_weight": 0.7}),
        ("llama", 3, {"num_modules": 2, "step_weights": [0.5, 0.4, 0.1]}),
        ("llama_tied", 2, {"depth_attention": "full", "step_decay": 0.5}),
    ],
)
def test_the_joint_loss_and_its_gradients_are_the_formula_written_out(
    family: str, depths: int, settings: dict[str, Any], folder: Callable[[str], Path]
) -> None:
    draft = build(folder(family), num_steps=depths, **settings)
    texts = [draw_text(11, 1), draw_text(7, 2)]
    batch = make_batch(*texts, supervised_from=3)
    output = run(draft, batch)
    found = gradients(draft, output.loss_sum / draft.normaliser(batch))
    main, *by_depth = (
        sum(entries)
        for entries in zip(*(written_out(draft, t, 3, depths) for t in texts), strict=True)
    )
    weights = settings.get("step_weights") or [
        settings.get("step_decay", 1.0) ** k for k in range(depths)
    ]
    if "step_weights" not in settings:
        weights = [weight / sum(weights) for weight in weights]
    scale = settings.get("mtp_weight", 0.3)
    total = main + scale * sum(w * loss for w, loss in zip(weights, by_depth, strict=True))
    count = (11 - 3) + (7 - 3)  # T for every term, also where a depth has fewer predictions
    assert int(draft.normaliser(batch)) == count
    expected = gradients(draft, total / count)
    torch.testing.assert_close(output.loss_sum, total, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-6, msg=name)
    assert float(output.sums["main_loss"]) == pytest.approx(main.item(), rel=1e-5)
    assert output.sums["mtp_loss"].tolist() == pytest.approx(
        [loss.item() for loss in by_depth], rel=1e-5
    )


def test_one_depth_is_the_same_with_either_kind_of_attention(
    folder: Callable[[str], Path],
) -> None:
    batch = make_batch(draw_text(9, 3), draw_text(6, 4))
    both = [
        run(build(folder("llama"), depth_attention=kind), batch).loss_sum
        for kind in ("chain", "full")
    ]
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("family", ["phi", "gemma2", "granite", "qwen3", "gpt2"])
def test_the_main_loss_is_that_of_transformers_for_any_head(
    family: str, folder: Callable[[str], Path]
) -> None:
    # A bias (phi), soft-capping (gemma2), scales (granite): all of the head learns.
    width = {"intermediate_size": 48}  # GPT-2 has no such name
    draft = build(folder(family), mtp_weight=0.0, **width).eval()
    text = draw_text(12, 5)
    batch = make_batch(text)
    draft.training = True  # the trunk itself stays in eval mode: GPT-2 has dropout
    output = run(draft, batch)
    found = gradients(draft, output.loss_sum / draft.normaliser(batch))
    ids = torch.tensor([text])
    loss = draft.trunk(input_ids=ids, labels=ids, use_cache=False).loss
    expected = gradients(draft, loss)
    torch.testing.assert_close(output.loss_sum / 11, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        if name.startswith("trunk."):
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-5, msg=name)
    joint = build(folder(family), num_steps=2, **width)
    run(joint, batch).loss_sum.backward()
    assert all(weight.grad is not None for weight in joint.parameters())


# --- lambda ---------------------------------------------------------------------------------------


def test_lambda_zero_has_the_main_loss_and_its_gradients_bit_for_bit(
    folder: Callable[[str], Path],
) -> None:
    batch = make_batch(draw_text(9, 6), draw_text(12, 7))
    off = build(folder("llama_tied"), mtp_weight=0.0)
    detached = build(folder("llama_tied"), mtp_weight=0.3, detach_trunk=True)
    on = build(folder("llama_tied"), mtp_weight=0.3)
    main = gradients(off, run(off, batch).loss_sum)
    apart = gradients(detached, run(detached, batch).loss_sum)
    joint = gradients(on, run(on, batch).loss_sum)
    for name in main:
        if name.startswith("trunk."):
            assert torch.equal(main[name], apart[name]), name
            assert not torch.equal(main[name], joint[name]), name
        else:
            assert main[name] is None, name
            assert apart[name].any(), name


def test_detached_modules_learn_and_their_loss_reaches_nothing_else(
    folder: Callable[[str], Path],
) -> None:
    batch = make_batch(draw_text(9, 6), draw_text(12, 7))

    def of_modules(**settings: Any) -> dict[str, Tensor | None]:
        draft = build(folder("llama"), num_steps=2, **settings)
        output = run(draft, batch)
        draft.mtp_weight = 0.0
        # The joint loss less the main loss: what the modules alone send back.
        return gradients(draft, output.loss_sum - run(draft, batch).loss_sum)

    stopped = of_modules(detach_trunk=True)
    passed = of_modules()
    for name in stopped:
        reached = float(stopped[name].abs().max()) > 1e-4
        assert reached == name.startswith("mtp."), name
        assert float(passed[name].abs().max()) > 1e-4, name
    # A module learns the same in both: only what lies beyond it is cut off.
    for name in (name for name in stopped if name.startswith("mtp.")):
        torch.testing.assert_close(stopped[name], passed[name])


def test_the_weight_follows_its_schedule_by_the_share_of_the_run(
    folder: Callable[[str], Path],
) -> None:
    draft = build(folder("llama"), mtp_weight=[[0.0, 0.3], [0.67, 0.1]])
    seen = []
    for step in range(6):
        draft.follow_progress(step / 6)
        seen.append(draft.mtp_weight)
    assert seen == [0.3] * 5 + [0.1]
    batch = make_batch(draw_text(9, 6))
    at_last = run(draft, batch)
    at_first = run(build(folder("llama"), mtp_weight=0.3), batch)
    part = at_first.sums["mtp_loss"].sum()
    torch.testing.assert_close(at_first.loss_sum - at_last.loss_sum, (0.2 * part).float())
    assert float(at_last.sums["mtp_weight"] / at_last.sums["mtp_weight_count"]) == 0.1


@pytest.mark.parametrize(
    "value",
    [
        -0.1,
        True,
        None,
        "0.3",
        float("nan"),
        [],
        [[0.1, 0.3]],
        [[0.0, 0.3], [0.0, 0.1]],
        [[0.0, 0.3], [1.0, 0.1]],
        [[0.0, 0.3], [0.5]],
        [0.0, 0.3],
    ],
)
def test_a_weight_that_is_no_schedule_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"method\.mtp_weight is .*\[\[0\.0, 0\.3\]"):
        JointMtpMethod(mtp_weight=value)


def test_a_number_is_a_schedule_of_one_entry() -> None:
    assert weight_schedule(0) == [(0.0, 0.0)]
    assert weight_schedule([[0, 1], [0.5, 0.25]]) == [(0.0, 1.0), (0.5, 0.25)]


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_vocab_size": 100},
        {"mask_alignment": "feature"},
        {"normalisation": "batch_tokens"},
        {"objective": {"name": "kl"}},
    ],
)
def test_settings_of_the_post_hoc_method_that_do_not_belong_are_refused(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=rf"method\.{next(iter(settings))}.*one loss"):
        JointMtpMethod(**settings)


# --- masks and documents --------------------------------------------------------------------------


def test_the_supervised_set_of_a_depth_is_the_mask_moved(folder: Callable[[str], Path]) -> None:
    # T13: mask [0 0 1 1 1 0], two depths. Labels 2, 3, 4 have a main prediction and one per depth.
    draft = build(folder("llama"), num_steps=2)
    batch = make_batch(draw_text(6, 8), supervised_from=2)
    batch.supervised_mask[:, 5] = False
    assert run(draft, batch).sums["supervised"].tolist() == [
        3,
        2,
    ]  # No slot for label 2 at depth 1.
    assert int(draft.normaliser(batch)) == 3
    batch.supervised_mask = torch.tensor([[False, False, False, False, True, False]])
    assert run(draft, batch).sums["supervised"].tolist() == [1, 1]


def counting_model(tiny: ModuleType, folder: Path) -> None:
    """A language in which token n + 1 follows token n, and a model that knows it: no layer adds
    anything, embeddings are one-hot, and the head looks one place on."""
    model = tiny.make_tiny_model("llama", vocab_size=32, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(32))
        model.model.norm.weight.fill_(10.0)
        model.lm_head.weight.copy_(torch.eye(32).roll(1, dims=0))
    model.save_pretrained(folder)


def test_modules_that_are_right_by_construction_have_no_loss(
    tiny: ModuleType, tmp_path: Path
) -> None:
    # T14: labels moved twice, or not at all, would cost about 50 nats here.
    counting_model(tiny, tmp_path)

    class Tokens:
        """As much of a tokenizer as a target of 32 tokens needs."""

        eos_token_id = None

        def __len__(self) -> int:
            return 32

    target = TargetModel(
        AutoModelForCausalLM.from_pretrained(tmp_path).eval().requires_grad_(False),
        Tokens(),  # type: ignore[arg-type]
        name_or_path="counting",
        fingerprint=Fingerprint("", "", ""),
    )
    modules = MtpMethod(num_steps=2, step_decay=1.0).build(target.head(), None, ())
    with torch.no_grad():
        for name, weight in modules.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        # Reads the token alone: the state after it is the token's own.
        modules.eh_proj[0].weight.copy_(torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1))
        modules.enorm[0].weight.fill_(1.0)
        modules.norm[0].weight.fill_(10.0)
    draft = JointMtp(target, modules, schedule=[(0.0, 1.0)], detach_trunk=False).train()
    output = run(draft, make_batch(list(range(4, 14)), list(range(9, 15))))
    assert output.loss_sum.item() < 1e-4
    assert output.sums["supervised"].tolist() == [12, 10]
    assert output.sums["correct"].tolist() == [12, 10]


def packed(*texts: list[int]) -> TrainBatch:
    """The texts behind one another in one row, positions restarting."""
    batch = make_batch([token for text in texts for token in text])
    batch.position_ids = torch.cat([torch.arange(len(text)) for text in texts])[None]
    return batch


def test_documents_of_a_packed_row_get_rows_of_their_own() -> None:
    batch = packed([10, 11, 12], [20, 21])
    batch.supervised_mask[0, 0] = False
    apart = documents_as_rows(batch)
    assert apart.input_ids.tolist() == [[10, 11, 12], [20, 21, 0]]
    assert apart.keep_mask.tolist() == [[True, True, True], [True, True, False]]
    assert apart.supervised_mask.tolist() == [[False, True, True], [True, True, False]]
    assert apart.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert documents_as_rows(apart) is apart


@pytest.mark.parametrize("settings", [{}, {"num_steps": 3}, {"num_steps": 2, "num_modules": 2}])
def test_packed_documents_equal_padded_ones(
    settings: dict[str, Any], folder: Callable[[str], Path]
) -> None:
    draft = build(folder("llama"), **settings)
    texts = [draw_text(9, 6), draw_text(5, 7), draw_text(7, 8)]
    together, apart = packed(*texts), make_batch(*texts)
    assert draft.normaliser(together) == draft.normaliser(apart)
    one, other = run(draft, together), run(draft, apart)
    torch.testing.assert_close(one.loss_sum, other.loss_sum)
    for name in one.sums:
        torch.testing.assert_close(one.sums[name], other.sums[name])
    # The control: as one document the same row has other predictions, across its seams.
    whole = replace(together, position_ids=torch.arange(21)[None])
    assert draft.normaliser(whole) == draft.normaliser(apart) + 2
    assert abs(float(run(draft, whole).loss_sum - other.loss_sum)) > 1e-2


def test_rows_of_a_batch_do_not_see_each_other(folder: Callable[[str], Path]) -> None:
    draft = build(folder("llama"), num_steps=2)
    texts = [draw_text(9, 6), draw_text(3, 7), draw_text(2, 8), draw_text(12, 9)]
    together = run(draft, make_batch(*texts))
    one_by_one = [run(draft, make_batch(text)) for text in texts]
    total = sum(output.loss_sum for output in one_by_one)
    torch.testing.assert_close(together.loss_sum, torch.as_tensor(total))
    for name in ("mtp_loss", "supervised", "main_loss"):
        parts = torch.stack([output.sums[name] for output in one_by_one]).sum(0)
        torch.testing.assert_close(together.sums[name], parts)


def test_texts_too_short_for_any_depth_still_have_gradients_everywhere(
    folder: Callable[[str], Path],
) -> None:
    # Two tokens: one main prediction, no slot. DDP waits for every parameter.
    draft = build(folder("llama"), num_steps=2)
    output = run(draft, make_batch(draw_text(2, 1), draw_text(2, 2)))
    output.loss_sum.backward()
    assert output.sums["supervised"].tolist() == [0, 0]
    assert all(weight.grad is not None for weight in draft.parameters())
    nothing = make_batch(draw_text(4, 1), supervised_from=4)
    draft.zero_grad()
    run(draft, nothing).loss_sum.backward()
    assert float(draft.normaliser(nothing)) == 0
    assert all(weight.grad is not None for weight in draft.parameters())


# --- statistics and weights -----------------------------------------------------------------------


def test_acceptance_is_agreement_with_the_main_model_not_with_the_text(
    folder: Callable[[str], Path],
) -> None:
    draft = build(folder("llama"), num_steps=2)
    text = draw_text(10, 11)
    found = run(draft, make_batch(text)).sums
    ids = torch.tensor([text])
    with torch.no_grad():
        own = draft.trunk(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        hidden = draft.trunk.model(input_ids=ids, use_cache=False).last_hidden_state
        batch = replace(make_batch(text), final_hidden_states=hidden)
        places = torch.ones(1, 10, dtype=torch.bool)
        places[0, -1] = False
        plan = plan_slots(places, batch.keep_mask, num_steps=2)
        guesses = draft._head[0](draft.mtp.unrolled(batch, plan, draft._head[0])).argmax(-1)
    hits = [[bool(guesses[k, q] == own[q]) for q in range(k + 1, 9)] for k in range(2)]
    assert found["correct"].tolist() == [sum(row) for row in hits]
    joint = sum(a and b for a, b in zip(hits[0], hits[1], strict=False))
    assert found["greedy_joint"].tolist() == [sum(hits[0]), joint]


def test_shared_weights_are_one_tensor_in_training_and_on_disk(
    folder: Callable[[str], Path],
) -> None:
    draft = build(folder("llama_tied"))
    embeddings = draft.trunk.get_input_embeddings().weight
    assert draft.trunk.get_output_embeddings().weight is embeddings
    assert draft.mtp._target_embeddings[0].weight is embeddings
    assert draft._head[0].weight is embeddings
    names = set(draft.state_dict())
    assert "trunk.model.embed_tokens.weight" in names
    assert "trunk.lm_head.weight" not in names
    assert not [n for n in names if n.startswith("mtp.") and ("embed" in n or "head" in n)]
    draft.load_state_dict(draft.state_dict())


@pytest.mark.parametrize(
    "settings", [{"num_steps": 2}, {"num_steps": 2, "num_modules": 2, "recycle": "before_norm"}]
)
def test_a_text_learnt_by_heart_by_both_is_drafted_and_accepted_in_full(
    settings: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    # T34: whatever differs between training, saving and drafting costs acceptance.
    draft = build(folder("llama_tied"), mtp_weight=1.0, **settings)
    text = draw_text(24, 12)
    batch = make_batch(text)
    optimizer = torch.optim.AdamW(draft.parameters(), weight_decay=0.0)
    for update in range(80):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / 80)
        output = run(draft, batch)
        (output.loss_sum / 23).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(output.sums["main_loss"]) / 23 < 0.05
    assert output.sums["correct"].tolist() == output.sums["supervised"].tolist()
    save_models(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    target = TargetModel.load(str(tmp_path / "model"), dtype="float32")
    loaded = load_drafter(tmp_path / "draft", target)
    prompt = torch.tensor([text[:6]])
    made = generate(target, loaded, prompt, max_new_tokens=18, policy=ChainPolicy(2))
    assert made.token_ids == text[6:]
    rounds = made.rounds[:-1]
    assert [record.accepted for record in rounds] == [record.depth for record in rounds]
    assert len(rounds) <= 6
