"""What all checkpoint formats share: the keys of a Llama-type layer, rotary settings, layer ids.

Every format keeps a `config.json` beside its tensors and spells the same facts in its own way.
Engines guess silently where a key is absent, so every architectural key is written even where it
equals an engine's default, and nothing is guessed when a folder is read.

Layer ids. Ours name the *output* of a 0-based layer (-1: the embeddings). SGLang, DeepSpec and
z-lab count the same way; vLLM and speculators count layers already run, one more. Read in the
sources of vLLM 0.32 (`v1/worker/gpu_model_runner.py`) and SGLang 0.5.23 (`models/llama.py`).

Axes: hidden, vocab, draft_vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.draft_sizes import DEFAULT_ROPE, draft_rope_parameters

LAYERS_RUN = 1
"""Added to our layer ids for vLLM and speculators, which count the layers already run."""
SPECULATORS_VERSION = "0.9.0"
"""Of the program whose nested format is written; informational there."""

SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys that mean the same in every format and in our configs."""

NEEDED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Without these a folder is not read: every default would be a guess."""

TRAINING_FIELDS = frozenset(
    {
        "rope_offset", "step_weights", "step_tokens", "mask_alignment", "normalisation",
        "checkpoint_steps", "target_fingerprint", "target_name_or_path", "training",
        "feature_loss", "feature_weight", "objective_weight", "feature_noise", "noise_amplitude",
        "decay", "num_anchors", "confidence_weight", "confidence_detached",
        "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    }
)  # fmt: skip
"""Fields of our configs that say how a draft was trained or stored, not what it is: no format has
a place for them. Whatever is not named here has to survive an export."""


@dataclass(frozen=True)
class TargetFacts:
    """What a format may need to know of the target."""

    name_or_path: str
    source: str
    """The hub id, or the folder that a local name, GGUF file or package stands for."""
    architectures: list[str]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """None where the target states no limit."""
    embeddings: Tensor | None = None
    """[vocab, hidden] as the draft reads them, scale included; None where no format asks."""
    scales_embeddings: bool = False
    """The target multiplies its embedding matrix before the layers read it."""
    head: Tensor | None = None
    """[vocab, hidden] the matrix of its head; None where no format asks."""
    head_is_plain: bool = True
    """Its logits are the product with that matrix and nothing else, as far as was looked."""


@dataclass
class ForeignFolder:
    """One checkpoint in another program's format."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    warnings: list[str] = field(default_factory=list)


# Writing.


def layer_keys(config: Any, *, max_positions: int | None) -> dict[str, Any]:
    """The keys of a Llama-type layer, without the rotary settings.

    Args:
        config: A draft's config.
        max_positions: The target's limit: an engine feeds the draft positions up to it.
    """
    keys = {name: getattr(config, name) for name in SIZE_KEYS}
    keys["max_position_embeddings"] = longest(config.max_position_embeddings, max_positions)
    return keys | {
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def longest(own: int, max_positions: int | None) -> int:
    """The draft's limit or the target's, whichever is longer."""
    return max(own, max_positions or 0)


def rope_keys(config: Any, *, max_positions: int | None) -> dict[str, Any]:
    """Rotary settings in both spellings: `rope_theta` + `rope_scaling` and `rope_parameters`.

    transformers 5 writes only the latter, older readers see only the former.
    """
    parameters = rope_up_to(config, max_positions)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    scaled = parameters["rope_type"] != "default"
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling if scaled else None,
        "rope_parameters": parameters,
    }


def proposal_keys(algorithm: str, num_draft_tokens: int, target: TargetFacts) -> dict[str, Any]:
    """`speculators_config` of a nested folder: the target, and the tokens drafted per round."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": target.source, "architectures": target.architectures},
    }


def verifier_cautions(target: TargetFacts) -> list[str]:
    """What a nested folder says of a target that is no hub id."""
    if not Path(target.source).is_dir():
        return []
    return [
        f"The folder names its target as {target.source}, a path on this machine, and `vllm serve "
        "FOLDER` takes hub ids only. Name both models on vLLM's command line, or export again "
        "with the target's hub id."
    ]


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary settings of one of our configs: flat, with rope_type and rope_theta."""
    return dict(config.rope_parameters)


def rope_up_to(config: Any, max_positions: int | None) -> dict[str, Any]:
    """Rotary settings that mean the same after the position limit was raised to the target's.

    Yarn and dynamic scaling fall back to that limit where they lack the original one.
    """
    raised, own = rope_of(config), config.max_position_embeddings
    falls_back = raised["rope_type"] in ("yarn", "dynamic", "longrope")
    if falls_back and longest(own, max_positions) > own:
        raised.setdefault("original_max_position_embeddings", own)
    return raised


def dtype_keys(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`dtype` and, for older readers, `torch_dtype`: what the tensors really are."""
    name = str(float_dtype(tensors)).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def float_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The one dtype of all float tensors.

    Raises:
        ValueError: there are several, or none.
    """
    kinds = sorted({str(t.dtype) for t in tensors.values() if t.is_floating_point()})
    if len(kinds) != 1:
        raise ValueError(
            f"The float tensors are of {len(kinds)} types ({', '.join(kinds)}); a config can name "
            "one. Store the draft in a single dtype."
        )
    return next(t.dtype for t in tensors.values() if t.is_floating_point())


# Reading.


def read_layer_settings(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of one of our configs from a format's layer keys, rotary settings included.

    Args:
        raw: The mapping that holds the keys.
        where: Names it in errors.

    Raises:
        ValueError: a size is missing, or the rotary settings are partial or contradict each other.
    """
    missing = [name for name in NEEDED_KEYS if raw.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}. Add what the checkpoint was made with; "
            "draftsmith does not guess sizes."
        )
    settings = {name: raw[name] for name in SIZE_KEYS if name in raw}
    if settings.get("num_key_value_heads") is None:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if settings.get("head_dim") is None:
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    settings["rope_parameters"] = read_rope(raw, where)
    return settings


def read_rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flat `rope_parameters` from either spelling.

    Raises:
        ValueError: the head is rotated in part, or the two spellings disagree.
    """
    old = dict(raw.get("rope_scaling") or {})
    if "type" in old:
        old.setdefault("rope_type", old.pop("type"))
    given = raw.get("rope_parameters") or old
    parameters = draft_rope_parameters(SimpleNamespace(rope_parameters=dict(given)))
    if not given:
        parameters = dict(DEFAULT_ROPE)
        parameters["rope_theta"] = raw.get("rope_theta", parameters["rope_theta"])
    theta = parameters.setdefault("rope_theta", raw.get("rope_theta", DEFAULT_ROPE["rope_theta"]))
    parameters.setdefault("rope_type", "default")
    if raw.get("rope_theta") not in (None, theta):
        raise ValueError(
            f"{where} has rope_theta {raw['rope_theta']}, but rope_parameters says {theta}. Keep "
            "the one that the draft was trained with."
        )
    partial = raw.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(
            f"{where} rotates only a part of each head (partial_rotary_factor {partial}); "
            "draftsmith's draft layers rotate whole heads. This draft cannot be read."
        )
    return parameters


def set_positions(
    settings: dict[str, Any],
    raw: Mapping[str, Any],
    max_positions: int | None,
    remarks: list[str],
    *,
    keeps_window: bool = False,
) -> None:
    """Raises the position limit to the target's; a draft that loses its window stays within it.

    Published drafts often state 2048 positions, and engines feed them the target's all the same.

    Args:
        settings: Changed in place.
        raw: The mapping that holds the format's layer keys.
        max_positions: The target's limit; None: not known.
        remarks: What was done is added here.
        keeps_window: Our draft has sliding layers of its own.
    """
    own = settings["max_position_embeddings"]
    limit = longest(own, max_positions)
    kinds = raw.get("layer_types") or []
    slides = "sliding_attention" in kinds or (not kinds and bool(raw.get("use_sliding_window")))
    window = raw.get("sliding_window")
    if slides and not keeps_window and window is not None and window < limit:
        settings["max_position_embeddings"] = window
        remarks.append(
            f"Its layers see {window} tokens back, draftsmith's see everything: it drafts only "
            f"within the first {window} tokens of a text, where both are the same."
        )
    elif limit > own:
        settings["rope_parameters"] = rope_up_to(SimpleNamespace(**settings), limit)
        settings["max_position_embeddings"] = limit
        remarks.append(
            f"It states {own} positions; raised to the target's {limit}, up to which engines use "
            "it. How it fares beyond what it was trained on, draftsmith-evaluate shows."
        )


def check_layer_ids(ids: Sequence[int], *, num_target_layers: int | None, where: str) -> list[int]:
    """Our layer ids: distinct, ascending and in the target.

    Raises:
        ValueError: what is wrong and what to give.
    """
    problem = ""
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in ids) or not ids:
        problem = "not a list of integers"
    elif list(ids) != sorted(set(ids)):
        problem = "not distinct and ascending (engines hand out states in layer order)"
    elif ids[0] < -1:
        problem = "below -1, the embeddings"
    elif num_target_layers is not None and ids[-1] >= num_target_layers:
        problem = f"beyond the target's {num_target_layers} layers (0 to {num_target_layers - 1})"
    if problem:
        raise ValueError(
            f"{where}: the target layers read are {list(ids)} (0-based outputs), which is "
            f"{problem}. Give the layers that the draft was trained on."
        )
    return list(ids)


def read_offsets(d2t: Tensor, size: int, vocab_size: int, where: str) -> Tensor:
    """[size] target ids, ascending, from a reduced vocabulary's map.

    Raises:
        ValueError: it does not hold that many offsets into the vocabulary.
    """
    ids = d2t.long() + torch.arange(len(d2t))
    if len(d2t) != size or bool((ids.diff() <= 0).any()) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ValueError(
            f"{where}: d2t does not hold {size} offsets (target id - draft id) that give ascending "
            f"ids below {vocab_size}; id + offset starts {ids[:6].tolist()}."
        )
    return ids
