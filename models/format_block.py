"""Checkpoints of block drafts in other programs: what DFlash and DSpark folders share.

All hold the same backbone tensors under the same names, in four kinds of folder. *Flat*: a Qwen3
config with the block's keys at the top and once more below `dflash_config`, because readers differ
in where they look (vLLM and SGLang: nested first; DeepSpec: the top only). *Nested* (speculators):
the layer's config below `transformer_layer_config`. DeepSpec's is flat, with the target's
embeddings and head inside. transformers' assistant: a class of its own and two other tensor names
(models/format_dflash.py).

Nothing that an engine would guess is left out: layout (`sample_from_anchor`), block size, mask
token, layers read, layer types and window. `dflash_config.causal` is the exception and never
written: in vLLM it overrides every layer, while layer types alone mean what draftsmith does, full
attention in both directions and sliding attention causal.

Layer ids are outputs of 0-based layers everywhere but in speculators, which counts layers already
run. Negative ones are refused both ways: DeepSpec's -1 is the embeddings, SGLang refuses it, and
Python indexing would take the target's last state.

Read in the sources of vLLM 0.32, SGLang 0.5.23, speculators 0.9.0, transformers 5.24, z-lab/dflash
and DeepSpec (afdfa7c).

Reading: models/format_block_read.py. Check: tests/test_formats_block.py.

Axes: hidden, vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from draftsmith.models.block_draft import LAYER_TYPES, BlockDraftConfig
from draftsmith.models.format_keys import (
    LAYERS_RUN,
    SPECULATORS_VERSION,
    ForeignFolder,
    TargetFacts,
    check_layer_ids,
    dtype_keys,
    layer_keys,
    proposal_keys,
    rope_keys,
    rope_up_to,
    verifier_cautions,
)

SLIDING = LAYER_TYPES[1]
PROGRAMS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "transformers": "transformers' assistant",
    "deepspec": "DeepSpec",
    "speculators": "speculators",
}
"""Format of a block draft -> whose it is, for people."""
HOLDS_TARGET = ("speculators", "deepspec")
"""Formats whose folders hold copies of the target's embeddings and head."""
ASSISTANT = "muse_glimmer_assistant"
"""`model_type` of the one class that transformers can decode a DFlash draft with."""


def block_layer_ids(
    config: BlockDraftConfig, format: str, target: TargetFacts | None
) -> tuple[list[int], Iterable[tuple[bool, str]]]:
    """The layers read, as outputs of 0-based layers, and what the engine cannot read of them.

    Raises:
        ValueError: they are missing, not distinct and ascending, or beyond the target.
    """
    num_layers = None if target is None else target.num_layers
    ids = check_layer_ids(
        config.aux_layer_ids or [], num_target_layers=num_layers, where="The draft"
    )
    return ids, [
        (
            ids[0] < 0 and format != "speculators",
            "target layer -1, the embeddings: SGLang refuses a negative id, and other readers of "
            "this form would take it for the last layer. Only format=speculators has a number "
            "for it.",
        ),
        (
            ids[-1] + 1 == num_layers and format in ("sglang", "transformers", "deepspec"),
            f"target layer {ids[-1]}, the last one: {PROGRAMS[format]} cannot read its output as "
            "it leaves the layer.",
        ),
    ]


def block_problems(
    config: BlockDraftConfig, format: str, target: TargetFacts | None
) -> Iterable[tuple[bool, str]]:
    """(whether it applies, what the engine cannot serve and what to do), of the backbone."""
    who, slides = PROGRAMS[format], SLIDING in (config.layer_types or [])
    yield (
        not config.qk_norm,
        f"qk_norm=false: a block draft has query and key norms in {who}. Train with "
        "method.qk_norm=true.",
    )
    yield config.mlp_bias, f"mlp_bias: {who} has no biases in the MLP."
    yield (
        config.attention_bias and format == "transformers",
        "attention_bias: transformers' assistant has no biases.",
    )
    yield (
        slides and format == "transformers",
        "sliding layers: transformers' assistant looks both ways within its window; draftsmith's "
        "sliding layers are causal.",
    )
    yield slides and format == "deepspec", "sliding layers: DeepSpec's masks have no window."
    if target is None:
        yield (
            format in HOLDS_TARGET,
            "the target's embeddings and head are part of it: give target.name_or_path=....",
        )
        return
    yield (
        target.scales_embeddings and format in ("sglang", "transformers"),
        f"the target scales its embeddings: {who} hands the draft the bare matrix.",
    )
    yield (
        not target.head_is_plain and format in HOLDS_TARGET,
        "the target's logits are more than a product with a matrix (a bias, soft-capping or "
        "scaling), which the folder's copy of its head cannot hold.",
    )


def refuse_problems(problems: Iterable[tuple[bool, str]], format: str) -> None:
    """Raises ValueError with all problems that apply."""
    found = [text for applies, text in problems if applies]
    if found:
        raise ValueError(
            f"This draft cannot be exported as format={format}:\n"
            + "\n".join(f"  - {problem}" for problem in found)
        )


def block_cautions(config: BlockDraftConfig, format: str, target: TargetFacts | None) -> list[str]:
    """What works in the checked versions only, or under conditions."""
    cautions = []
    kinds = set(config.layer_types or [])
    if SLIDING in kinds and format in ("vllm", "sglang", "speculators"):
        cautions.append(
            f"Sliding layers (window {config.sliding_window}): engines before the checked versions "
            "ignore the window or look both ways in it; acceptance then falls behind the first "
            f"{config.sliding_window} tokens of a text."
        )
    if SLIDING in kinds and format == "speculators":
        cautions.append(
            "speculators itself counts that window from the anchor, not from each slot: its own "
            "loss differs a little; vLLM serves what draftsmith trained."
        )
    if len(kinds) > 1 and format == "vllm":
        cautions.append(
            "Full and sliding layers: vLLM refuses the mixture unless it runs with "
            "VLLM_USE_V2_MODEL_RUNNER=1."
        )
    if target is not None and not target.head_is_plain and format not in HOLDS_TARGET:
        cautions.append(
            "The target's logits are more than a product with a matrix; engines draft with the "
            "bare matrix. Greedy drafts are the same where soft-capping or scaling is all there is."
        )
    if format == "speculators" and target is not None:
        cautions += verifier_cautions(target)
    return cautions


def flat_block_config(
    config: BlockDraftConfig,
    tensors: Mapping[str, Tensor],
    ids: Sequence[int],
    target: TargetFacts | None,
    *,
    architecture: str,
    own_keys: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of a flat folder.

    Args:
        config: The draft's.
        tensors: Of the draft.
        ids: The layers read.
        target: Facts about the target; None: not known.
        architecture: The class.
        own_keys: What the method adds to the block's keys.
    """
    limit = None if target is None else target.max_positions
    block = _block_keys(config) | {"target_layer_ids": list(ids), **own_keys}
    if target is not None:
        block["num_target_layers"] = target.num_layers
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **_qwen3_keys(config, limit),
        **rope_keys(config, max_positions=limit),
        **dtype_keys(tensors),
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        **block,
        "dflash_config": block | {"use_aux_hidden_state": True},
    }


def nested_block_config(
    config: BlockDraftConfig,
    tensors: Mapping[str, Tensor],
    ids: Sequence[int],
    target: TargetFacts,
    *,
    kind: str,
    own_keys: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of a speculators folder.

    Args:
        config: The draft's.
        tensors: Of the draft.
        ids: The layers read.
        target: Facts about the target.
        kind: speculators' name of the method.
        own_keys: What the method adds at the top.
    """
    limit = target.max_positions
    layer = _qwen3_keys(config, limit) | {
        "model_type": "qwen3",
        "rope_parameters": rope_up_to(config, limit),
    }
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": proposal_keys(kind, config.num_steps, target),
        "transformer_layer_config": layer,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": None,  # The draft's own; a number is for drafts that differ.
        **_block_keys(config),
        "aux_hidden_state_layer_ids": [layer_id + LAYERS_RUN for layer_id in ids],
        # vLLM takes it for all layers of a DFlash draft at once: causal, unless it is true.
        "sliding_window_non_causal": SLIDING not in (config.layer_types or []),
        **own_keys,
        "tie_word_embeddings": False,
        "dtype": dtype_keys(tensors)["dtype"],
    }


def _block_keys(config: BlockDraftConfig) -> dict[str, Any]:
    names = ("block_size", "mask_token_id", "sample_from_anchor")
    return {name: getattr(config, name) for name in names}


def _qwen3_keys(config: BlockDraftConfig, max_positions: int | None) -> dict[str, Any]:
    """The layer's keys; a Qwen3 config drops its window unless `use_sliding_window` is set."""
    keys = layer_keys(config, max_positions=max_positions)
    del keys["mlp_bias"], keys["pretraining_tp"]  # Not known to this family.
    slides = SLIDING in (config.layer_types or [])
    return keys | {
        "layer_types": list(config.layer_types or []),
        "sliding_window": config.sliding_window if slides else None,
        "use_sliding_window": slides,
        "max_window_layers": config.num_hidden_layers,
    }


def block_tensors(
    tensors: Mapping[str, Tensor], format: str, target: TargetFacts | None
) -> dict[str, Tensor]:
    """The draft's tensors, and the target's where the format or its engine needs them."""
    written = dict(tensors)
    kept = tensors["fc.weight"].dtype
    # vLLM would hand the draft the bare matrix of a target that scales its embeddings.
    scaled = format == "vllm" and target is not None and target.scales_embeddings
    if format in HOLDS_TARGET or scaled:
        assert target is not None, "checked above"
        assert target.embeddings is not None, "the export reads them for these formats"
        written["embed_tokens.weight"] = target.embeddings.to(kept)
    if format in HOLDS_TARGET:
        assert target is not None, "checked above"
        assert target.head is not None, "the export reads it for these formats"
        written["lm_head.weight"] = target.head.to(kept)
    return written


def block_folder(
    config: BlockDraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
    kind: str,
    architecture: str,
    own_keys: Mapping[str, Any],
    problems: Iterable[tuple[bool, str]],
    cautions: Iterable[str] = (),
) -> ForeignFolder:
    """A folder in the flat form, DeepSpec's or speculators'.

    Args:
        config: The draft's.
        tensors: Its tensors under our names, in the dtype to write.
        format: One of PROGRAMS but transformers.
        target: Facts about the target; None: not known.
        kind: speculators' name of the method.
        architecture: Class of a flat folder.
        own_keys: What the method adds to the block's keys.
        problems: Of the method, beside the backbone's.
        cautions: Of the method.

    Raises:
        ValueError: the format or its engine has no place for something this draft is.
    """
    ids, about_ids = block_layer_ids(config, format, target)
    refuse_problems([*about_ids, *block_problems(config, format, target), *problems], format)
    if format == "speculators":
        assert target is not None, "checked above"
        written = nested_block_config(config, tensors, ids, target, kind=kind, own_keys=own_keys)
    else:
        written = flat_block_config(
            config, tensors, ids, target, architecture=architecture, own_keys=own_keys
        )
    return ForeignFolder(
        written,
        block_tensors(tensors, format, target),
        [*block_cautions(config, format, target), *cautions],
    )
