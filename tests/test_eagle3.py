"""EAGLE-3 training: shift table, uncached reference, invariances, overfitting a tiny target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.models.draft_layer import DraftAttention
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Method
from draftsmith.models.protocols import (
    DraftContext,
    ObjectiveOutput,
    Predictions,
    TrainBatch,
    TrainOutput,
)
from draftsmith.models.ttt_slots import plan_slots, prediction_sums, supervised_places
from draftsmith.models.vocabulary_map import set_draft_vocabulary
from draftsmith.train.objectives import make_objective

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS, STEPS = 40, 24, 32, 2, 3


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
        "step_weights": [0.8**step for step in range(STEPS)],
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


def make_head() -> nn.Module:
    """A random target head whose logits are clear."""
    head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5)
    return head


def make_batch(lengths: list[int], supervised: list[list[int]], *, seed: int = 0) -> TrainBatch:
    """Random right-padded rows; `supervised` lists the positions of the target's own tokens."""
    seq, rows = max(lengths), len(lengths)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(rows, seq, dtype=torch.bool)
    for row, positions in enumerate(supervised):
        mask[row, positions] = True
    keep = torch.arange(seq) < torch.tensor(lengths)[:, None]
    aux = torch.randn(rows, seq, LAYERS * HIDDEN, generator=generator)
    final = torch.randn(rows, seq, HIDDEN, generator=generator)
    return TrainBatch(
        input_ids=torch.randint(0, VOCAB, (rows, seq), generator=generator) * keep,
        supervised_mask=mask,
        keep_mask=keep,
        position_ids=torch.arange(seq).expand(rows, seq),
        aux_hidden_states=aux * keep[..., None],
        final_hidden_states=final * keep[..., None],
    )


def row_of(batch: TrainBatch, row: int) -> TrainBatch:
    """One row without its padding."""
    length = int(batch.keep_mask[row].sum())
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return TrainBatch(**{name: t[row : row + 1, :length] for name, t in fields.items()})


class Recording:
    """Passes on to the KL objective and keeps its predictions."""

    def __init__(self) -> None:
        self.objective = make_objective("kl")

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        self.predictions = predictions
        return self.objective(predictions, target_head)


def train(draft: Eagle3Draft, batch: TrainBatch, objective: Any = None) -> TrainOutput:
    """One training forward with the random target head."""
    return draft(batch, target_head=make_head(), objective=objective or make_objective("kl"))


# The shift table.


def shift_table(mask: list[int], alignment: str, steps: int) -> dict[int, list[tuple[int, ...]]]:
    """Slot -> per step (token read, label token or -1, teacher's position) where it is taught."""
    ids = torch.arange(5, 5 + len(mask))[None]  # Token at position t is t + 5.
    keep = torch.ones_like(ids, dtype=torch.bool)
    places = supervised_places(torch.tensor([mask]).bool(), keep, alignment)
    plan = plan_slots(places, keep, num_steps=steps)
    table: dict[int, list[tuple[int, ...]]] = {}
    for step in range(steps):
        for row, place in enumerate(plan.places.tolist()):
            if not plan.supervised[step, row]:
                continue
            active = int(plan.row_slots[step, row])
            read = int(ids[0, plan.step_positions[step, active]])
            label = int(ids[0, place + 1]) if place + 1 < len(mask) else -1
            table.setdefault(int(plan.active[active]), []).append((step, read, label, place))
    return {slot: table[slot] for slot in sorted(table)}


def test_each_step_reads_the_true_next_token_and_is_taught_by_its_position() -> None:
    # ids [5, 6, 7, 8, 9], all the target's own: slot t, step j reads token t+1+j, learns t+2+j.
    assert shift_table([1, 1, 1, 1, 1], "label", 3) == {
        0: [(0, 6, 7, 1), (1, 7, 8, 2), (2, 8, 9, 3)],
        1: [(0, 7, 8, 2), (1, 8, 9, 3)],
        2: [(0, 8, 9, 3)],
    }


def test_label_alignment_teaches_the_first_token_of_a_reply_and_nothing_behind_it() -> None:
    """T06"""
    # Positions 0 to 2 are the prompt [5, 6, 7], the reply is [8, 9], the rest is the next prompt.
    table = shift_table([0, 0, 0, 1, 1, 0, 0], "label", 2)
    labels = {slot: [(step, label) for step, _, label, _ in rows] for slot, rows in table.items()}
    assert labels == {0: [(1, 8)], 1: [(0, 8), (1, 9)], 2: [(0, 9)]}


def test_feature_alignment_is_two_tokens_late_as_in_the_published_code() -> None:
    table = shift_table([0, 0, 0, 1, 1, 0, 0], "feature", 2)
    labels = {slot: [(step, label) for step, _, label, _ in rows] for slot, rows in table.items()}
    assert labels == {2: [(1, 10)], 3: [(0, 10), (1, 11)], 4: [(0, 11)]}
    # The last real token's mask is cleared, so no slot reads beyond the text.
    assert shift_table([1, 1, 1], "feature", 3) == {
        0: [(0, 6, 7, 1), (1, 7, -1, 2)],
        1: [(0, 7, -1, 2)],
    }


def test_an_unknown_alignment_is_refused() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="labels"):
        supervised_places(mask, mask, "labels")


# Training against an uncached reference.


def uncached_state(
    draft: Eagle3Draft, token_ids: list[int], features: Tensor, fed_back: list[Tensor]
) -> Tensor:
    """The fed-back state of the last pair, from whole-sequence matrices as the paper writes them.

    Args:
        token_ids: One read token per pair.
        features: [pairs - len(fed_back), layers * hidden] true features of the first pairs.
        fed_back: The draft's own states, which stand in for the features of the rest.
    """
    config = draft.config
    w = dict(draft.named_parameters())
    length = len(token_ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    embedded = draft._target_embeddings[0](torch.tensor(token_ids))
    if config.norm_before_fc:
        features = norm(features, "input_norm")
    if config.fc_norm:
        parts = features.unflatten(-1, (LAYERS, -1)).unbind(-2)
        features = torch.cat([norm(x, f"fc_norm.{i}") for i, x in enumerate(parts)], dim=-1)
    g = torch.cat([features @ w["fc.weight"].T, *[s[None] for s in fed_back]])
    cos, sin = LlamaRotaryEmbedding(config)(g, torch.arange(length)[None] + config.rope_offset)
    for index in range(config.num_hidden_layers):
        at = f"layers.{index}"
        a = norm(embedded if index == 0 else g, f"{at}.input_layernorm")
        if index == 0:
            a = torch.cat([a, norm(g, f"{at}.hidden_norm")], dim=-1)
            g = norm(g, f"{at}.hidden_norm") if config.norm_before_residual else g
        projected = []
        for name in ("q", "k", "v"):
            x = F.linear(
                a,
                w[f"{at}.self_attn.{name}_proj.weight"],
                w.get(f"{at}.self_attn.{name}_proj.bias"),
            )
            x = x.view(1, length, -1, config.head_dim).transpose(1, 2)
            if config.qk_norm and name != "v":
                x = norm(x, f"{at}.self_attn.{name}_norm")
            projected.append(x)
        q, k = apply_rotary_pos_emb(*projected[:2], cos, sin)
        out = F.scaled_dot_product_attention(q, k, projected[2], is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)[0]
        r = g + F.linear(
            out, w[f"{at}.self_attn.o_proj.weight"], w.get(f"{at}.self_attn.o_proj.bias")
        )
        m = norm(r, f"{at}.post_attention_layernorm")
        gate, up, down = (w[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        g = r + (F.silu(m @ gate.T) * (m @ up.T)) @ down.T
    return norm(g[-1], "norm") if config.norm_output else g[-1]


def head_input(draft: Eagle3Draft, state: Tensor) -> Tensor:
    """What the draft's head reads: the normed state."""
    if draft.config.norm_output:
        return state
    return F.rms_norm(state, state.shape, draft.norm.weight, draft.config.rms_norm_eps)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_layers": {"num_hidden_layers": 2},
    "qk_norm_and_bias": {"qk_norm": True, "attention_bias": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "rope_at_the_token": {"rope_offset": 1},
    "checkpointed": {"checkpoint_steps": True, "num_hidden_layers": 2},
    "own_head_dim": {"head_dim": 16},
    "full_vocabulary": {"draft_vocab_size": VOCAB},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_unrolled_step_equals_an_uncached_chain(variant: str) -> None:
    """M12: fed back raw, or normed with norm_output; the head's input is normed once in both."""
    draft = make_draft(**VARIANTS[variant])
    batch = make_batch([9, 6], [[4, 5, 6, 8], [3, 4]])
    recording = Recording()
    train(draft, batch, recording)
    made = recording.predictions
    places = supervised_places(batch.supervised_mask, batch.keep_mask, "label").nonzero()
    checked = 0
    for row, (sample, place) in enumerate(places.tolist()):
        ids, aux = batch.input_ids[sample].tolist(), batch.aux_hidden_states[sample]
        for step in range(STEPS):
            slot = place - 1 - step
            assert bool(made.supervised[step, row]) == (slot >= 0)
            if slot < 0:
                continue
            chain: list[Tensor] = []
            for j in range(step + 1):
                read = ids[1 : slot + 2 + j]
                chain.append(uncached_state(draft, read, aux[: slot + 1], chain))
            found = made.draft_hidden[step, row]
            torch.testing.assert_close(found, head_input(draft, chain[-1]), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                made.target_hidden[row], batch.final_hidden_states[sample, place]
            )
            checked += 1
    assert checked > 10


@pytest.mark.parametrize("alignment", ["label", "feature"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_padded_batch_equals_its_rows_one_by_one(layers: int, alignment: str) -> None:
    """T12: conversations are never packed; those that share a batch do not see each other."""
    draft = make_draft(num_hidden_layers=layers, mask_alignment=alignment)
    batch = make_batch([11, 7, 4], [[3, 4, 5, 9, 10], [2, 3, 6], [3]])
    whole = train(draft, batch)
    whole.loss_sum.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad()
    alone = [train(draft, row_of(batch, row)) for row in range(3)]
    sum(output.loss_sum for output in alone).backward()  # type: ignore[union-attr]
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    for name, value in whole.sums.items():
        # Sums in float64 of numbers in float32.
        wanted = sum(output.sums[name] for output in alone)
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    counts = [draft.normaliser(row_of(batch, row)) for row in range(3)]
    assert draft.normaliser(batch) == sum(counts)
    assert draft.normaliser(batch) == whole.sums["supervised"][0] == whole.sums["chains"]


def test_gradients_at_padding_and_behind_the_last_label_are_exactly_zero() -> None:
    draft = make_draft()
    batch = make_batch([8, 5], [[3, 4, 5, 6, 7], [2, 3, 4]])
    aux = batch.aux_hidden_states.requires_grad_()
    train(draft, batch).loss_sum.backward()
    touched = aux.grad.any(-1)
    # The last slot with a label is two before the last token.
    assert touched.tolist() == [[True] * 6 + [False] * 2, [True] * 3 + [False] * 5]


def test_what_stands_at_padding_changes_nothing() -> None:
    draft = make_draft()
    batch = make_batch([8, 5], [[3, 4, 5, 6, 7], [2, 3, 4]])
    clean = train(draft, batch)
    padding = ~batch.keep_mask
    batch.aux_hidden_states[padding] = float("nan")
    batch.final_hidden_states[padding] = float("nan")
    batch.input_ids[padding] = VOCAB - 1
    batch.supervised_mask[padding] = True
    dirty = train(draft, batch)
    assert torch.equal(clean.loss_sum, dirty.loss_sum)


def test_a_batch_without_supervised_tokens_gives_zero_gradients_to_every_weight() -> None:
    """T22: a wrapper that waits for every weight's gradient does not hang."""
    for layers in (1, 2):
        draft = make_draft(num_hidden_layers=layers)
        output = train(draft, make_batch([6, 4], [[], []]))
        assert output.loss_sum.item() == 0.0
        output.loss_sum.backward()
        for name, parameter in draft.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
        assert all(not value.any() for value in output.sums.values())


def test_a_row_of_one_token_is_harmless() -> None:
    draft = make_draft()
    output = train(draft, make_batch([1], [[0]]))
    assert output.loss_sum.item() == 0.0


def test_autocast_and_half_precision_weights_stay_close_to_float32() -> None:
    batch = make_batch([9, 6], [[4, 5, 6, 8], [3, 4]])
    exact = train(make_draft(qk_norm=True), batch).loss_sum.item()
    draft = make_draft(qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = train(draft, batch).loss_sum
    mixed.backward()
    assert all(p.grad.dtype == torch.float32 for p in draft.parameters())
    half = make_draft(qk_norm=True).bfloat16()
    halved = batch.to(torch.device("cpu"), torch.bfloat16)
    output = half(halved, target_head=make_head().bfloat16(), objective=make_objective("kl"))
    output.loss_sum.backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in half.parameters())
    for loss in (mixed.item(), output.loss_sum.item()):
        assert loss == pytest.approx(exact, rel=0.03)
        assert loss != exact


def test_positions_follow_the_batch_not_the_row() -> None:
    """Rotary positions come from position_ids; a common shift leaves relative distances alone."""
    draft = make_draft()
    batch = make_batch([9], [[3, 4, 5, 6, 7, 8]])
    plain = train(draft, batch).loss_sum
    moved = dataclasses.replace(batch, position_ids=batch.position_ids + 11)
    torch.testing.assert_close(train(draft, moved).loss_sum, plain, rtol=1e-5, atol=1e-5)
    stretched = dataclasses.replace(batch, position_ids=batch.position_ids * 3)
    assert abs(train(draft, stretched).loss_sum - plain) > 1e-3


def test_joint_sums_follow_each_chain_until_it_misses_or_ends() -> None:
    # One row of seven tokens; labels 2 to 6 are taught, so slots 0 to 4 start chains.
    keep = torch.ones(1, 7, dtype=torch.bool)
    plan = plan_slots(supervised_places(keep, keep, "label"), keep, num_steps=2)
    rows = len(plan.places)
    correct = torch.ones(2, rows, dtype=torch.bool) & plan.supervised
    correct[0, 1] = False  # The first step of slot 1.
    acceptance = torch.full((2, rows), 0.5)
    in_vocabulary = torch.ones(rows, dtype=torch.bool)
    sums = prediction_sums(
        plan, ObjectiveOutput(torch.zeros(()), torch.zeros(2), correct, acceptance, in_vocabulary)
    )
    assert sums["chains"] == 5
    assert sums["supervised"].tolist() == [5, 4]
    assert sums["correct"].tolist() == [4, 4]
    # Slot 1 misses at once; slot 4's second label does not exist.
    assert sums["greedy_joint"].tolist() == [4, 3]
    assert sums["sampled_joint"].tolist() == [2.5, 1.0]
    assert sums["acceptance"].tolist() == [2.5, 2.0]
    assert all(value.dtype == torch.float64 for value in sums.values())


# What belongs to the draft and what to the target.


def test_target_embeddings_are_not_part_of_the_module() -> None:
    draft = make_draft()
    embeddings = draft._target_embeddings[0]
    ids = {id(p) for p in draft.parameters()}
    assert id(embeddings.weight) not in ids
    assert not any("embed" in name for name in draft.state_dict())
    assert all(p.requires_grad for p in draft.parameters())
    train(draft, make_batch([6], [[3, 4, 5]])).loss_sum.backward()
    assert embeddings.weight.grad is None


def test_drafting_or_training_without_embeddings_says_what_to_call() -> None:
    draft = Eagle3Draft(make_draft().config)
    with pytest.raises(ValueError, match="attach_target"):
        train(draft, make_batch([6], [[3, 4, 5]]))


# With a real (tiny) target.


def make_method(**overrides: Any) -> Eagle3Method:
    """A method for the tiny targets, with layers that exist."""
    settings = {"aux_layer_ids": [0, 1, 2], "draft_vocab_size": None, "num_steps": 4}
    return Eagle3Method(**(settings | overrides))


def build(method: Eagle3Method, target: Any, ids: Tensor | None = None) -> Eagle3Draft:
    """A draft for a loaded target, as the training entry point makes it."""

    class Vocabulary:
        draft_to_target = ids

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return method.build(target.head(), None if ids is None else Vocabulary(), [0, 1, 2])


def test_overfitting_one_text_makes_the_greedy_chain_write_it(
    tiny_target: Callable[..., Any], draft_chain: Callable[..., Any]
) -> None:
    target = tiny_target("llama")
    text = torch.randint(4, 300, (1, 8), generator=torch.Generator().manual_seed(3))
    for _ in range(40):
        logits = target.forward(text, logits="last").logits
        text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    output = target.forward(text, aux_layer_ids=[0, 1, 2])
    batch = TrainBatch(
        input_ids=text,
        supervised_mask=torch.arange(48)[None] >= 8,
        keep_mask=torch.ones(1, 48, dtype=torch.bool),
        position_ids=torch.arange(48)[None],
        aux_hidden_states=output.aux_hidden_states,
        # Sharpened, so that the target's argmax holds nearly all of its mass.
        final_hidden_states=output.final_hidden_states * 8,
    )
    draft = build(make_method(), target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    objective, losses = make_objective("kl"), []
    for _ in range(80):
        trained = draft(batch, target_head=target.head(), objective=objective)
        (trained.loss_sum / draft.normaliser(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(trained.sums["loss"].sum()))
    assert losses[-1] < 0.1 * losses[0]
    chains = trained.sums["chains"]
    assert trained.sums["greedy_joint"][0] / chains > 0.95
    accepted = 0
    starts = range(9, 44)
    for length in starts:
        context = DraftContext(
            text[:, :length],
            output.aux_hidden_states[:, : length - 1],
            output.final_hidden_states[:, : length - 1],
        )
        made = draft_chain(draft, context, 4)
        right = made.tokens == text[0, length : length + 4]
        accepted += int(right.long().cumprod(0).sum())
    assert accepted / len(starts) >= 0.9 * 4


def test_the_head_starts_as_the_targets_rows(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("qwen3")
    ids = torch.tensor([3, 7, 8, 50, 311])
    draft = build(make_method(draft_vocab_size=5), target, ids)
    head = target.head()
    assert torch.equal(draft.lm_head.weight, head.weight[ids])
    assert torch.equal(draft.norm.weight, torch.ones(32))
    assert draft.lm_head.weight.requires_grad
    assert draft.d2t.tolist() == [3, 6, 6, 47, 307]
    assert draft.t2d.nonzero().squeeze(-1).tolist() == ids.tolist()
    drawn = build(make_method(draft_vocab_size=5, init_head="random"), target, ids)
    assert not torch.equal(drawn.lm_head.weight, head.weight[ids])


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "qwen3", "gemma3", "gpt_neox"])
def test_every_family_of_targets_gets_a_draft_that_trains(
    tiny_target: Callable[..., Any], family: str
) -> None:
    target = tiny_target(family)
    draft = build(make_method(draft_vocab_size=40), target, torch.arange(0, 320, 8))
    text = torch.randint(4, 300, (2, 12), generator=torch.Generator().manual_seed(3))
    output = target.forward(text, aux_layer_ids=[0, 1, 2])
    keep = torch.ones_like(text, dtype=torch.bool)
    batch = TrainBatch(
        text, keep, keep, torch.arange(12).expand(2, 12),
        output.aux_hidden_states, output.final_hidden_states,
    )  # fmt: skip
    made = draft(batch, target_head=target.head(), objective=make_objective("kl"))
    made.loss_sum.backward()
    assert made.loss_sum.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters())
    assert draft.config.tie_word_embeddings is False
    assert draft.config.head_dim == (getattr(target.config, "head_dim", None) or 8)
    assert draft.config.max_position_embeddings == 512


def test_missing_sizes_of_a_target_have_to_be_set(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("gpt2")
    with pytest.raises(ValueError, match=r"no intermediate_size. Set method.intermediate_size"):
        build(make_method(), target)
    draft = build(make_method(intermediate_size=64), target)
    assert draft.config.rope_parameters["rope_theta"] == 10000.0
    assert draft.config.num_key_value_heads == 4


def test_step_weights_come_from_the_decay_or_from_a_list(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    assert build(make_method(step_decay=0.5), target).step_weights == [1.0, 0.5, 0.25, 0.125]
    own = build(make_method(step_weights=[1.0, 1.0, 0.0, 2.0]), target)
    assert own.step_weights == [1.0, 1.0, 0.0, 2.0]


def test_a_fresh_draft_attends_to_its_own_slot_first() -> None:
    config = Eagle3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=8,
        aux_layer_ids=[1],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = DraftAttention(config, 128)
        states = torch.randn(24, 128)
    for projection in (attention.q_proj, attention.k_proj):
        torch.nn.init.normal_(projection.weight, std=128**-0.5)
    rope = (torch.ones(24, 1, 32), torch.zeros(24, 1, 32))

    def own_share() -> float:
        key = attention.keys_values(states, rope)[0].repeat_interleave(2, dim=1)
        query = attention.queries(states, rope)
        scores = torch.einsum("qhd,khd->hqk", query, key) / 32**0.5
        return scores.softmax(-1).diagonal(dim1=1, dim2=2).mean().item()

    before = own_share()
    attention.focus_on_own_slot(64)
    assert before < 0.15
    assert own_share() > 0.5
