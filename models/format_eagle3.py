"""EAGLE-3 checkpoints of other programs: SafeAILab/EAGLE, vLLM, SGLang, speculators, DeepSpec.

Two kinds of folder hold the same tensors. *Flat*: a Llama config with a few keys more, read by vLLM
and SGLang alike; one layer is called `midlayer`, which is also what SafeAILab's own code loads.
*Nested* (speculators): the layer's config below `transformer_layer_config`, every tensor present,
embeddings included (absent ones load as uninitialised memory there, in 0.8 and 0.9).

The layers read stand in a flat config twice, because vLLM and SGLang give one key two meanings:
vLLM prefers the top-level key (layers already run), SGLang reads only the nested one (outputs of
0-based layers). With both, one folder serves both.

Differs from what the programs write: no key is left out where it equals a default, layers after the
first carry their input norm under both engines' names, and full vocabularies have no map (vLLM
refuses one).

Check: tests/test_formats.py, tests/test_golden_formats.py (folders written by those programs).

Axes: hidden, vocab, draft_vocab, layers (target layers read).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.format_keys import (
    LAYERS_RUN,
    SPECULATORS_VERSION,
    ForeignFolder,
    TargetFacts,
    check_layer_ids,
    dtype_keys,
    layer_keys,
    proposal_keys,
    read_layer_settings,
    read_offsets,
    rope_keys,
    rope_of,
    rope_up_to,
    set_positions,
    verifier_cautions,
)
from draftsmith.models.target import default_aux_layer_ids
from draftsmith.models.vocabulary_map import check_vocabulary_buffers

NORM_FLAGS = {
    "norm_before_fc": "input_norm.",
    "fc_norm": "fc_norm.",
}
"""Switches that bring tensors of their own, and how these start."""
SWITCHES = (*NORM_FLAGS, "norm_before_residual", "norm_output")

OLD_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Names in older files -> ours."""

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


# Writing.


def to_eagle3_format(
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
    num_draft_tokens: int,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: vllm, sglang, eagle or speculators.
        target: Facts about the target; None: not known.
        num_draft_tokens: Tokens per round that a speculators folder asks for.

    Raises:
        ValueError: the format or its engine has no place for something this draft is.
    """
    ids = check_layer_ids(
        config.aux_layer_ids or [],
        num_target_layers=None if target is None else target.num_layers,
        where="The draft",
    )
    problems = [text for applies, text in _problems(config, ids, format, target) if applies]
    if problems:
        raise ValueError(
            f"This draft cannot be exported as format={format}:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    if format == "speculators":
        assert target is not None, "checked above"
        return ForeignFolder(
            _nested_config(config, tensors, ids, target, num_draft_tokens),
            {**tensors, "embed_tokens.weight": _embeddings(tensors, target)},
            verifier_cautions(target),
        )
    return ForeignFolder(
        _flat_config(config, tensors, ids, format, target),
        _flat_tensors(tensors),
        _cautions(config, ids),
    )


def _problems(
    config: Eagle3Config, ids: list[int], format: str, target: TargetFacts | None
) -> Iterable[tuple[bool, str]]:
    """(whether it applies, what the engine cannot serve and what to do)."""
    flat = format != "speculators"
    engine = {"vllm": "vLLM", "sglang": "SGLang", "eagle": "SafeAILab's code"}.get(format, format)
    yield (
        flat and config.qk_norm,
        f"qk_norm: a Llama draft has no query and key norms in {engine}. format=speculators writes "
        "a Qwen3 draft, which vLLM serves.",
    )
    yield (
        not flat and config.qk_norm and config.attention_bias,
        "attention_bias with qk_norm: vLLM's Qwen3 layer has no bias on o_proj and drops it.",
    )
    if format in ("sglang", "eagle"):
        yield config.norm_before_residual, f"norm_before_residual: {engine} does not know it."
        yield (
            config.attention_bias,
            f"attention_bias: the first layer has no biases in {engine}, which drops them.",
        )
        yield config.mlp_bias, f"mlp_bias: {engine} has no biases in the MLP and drops them."
    if format == "sglang":
        yield (
            len(ids) == 1,
            "a single target layer: SGLang skips fc where its input is as wide as its output.",
        )
        yield (
            target is not None and target.num_layers - 1 in ids,
            f"target layer {ids[-1]}, the last one: SGLang cannot capture its output.",
        )
    if format == "eagle":
        yield from _eagle_problems(config, ids, target)
    if format == "speculators":
        yield (
            target is None or target.embeddings is None,
            "the target's embeddings are part of it: give target.name_or_path=....",
        )


def _eagle_problems(
    config: Eagle3Config, ids: list[int], target: TargetFacts | None
) -> Iterable[tuple[bool, str]]:
    """What SafeAILab's own code, which reads no switches, would load wrongly."""
    set_flags = [name for name in (*NORM_FLAGS, "norm_output") if getattr(config, name)]
    yield bool(set_flags), f"{', '.join(set_flags)}: SafeAILab's code does not know it."
    yield (
        config.num_hidden_layers != 1,
        f"{config.num_hidden_layers} draft layers: SafeAILab's code builds one.",
    )
    rope_type = rope_of(config)["rope_type"]
    yield (
        rope_type != "default",
        f"rotary scaling {rope_type}: SafeAILab's code rotates plainly or refuses to load.",
    )
    if target is None:
        yield (
            True,
            "its code always reads three fixed target layers, and whether they are this draft's "
            "depends on the target: give target.name_or_path=....",
        )
        return
    fixed = _default_ids(target.num_layers)
    reads = f"always reads {fixed}" if fixed else "has no three layers to read"
    yield (
        ids != fixed,
        f"target layers {ids}: SafeAILab's code {reads} of a target with {target.num_layers} "
        "layers.",
    )


def _default_ids(num_layers: int) -> list[int] | None:
    """EAGLE-3's fixed triple, or None where the target is too shallow for it."""
    try:
        return list(default_aux_layer_ids(num_layers))
    except ValueError:
        return None


def _cautions(config: Eagle3Config, ids: list[int]) -> list[str]:
    """What works in the checked versions only."""
    cautions = []
    if len(ids) != 3:
        cautions.append(
            f"{len(ids)} target layers: engines before the checked versions assume 3 and fail on "
            "the shape of fc."
        )
    if config.num_hidden_layers > 1:
        cautions.append(
            f"{config.num_hidden_layers} draft layers: one is the portable case; engines before "
            "the checked versions serve only one."
        )
    return cautions


def _flat_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under the names that both engines load."""
    several = any(name.startswith("layers.1.") for name in tensors)
    written = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if name.startswith("layers.0.") and not several:
            written[f"midlayer.{rest}"] = tensor
            continue
        written[name] = tensor
        # vLLM reads a further layer's input_layernorm, SGLang the same vector as hidden_norm.
        if name.startswith("layers.") and layer != "0" and rest == "input_layernorm.weight":
            written[f"layers.{layer}.hidden_norm.weight"] = tensor
    return written


def _flat_config(
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    ids: list[int],
    format: str,
    target: TargetFacts | None,
) -> dict[str, Any]:
    limit = None if target is None else target.max_positions
    # SafeAILab's readers take the plain name; vLLM and SGLang know the class by the other one.
    architecture = "LlamaForCausalLM" if format == "eagle" else "LlamaForCausalLMEagle3"
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **layer_keys(config, max_positions=limit),
        **rope_keys(config, max_positions=limit),
        **dtype_keys(tensors),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{name: getattr(config, name) for name in SWITCHES},
        "num_aux_hidden_states": len(ids),
        LAYER_IDS_KEY: [layer + LAYERS_RUN for layer in ids],
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS_KEY: ids},
    }


def _nested_config(
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    ids: list[int],
    target: TargetFacts,
    num_draft_tokens: int,
) -> dict[str, Any]:
    limit = target.max_positions
    layer = layer_keys(config, max_positions=limit) | {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "rope_parameters": rope_up_to(config, limit),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        # vLLM's Llama draft counts the layers by this key only, and only here.
        "num_aux_hidden_states": len(ids),
    }
    if config.qk_norm:
        layer["max_window_layers"] = config.num_hidden_layers
        del layer["mlp_bias"], layer["pretraining_tp"]  # Not known to this family.
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": proposal_keys("eagle3", num_draft_tokens, target),
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{name: getattr(config, name) for name in SWITCHES},
        "embed_requires_grad": False,
        LAYER_IDS_KEY: [layer_id + LAYERS_RUN for layer_id in ids],
        "tie_word_embeddings": False,
        "dtype": dtype_keys(tensors)["dtype"],
    }


def _embeddings(tensors: Mapping[str, Tensor], target: TargetFacts) -> Tensor:
    """[vocab, hidden] the target's embeddings in the dtype of the draft."""
    assert target.embeddings is not None, "checked before anything is written"
    return target.embeddings.to(tensors["fc.weight"].dtype)


# Reading.


def from_eagle3_format(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    aux_layer_ids: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
) -> tuple[Eagle3Config, dict[str, Tensor], list[str]]:
    """A draft of ours from a flat, nested or DeepSpec folder.

    Args:
        raw: Its config.json.
        tensors: Its tensors; embeddings were taken out.
        aux_layer_ids: The target layers read, in our counting; None: as the config says.
        target: Facts about the target; None: not known.
        where: Names the config in errors.

    Returns:
        Config, tensors under our names (no `lm_head.weight` where the draft uses the target's
        head), and remarks for the user.

    Raises:
        ValueError: a fact is missing or contradicts another.
    """
    nested = "speculators_model_type" in raw
    inner = raw["transformer_layer_config"] if nested else raw
    settings = read_layer_settings(inner, where)
    own = _own_names(tensors, settings.get("num_hidden_layers", 1), where)
    size = settings["hidden_size"]
    target_size = raw.get("target_hidden_size") or size
    count, rest = divmod(own["fc.weight"].shape[1], target_size)
    if rest:
        raise ValueError(
            f"{where}: fc reads {own['fc.weight'].shape[1]} numbers, not a multiple of the "
            f"target's hidden size {target_size}. The config belongs to another checkpoint."
        )
    remarks: list[str] = []
    settings |= _read_switches(raw, own, nested=nested, where=where)
    settings |= {
        "target_hidden_size": target_size,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in own,
        "aux_layer_ids": _read_layer_ids(
            raw, count, nested=nested, given=aux_layer_ids, target=target, where=where,
            remarks=remarks,
        ),
        # speculators trains with the position of the token, the others with the feature's.
        "rope_offset": int(nested),
    }  # fmt: skip
    set_positions(settings, inner, None if target is None else target.max_positions, remarks)
    settings["draft_vocab_size"] = _read_vocabulary(raw, own, settings["vocab_size"], where)
    return Eagle3Config(**settings), own, remarks


def _own_names(tensors: Mapping[str, Tensor], num_layers: int, where: str) -> dict[str, Tensor]:
    """Tensors under our names."""
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new) if name.startswith(old) else name
        if name in own:
            raise ValueError(f"{where}: {name} is there twice, under an older name as well.")
        own[name] = tensor
    if "fc.weight" not in own:
        raise ValueError(f"{where}: the checkpoint has no fc.weight, so it is no EAGLE-3 draft.")
    for layer in range(1, num_layers):
        ours, sglang = (
            f"layers.{layer}.input_layernorm.weight",
            f"layers.{layer}.hidden_norm.weight",
        )
        if sglang not in own:
            continue
        if ours in own and not torch.equal(own[ours], own[sglang]):
            raise ValueError(
                f"{where}: {ours} (read by vLLM) and {sglang} (read by SGLang) differ, so the "
                "checkpoint means two things. Keep the one that it was trained with."
            )
        own[ours] = own.pop(sglang)
    return own


def _read_switches(
    raw: Mapping[str, Any], own: Mapping[str, Tensor], *, nested: bool, where: str
) -> dict[str, bool]:
    """The norm switches; each must agree with the tensors that it brings."""
    if nested and raw.get("norm_before_residual") is None:
        raise ValueError(
            f"{where} lacks norm_before_residual: speculators takes that for false, vLLM for true. "
            "Add what the draft was trained with."
        )
    inside = raw.get("eagle_config") or {}
    found = {name: bool(inside.get(name, raw.get(name))) for name in SWITCHES}
    found["fc_norm"] = found["fc_norm"] or bool(raw.get("use_aux_norm"))  # SGLang's older name.
    for name, prefix in NORM_FLAGS.items():
        present = any(key.startswith(prefix) for key in own)
        if present != found[name]:
            raise ValueError(
                f"{where} says {name}: {str(found[name]).lower()}, but the checkpoint "
                f"{'has' if present else 'lacks'} {prefix}* tensors. An engine would ignore the "
                "one or the other; correct the config."
            )
    return found


def _read_layer_ids(
    raw: Mapping[str, Any],
    count: int,
    *,
    nested: bool,
    given: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
    remarks: list[str],
) -> list[int]:
    """The target layers read, as 0-based outputs."""
    num_layers = None if target is None else target.num_layers
    if given is not None:
        found = list(given)
    else:
        found = _layer_ids_of(raw, nested=nested, where=where, remarks=remarks) or []
        if not found:
            raise ValueError(_ask_for_layer_ids(count, target, where))
    ids = check_layer_ids(found, num_target_layers=num_layers, where=where)
    if len(ids) != count:
        raise ValueError(
            f"{where}: fc reads {count} target layers, but {len(ids)} are named: {ids} (0-based "
            "outputs). Give aux_layer_ids with one id per layer."
        )
    return ids


def _layer_ids_of(
    raw: Mapping[str, Any], *, nested: bool, where: str, remarks: list[str]
) -> list[int] | None:
    """What the config says, in our counting; None where it says nothing."""
    if raw.get("target_layer_ids"):  # DeepSpec.
        return list(raw["target_layer_ids"])
    run = raw.get(LAYER_IDS_KEY)
    outputs = None if nested else (raw.get("eagle_config") or {}).get(LAYER_IDS_KEY)
    if run and outputs and [layer - LAYERS_RUN for layer in run] != list(outputs):
        raise ValueError(
            f"{where}: {LAYER_IDS_KEY} is {run} at the top (vLLM: layers already run), {outputs} "
            "in eagle_config (SGLang: outputs, one less). They name different layers. Give "
            "aux_layer_ids=[...], the 0-based layers whose outputs the draft was trained on."
        )
    if run:
        return [layer - LAYERS_RUN for layer in run]
    if outputs:
        remarks.append(
            f"eagle_config names the target layers {list(outputs)}; taken for outputs of 0-based "
            "layers, as SGLang, SpecForge and ModelOpt mean it. If the folder was made for vLLM "
            f"alone, give aux_layer_ids={[layer - LAYERS_RUN for layer in outputs]}."
        )
        return list(outputs)
    return None


def _ask_for_layer_ids(count: int, target: TargetFacts | None, where: str) -> str:
    text = (
        f"{where} does not say which {count} target layers the draft reads, and a wrong guess "
        "would only show as a low acceptance. Give aux_layer_ids=[...]: 0-based layers whose "
        "outputs are read, ascending."
    )
    if count != 3:
        return text
    text += (
        " EAGLE's own training code, and both engines where the key is absent, take the states "
        "after 2, N // 2 and N - 3 of the target's N layers, the outputs of layers 1, N // 2 - 1 "
        "and N - 4"
    )
    default = None if target is None else _default_ids(target.num_layers)
    if target is None:
        return text + "; with target.name_or_path=... these are worked out."
    if default is None:
        return text + f"; {target.name_or_path} with {target.num_layers} layers is too shallow."
    listed = ",".join(str(layer) for layer in default)
    return text + f": for {target.name_or_path}, aux_layer_ids=[{listed}]."


def _read_vocabulary(
    raw: Mapping[str, Any], own: dict[str, Tensor], vocab_size: int, where: str
) -> int:
    """The draft vocabulary's size; completes `d2t` and `t2d` in place, or takes them out."""
    head = own.get("lm_head.weight")
    size = raw.get("draft_vocab_size")
    if head is None and size is not None:
        raise ValueError(
            f"{where} wants a head over {size} tokens, but the checkpoint has no lm_head.weight: "
            "an engine would draft with random numbers."
        )
    size = (vocab_size if head is None else len(head)) if size is None else size
    if head is not None and len(head) != size:
        raise ValueError(
            f"{where} says draft_vocab_size {size}, but lm_head.weight has {len(head)} rows."
        )
    d2t = own.pop("d2t", None)
    t2d = own.pop("t2d", None)
    if size == vocab_size:
        if d2t is not None and bool(d2t.any()):
            raise ValueError(
                f"{where}: draft and target vocabulary both have {size} tokens, but d2t moves ids. "
                "A full vocabulary has no map."
            )
        return size
    if d2t is None:
        raise ValueError(
            f"{where}: the draft vocabulary has {size} of {vocab_size} tokens, but the checkpoint "
            "has no d2t: nobody can know which."
        )
    own["d2t"] = d2t.long()
    ids = read_offsets(d2t, size, vocab_size, where)
    if t2d is None:
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
    own["t2d"] = t2d.bool()
    both = nn.Module()
    both.register_buffer("d2t", own["d2t"])
    both.register_buffer("t2d", own["t2d"])
    check_vocabulary_buffers(both)
    return size
