"""DSpark checkpoints of other programs: DeepSpec, SpecForge, vLLM, SGLang, speculators.

The backbone's keys and tensors: models/format_block.py. The heads' tensors have DeepSpec's names
everywhere, and so have ours. Programs differ in what they serve: vLLM the plain Markov head only,
SGLang any sequential head but none, speculators and DeepSpec all of them.

A reduced vocabulary (speculators) is left out when a folder is read: the head is the target's, so
no weight of the backbone depends on it. The sequential head has no rows for the missing tokens;
they become zeros, no correction.

Temperatures of the confidence head are draftsmith's own key, `confidence_temperatures`; engines
that do not know it ignore it. SGLang reads them from a file of its own, see docs/serving.md.

Check: tests/test_formats_block.py, tests/test_golden_block.py.

Axes: vocab, rank, rows (of a vocabulary that another program reduced).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from draftsmith.models.dspark import DSparkConfig
from draftsmith.models.format_block import block_folder
from draftsmith.models.format_block_read import needed, read_backbone, read_both
from draftsmith.models.format_keys import ForeignFolder, TargetFacts

HEADS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
"""Our sequential head -> `markov_head_type` of the other programs."""
TEMPERATURES = "confidence_temperatures"
W2 = "markov_head.markov_w2.weight"


def to_dspark_format(
    config: DSparkConfig,
    tensors: Mapping[str, Tensor],
    *,
    format: str,
    target: TargetFacts | None,
) -> ForeignFolder:
    """A draft of ours in another program's format.

    Args:
        config: The draft's config.
        tensors: Its tensors under our names, in the dtype to write.
        format: vllm, sglang, transformers, deepspec or speculators.
        target: Facts about the target; None: not known.

    Raises:
        ValueError: the format or its engine has no place for something this draft is.
    """
    temperatures = getattr(config, TEMPERATURES, None)
    own_keys = {
        "markov_rank": config.markov_rank if config.sequential_head != "none" else 0,
        "markov_head_type": HEADS.get(config.sequential_head, "vanilla"),
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "num_anchors": config.num_anchors,  # DeepSpec does not load a folder without.
        **({} if temperatures is None else {TEMPERATURES: temperatures}),
    }
    return block_folder(
        config,
        tensors,
        format=format,
        target=target,
        kind="dspark",
        architecture="Qwen3DSparkModel",
        own_keys=own_keys,
        problems=_problems(config, format, target),
        cautions=_cautions(config, format),
    )


def _problems(
    config: DSparkConfig, format: str, target: TargetFacts | None
) -> Iterable[tuple[bool, str]]:
    """(whether it applies, what the engine cannot serve and what to do)."""
    head = config.sequential_head
    yield (
        format == "transformers",
        "DSpark: transformers' assistant has neither a sequential nor a confidence head, and "
        "proposes from the second slot on.",
    )
    yield (
        format == "vllm" and head != "markov",
        f"sequential_head={head}: vLLM has the plain markov head only.",
    )
    yield (
        format == "sglang" and head == "none",
        "sequential_head=none: SGLang insists on a Markov head.",
    )
    yield (
        not config.sample_from_anchor and format == "deepspec",
        "sample_from_anchor=false: DeepSpec's blocks propose from the anchor's slot on.",
    )
    yield (
        not config.sample_from_anchor and head == "rnn",
        "sequential_head=rnn with sample_from_anchor=false: other programs let it read the "
        "anchor's slot first, which proposes nothing here.",
    )
    yield (
        format in ("vllm", "sglang") and target is not None and not target.head_is_plain,
        "the target's logits are more than a product with a matrix: the engine adds the correction "
        "to the bare product, draftsmith to the target's own logits.",
    )


def _cautions(config: DSparkConfig, format: str) -> Iterable[str]:
    if format == "sglang" and not config.confidence_head:
        yield (
            "No confidence head: SGLang loads the draft only where every draft token is verified "
            "(static ragged verification)."
        )
    if format == "sglang" and getattr(config, TEMPERATURES, None) is not None:
        yield (
            "SGLang reads the confidence head's temperatures from a file of its own "
            "(--speculative-dspark-confidence-sts-path): "
            f'{{"temperatures": {list(getattr(config, TEMPERATURES))}}}'
        )


def from_dspark_format(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    aux_layer_ids: Sequence[int] | None,
    target: TargetFacts | None,
    where: str,
    head_ids: Tensor | None,
) -> tuple[DSparkConfig, dict[str, Tensor], list[str]]:
    """A draft of ours from any of these folders.

    Args:
        raw: Its config.json.
        tensors: Its tensors; the target's embeddings and head were taken out.
        aux_layer_ids: The target layers read, in our counting; None: as the config says.
        target: Facts about the target; None: not known.
        where: Names the config in errors.
        head_ids: [rows] tokens of a reduced vocabulary; None: all.

    Returns:
        Config, tensors under our names, and remarks for the user.

    Raises:
        ValueError: a fact is missing, contradicts another, or has no counterpart in draftsmith.
    """
    own = dict(tensors)
    settings, remarks = read_backbone(
        raw, own, aux_layer_ids=aux_layer_ids, target=target, where=where, anchor_first=True
    )
    settings |= _read_heads(raw, own, where)
    if settings["sequential_head"] == "rnn" and not settings["sample_from_anchor"]:
        raise ValueError(
            f"{where}: an rnn head in blocks that do not propose from the anchor's slot reads that "
            "slot first; draftsmith's starts behind it. This draft cannot be read."
        )
    if head_ids is not None and W2 in own:
        if len(own[W2]) != len(head_ids):
            raise ValueError(
                f"{where}: {W2} has {len(own[W2])} rows, the draft vocabulary {len(head_ids)}."
            )
        whole = own[W2].new_zeros(settings["vocab_size"], own[W2].shape[1])
        whole[head_ids] = own[W2]
        own[W2] = whole
    return DSparkConfig(**settings), own, remarks


def _read_heads(raw: Mapping[str, Any], own: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The heads' settings; each must agree with the tensors that it brings."""
    rank = int(needed(raw, "markov_rank", where, "engines would guess 0 or 256."))
    settings: dict[str, Any] = {"sequential_head": "none"}
    if rank:
        kind = needed(raw, "markov_head_type", where, "SGLang would refuse the draft.")
        ours = {theirs: head for head, theirs in HEADS.items()}.get(str(kind).lower())
        if ours is None:
            raise ValueError(
                f"{where} says markov_head_type {kind!r}, expected one of "
                f"{', '.join(HEADS.values())}."
            )
        settings |= {"sequential_head": ours, "markov_rank": rank}
    confidence = bool(
        needed(raw, "enable_confidence_head", where, "vLLM would guess no, speculators yes.")
    )
    settings["confidence_head"] = confidence
    with_markov = read_both(raw, "confidence_head_with_markov", where)
    if confidence and with_markov is None:
        raise ValueError(
            f"{where} lacks confidence_head_with_markov: vLLM would guess no, SGLang yes. Add what "
            "the draft was trained with."
        )
    settings["confidence_with_markov"] = rank > 0 if with_markov is None else bool(with_markov)
    for part, present in (("markov_head.", rank > 0), ("confidence_head.", confidence)):
        if any(name.startswith(part) for name in own) != present:
            raise ValueError(
                f"{where} says that there is {'a' if present else 'no'} {part[:-1]}, but the "
                f"checkpoint {'lacks' if present else 'has'} {part}* tensors. Correct the config."
            )
    if raw.get(TEMPERATURES) is not None:
        settings[TEMPERATURES] = list(raw[TEMPERATURES])
    return settings
