"""MTP: training against its equations written out, cached drafting against training for both kinds
of attention, the loss, decoding with every policy, any target family.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import (
    ChainPolicy,
    DynamicTreePolicy,
    SampledTreePolicy,
    StaticTreePolicy,
)
from draftsmith.models.load import load_drafter
from draftsmith.models.mtp import MtpConfig, MtpDraft, MtpMethod
from draftsmith.models.protocols import DraftContext, Frontier, Predictions, TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.checkpoint import save_draft
from draftsmith.train.objectives import make_objective

SEQ = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "chain": {},
    "chain_mimo": {"concat": "hidden_first", "zero_first_slot": True, "attention_bias": True},
    "chain_before_norm": {"recycle": "before_norm", "qk_norm": True, "num_hidden_layers": 2},
    "shared_full": {"depth_attention": "full", "qk_norm": True},
    "modules": {"num_modules": 3},
    "modules_before_norm": {
        "num_modules": 2, "recycle": "before_norm", "num_hidden_layers": 2, "zero_first_slot": True,
    },
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}  # fmt: skip
POLICIES: dict[str, Any] = {
    "chain": ChainPolicy(5),
    "static": StaticTreePolicy(),
    "dynamic": DynamicTreePolicy(total_tokens=10, depth=3, top_k=3),
    "sampled": SampledTreePolicy((2, 2, 1)),
}


def make_draft(target: TargetModel, *, seed: int = 0, **settings: Any) -> MtpDraft:
    """A random draft for a loaded target, all weights large enough to matter, in training mode."""
    torch.manual_seed(seed)
    draft = MtpMethod(**settings).build(target.head(), None, [])
    for parameter in draft.parameters():
        if parameter.ndim == 1:
            parameter.data.copy_(1.0 + 0.2 * torch.randn_like(parameter))
        else:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return draft.train()


def make_batch(target: TargetModel, lengths: list[int] | None = None) -> TrainBatch:
    """Random tokens with the target's own states, supervised from the fifth on."""
    lengths = lengths or [SEQ, 11]
    seq = max(lengths)
    ids = torch.randint(4, 300, (len(lengths), seq), generator=torch.Generator().manual_seed(1))
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


def rows_of(batch: TrainBatch, row: int, length: int) -> TrainBatch:
    """One conversation of a batch, without its padding."""
    fields = {entry.name: getattr(batch, entry.name) for entry in dataclasses.fields(batch)}
    return TrainBatch(**{name: value[row : row + 1, :length] for name, value in fields.items()})


class Recording:
    """An objective that keeps what it was given and what came out."""

    predictions: Predictions

    def __init__(self, name: str = "kl") -> None:
        self.objective = make_objective(name)

    def __call__(self, predictions: Predictions, target_head: Any) -> Any:
        self.predictions = predictions
        self.output = self.objective(predictions, target_head)
        return self.output


def run(
    draft: MtpDraft, target: TargetModel, batch: TrainBatch, name: str = "kl"
) -> tuple[Recording, Any]:
    recording = Recording(name)
    return recording, draft(batch, target_head=target.head(), objective=recording)


# The equations of models/mtp_module.py, one slot at a time, everything computed afresh.


class Equations:
    """A draft's weights, and the module as it is written."""

    def __init__(self, draft: MtpDraft, target: TargetModel) -> None:
        self.config = draft.config
        self.w = {name: weight.detach() for name, weight in draft.state_dict().items()}
        self.embed, self.head = target.embed_tokens, target.head()

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def entered(self, module: int, ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """M [enorm(embedding) ; hnorm(state)]"""
        embedded = self.embed(ids)
        if self.config.zero_first_slot:
            embedded = embedded * (positions > 0)[:, None]
        parts = [self.norm(embedded, f"enorm.{module}"), self.norm(states, f"hnorm.{module}")]
        if self.config.concat == "hidden_first":
            parts.reverse()
        return torch.cat(parts, -1) @ self.w[f"eh_proj.{module}.weight"].T

    def block(self, module: int, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        count = self.config.num_hidden_layers
        for layer in range(module * count, (module + 1) * count):
            x = self.layer(f"layers.{layer}", x, positions, seen)
        return x

    def layer(self, name: str, x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        dim = self.config.head_dim
        theta = self.config.rope_parameters["rope_theta"]
        rates = theta ** (-torch.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * rates).repeat(1, 2)[:, None]

        def turned(y: Tensor) -> Tensor:
            half = torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
            return y * angles.cos() + half * angles.sin()

        normed = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.linear(normed, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, dim))
            for part in "qkv"
        )
        if self.config.qk_norm:
            q = self.norm(q, f"{name}.self_attn.q_norm")
            k = self.norm(k, f"{name}.self_attn.k_norm")
        groups = q.shape[1] // k.shape[1]
        q, k = turned(q), turned(k).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(groups, 1)).flatten(1)
        x = x + self.linear(mixed, f"{name}.self_attn.o_proj")
        return x + self.mlp(f"{name}.mlp", self.norm(x, f"{name}.post_attention_layernorm"))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        if self.config.num_experts is None:
            gate = F.silu(self.linear(x, f"{name}.gate_proj"))
            return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")
        chances = (x @ self.w[f"{name}.gate.weight"].T).softmax(-1)
        best, chosen = chances.topk(self.config.num_experts_per_tok)
        total = []
        for row, weights, experts in zip(x, best / best.sum(-1, keepdim=True), chosen, strict=True):
            out = torch.zeros_like(row)
            for weight, expert in zip(weights, experts, strict=True):
                gate, up = (self.w[f"{name}.experts.gate_up_proj"][expert] @ row).chunk(2)
                down = self.w[f"{name}.experts.down_proj"][expert]
                out = out + weight * (down @ (F.silu(gate) * up))
            total.append(out)
        return torch.stack(total)

    def outputs(self, module: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden, f"norm.{module}")
        return normed, normed if self.config.recycle == "after_norm" else hidden

    def predicted(self, ids: Tensor, final: Tensor, slot: int, depth: int) -> Tensor:
        """[hidden] what the head reads at depth `depth` of `slot`, for ids [seq] and states."""
        if self.config.depth_attention == "full":
            return self.depthwise(ids, final, slot, depth)
        return self.chained(ids, final, slot, depth)

    def depthwise(self, ids: Tensor, final: Tensor, slot: int, depth: int) -> Tensor:
        count = slot + 1
        positions = torch.arange(count)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        state, normed = final[:count], final
        for k in range(depth + 1):
            module = min(k, self.config.num_modules - 1)
            x = self.entered(module, ids[1 + k : 1 + k + count], state, positions)
            normed, state = self.outputs(module, self.block(module, x, positions, causal))
        return normed[slot]

    def chained(self, ids: Tensor, final: Tensor, slot: int, depth: int) -> Tensor:
        # Rows 0 .. slot are pairs of the text, row slot + j is the chain's step j.
        states, normed = final[: slot + 1], final
        for j in range(depth + 1):
            count = slot + 1 + j
            positions = torch.arange(count)
            x = self.entered(0, ids[1 : 1 + count], states, positions)
            causal = torch.ones(count, count, dtype=torch.bool).tril()
            normed, state = self.outputs(0, self.block(0, x, positions, causal))
            states = torch.cat([states, state[-1:]])
        return normed[-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_depth_equals_its_equation(tiny_target: Callable[..., Any], name: str) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, **VARIANTS[name])
    batch = make_batch(target)
    recording, output = run(draft, target, batch)
    made = recording.predictions
    places = (batch.supervised_mask[:, 2:].nonzero() + torch.tensor([0, 1])).tolist()
    assert made.draft_hidden.shape[:2] == (3, len(places))
    equations = Equations(draft, target)
    checked = 0
    for row, (sample, place) in enumerate(places):
        for depth in range(3):
            slot = place - 1 - depth
            assert bool(made.supervised[depth, row]) == (slot >= 0)
            if slot < 0:
                continue
            wanted = equations.predicted(
                batch.input_ids[sample], batch.final_hidden_states[sample], slot, depth
            )
            torch.testing.assert_close(made.draft_hidden[depth, row], wanted, rtol=1e-4, atol=1e-5)
            checked += 1
    assert checked > 30
    output.loss_sum.backward()
    gradients = {name: weight.grad for name, weight in draft.named_parameters()}
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in gradients.values())
    assert target.head().weight.grad is None
    assert not any("embed" in name or "lm_head" in name for name in draft.state_dict())


def test_the_two_kinds_of_attention_agree_at_the_first_depth_only(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    batch = make_batch(target)
    chain, full = (
        run(make_draft(target, depth_attention=kind), target, batch)[0].predictions.draft_hidden
        for kind in ("chain", "full")
    )
    torch.testing.assert_close(chain[0], full[0])
    assert not torch.allclose(chain[1], full[1], atol=1e-2)


@pytest.mark.parametrize("settings", [{}, {"num_modules": 3}])
def test_recomputing_the_steps_changes_nothing(
    tiny_target: Callable[..., Any], settings: dict[str, Any]
) -> None:
    target = tiny_target("llama")
    batch = make_batch(target)
    found = []
    for checkpoint_steps in (False, True):
        draft = make_draft(target, checkpoint_steps=checkpoint_steps, **settings)
        run(draft, target, batch)[1].loss_sum.backward()
        found.append({name: weight.grad for name, weight in draft.named_parameters()})
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted)


# The loss.


def test_one_module_and_one_step_is_the_formula_of_the_paper(
    tiny_target: Callable[..., Any],
) -> None:
    """L = - 1 / T sum_i log P_i[t_{i+2}] (DeepSeek-V3, equation 24 with k = 1), T as documented."""
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=1)
    batch = make_batch(target)
    recording, output = run(draft, target, batch, "ce")
    equations = Equations(draft, target)
    output.loss_sum = output.loss_sum.detach()
    total, count = 0.0, 0
    for sample, length in enumerate([SEQ, 11]):
        ids, final = batch.input_ids[sample], batch.final_hidden_states[sample]
        for slot in range(length - 2):
            if not batch.supervised_mask[sample, slot + 2]:
                continue
            logits = target.logits(equations.predicted(ids, final, slot, 0))
            total -= float(logits.log_softmax(-1)[ids[slot + 2]])
            count += 1
    assert draft.step_weights == [1.0]
    assert float(draft.normaliser(batch)) == count
    assert float(output.loss_sum) / count == pytest.approx(total / count, rel=1e-5)
    assert torch.equal(recording.predictions.weights, torch.ones(1, count))


def test_the_weights_of_the_steps_are_the_published_ones_and_sum_to_one(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    weights = make_draft(target).step_weights
    assert [round(weight, 2) for weight in weights] == [0.51, 0.31, 0.18]
    assert math.fsum(make_draft(target, num_steps=4, step_decay=0.9).step_weights) == pytest.approx(
        1.0
    )
    assert make_draft(target, step_decay=1.0).step_weights == pytest.approx([1 / 3] * 3)
    own = make_draft(target, num_steps=2, step_weights=[2.0, 1.0])
    assert own.step_weights == [2.0, 1.0]
    recording, output = run(own, target, make_batch(target))
    sums = (recording.output.losses * recording.predictions.supervised).sum(-1)
    assert float(output.loss_sum) == pytest.approx(float(2.0 * sums[0] + sums[1]), rel=1e-5)


@pytest.mark.parametrize("name", ["chain", "modules_before_norm"])
def test_a_padded_batch_equals_its_rows(tiny_target: Callable[..., Any], name: str) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, **VARIANTS[name])
    batch = make_batch(target)
    whole = run(draft, target, batch)[1]
    parts = [
        run(draft, target, rows_of(batch, row, length))[1] for row, length in enumerate([SEQ, 11])
    ]
    total = sum(float(part.loss_sum.detach()) for part in parts)
    assert float(whole.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    for key in ("supervised", "correct", "chains", "greedy_joint"):
        assert torch.equal(whole.sums[key], parts[0].sums[key] + parts[1].sums[key])


def test_depth_k_is_taught_where_its_own_label_is_the_targets(
    tiny_target: Callable[..., Any],
) -> None:
    """T13, T14: labels moved once per depth, never the mask alone."""
    target = tiny_target("llama")
    batch = make_batch(target, [6])
    batch.supervised_mask = torch.tensor([[False, False, True, True, True, False]])
    made = run(make_draft(target), target, batch, "ce")[0].predictions
    # Labels are tokens 2, 3, 4; depth k of slot t has label t + 2 + k, so slots 0-2, 0-1, 0.
    assert made.labels.tolist() == batch.input_ids[0, 2:5].tolist()
    assert made.supervised.sum(-1).tolist() == [3, 2, 1]


def test_the_label_may_be_the_text_or_the_targets_own_choice(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    draft, batch = make_draft(target, num_steps=1), make_batch(target)
    made = run(draft, target, batch)[0].predictions
    draft_logits = target.head()(made.draft_hidden[0]).log_softmax(-1)
    choice = target.head()(made.target_hidden).argmax(-1)
    assert not torch.equal(choice, made.labels)
    for labels, tokens in (("text", made.labels), ("target", choice)):
        output = make_objective("ce", labels=labels)(made, target.head())
        wanted = -draft_logits.gather(-1, tokens[:, None]).sum()
        torch.testing.assert_close(output.loss_sum, wanted, rtol=1e-5, atol=1e-4)
        wanted_gradient = torch.autograd.grad(wanted, made.draft_hidden, retain_graph=True)[0]
        gradient = torch.autograd.grad(output.loss_sum, made.draft_hidden, retain_graph=True)[0]
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="text or target"):
        make_objective("ce", labels="teacher")


# Drafting.


@pytest.mark.parametrize("name", VARIANTS)
def test_cached_drafting_equals_the_training_forward(
    tiny_target: Callable[..., Any], name: str
) -> None:
    """I18: what is drafted with caches is what was trained, at every depth."""
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=4, **VARIANTS[name]).eval()
    batch = make_batch(target, [SEQ])
    batch.supervised_mask = torch.ones_like(batch.supervised_mask)
    trained = run(draft, target, batch)[0].predictions.draft_hidden  # Row r is place r + 1.
    state, length = draft.start(64), 0
    for stop in (5, 6, 7, 10):
        ids = batch.input_ids[:, :stop]
        new = batch.final_hidden_states[:, length : stop - 1]
        logits = draft.read([DraftContext(ids, new[..., :0], new)], [state])
        for step in range(4):
            wanted = target.logits(trained[step, stop - 2 + step])
            torch.testing.assert_close(logits[-1], wanted, rtol=1e-4, atol=1e-4)
            token = batch.input_ids[0, stop + step]
            frontier = Frontier(token[None], torch.tensor([step]), is_chain=True)
            logits = draft.extend([state], [frontier])
        length = stop - 1


@pytest.mark.parametrize("name", ["chain", "shared_full", "modules", "modules_before_norm"])
def test_a_tree_of_two_texts_at_once_equals_its_chains(
    tiny_target: Callable[..., Any], name: str
) -> None:
    """Every node of a tree predicts what a chain along its path predicts, deeper than training."""
    target = tiny_target("llama")
    draft = make_draft(target, **VARIANTS[name]).eval()
    batch = make_batch(target, [12, 12])
    # Rows: root 0; 1 and 2 below it; 3 below 1, 4 and 5 below 2; 6 below 5; 7 below 6.
    levels = [([0, 0], [21, 22]), ([1, 2, 2], [31, 32, 33]), ([5], [41]), ([6], [51])]
    paths = [[21], [22], [21, 31], [22, 32], [22, 33], [22, 33, 41], [22, 33, 41, 51]]
    lengths = (9, 4)

    def context(row: int) -> DraftContext:
        count = lengths[row]
        final = batch.final_hidden_states[row : row + 1, : count - 1]
        return DraftContext(batch.input_ids[row : row + 1, :count], final[..., :0], final)

    states = [draft.start(40), draft.start(40)]
    found: list[list[Tensor]] = [[], []]
    draft.read([context(0), context(1)], states)
    for parents, tokens in levels:
        frontier = Frontier(torch.tensor(tokens), torch.tensor(parents))
        logits = draft.extend(states, [frontier, frontier])
        for row, part in enumerate(logits.split(len(tokens))):
            found[row] += list(part)
    for row in range(2):
        for path, logits in zip(paths, found[row], strict=True):
            state = draft.start(40)
            draft.read([context(row)], [state])
            for step, token in enumerate(path):
                frontier = Frontier(torch.tensor([token]), torch.tensor([step]), is_chain=True)
                wanted = draft.extend([state], [frontier])
            torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["chain", "shared_full", "modules"])
@pytest.mark.parametrize("length", [2, 3])
def test_a_text_shorter_than_the_depths_is_drafted_for_as_it_was_trained(
    tiny_target: Callable[..., Any], name: str, length: int
) -> None:
    """Deeper caches have no committed entry there; the drafted ones come first."""
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=4, **VARIANTS[name]).eval()
    prompt = torch.randint(4, 300, (1, length), generator=torch.Generator().manual_seed(5))
    own = generate(target, None, prompt, max_new_tokens=8)
    made = generate(target, draft, prompt, max_new_tokens=8, policy=ChainPolicy(4))
    assert made.token_ids == own.token_ids
    assert made.rounds[0].proposed == 4
    batch = make_batch(target, [SEQ])
    final = batch.final_hidden_states
    state = draft.start(20)
    logits = draft.read(
        [DraftContext(batch.input_ids[:, :length], final[..., :0], final[:, : length - 1])], [state]
    )
    equations = Equations(draft, target)
    for step in range(4):
        wanted = equations.predicted(batch.input_ids[0], final[0], length - 2, step)
        torch.testing.assert_close(logits[0], target.logits(wanted), rtol=1e-4, atol=1e-4)
        token = batch.input_ids[0, length + step]
        logits = draft.extend([state], [Frontier(token[None], torch.tensor([step]), True)])


@pytest.mark.lossless
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("family", "name"), [("llama", "chain"), ("gemma2", "modules")])
def test_greedy_text_is_the_targets_own(
    tiny_target: Callable[..., Any], family: str, name: str, policy: str
) -> None:
    """Chains here are five tokens deep, two deeper than the steps that were unrolled."""
    target = tiny_target(family)
    draft = make_draft(target, **VARIANTS[name]).eval()
    prompt = torch.randint(4, 300, (1, 9), generator=torch.Generator().manual_seed(2))
    own = generate(target, None, prompt, max_new_tokens=14)
    made = generate(target, draft, prompt, max_new_tokens=14, policy=POLICIES[policy])
    assert made.token_ids == own.token_ids
    assert max(record.proposed for record in made.rounds) >= 4


@pytest.mark.parametrize("settings", [{}, {"num_modules": 2}, {"num_experts": 4}])
def test_a_saved_draft_loads_and_computes_the_same(
    tiny_target: Callable[..., Any], tmp_path: Path, settings: dict[str, Any]
) -> None:
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=2, **settings).eval()
    save_draft(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "draft", target)
    assert type(loaded) is type(draft)
    batch = make_batch(target)
    first, second = (run(one, target, batch)[1] for one in (draft, loaded))
    assert torch.equal(first.loss_sum, second.loss_sum)


def test_a_tensor_loaded_under_another_name_is_noticed(
    tiny_target: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 with an empty prefix reads enorm.0.weight into norm.0.weight."""
    target = tiny_target("llama")
    draft = make_draft(target, num_steps=2).eval()
    save_draft(draft, draft.state_dict(), tmp_path / "draft", dtype=torch.float32)
    monkeypatch.setattr(MtpDraft, "base_model_prefix", "")
    with pytest.raises(ValueError, match="under its name"):
        load_drafter(tmp_path / "draft", target)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gemma3", "granite"])
def test_every_family_of_targets_gets_a_draft_that_trains(
    tiny_target: Callable[..., Any], family: str
) -> None:
    target = tiny_target(family)
    torch.manual_seed(0)
    draft = MtpMethod(num_steps=2).build(target.head(), None, []).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    batch = make_batch(target)
    for _ in range(40):
        output = run(draft, target, batch)[1]
        (output.loss_sum / draft.normaliser(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(output.sums["correct"].sum()) > 0.6 * float(output.sums["supervised"].sum())


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concat": "embedding"}, "Did you mean 'embedding_first'"),
        ({"recycle": "post"}, "before_norm"),
        ({"depth_attention": "ful"}, "Did you mean 'full'"),
        ({"num_modules": 2, "depth_attention": "chain"}, "separate caches"),
        ({"num_modules": 4}, "never be trained"),
        ({"num_modules": 2, "step_tokens": ["true", "own", "own"]}, "no effect"),
        ({"num_experts": 1}, "num_experts_per_tok"),
        ({"zero_first_slot": "yes"}, "true or false"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MtpMethod(**settings)


def test_a_config_that_contradicts_its_class_is_refused(tiny_target: Callable[..., Any]) -> None:
    config = make_draft(tiny_target("llama"), num_modules=2).config
    with pytest.raises(ValueError, match="do not fit"):
        MtpDraft(config)


def test_the_presets_hold_the_defaults_and_the_wiring_of_each_family() -> None:
    from omegaconf import OmegaConf

    import draftsmith.conf

    folder = Path(draftsmith.conf.__path__[0]) / "method"

    def node(name: str) -> dict[str, Any]:
        found: Any = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
        return found

    plain = node("mtp")
    assert plain.pop("_target_") == "draftsmith.models.mtp.MtpMethod"
    defaults = dataclasses.asdict(MtpMethod())
    assert defaults.pop("aux_layer_ids") == []
    assert plain == defaults
    wiring = {}
    for family in ("deepseek", "glm", "mimo", "qwen3_5"):
        changed = node(f"mtp_{family}")
        assert changed.pop("defaults") == ["mtp", "_self_"]
        made = MtpMethod(**(plain | changed))
        wiring[family] = (made.concat, made.recycle, made.zero_first_slot)
    assert wiring == {  # METHODS, sections 3.2 and 3.3: what vLLM computes.
        "deepseek": ("embedding_first", "after_norm", True),
        "glm": ("embedding_first", "before_norm", True),
        "mimo": ("hidden_first", "after_norm", True),
        "qwen3_5": ("embedding_first", "after_norm", False),
    }
    assert MtpConfig(depth_attention="full", num_modules=2).step_weights == [0.5, 0.5]
