"""MTP against recorded runs: transformers' modules and `generate(use_mtp=True)`, speculators' loss.

Sets transformers/mtp-* (5.24.0) and speculators/mtp (0.8.0.dev196); see golden/README.md. float32.
The first ones have the decoder blocks of DeepSeek-V3 (latent attention, experts) and GLM-4-MoE,
which our drafts have not: here they stand in the place of the Llama-type layer, so that wiring,
recycling, caches and drafting are those of the draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import rotate_half

from draftsmith.models.draft_layer import Rope
from draftsmith.models.mtp import DepthwiseMtpDraft, MtpConfig
from draftsmith.models.protocols import DraftContext, Frontier, Predictions, TrainBatch
from draftsmith.models.target import TargetHead
from draftsmith.models.target_structure import find_structure
from draftsmith.train.objectives import make_objective

pytestmark = pytest.mark.golden
TOLERANCE = 1e-5


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> bool:
    scale = float(wanted.abs().max().clamp_min(1e-3))
    return float((found - wanted).detach().abs().max()) <= tolerance * scale


class Recording:
    """An objective that keeps what it was given and what came out."""

    predictions: Predictions

    def __init__(self, name: str) -> None:
        self.objective = make_objective(name)

    def __call__(self, predictions: Predictions, target_head: Any) -> Any:
        self.predictions = predictions
        self.output = self.objective(predictions, target_head)
        return self.output


# Blocks of other families, called as a `DraftLayer` is.


class LatentAttention:
    """DeepSeek-V3's projections on gathered rows; values padded to the width of the keys."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def _turned(self, x: Tensor, rope: Rope) -> Tensor:
        cos, sin = (part.transpose(0, 1) for part in rope)  # [1, rows, rotary]
        turned, _ = apply_rotary_pos_emb_interleave(x[None], x[None], cos, sin, unsqueeze_dim=2)
        return turned[0]

    def queries(self, states: Tensor, rope: Rope, _tokens: Tensor) -> Tensor:
        inner = self.inner
        query = inner.q_b_proj(inner.q_a_layernorm(inner.q_a_proj(states)))
        still, moving = query.unflatten(-1, (-1, inner.qk_head_dim)).split(
            [inner.qk_nope_head_dim, inner.qk_rope_head_dim], -1
        )
        return torch.cat([still, self._turned(moving, rope)], -1)

    def keys_values(self, states: Tensor, rope: Rope, _tokens: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.inner
        latent, moving = inner.kv_a_proj_with_mqa(states).split(
            [inner.kv_lora_rank, inner.qk_rope_head_dim], -1
        )
        both = inner.kv_b_proj(inner.kv_a_layernorm(latent)).unflatten(-1, (inner.num_heads, -1))
        still, value = both.split([inner.qk_nope_head_dim, inner.v_head_dim], -1)
        moving = self._turned(moving[:, None], rope).expand(-1, inner.num_heads, -1)
        padding = inner.qk_head_dim - inner.v_head_dim
        return torch.cat([still, moving], -1), nn.functional.pad(value, (0, padding))


class HalfTurnedAttention:
    """GLM-4's: norms on queries and keys, half of a head is rotated."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def _turned(self, x: Tensor, rope: Rope) -> Tensor:
        cos, sin = rope
        moving, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
        return torch.cat([moving * cos + rotate_half(moving) * sin, still], -1)

    def queries(self, states: Tensor, rope: Rope, _tokens: Tensor) -> Tensor:
        query = self.inner.q_proj(states).unflatten(-1, (-1, self.inner.head_dim))
        return self._turned(self.inner.q_norm(query), rope)

    def keys_values(self, states: Tensor, rope: Rope, _tokens: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (
            projection(states).unflatten(-1, (-1, self.inner.head_dim))
            for projection in (self.inner.k_proj, self.inner.v_proj)
        )
        return self._turned(self.inner.k_norm(key), rope), value


class FamilyLayer(nn.Module):
    """A decoder layer of transformers, called as a `DraftLayer` is."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        latent = hasattr(inner.self_attn, "kv_b_proj")
        self.self_attn = (LatentAttention if latent else HalfTurnedAttention)(inner.self_attn)
        self.value_width = inner.self_attn.o_proj.in_features // 4  # Four heads in every set.

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.input_layernorm(hidden), hidden

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        mixed = attended[..., : self.value_width].flatten(1)
        hidden = residual + self.inner.self_attn.o_proj(mixed)
        return hidden + self.inner.mlp(self.inner.post_attention_layernorm(hidden)[None])[0]


def family_layer(layer_class: Any, config: Any, weights: dict[str, Tensor]) -> FamilyLayer:
    """One with the tensors of a checkpoint, whose experts are stored one by one."""
    inner = layer_class(config, layer_idx=config.num_hidden_layers - 1)
    wanted = {}
    for name in inner.state_dict():
        if name.startswith("mlp.experts."):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            wanted[name] = torch.stack(
                [
                    torch.cat([weights[f"mlp.experts.{e}.{part}.weight"] for part in parts], dim=0)
                    for e in range(config.n_routed_experts)
                ]
            )
        else:
            wanted[name] = weights[name]
    inner.load_state_dict(wanted)
    return FamilyLayer(inner.eval())


def transformers_case(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[DepthwiseMtpDraft, Any, TargetHead]:
    """The draft of a set with the family's blocks, the trunk and its head."""
    config = AutoConfig.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    modules = json.loads((folder / "golden.json").read_text())["num_mtp_layers"]
    depth = config.num_hidden_layers
    model_class = type(AutoModelForCausalLM.from_config(config))
    ignored = [rf"model\.layers\.{depth + k}\..*" for k in range(modules)]
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", ignored)
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = TargetHead(trunk, find_structure(trunk))
    rotary = getattr(config, "qk_rope_head_dim", None) or config.head_dim // 2
    draft = DepthwiseMtpDraft(
        MtpConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=rotary,  # Only its rotary table is used.
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            num_modules=modules,
            depth_attention="full",
            step_weights=[0.5, 0.5],  # Two depths everywhere; a lone module serves both.
        )
    )
    layer_class = type(trunk.model.layers[-1])
    for module in range(modules):
        prefix = f"model.layers.{depth + module}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        for part, name in (
            (draft.enorm, "enorm"), (draft.hnorm, "hnorm"), (draft.eh_proj, "eh_proj"),
            (draft.norm, "shared_head.norm"),
        ):  # fmt: skip
            part[module].weight.data.copy_(own[f"{name}.weight"])
        draft.layers[module] = family_layer(layer_class, trunk.config, own)  # type: ignore[index]
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    return draft.eval(), trunk, head


@pytest.fixture
def folders(golden_folder: Path) -> list[Path]:
    found = sorted((golden_folder / "transformers").glob("mtp-*"))
    assert found, "no set of transformers' MTP"
    return found


def test_both_depths_equal_transformers_modules(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in folders:
        draft, _, head = transformers_case(folder, monkeypatch)
        out = load_file(folder / "golden.safetensors")
        ids, states = out["in.input_ids"], out["in.hidden_states"]
        count = states.shape[1]
        batch = TrainBatch(
            input_ids=ids,
            supervised_mask=torch.ones_like(ids, dtype=torch.bool),
            keep_mask=torch.ones_like(ids, dtype=torch.bool),
            position_ids=torch.arange(ids.shape[1])[None],
            aux_hidden_states=states.new_empty(*ids.shape, 0),
            final_hidden_states=nn.functional.pad(states, (0, 0, 0, ids.shape[1] - count)),
        )
        recording = Recording("kl")
        draft(batch, target_head=head, objective=recording)
        made = recording.predictions.draft_hidden  # Row r is place r + 1, slot r - depth.
        for depth in range(2):
            found = made[depth, depth : min(count + depth, made.shape[1])]
            wanted = out[f"out.depth{depth + 1}.hidden"][0, : len(found)]
            assert len(found) >= count - 1
            assert close(found, wanted), (folder.name, depth)
            assert close(head(found), out[f"out.depth{depth + 1}.logits"][0, : len(found)])


@torch.no_grad()
def test_every_round_of_transformers_decoding_is_drafted_alike(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and matches exactly, logits to rounding; caches go on from round to round."""
    rounds = 0
    for folder in folders:
        draft, trunk, _ = transformers_case(folder, monkeypatch)
        out = load_file(folder / "golden.safetensors")
        for case, recorded in enumerate(
            json.loads((folder / "golden.json").read_text())["decode"]["cases"]
        ):
            ids = out[f"case{case}.output_ids"]
            final = trunk.model(ids).last_hidden_state
            state, read = draft.start(ids.shape[1] + 4), 0
            for index, wanted in enumerate(recorded["rounds"]):
                length = wanted["context_tokens"]
                new = final[:, read : length - 1]
                read = length - 1
                context = DraftContext(ids[:, :length], new[..., :0], new)
                logits = [draft.read([context], [state])]
                tokens = [logits[0].argmax(-1)]
                for step in range(len(wanted["drafted"]) - 1):
                    frontier = Frontier(tokens[-1], torch.tensor([step]), is_chain=True)
                    logits.append(draft.extend([state], [frontier]))
                    tokens.append(logits[-1].argmax(-1))
                where = (folder.name, case, index)
                assert [int(token) for token in tokens] == wanted["drafted"], where
                assert close(
                    torch.cat(logits), out[f"case{case}.round{index}.draft_logits"], 2 * TOLERANCE
                ), where
                text = ids[0, length:].tolist()
                agree = [a == b for a, b in zip(wanted["drafted"], text, strict=False)]
                matches = agree.index(False) if False in agree else len(agree)
                # The last round is cut by the number of tokens asked for, matches included.
                assert wanted["n_matches"] == min(matches, len(text) - 1), where
                rounds += 1
    assert rounds > 20


class FromStatesBeforeTheNorm(DepthwiseMtpDraft):
    """speculators trains on the state before the target's final norm."""

    def _features(self, source: Any) -> Tensor:
        return source.aux_hidden_states


NAMES = {
    "token_layernorm": "enorm.0",
    "hidden_layernorm": "hnorm.0",
    "input_proj": "eh_proj.0",
    "final_layernorm": "norm.0",
}


def own_name(name: str) -> str:
    """speculators' name of a tensor -> ours."""
    rest = name.removeprefix("mtp_layers.0.")
    first = rest.partition(".")[0]
    return rest.replace(first, NAMES[first], 1) if first in NAMES else f"layers.0.{rest}"


def test_losses_logits_and_gradients_equal_speculators(golden_folder: Path) -> None:
    folder = golden_folder / "speculators"
    head = TargetHead.load(str(folder / "target-qwen3"), dtype="float32")
    layer = json.loads((folder / "mtp" / "config.json").read_text())["transformer_layer_config"]
    sizes = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    draft = FromStatesBeforeTheNorm(
        MtpConfig(
            **{name: layer[name] for name in sizes},
            rope_parameters=layer["rope_parameters"],
            qk_norm=True,
            depth_attention="full",
            step_weights=[1.0, 1.0, 1.0],
        )
    )
    weights = load_file(folder / "mtp" / "model.safetensors")
    draft.load_state_dict({own_name(name): tensor for name, tensor in weights.items()})
    draft.attach_target(embed_tokens=head.embed_tokens, head=head)
    packed = load_file(folder / "mtp" / "batch.safetensors")
    lengths = [int((packed["document_ids"] == number).sum()) for number in range(2)]
    starts = [0, lengths[0]]

    def rows(tensor: Tensor) -> Tensor:
        """One padded row per document."""
        pieces = [tensor[0, a : a + n] for a, n in zip(starts, lengths, strict=True)]
        return nn.utils.rnn.pad_sequence(pieces, batch_first=True)

    before = rows(packed["hidden_states"])
    rms = before.pow(2).mean(-1, keepdim=True).add(layer["rms_norm_eps"]).rsqrt()
    assert head.final_norm_weight is not None
    keep = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    batch = TrainBatch(
        input_ids=rows(packed["input_ids"]),
        supervised_mask=rows(packed["loss_mask"]).bool(),
        keep_mask=keep,
        position_ids=torch.arange(max(lengths)).expand(2, -1),
        aux_hidden_states=before,
        final_hidden_states=before * rms * head.final_norm_weight,
    )
    recording = Recording("ce")
    output = draft.train()(batch, target_head=head, objective=recording)
    result = json.loads((folder / "mtp" / "result.json").read_text())
    means = recording.output.step_loss_sums / output.sums["supervised"]
    for step, mean in enumerate(means.tolist()):
        assert mean == pytest.approx(result["metrics"][f"loss_step_{step}"], rel=TOLERANCE)
    assert float(means.sum()) == pytest.approx(result["loss"], rel=TOLERANCE)

    trace = load_file(folder / "mtp" / "trace.safetensors")
    places = (batch.supervised_mask[:, 2:].nonzero() + torch.tensor([0, 1])).tolist()
    made = recording.predictions
    for step in range(3):
        found, wanted = [], []
        for row, (document, place) in enumerate(places):
            if made.supervised[step, row]:
                found.append(head(made.draft_hidden[step, row]))
                slot = starts[document] + place - 1 - step
                wanted.append(trace[f"head_logits_{step}"][0, slot])
        assert len(found) > 100
        assert close(torch.stack(found), torch.stack(wanted))

    assert len(set(output.sums["supervised"].tolist())) == 1
    (output.loss_sum / output.sums["supervised"][0]).backward()
    gradients = {name: weight.grad for name, weight in draft.named_parameters()}
    assert len(result["grad_norms"]) == len(gradients)
    for name, norm in result["grad_norms"].items():
        found_gradient = gradients[own_name(name)]
        assert found_gradient is not None
        assert float(found_gradient.norm()) == pytest.approx(norm, rel=1e-4), name
