"""A smaller model cut from a target: some of its layers, its embeddings, norms and head.

Works for any family that transformers loads: the parts are those that `find_structure` sees, and
tensors keep their names but for the number of the layer. Of a multimodal target only the text part
is taken.

How to check: tests/test_small_model.py, on tiny models of eleven families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from draftsmith.models.target import TargetHead
from draftsmith.models.target_structure import find_structure, text_config_of


def spread_layers(num_target_layers: int, count: int) -> list[int]:
    """`count` layers spread evenly over the target's, the first and the last included."""
    if count == 1:
        return [0]
    last, gaps = num_target_layers - 1, count - 1
    return [(place * last + gaps // 2) // gaps for place in range(count)]


def student_config(config: PreTrainedConfig, layers: Sequence[int]) -> Any:
    """A target's text configuration cut down to some of its layers.

    Lists with one entry per layer (`layer_types`) are cut with them. Soft-capping of the logits is
    left out: objectives see a head as a matrix, and a student need not copy it.
    """
    entries = config.to_dict()
    total = config.num_hidden_layers
    for name, value in entries.items():
        per_layer = isinstance(value, list) and len(value) == total
        if per_layer and not name.endswith("_token_id") and name != "architectures":
            entries[name] = [value[layer] for layer in layers]
    # Some families have their own name for the number (GPT-2: n_layer).
    entries[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    cut = type(config).from_dict(entries)
    drop_soft_capping(cut)
    return cut


def drop_soft_capping(config: PreTrainedConfig) -> None:
    """Leaves out what Gemma 2 does to its logits (monotone, so greedy choices stay)."""
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None  # type: ignore[attr-defined]


@torch.no_grad()
def take_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 model of the target's text part with some of its layers, all weights copied.

    Raises:
        ValueError: The layers chosen do not form a model of this architecture.
    """
    config = student_config(text_config_of(target.config), layers)
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    source, goal = find_structure(target), find_structure(student)
    prefix = _layer_prefix(source.decoder, source.layers)
    new_place = {layer: place for place, layer in enumerate(layers)}
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.decoder.state_dict().items():
        if name.startswith(prefix):
            layer, _, rest = name.removeprefix(prefix).partition(".")
            if int(layer) not in new_place:
                continue
            name = f"{prefix}{new_place[int(layer)]}.{rest}"
        tensors[name] = tensor
    try:
        goal.decoder.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"Layers {list(layers)} of {type(target).__name__} do not form a smaller model: its "
            f"layers differ in kind. Choose others with method.layers.\nCause: {error}"
        ) from error
    head = target.get_submodule(source.head_name).state_dict()
    student.get_submodule(goal.head_name).load_state_dict(head)
    return student


def _layer_prefix(decoder: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Name of the decoder's list of layers, with the dot behind it."""
    name = next(name for name, module in decoder.named_modules() if module is layers[0])
    return name.removesuffix("0")


def linear_head_factor(head: TargetHead) -> float:
    """What a head multiplies raw logits with (1 mostly; Granite scales them).

    Raises:
        ValueError: It does something else to them (soft-capping), which no matrix can express.
    """
    if head.is_plain:
        return 1.0
    raw = torch.tensor([[-100.0, -1.0, 1.0, 100.0]], device=head.weight.device)
    with torch.no_grad():
        found = head.transform(raw).float()
    factor = float(found[0, 2])
    if not torch.allclose(found, raw * factor, rtol=1e-3):
        raise ValueError(
            "The small model's head changes its logits by more than a factor (soft-capping?), "
            "which training does not support. Build the student with method=small_model, which "
            "leaves soft-capping out."
        )
    return factor
