"""Reads the checkpoints of block drafts that models/format_block.py writes, and what other programs
write of that kind: keys at the top, in `dflash_config`, or in speculators' form.

Nothing is guessed: a key that readers would fill in with different defaults is asked for, places
that contradict each other are refused, and so is every switch that draftsmith has no counterpart
of.

Check: tests/test_formats_block.py, tests/test_golden_block.py.

Axes: hidden, vocab, rows (of a vocabulary that another program reduced).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.models.block_draft import LAYER_TYPES
from draftsmith.models.format_block import ASSISTANT, SLIDING
from draftsmith.models.format_keys import (
    LAYERS_RUN,
    TargetFacts,
    check_layer_ids,
    read_layer_settings,
    read_offsets,
    set_positions,
)

NESTED = ("dflash_config", "dspark_config")

FOREIGN_SWITCHES: dict[str, tuple[Any, ...]] = {
    "use_gemma_norm": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "logit_scale": (1.0,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "use_swa": (False,),
    "use_aux_hidden_state": (True,),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
}
"""Switches of other programs that draftsmith has no counterpart of -> what may be said there."""


@dataclass
class TargetRows:
    """The target's head as a checkpoint carries it; drafts of ours use the target's own."""

    weight: Tensor
    """[rows, hidden]."""
    ids: Tensor | None
    """[rows] the tokens; None: all of them."""


def read_both(raw: Mapping[str, Any], name: str, where: str) -> Any:
    """A key's value, at the top or in dflash_config or dspark_config; None where it is absent.

    Raises:
        ValueError: the places contradict each other.
    """
    places = [("at the top", raw)]
    places += [(f"in {key}", raw[key]) for key in NESTED if isinstance(raw.get(key), dict)]
    found = [(place, node[name]) for place, node in places if node.get(name) is not None]
    if any(value != found[0][1] for _, value in found):
        said = " and ".join(f"{value!r} {place}" for place, value in found)
        raise ValueError(
            f"{where} says {name} {said}. Engines read the one or the other; keep what the draft "
            "was trained with."
        )
    return found[0][1] if found else None


def needed(raw: Mapping[str, Any], name: str, where: str, why: str) -> Any:
    """Like `read_both`, for a key without which the draft could only be guessed at."""
    value = read_both(raw, name, where)
    if value is None:
        raise ValueError(f"{where} lacks {name}: {why} Add what the draft was trained with.")
    return value


def take_head(raw: Mapping[str, Any], tensors: dict[str, Tensor], where: str) -> TargetRows | None:
    """Takes the target's head and a vocabulary map out of a checkpoint's tensors.

    Raises:
        ValueError: they contradict each other.
    """
    weight = tensors.pop("lm_head.weight", None)
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    inner = raw.get("transformer_layer_config", raw)
    vocab_size = inner.get("vocab_size")
    size = raw.get("draft_vocab_size") or vocab_size
    if weight is None:
        if d2t is not None or size != vocab_size:
            raise ValueError(
                f"{where}: the draft vocabulary has {size} of {vocab_size} tokens, but the "
                "checkpoint has no lm_head.weight: nobody can know its head."
            )
        return None
    if len(weight) != size:
        raise ValueError(
            f"{where} says draft_vocab_size {size}, but lm_head.weight has {len(weight)} rows."
        )
    if size == vocab_size:
        return TargetRows(weight, None)
    if d2t is None:
        raise ValueError(
            f"{where}: the draft vocabulary has {size} of {vocab_size} tokens, but the checkpoint "
            "has no d2t: nobody can know which."
        )
    return TargetRows(weight, read_offsets(d2t, size, vocab_size, where))


def read_backbone(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    aux_layer_ids: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
    anchor_first: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Arguments of a block draft's config, and remarks for the user.

    Args:
        raw: The folder's config.json.
        tensors: Its tensors under our names; the target's were taken out.
        aux_layer_ids: The layers read, in our counting; None: as the config says.
        target: Facts about the target; None: not known.
        where: Names the config in errors.
        anchor_first: What a flat folder means that does not say `sample_from_anchor`: published
            DFlash folders have no such key and are not, published DSpark folders are.

    Raises:
        ValueError: a fact is missing, contradicts another, or has no counterpart in draftsmith.
    """
    nested = "speculators_model_type" in raw
    inner = _layer_node(raw, target, where)
    _refuse_switches(raw, where)
    settings = read_layer_settings(inner, where)
    size = settings["hidden_size"]
    if (raw.get("target_hidden_size") or size) != size:
        raise ValueError(
            f"{where}: the draft's hidden size is {size}, its target's "
            f"{raw['target_hidden_size']}; draftsmith's block drafts share the target's head and "
            "embeddings, so they are as wide."
        )
    remarks: list[str] = []
    settings |= _read_attention(raw, inner, settings, where)
    settings |= {
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "block_size": needed(raw, "block_size", where, "engines would guess 8 or 16."),
        "mask_token_id": needed(raw, "mask_token_id", where, "a slot needs a token to read."),
        "aux_layer_ids": _read_block_layers(
            raw, tensors, size, nested=nested, given=aux_layer_ids, target=target, where=where
        ),
    }
    layout = read_both(raw, "sample_from_anchor", where)
    if layout is None and nested:
        raise ValueError(
            f"{where} lacks sample_from_anchor: speculators and vLLM take different defaults. Add "
            "what the draft was trained with."
        )
    settings["sample_from_anchor"] = anchor_first if layout is None else bool(layout)
    if nested and settings["sliding_window"] is not None:
        remarks.append(
            "speculators counts the window of a sliding layer from the anchor, draftsmith and the "
            "engines from each slot: the later ones see fewer tokens than they were trained with."
        )
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        ids = settings.get(role)
        if settings["mask_token_id"] in (ids if isinstance(ids, list) else [ids]):
            remarks.append(
                f"Its mask token, {settings['mask_token_id']}, is its {role}: it was trained so, "
                "but a text that contains it looks like an empty slot to the draft."
            )
    limit = None if target is None else target.max_positions
    set_positions(settings, inner, limit, remarks, keeps_window=True)
    return settings, remarks


def _layer_node(raw: Mapping[str, Any], target: TargetFacts | None, where: str) -> dict[str, Any]:
    """The mapping that holds the layer's keys."""
    node = dict(raw.get("transformer_layer_config", raw))
    family = node.get("model_type")
    if family not in ("qwen3", ASSISTANT):
        raise ValueError(
            f"{where}: the layers are of the family {family!r}; draftsmith's block drafts have "
            "qwen3 layers."
        )
    if node.get("vocab_size") is None and family == ASSISTANT:
        # Its class has no such key; the vocabulary is the target's.
        if target is None:
            raise ValueError(
                f"{where} does not say the size of the vocabulary, which is the target's: give "
                "target.name_or_path=...."
            )
        node["vocab_size"] = target.vocab_size
    return node


def _refuse_switches(raw: Mapping[str, Any], where: str) -> None:
    for name, neutral in FOREIGN_SWITCHES.items():
        value = read_both(raw, name, where)
        if value is not None and value not in neutral:
            raise ValueError(
                f"{where} says {name} {value!r}, which draftsmith's block drafts do not have: the "
                "same weights would compute something else. This draft cannot be read."
            )


def _read_attention(
    raw: Mapping[str, Any], inner: Mapping[str, Any], settings: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Layer types and window; every sliding layer causal in its block, every full one not."""
    layers = settings.get("num_hidden_layers")
    if layers is None:
        raise ValueError(f"{where} lacks num_hidden_layers. Add what the checkpoint was made with.")
    kinds, window = inner.get("layer_types"), inner.get("sliding_window")
    if kinds is None:
        if inner.get("use_sliding_window"):
            raise ValueError(
                f"{where} says use_sliding_window, but lacks layer_types: which layers slide? Add "
                "one entry per layer."
            )
        kinds = [LAYER_TYPES[0]] * layers
    slides = SLIDING in kinds
    if slides and (window is None or inner.get("use_sliding_window") is False):
        raise ValueError(
            f"{where} has sliding layers, but sliding_window {window!r} and use_sliding_window "
            f"{inner.get('use_sliding_window')!r}: engines would drop the window or stop. Correct "
            "the config."
        )
    causal = read_both(raw, "is_causal", where)
    causal = read_both(raw, "causal", where) if causal is None else causal
    if inner.get("model_type") == ASSISTANT or raw.get("sliding_window_non_causal"):
        causal = False
    mixed = (causal is True and set(kinds) != {SLIDING}) or (causal is False and slides)
    if mixed:
        raise ValueError(
            f"{where}: layer_types is {kinds}, and causal attention is set to {causal} for all of "
            "them; draftsmith's sliding layers are causal in a block and its full ones are not. "
            "This draft cannot be read."
        )
    return {"layer_types": list(kinds), "sliding_window": window if slides else None}


def _read_block_layers(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    size: int,
    *,
    nested: bool,
    given: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
) -> list[int]:
    """The target layers read, as outputs of 0-based layers."""
    if "fc.weight" not in tensors:
        raise ValueError(f"{where}: the checkpoint has no fc.weight, so it is no block draft.")
    count, rest = divmod(tensors["fc.weight"].shape[1], size)
    if rest:
        raise ValueError(
            f"{where}: fc reads {tensors['fc.weight'].shape[1]} numbers, not a multiple of the "
            f"hidden size {size}. The config belongs to another checkpoint."
        )
    ask = (
        "Give aux_layer_ids=[...]: the 0-based target layers whose outputs the draft was trained "
        "on, distinct and ascending."
    )
    found = list(given) if given is not None else None
    if found is None:
        key = "aux_hidden_state_layer_ids" if nested else "target_layer_ids"
        said = read_both(raw, key, where)
        if not said:
            raise ValueError(
                f"{where} does not say which {count} target layers the draft reads ({key}), and "
                f"engines would guess. {ask}"
            )
        if any(isinstance(layer, int) and layer < 0 for layer in said):
            raise ValueError(
                f"{where}: {key} is {list(said)}. A negative id is DeepSpec's for the embeddings, "
                f"is refused by SGLang and means the target's last state elsewhere. {ask} -1 is "
                "the embeddings there."
            )
        found = [layer - LAYERS_RUN for layer in said] if nested else list(said)
        depth = read_both(raw, "num_target_layers", where)
        if target is not None and depth not in (None, target.num_layers):
            raise ValueError(
                f"{where} says num_target_layers {depth}, but {target.name_or_path} has "
                f"{target.num_layers} layers. Give the draft's own target."
            )
    num_layers = None if target is None else target.num_layers
    ids = check_layer_ids(found, num_target_layers=num_layers, where=where)
    if len(ids) != count:
        raise ValueError(
            f"{where}: fc reads {count} target layers, but {len(ids)} are named: {ids} (0-based "
            f"outputs). {ask}"
        )
    return ids
