"""Which layers of the target a draft model reads: the default choice, and what may be chosen.

Layer ids count as in target.py: 0-based decoder layers, -1 is the embedding output.
"""

from __future__ import annotations

from collections.abc import Sequence


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice of an early, a middle and a late layer: (1, num_layers // 2 - 1, N - 4).

    Source: arXiv 2503.01840 and its code, which counts (2, N // 2, N - 3) with 0 the embeddings.

    Raises:
        ValueError: The target is too shallow for three distinct layers.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if not ids[0] < ids[1] < ids[2]:
        usable = ", ".join(str(layer) for layer in range(num_layers - 1)) or "none"
        raise ValueError(
            f"The target has only {num_layers} layers, too few for the default aux_layer_ids "
            f"(1, N // 2 - 1, N - 4) = {ids}. Set method.aux_layer_ids yourself, distinct and "
            f"ascending (usable: -1 for the embeddings, {usable})."
        )
    return ids


def validate_aux_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Checks layer ids: distinct, ascending, and in -1 .. num_layers - 2.

    The last layer is refused: transformers' tuple of hidden states holds its output after the final
    norm, engines hand out the raw residual, so the same id would mean two different things.

    Raises:
        ValueError: What is wrong and what to set instead.
    """
    checked = tuple(int(layer) for layer in ids)
    choice = f"Set method.aux_layer_ids to distinct ascending ids in -1 .. {num_layers - 2}"
    if num_layers - 1 in checked:
        raise ValueError(
            f"method.aux_layer_ids {checked} has {num_layers - 1}, the last layer: its output "
            "means different things in different engines (raw or normalised), and the final hidden "
            f"state is always given anyway. {choice}."
        )
    outside = [layer for layer in checked if not -1 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"method.aux_layer_ids {checked} has {outside}, but the target has {num_layers} layers "
            f"(0 to {num_layers - 1}; -1 is the embedding output). {choice}."
        )
    if list(checked) != sorted(set(checked)):
        raise ValueError(
            f"method.aux_layer_ids {checked} is not distinct and ascending. {choice}, for example "
            f"{tuple(sorted(set(checked)))}."
        )
    return checked
