"""One decoder layer of a target's own family, run as a draft's block.

There are no lists of families. The block is the family's own decoder, as transformers builds it
from the target's configuration, with one layer in it, no embeddings and no final norm: masks,
rotary embeddings (interleaved, on a part of the head), latent attention, output gates and routed
experts are the family's own code.

Which layer. An MTP module is one more layer behind the last one, so it is of the last layer's kind;
where layers differ in their attention, the last one that attends to everything (Qwen3-Next's and
Qwen3.5's modules are full-attention layers). Families say in several ways what a layer's number
means; transformers' own MTP code does the same as here: lists with an entry per layer are cut to
the chosen one, and `first_k_dense_replace` (dense layers at the bottom) becomes 0. That the outcome
is the chosen layer is checked, tensor by tensor.

Check: tests/test_mtp_native.py, tests/test_golden_mtp_native.py.

Axes: rows, hidden, batch, seq.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from draftsmith.models.packed import Segment, attention_configs, packed_attention
from draftsmith.models.target_structure import accepts, first_tensor

FULL_ATTENTION = "full_attention"
STORAGE_KEYS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "quantization_config",
    "id2label",
    "label2id",
    "use_cache",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
)
"""Keys of a target's configuration that say how it is stored or used and how many modules it
carries, not what its layers are."""


def block_settings(text_config: PreTrainedConfig) -> dict[str, Any]:
    """The target's (text) configuration, as a draft of its family keeps it.

    Raises:
        ValueError: its family is not one of transformers' own.
    """
    # As it will be read back from a file.
    plain = json.loads(json.dumps(text_config.to_dict()))
    kept = {name: value for name, value in plain.items() if name not in STORAGE_KEYS}
    kept["model_type"] = _family(text_config)
    try:
        _config_of(kept)
    except ValueError as error:
        raise ValueError(
            f"The target's decoder is a {type(text_config).__name__}, whose code is not in "
            "transformers: a block of its own family cannot be built. Use method=mtp, whose block "
            "is a Llama-type layer."
        ) from error
    return kept


def _family(config: PreTrainedConfig) -> str:
    """The model type of a configuration, or of the one in transformers that it is derived from."""
    for kind in type(config).__mro__:
        family = getattr(kind, "model_type", None)
        if kind.__module__.startswith("transformers.models.") and family:
            return str(family)
    return config.model_type


def _config_of(settings: dict[str, Any]) -> PreTrainedConfig:
    rest = dict(settings)
    return AutoConfig.for_model(rest.pop("model_type"), **rest)


def chosen_layer(config: PreTrainedConfig) -> int:
    """The target's layer that a module's block is like.

    Raises:
        ValueError: no layer attends to everything.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return config.num_hidden_layers - 1
    full = [index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION]
    if not full:
        raise ValueError(
            f"No layer of the target attends to everything (layer_types has {sorted(set(kinds))}), "
            "but an MTP module's block does. This target is not supported by method=mtp_native."
        )
    return full[-1]


def single_layer_config(settings: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a decoder that has the chosen layer only."""
    whole = _config_of(settings)
    layer, count = chosen_layer(whole), whole.num_hidden_layers
    cut = copy.deepcopy(settings)
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == count and name.endswith("_types"):
            cut[name] = [value[layer]]
    cut |= {"num_hidden_layers": 1, "vocab_size": 1}
    cut |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if "first_k_dense_replace" in cut:
        cut["first_k_dense_replace"] = 0
    return _config_of(cut)


class FamilyBlock:
    """A family's decoder with one layer; its parameters belong to the draft that holds the layer.

    Not a module: the draft registers `layer` and `rotary_emb` under names of its own.
    """

    def __init__(self, settings: dict[str, Any], *, attention: str = "sdpa") -> None:
        """Builds the layer with random weights, on the default device.

        Args:
            settings: of `block_settings`.
            attention: transformers' name of the attention that training runs with.
        """
        config = single_layer_config(settings)
        decoder: Any = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        if hasattr(decoder, "set_attn_implementation"):
            decoder.set_attn_implementation(attention if decoder._supports_sdpa else "eager")
        self.decoder: Any = decoder
        self.norm_class: Any = type(decoder.norm)
        self.norm_eps = config.rms_norm_eps
        decoder.norm = nn.Identity()
        decoder.set_input_embeddings(None)
        self.layer: nn.Module = decoder.layers[0]
        self.rotary_emb: nn.Module | None = getattr(decoder, "rotary_emb", None)
        self._cache_argument = "cache" if accepts(decoder, "cache") else "past_key_values"
        self._configs = attention_configs(decoder)

    def share_rotary(self, blocks: Sequence[FamilyBlock]) -> nn.Module:
        """Gives all blocks this one's rotary embeddings, to be registered once by the draft."""
        rotary = nn.Identity() if self.rotary_emb is None else self.rotary_emb
        for block in blocks:
            if block.rotary_emb is not None:
                block.rotary_emb = block.decoder.rotary_emb = rotary
        return rotary

    def new_norm(self, size: int) -> nn.Module:
        """A norm of the family's own class, which may store its weights minus one."""
        return self.norm_class(size, eps=self.norm_eps)

    def init_weights(self, module: nn.Module) -> None:
        """The family's own start of a module's weights."""
        self.decoder._init_weights(module)

    def over_texts(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] into the layer, whole texts from position 0 on -> out of it."""
        output = self.decoder(inputs_embeds=hidden, use_cache=False)
        return _states(output)

    def new_cache(self) -> Cache:
        """An empty cache of transformers', through which gradients flow."""
        return DynamicCache()

    def over_chains(self, hidden: Tensor, cache: Cache, step: int) -> Tensor:
        """One step of a chain at every slot: it sees the true states up to its own and what it made
        itself in the steps before.

        Args:
            hidden: [batch, seq, hidden] into the layer.
            cache: holds the steps before, seq entries each, step 0 first; this one's are added.
            step: from 0.

        Returns:
            [batch, seq, hidden] out of the layer.
        """
        seq = hidden.shape[1]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=hidden.device).tril()
        own = torch.eye(seq, dtype=torch.bool, device=hidden.device)
        seen = torch.cat([causal, *[own] * step], dim=1)[None, None]
        if self.decoder.config._attn_implementation == "eager":  # It adds its masks.
            lowest = torch.finfo(hidden.dtype).min
            seen = torch.zeros_like(seen, dtype=hidden.dtype).masked_fill_(~seen, lowest)
        arguments = {self._cache_argument: cache}
        output = self.decoder(
            inputs_embeds=hidden,
            attention_mask=seen,
            position_ids=torch.arange(seq, device=hidden.device)[None] + step,
            **arguments,
        )
        return _states(output)

    def over_rows(self, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
        """[rows, hidden] new rows of all segments -> out of the layer; their caches are written."""
        positions = torch.cat([segment.new_positions(hidden.device) for segment in segments])
        with packed_attention(self._configs, segments) as cache:
            arguments = {self._cache_argument: cache}
            output = self.decoder(
                inputs_embeds=hidden[None], position_ids=positions[None], **arguments
            )
        if cache.step.layers_attended != 1:
            raise ValueError(
                f"{type(self.layer).__name__} does not attend through transformers' interface: "
                "drafts with a block of this family can be trained, but not decoded here."
            )
        return _states(output)[0]

    @torch.no_grad()
    def check(self, settings: dict[str, Any]) -> None:
        """Insists that the block is the target's own layer and nothing is around it.

        Raises:
            ValueError: its tensors are not those of the chosen layer, or the decoder changes what
                it reads before the layer does.
        """
        whole = _config_of(settings)
        index = chosen_layer(whole)
        with torch.device("meta"):
            model: Any = AutoModel.from_config(whole)
        own, other = _shapes(self.layer), _shapes(model.layers[index])
        name = type(self.layer).__name__
        if own != other:
            differing = sorted(key for key in {*own, *other} if own.get(key) != other.get(key))
            raise ValueError(
                f"{name}: a layer built alone differs from layer {index} of the target in "
                f"{', '.join(differing[:4])}. This family is not supported by method=mtp_native."
            )
        probe = torch.linspace(-1.0, 1.0, 2 * whole.hidden_size).reshape(1, 2, -1)
        layers = self.decoder.layers
        self.decoder.layers = nn.ModuleList()
        try:
            through = _states(self.decoder(inputs_embeds=probe, use_cache=False))
        finally:
            self.decoder.layers = layers
        if not torch.equal(through, probe):
            raise ValueError(
                f"{type(self.decoder).__name__} changes its inputs before the first layer (scaled "
                "embeddings). This family is not supported by method=mtp_native."
            )


def norm_offset(norm: nn.Module) -> int:
    """Factor that a norm applies minus the weight it stores: 0, or 1 (Gemma, Qwen3-Next).

    Args:
        norm: an RMS norm with a `weight`.
    """
    made: Any = copy.deepcopy(norm).float().cpu()
    with torch.no_grad():
        made.weight.zero_()
        return int(bool(made(torch.ones(1, len(made.weight))).any()))


def _states(output: Any) -> Tensor:
    states = first_tensor(output)
    assert states is not None, "a decoder returns its states"
    return states


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
