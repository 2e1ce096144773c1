"""What the tests of block drafts (DFlash, DSpark) share: small drafts, batches, and a reference
that computes one block from the formulas, position by position and without a cache.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.decode import generate
from draftsmith.models.load import load_drafter
from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings, TrainBatch
from draftsmith.models.target import TargetModel
from draftsmith.train.checkpoint import save_draft
from draftsmith.train.objectives import make_objective

LAYERS = (0, 1, 2)
"""Target layers that the drafts of these tests read."""
MASK = 319
"""The last id of the tiny targets' embeddings, which no text contains."""


def make_draft(method_class: Any, target: TargetModel, *, seed: int = 0, **settings: Any) -> Any:
    """A random draft for a loaded target, norm weights away from 1, in training mode."""
    torch.manual_seed(seed)
    usual = {"num_hidden_layers": 2, "mask_token_id": MASK, "head_dim": 16}
    draft = method_class(**(usual | settings)).build(target.head(), None, LAYERS)
    for parameter in draft.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return draft.train()


def make_batch(target: TargetModel, lengths: tuple[int, ...] = (24, 17), start: int = 5) -> Any:
    """Random tokens with the target's own states, supervised from `start` on."""
    seq = max(lengths)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 300, (len(lengths), seq), generator=generator)
    keep = torch.arange(seq)[None] < torch.tensor(lengths)[:, None]
    output = target.forward(ids, aux_layer_ids=list(LAYERS))
    return TrainBatch(
        input_ids=ids * keep,
        supervised_mask=keep & (torch.arange(seq)[None] >= start),
        keep_mask=keep,
        position_ids=torch.arange(seq).expand(len(lengths), seq),
        aux_hidden_states=output.aux_hidden_states * keep[..., None],
        final_hidden_states=output.final_hidden_states * keep[..., None],
    )


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(states: Tensor, position: int, theta: float) -> Tensor:
    """[heads, head_dim], half-split rotary embedding at one position."""
    half = states.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def reference_block(draft: Any, features: Tensor, anchor_token: int) -> Tensor:
    """[slots, hidden] of one block after the last norm, from the formulas.

    Args:
        draft: Of which only settings, weights and the target's embeddings are read.
        features: [anchor, layers * hidden] of the positions before the anchor.
        anchor_token: Its id.
    """
    config, weights = draft.config, {n: w.detach() for n, w in draft.state_dict().items()}
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    slots, anchor, size = config.block_size, len(features), config.head_dim
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    ids = [anchor_token] + [config.mask_token_id] * (slots - 1)
    hidden = draft._target_embeddings[0](torch.tensor(ids))
    for number, kind in enumerate(config.layer_types):

        def weight(name: str, number: int = number) -> Tensor:
            return weights[f"layers.{number}.{name}.weight"]

        normed = rms(hidden, weight("input_layernorm"), eps)
        inputs = torch.cat([context, normed])  # [anchor + slots, hidden]
        keys = (inputs @ weight("self_attn.k_proj").T).unflatten(-1, (-1, size))
        values = (inputs @ weight("self_attn.v_proj").T).unflatten(-1, (-1, size))
        queries = (normed @ weight("self_attn.q_proj").T).unflatten(-1, (-1, size))
        if config.qk_norm:
            keys = rms(keys, weight("self_attn.k_norm"), eps)
            queries = rms(queries, weight("self_attn.q_norm"), eps)
        keys = torch.stack([rotated(key, place, theta) for place, key in enumerate(keys)])
        attended = []
        for slot in range(slots):
            own = anchor + slot
            query = rotated(queries[slot], own, theta)
            seen = list(range(anchor + slots))
            if kind == "sliding_attention":
                seen = [place for place in seen if own - config.sliding_window < place <= own]
            heads = []
            for head, one in enumerate(query):
                shared = head // (len(query) // keys.shape[1])
                scores = keys[seen, shared] @ one * size**-0.5
                heads.append(scores.softmax(-1) @ values[seen, shared])
            attended.append(torch.cat(heads))
        hidden = hidden + torch.stack(attended) @ weight("self_attn.o_proj").T
        normed = rms(hidden, weight("post_attention_layernorm"), eps)
        gate = torch.nn.functional.silu(normed @ weight("mlp.gate_proj").T)
        hidden = hidden + (gate * (normed @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return rms(hidden, weights["norm.weight"], eps)


def propose_once(draft: Any, context: DraftContext, state: Any, count: int, **how: Any) -> Draft:
    """One sequence's proposal; greedy unless told otherwise."""
    (found,) = draft.propose(
        [context],
        [state],
        num_draft_tokens=[count],
        sampling=[how.get("sampling", SamplingSettings())],
        generators=[how.get("generator")],
    )
    return found


def contexts_of(batch: TrainBatch, row: int, anchors: list[int]) -> list[DraftContext]:
    """What the decoder would say at each of these anchors of a text, one after the other."""
    contexts, first = [], 0
    for anchor in anchors:
        contexts.append(
            DraftContext(
                batch.input_ids[row : row + 1, : anchor + 1],
                batch.aux_hidden_states[row : row + 1, first:anchor],
                batch.final_hidden_states[row : row + 1, first:anchor],
            )
        )
        first = anchor
    return contexts


def overfit(draft: Any, target: TargetModel, batch: TrainBatch, *, updates: int) -> list[float]:
    """[steps] share of right predictions after training on one batch, in the draft's objective."""
    objective = make_objective("ce" if not draft.config.sample_from_anchor else "ce_l1")
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 - update / updates)
        divisor = draft.normaliser(batch)
        output = draft(batch, target_head=target.head(), objective=objective)
        (output.loss_sum / divisor).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return (output.sums["correct"] / output.sums["supervised"]).tolist()


def saved_and_loaded(draft: Any, target: TargetModel, folder: Path) -> Any:
    save_draft(draft, draft.state_dict(), folder, dtype=torch.float32)
    return load_drafter(folder, target)


def sharp_target(tiny: Any, folder: Path) -> Any:
    """A target whose choices are clear (its final norm is eight times as large), its greedy answer
    of 32 tokens to a prompt of 8, and both as a batch."""
    model = tiny.make_tiny_model("llama", seed=5, vocab_size=tiny.PADDED_VOCAB_SIZE)
    model.get_decoder().norm.weight.data.mul_(8.0)
    model.save_pretrained(folder)
    tiny.make_tiny_tokenizer().save_pretrained(folder)
    target = TargetModel.load(str(folder), dtype="float32")
    prompt = torch.randint(4, 300, (1, 8), generator=torch.Generator().manual_seed(3))
    text = generate(target, None, prompt, max_new_tokens=32).token_ids
    assert len(text) == 32, "the text must not end early"
    ids = torch.cat([prompt, torch.tensor([text])], dim=1)
    output = target.forward(ids, aux_layer_ids=list(LAYERS))
    batch = TrainBatch(
        input_ids=ids,
        supervised_mask=torch.arange(40)[None] >= 8,
        keep_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=torch.arange(40)[None],
        aux_hidden_states=output.aux_hidden_states,
        final_hidden_states=output.final_hidden_states,
    )
    return SimpleNamespace(target=target, prompt=prompt, text=text, batch=batch)
