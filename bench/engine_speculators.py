"""Loads an exported draft with speculators and computes its training loss on given states.

Runs in the environment of `make engine-check` as a child of bench/engine_check.py and imports
nothing of draftsmith. Reads a request and writes an answer, both JSON files:

    python bench/engine_speculators.py REQUEST ANSWER

Request: `draft` (folder in the speculators format), `target` (folder), `steps` (EAGLE-3: draft
steps that are unrolled) or `anchors` (DFlash, DSpark: how many, which is all that speculators can
choose from), `batch` (safetensors file, documents one after the other: `lengths` [documents],
`input_ids` [tokens], `supervised` [tokens] bool, `features` [tokens, layers * hidden],
`last_states` [tokens, hidden]: the last layer's output before the final norm). Supervised are:
EAGLE-3 and DSpark, tokens whose logits teach; DFlash, tokens that are predicted.

Answer: `version`; `architecture`; `layer_ids` (speculators counts layers that have run);
`not_loaded` (names of the file that are no part of the model, or differ in it); `loss`: EAGLE-3,
per step, each the mean KL divergence over its supervised places; block drafts, one number, the KL
divergences weighted by position over the number of predictions; and `counts` of these.

Shifting and packing are speculators' own; attention is `sdpa` and the loss `eager`, because the
defaults (flex attention, fused losses) need a GPU.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from torch import Tensor


def load(request: dict[str, Any]) -> Any:
    """The draft model in float32, attached to the target in the request's folder."""
    config = SpeculatorModelConfig.from_pretrained(request["draft"])
    config.transformer_layer_config._attn_implementation = "sdpa"
    # The export names the target as it was called where it was trained.
    config.speculators_config.verifier.name_or_path = request["target"]
    model = SpeculatorModel.from_pretrained(request["draft"], config=config, dtype=torch.float32)
    return model.eval()


def not_loaded(model: Any, folder: str) -> list[str]:
    """Tensors of the files that the model lacks or holds with other values."""
    state = model.state_dict()
    found = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name not in state or not torch.equal(state[name], tensor.to(state[name].dtype)):
                found.append(name)
    return found


def pack(batch: dict[str, Tensor], *, shifted: bool) -> dict[str, Tensor]:
    """One packed row of all documents, for EAGLE-3 shifted by speculators' own code."""
    lengths = batch["lengths"].tolist()
    names = ("input_ids", "supervised", "features", "last_states")
    parts = zip(*(batch[name].split(lengths) for name in names), strict=True)
    rows = []
    for number, (ids, supervised, features, last_states) in enumerate(parts):
        row = {
            "input_ids": ids,
            "hidden_states": features,
            "verifier_last_hidden_states": last_states,
            "loss_mask": supervised,
            "lengths": torch.tensor([len(ids)]),
            "position_ids": torch.arange(len(ids)),
        }
        row = shift_batch(row) if shifted else row
        row["document_ids"] = torch.full_like(row["input_ids"], number)
        del row["lengths"]
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


@torch.no_grad()
def losses(model: Any, packed: dict[str, Tensor], steps: int) -> tuple[list[float], list[int]]:
    """Mean loss and number of supervised places of every step."""
    _, _, metrics = model(
        **packed,
        ttt_steps=steps,
        ttt_step_loss_decay=1.0,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return (
        [float(metrics[f"loss_{step}_sum"]) for step in range(steps)],
        [int(metrics[f"full_acc_{step}_total"]) for step in range(steps)],
    )


@torch.no_grad()
def block_losses(
    model: Any, packed: dict[str, Tensor], anchors: int
) -> tuple[list[float], list[int]]:
    """The loss over all blocks, without a confidence head's, and the number of predictions."""
    more: dict[str, Any] = {}
    if hasattr(model, "markov_head"):  # DSpark
        tv = resolve_loss_config("tv", "eager")["tv"][0]
        more = {"tv_loss_fn": tv, "confidence_head_alpha": 0.0}
    _, _, metrics = model(
        **packed,
        max_anchors=anchors,
        gamma=4.0,
        per_position_loss_weight="fixed-exp-decay",
        loss_config=resolve_loss_config("kl_div", "eager"),
        **more,
    )
    return [float(metrics["loss_sum"])], [int(metrics["full_acc_total"])]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = load(request)
    is_block = "anchors" in request
    packed = pack(load_file(request["batch"]), shifted=not is_block)
    if is_block:
        found, counts = block_losses(model, packed, request["anchors"])
    else:
        found, counts = losses(model, packed, request["steps"])
    answer = {
        "engine": "speculators",
        "version": version("speculators"),
        "architecture": type(model).__name__,
        "layer_ids": list(model.target_layer_ids),
        "not_loaded": not_loaded(model, request["draft"]),
        "loss": found,
        "counts": counts,
    }
    Path(sys.argv[2]).write_text(json.dumps(answer) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
