"""draftsmith-export: a trained draft as a folder that an engine loads, checked before it is there.

The folder is written aside, read back through the importer, and compared with the draft: every
tensor, every architectural field of the config, and the logits of both on random inputs. It takes
its name only when all are equal.

Check: tests/test_export.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models.block_check import block_logits
from draftsmith.models.block_draft import BlockDraftConfig
from draftsmith.models.chain_draft import ChainDraft
from draftsmith.models.eagle import EagleConfig, EagleDraft
from draftsmith.models.export_mtp import CLASSES as MTP_CLASSES
from draftsmith.models.export_mtp import export_mtp
from draftsmith.models.foreign_files import (
    read_config_file,
    read_tensors,
    write_checked,
    write_folder,
)
from draftsmith.models.format_block import ASSISTANT, HOLDS_TARGET, SLIDING
from draftsmith.models.format_keys import (
    TRAINING_FIELDS,
    TargetFacts,
    float_dtype,
    longest,
    rope_up_to,
)
from draftsmith.models.formats import (
    DRAFT_CLASSES,
    DraftConfig,
    ForeignFolder,
    new_draft,
    read_foreign,
    to_format,
)
from draftsmith.models.load import draft_folder, load_draft
from draftsmith.models.mtp_module import MtpConfig
from draftsmith.models.protocols import DraftContext, Frontier
from draftsmith.models.target import TargetHead
from draftsmith.models.target_facts import (
    NamedTarget,
    TargetSettings,
    embedding_table,
    read_fingerprint,
    read_target_facts,
    read_target_head,
)
from draftsmith.models.target_structure import find_structure

CHECK_TOKENS = 64
"""Tokens that the random inputs of the check are drawn from (at most)."""
CHECK_LENGTH = 12
"""Length of the random text."""


class ExportSettings(Protocol):
    """conf/schema.py, ExportConfig."""

    draft: str
    format: str
    output: str
    target: TargetSettings
    full_vocabulary: bool
    num_draft_tokens: int | None


@dataclass
class Exported:
    """What was written."""

    folder: Path
    config: dict[str, Any]
    num_tensors: int
    remarks: list[str]


def run(settings: ExportSettings) -> None:
    """The verb: writes the folder, checks it, and says how to serve it."""
    exported = export_draft(settings)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for remark in exported.remarks:
        console.print(f"Note: {remark}")
    console.print(
        f"{exported.folder}: {exported.num_tensors} tensors ({exported.config['dtype']}) for "
        f"{settings.format}, architecture {exported.config['architectures'][0]}. Read back: every "
        "tensor, every field and the logits are equal to the draft's."
    )


def export_draft(settings: ExportSettings) -> Exported:
    """Writes a draft in another program's format.

    Raises:
        ValueError: no such draft, a format that cannot hold it, an output that exists, or a folder
            that did not come back as it went in.
    """
    folder = draft_folder(settings.draft)
    _check_ours(folder)
    config, tensors = load_draft(folder).config, read_tensors(folder)
    if settings.full_vocabulary:
        config, tensors = _with_full_vocabulary(config, tensors)
    target, remarks = _find_target(settings, config, tensors)
    if isinstance(config, MtpConfig):
        written = export_mtp(
            config,
            tensors,
            format=settings.format,
            output=settings.output,
            target=target,
            num_draft_tokens=settings.num_draft_tokens,
        )
        return Exported(*written[:3], remarks + written[3])
    foreign = to_format(
        config,
        tensors,
        format=settings.format,
        target=target,
        num_draft_tokens=settings.num_draft_tokens,
    )

    def write(aside: Path) -> None:
        write_folder(aside, foreign.config, foreign.tensors)
        check_export(aside, config, tensors, foreign=foreign, target=target)

    return Exported(
        write_checked(settings.output, write),
        foreign.config,
        len(foreign.tensors),
        remarks + foreign.warnings,
    )


def _check_ours(folder: Path) -> None:
    """Refuses what is no draft of draftsmith's own making, before anything is loaded."""
    if not folder.is_dir():
        raise ValueError(f"draft is {folder}: there is no such folder.")
    name = read_config_file(folder).get("draftsmith_class")
    if name is None:
        raise ValueError(
            f"{folder} was not saved by draftsmith. An ordinary language model is served as it is "
            "(vLLM: method draft_model); a draft of another program is imported first "
            "(draftsmith-import)."
        )
    known = [f"{kind.__module__}.{kind.__qualname__}" for kind in DRAFT_CLASSES.values()]
    if name not in (*known, *MTP_CLASSES):
        raise ValueError(
            f"{folder} holds a {name}; draftsmith exports {' and '.join(known)} so far."
        )


def _with_full_vocabulary(
    config: DraftConfig, tensors: dict[str, Tensor]
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """An EAGLE-1 draft without its draft vocabulary: no weight depends on it."""
    if not isinstance(config, EagleConfig):
        raise ValueError(
            "full_vocabulary is for EAGLE-1, whose head is the target's. This draft has a head of "
            "its own, which knows no other tokens. Leave full_vocabulary out."
        )
    config = copy.deepcopy(config)
    config.draft_vocab_size = config.vocab_size
    return config, {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}


def _find_target(
    settings: ExportSettings, config: DraftConfig, tensors: Mapping[str, Tensor]
) -> tuple[TargetFacts | None, list[str]]:
    """Facts about the target, where it is named or recorded and can be read; and remarks."""
    named = bool(settings.target.name_or_path)
    recorded = getattr(config, "target_name_or_path", None)
    target = settings.target if named else NamedTarget(recorded or "")
    if not target.name_or_path:
        return None, ["Not compared with the target: give target.name_or_path=... to check sizes."]
    try:
        facts = read_target_facts(target)
        _check_fingerprint(config, target)
    except ValueError:
        if named:
            raise
        return None, [
            f"The target that the draft records, {recorded}, is not here, so sizes, layers and "
            "positions were not compared with it. Give target.name_or_path=... to do so."
        ]
    uses_head = isinstance(config, EagleConfig | BlockDraftConfig)
    if uses_head or settings.format in HOLDS_TARGET:
        head = read_target_head(target, float_dtype(tensors))
        table, scales = embedding_table(head)
        facts = replace(
            facts,
            embeddings=table,
            scales_embeddings=scales,
            head=head.weight.detach() if isinstance(config, BlockDraftConfig) else None,
            head_is_plain=head.is_plain and head.bias is None,
        )
    return facts, []


def _check_fingerprint(config: DraftConfig, target: TargetSettings) -> None:
    """The target must be the one that the draft was trained for."""
    recorded = getattr(config, "target_fingerprint", None)
    if recorded is None:
        return
    found = read_fingerprint(target).weights
    if recorded["weights"] != found:
        raise ValueError(
            f"The draft was trained for another target: it records weights "
            f"{recorded['weights'][:12]}, {target.name_or_path} has {found[:12]}. Give the target "
            "that it was trained for."
        )


# The check.


def check_export(
    folder: Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    foreign: ForeignFolder,
    target: TargetFacts | None,
) -> None:
    """Reads a written folder back and insists that it is the draft.

    Args:
        folder: What was written.
        config: The draft's config.
        tensors: Its tensors, under our names.
        foreign: What was meant to be written.
        target: As for the export.

    Raises:
        ValueError: a tensor, a field or the logits differ.
    """
    stored = read_tensors(folder)
    _compare_tensors(stored, foreign.tensors, "The written file")
    again = read_foreign(folder, target=target)
    config, tensors = _without_zero_bias(config, tensors)
    _compare_tensors(again.tensors, tensors, "Read back, the export")
    limit = None if target is None else target.max_positions
    expected, found = _architecture(config), _architecture(again.config)
    if foreign.config.get("model_type") == ASSISTANT:
        del expected["eos_token_id"], found["eos_token_id"]  # Its class holds one, and reads none.
    expected["rope_parameters"] = rope_up_to(config, limit)
    expected["max_position_embeddings"] = longest(config.max_position_embeddings, limit)
    lost = [
        f"{name} is {found.get(name)!r}, the draft has {expected.get(name)!r}"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name) != expected.get(name)
    ]
    if lost:
        raise ValueError(f"Read back, the export is another draft: {'; '.join(lost)}.")
    # No format says where positions are counted from, and scores hardly depend on it.
    if not isinstance(config, BlockDraftConfig):
        again.config.rope_offset = config.rope_offset
    own, other = random_logits(config, tensors), random_logits(again.config, again.tensors)
    if not torch.allclose(own, other, rtol=0.0, atol=1e-6 * float(own.abs().max())):
        error = float((own - other).abs().max())
        raise ValueError(f"Read back, the export gives other logits: they differ by {error:.2e}.")


def _compare_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], who: str) -> None:
    """Names, dtypes, shapes and values."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is too much" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        own, other = expected[name].cpu(), found[name].cpu()
        if own.dtype != other.dtype or not torch.equal(own, other) or not own.numel():
            problems.append(f"{name} differs")
    if problems:
        raise ValueError(f"{who} is not the draft: {'; '.join(problems)}.")


def _without_zero_bias(
    config: DraftConfig, tensors: Mapping[str, Tensor]
) -> tuple[DraftConfig, Mapping[str, Tensor]]:
    """A draft whose `fc.bias` is zero means the same without one, and is read back so."""
    bias = tensors.get("fc.bias")
    if not isinstance(config, EagleConfig) or bias is None or bool(bias.any()):
        return config, tensors
    config = copy.deepcopy(config)
    config.fc_bias = False
    return config, {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}


def _architecture(config: DraftConfig) -> dict[str, Any]:
    """Every field of a config but those that say how the draft was trained, or mean nothing."""
    left_out = set(TRAINING_FIELDS)
    if isinstance(config, BlockDraftConfig):
        if SLIDING not in (config.layer_types or []):
            left_out.add("sliding_window")
        if getattr(config, "sequential_head", None) == "none":
            left_out.add("markov_rank")
        if not getattr(config, "confidence_head", True):
            left_out.add("confidence_with_markov")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


@torch.no_grad()
def random_logits(config: DraftConfig, tensors: Mapping[str, Tensor], *, seed: int = 0) -> Tensor:
    """[5, draft_vocab] float32 logits of a short random text, a chain and a small tree below it; of
    a block draft what models/block_check.py says.

    Args:
        config: The draft's config.
        tensors: All of its tensors under our names.
        seed: Of the text, the target's states, the embeddings and, for EAGLE-1, the target's head.
    """
    count = min(CHECK_TOKENS, config.vocab_size)
    if isinstance(config, BlockDraftConfig):
        return block_logits(
            config, tensors, make=new_draft, make_head=_random_head, count=count, seed=seed
        )
    generator = torch.Generator().manual_seed(seed)
    draft = _draft_for_check(config, tensors, count, generator)
    hidden, layers = config.hidden_size, len(draft.aux_layer_ids)
    ids = torch.randint(count, (1, CHECK_LENGTH + 2), generator=generator)
    aux = torch.randn(1, CHECK_LENGTH - 1, layers * hidden, generator=generator)
    final = torch.randn(1, CHECK_LENGTH - 1, hidden, generator=generator)
    state = draft.start(2 * CHECK_LENGTH)
    logits = [draft.read([DraftContext(ids[:, :CHECK_LENGTH], aux, final)], [state])]
    # Two children of the root, then one below the first of them and one below the second.
    for tokens, parents in ((ids[0, -2:], [0, 0]), (ids[0, :2], [1, 2])):
        logits.append(draft.extend([state], [Frontier(tokens, torch.tensor(parents))]))
    return torch.cat(logits)


def _draft_for_check(
    config: DraftConfig, tensors: Mapping[str, Tensor], count: int, generator: torch.Generator
) -> ChainDraft:
    """A float32 draft with these tensors, attached to random embeddings of `count` tokens."""
    hidden = config.hidden_size
    if isinstance(config, EagleConfig):
        # Its head is the target's; a small one does, since no weight depends on the vocabulary.
        config = copy.deepcopy(config)
        config.vocab_size = config.draft_vocab_size = count
        tensors = {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}
    draft = new_draft(config).float().eval()
    draft.load_state_dict(dict(tensors), strict=True)
    embeddings = nn.Embedding(count, hidden)
    embeddings.weight.copy_(torch.randn(count, hidden, generator=generator))
    head = None
    if isinstance(draft, EagleDraft):
        head = _random_head(torch.randn(count, hidden, generator=generator))
    draft.attach_target(embed_tokens=embeddings, head=head)
    return draft


def _random_head(weight: Tensor) -> TargetHead:
    """A target's head with this matrix [vocab, hidden]."""
    vocab_size, hidden = weight.shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden, intermediate_size=8, num_hidden_layers=0,
            num_attention_heads=1, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
        )
    ).float().eval()  # fmt: skip
    model.lm_head.weight.copy_(weight)
    return TargetHead(model, find_structure(model, has_layers=False))
