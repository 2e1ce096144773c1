"""The target model: a frozen causal language model seen through hidden states and logits.

Axes used in this file: batch, seq, hidden, vocab, layers.

*Layer id l* is the output of 0-based decoder layer l, before the final norm; -1 is the embedding
output. The *final hidden state* is what the head reads. Target logits are always the target's own
code applied to the final hidden state (soft-capping, logit scaling), see target_structure.py.

`TargetModel` is the whole model, for capturing states and for verification. `TargetHead` is only
what training from a cache needs: embeddings, final norm and head, read without the layers.

How to check: `tests/test_target.py`, on tiny models of eleven families.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from draftsmith.models.aux_layers import default_aux_layer_ids, validate_aux_layer_ids
from draftsmith.models.kv_cache import empty_layers
from draftsmith.models.recurrent_states import NO_TREES, require_mixers, watched_mixers
from draftsmith.models.target_source import (
    Fingerprint,
    chat_template_fingerprint,
    check_vocabulary,
    collect_eos_token_ids,
    explained_load_errors,
    fingerprint_target,
    load_tokenizer,
    loading_arguments,
    make_fingerprint,
    model_class_of,
    read_config,
    resolve_target,
    tokenizer_fingerprint,
    whole_weights,
)
from draftsmith.models.target_structure import (
    HeadForward,
    TargetStructure,
    accepts,
    agree,
    find_structure,
    first_tensor,
    layer_input,
    norm_factor,
    probe_tokens,
    text_config_of,
)

__all__ = [
    "Fingerprint",
    "TargetHead",
    "TargetModel",
    "TargetOutput",
    "chat_template_fingerprint",
    "default_aux_layer_ids",
    "fingerprint_target",
    "resolve_target",
    "tokenizer_fingerprint",
    "validate_aux_layer_ids",
]

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
UNLIMITED_POSITIONS = 1 << 30
"""`max_positions` of a target whose configuration states no limit (no position embeddings)."""


@dataclass
class TargetOutput:
    """States and logits of one forward pass."""

    aux_hidden_states: Tensor
    """[batch, seq, layers * hidden]: the chosen layers in the order asked for (width 0 if none)."""
    final_hidden_states: Tensor
    """[batch, seq, hidden]: what the head reads."""
    logits: Tensor | None
    """[batch, seq or 1, vocab], or None when none were asked for."""


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name.

    Raises:
        ValueError: An unknown name; lists the choices.
    """
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if str(dtype) not in DTYPES:
        near = difflib.get_close_matches(str(dtype), DTYPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown dtype {str(dtype)!r}; choose one of {', '.join(DTYPES)}.{hint}")
    return DTYPES[str(dtype)]


def choose_device(device: str | torch.device) -> torch.device:
    """A device by name; "auto" is cuda where there is one, else cpu."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _load_causal_lm(
    name_or_path: str, source: str, arguments: dict[str, Any], **settings: Any
) -> PreTrainedModel:
    """Loads a frozen model in eval mode and insists that every weight came from the checkpoint.

    Raises:
        ValueError: A weight is missing, which transformers would draw at random.
    """
    device = choose_device(settings.pop("device"))
    if device.type != "cpu":
        settings["device_map"] = {"": device}
    verbosity = transformers_logging.get_verbosity()
    if settings.pop("quiet", False):
        transformers_logging.set_verbosity_error()
    try:
        with whole_weights(), explained_load_errors(name_or_path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, **arguments, **settings
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"The weight files of {name_or_path!r} lack {len(missing)} tensors of "
            f"{type(model).__name__}, for example {missing[:3]}: an incomplete or a wrong "
            "checkpoint. Get it again."
        )
    return model.eval().requires_grad_(False)


def _supported_attention(name_or_path: str, config: PreTrainedConfig, wanted: str) -> str:
    """The attention to load with: eager where the architecture has no sdpa (soft-capped scores)."""
    model_class = model_class_of(config)
    if wanted == "sdpa" and model_class is not None and not model_class._supports_sdpa:
        logger.warning(
            "%s has no sdpa attention in transformers; loading it with attn_implementation=eager.",
            name_or_path,
        )
        return "eager"
    return wanted


class TargetModel:
    """A loaded, frozen target. It is never trained and never written to.

    Attributes:
        model: The transformers causal language model.
        config: Its text configuration (the nested one of multimodal targets).
        tokenizer: Its own tokenizer, template included.
        name_or_path: The name as the user gave it.
        num_layers, hidden_size, vocab_size: Sizes; vocab_size is the head's, padding included.
        device, dtype: Of the weights.
        embed_tokens: Maps ids to the embeddings the decoder layers read, scale included.
        eos_token_ids: Every token that ends an answer.
        max_positions: Longest sequence the target is made for, in tokens.
        mixers: The module of each recurrent layer that keeps its state, by the layer's index in the
            cache; empty for a target of attention layers. Such a target reads chains, no trees.
        fingerprint: Weights, tokenizer and template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name_or_path: str,
        fingerprint: Fingerprint,
    ) -> None:
        """Wraps a loaded model; most callers use `load`.

        Raises:
            ValueError: The structure is not supported, or states and logits disagree.
        """
        structure = find_structure(model)
        self.model = model
        self.config = text_config_of(model.config)
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.fingerprint = fingerprint
        self._head = TargetHead(model, structure)
        self._decoder = structure.decoder
        self._layers = structure.layers
        self.num_layers = len(structure.layers)
        self.hidden_size = self._head.hidden_size
        self.vocab_size = self._head.vocab_size
        self.embed_tokens = structure.embed_tokens
        self.device = self._head.weight.device
        self.dtype = self._head.weight.dtype
        check_vocabulary(name_or_path, tokenizer, self.vocab_size)
        self.eos_token_ids = collect_eos_token_ids(
            model.config, getattr(model, "generation_config", None), tokenizer, self.vocab_size
        )
        limit = getattr(self.config, "max_position_embeddings", None)
        self.max_positions = UNLIMITED_POSITIONS if limit is None else int(limit)
        self._cache_argument = self._find_cache_argument()
        self._takes_positions = accepts(self._decoder, "position_ids")
        self._cache_layers = empty_layers(model.config)
        self.mixers: dict[int, nn.Module] = {}
        self.packed_model: Any = None  # Made by models/packed.py, which builds on this file.
        self._captured: dict[int, Tensor] = {}
        self._hooked: set[int] = set()
        self._check_states(structure)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> TargetModel:
        """Loads a target with its tokenizer.

        Args:
            name_or_path: A local folder, a hub id, a GGUF file, or `package:NAME`.
            dtype: bfloat16, float16 or float32.
            device: Where the whole model goes; "auto" is cuda where there is one, else cpu.
            attn_implementation: As in transformers.
            trust_remote_code: Run code that comes with the model.
            revision: Branch, tag or commit of a hub id.

        Raises:
            ValueError: It cannot be found, loaded or served; says what to do.
        """
        torch_dtype = parse_dtype(dtype)
        source = resolve_target(name_or_path)
        arguments = loading_arguments(
            source, trust_remote_code=trust_remote_code, revision=revision
        )
        config = read_config(name_or_path, source, arguments)
        tokenizer = load_tokenizer(name_or_path, source, arguments)
        check_vocabulary(name_or_path, tokenizer, text_config_of(config).vocab_size)
        model = _load_causal_lm(
            name_or_path,
            source,
            arguments,
            config=config,
            dtype=torch_dtype,
            device=device,
            attn_implementation=_supported_attention(name_or_path, config, attn_implementation),
        )
        return cls(
            model,
            tokenizer,
            name_or_path=name_or_path,
            fingerprint=make_fingerprint(name_or_path, source, tokenizer, revision=revision),
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        aux_layer_ids: Sequence[int] = (),
        logits: Literal["none", "last", "all"] = "none",
    ) -> TargetOutput:
        """Runs the decoder, and the head on what was asked for.

        Args:
            input_ids: [batch, seq] int64.
            attention_mask: [batch, past + seq], True or 1 on real tokens, padding on either side;
                or [batch, 1, seq, past + seq] as transformers takes it (then give position_ids).
                None when there is no padding.
            position_ids: [batch, seq]; taken from the mask, or from the cache's length, if None.
            cache: Keys and values of earlier tokens (`new_cache`); this call's are added to it.
            aux_layer_ids: Layers whose outputs are wanted; -1 is the embedding output.
            logits: Of no position, of the last column only, or of all.

        Returns:
            A `TargetOutput`; states at padding are meaningless.

        Raises:
            ValueError: A mask of four axes with recurrent layers, which do not look at it.
        """
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_argument] = cache
        if attention_mask is not None:
            if attention_mask.ndim == 4 and self.chain_only:
                raise ValueError(NO_TREES)
            arguments["attention_mask"] = attention_mask
            if position_ids is None and attention_mask.ndim == 2:
                counted = attention_mask.long().cumsum(-1) - 1  # [batch, past + seq]
                position_ids = counted[:, -input_ids.shape[1] :].clamp_(min=0)
        if position_ids is not None and self._takes_positions:
            arguments["position_ids"] = position_ids
        for layer in aux_layer_ids:
            if layer not in self._hooked:
                self._hook(layer)
        self._captured.clear()
        final_hidden = first_tensor(self._decoder(**arguments))
        assert final_hidden is not None, "the probe at load saw the decoder return its states"
        aux = [self._captured[layer] for layer in aux_layer_ids]
        self._captured.clear()  # The layers that were not asked for now are not kept alive.
        asked = {"none": None, "last": final_hidden[:, -1:], "all": final_hidden}[logits]
        return TargetOutput(
            aux_hidden_states=torch.cat(aux, dim=-1) if aux else final_hidden[..., :0],
            final_hidden_states=final_hidden,
            logits=None if asked is None else self._head(asked),
        )

    def _hook(self, layer: int) -> None:
        """Records a layer's output in every later forward: hooks are put on once, on first use."""
        if not -1 <= layer < self.num_layers:
            raise ValueError(
                f"Layer id {layer} asked of a target with {self.num_layers} layers "
                f"(0 to {self.num_layers - 1}; -1 is the embedding output)."
            )

        def record_output(_: nn.Module, __: Any, output: Any) -> None:
            self._captured[layer] = first_tensor(output)  # type: ignore[assignment]

        def record_input(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._captured[-1] = layer_input(args, kwargs)

        if layer == -1:
            self._layers[0].register_forward_pre_hook(record_input, with_kwargs=True)
        else:
            self._layers[layer].register_forward_hook(record_output)
        self._hooked.add(layer)

    def logits(self, final_hidden: Tensor) -> Tensor:
        """[..., hidden] final hidden states -> the target's own logits [..., vocab]."""
        return self._head(final_hidden)

    def new_cache(self) -> Cache:
        """An empty cache whose attention layers keep every token, so that rollback is exact.

        A sliding-window layer that has dropped its oldest entries cannot take back rejected
        tokens; the mask keeps the window, the cache need not. Recurrent layers cannot go back
        (`models/recurrent_states.py` does it for one sequence).
        """
        cache = DynamicCache()
        cache.layers.extend(copy.deepcopy(self._cache_layers))
        return cache

    def head(self) -> TargetHead:
        """The head, sharing this target's weights."""
        return self._head

    @property
    def chain_only(self) -> bool:
        """It reads drafted tokens one after the other only: its recurrent layers cannot branch."""
        return bool(self.mixers)

    def _find_cache_argument(self) -> str:
        """The decoder's name for its cache: it changed between versions of transformers.

        Raises:
            ValueError: It takes none.
        """
        for name in ("cache", "past_key_values"):
            if accepts(self._decoder, name):
                return name
        raise ValueError(
            f"{type(self.model).__name__} takes no cache of keys and values, so it cannot be a "
            "target."
        )

    def _check_states(self, structure: TargetStructure) -> None:
        """Insists that states taken our way give the logits of the model's own forward pass.

        Raises:
            ValueError: They differ, so a wrapper around the decoder does more than we know of; or
                the decoder leaves the cache empty, or its recurrent layers read padding.
        """
        name, cache = type(self.model).__name__, self.new_cache()
        probe = probe_tokens(self._head.weight)
        with watched_mixers(self._decoder, cache) as self.mixers:
            found = self.forward(probe, cache=cache, logits="all").logits
        assert found is not None, "logits were asked for"
        require_mixers(name, cache, self.mixers)
        if cache.get_seq_length() != probe.shape[1]:
            raise ValueError(
                f"{name} does not write its keys and values into a transformers cache, so it "
                "cannot be a target."
            )
        if not _close(found, structure.probe_logits):
            raise ValueError(
                f"{name}: the decoder's own states do not lead to the model's logits (its wrapper "
                "changes inputs or states). This target is not supported."
            )
        if self.mixers and self._reads_padding(probe, found):
            raise ValueError(
                f"{name}: its recurrent layers read padding, so batches of texts would get other "
                "states than single ones. This target is not supported."
            )

    def _reads_padding(self, probe: Tensor, expected: Tensor) -> bool:
        """Whether padding on either side changes the probe's logits."""
        ids = probe.repeat(1, 2)
        for half in range(2):
            keep = (torch.arange(ids.shape[1], device=ids.device) // probe.shape[1] == half)[None]
            found = self.forward(ids, attention_mask=keep, logits="all").logits
            assert found is not None, "logits were asked for"
            if not agree(found[:, keep[0]], expected):
                return True
        return False


class TargetHead(nn.Module):
    """A target's frozen embeddings, final norm and head.

    Calling it maps final hidden states to the target's own logits; gradients flow to the states.

    Attributes:
        config: The text configuration of the whole target.
        embed_tokens: Maps ids to the embeddings the decoder layers read, scale included.
        final_norm_weight: [hidden] factor of the final norm as it acts (Gemma's 1 + weight), or
            None where the target has no such norm.
        hidden_size, vocab_size: Of the head's matrix.
        is_plain: True when logits are just the matrix product.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: TargetStructure,
        *,
        config: PreTrainedConfig | None = None,
    ) -> None:
        """Takes the head out of a model; most callers use `load` or `TargetModel.head`.

        Args:
            model: The causal language model; only its head and embeddings are kept.
            structure: Its parts.
            config: Text configuration to keep, if not the model's own.

        Raises:
            ValueError: The logits are not a function of raw logits, element by element.
        """
        super().__init__()
        self.config = text_config_of(model.config) if config is None else config
        self.matrix: Any = model.get_submodule(structure.head_name)  # A Linear, or shaped like it.
        self.path = HeadForward(model, structure)
        self.embed_tokens = structure.embed_tokens
        self.final_norm_weight = norm_factor(structure.final_norm)
        self.vocab_size, self.hidden_size = self.weight.shape
        self.is_plain = self._check(type(model).__name__, structure)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> TargetHead:
        """Reads embeddings, final norm and head of a target, and none of its layers.

        The model is built from its configuration with zero decoder layers, so transformers itself
        finds the tensors by name (tied, sharded, prefixed) and leaves those of the layers unread.

        Args:
            name_or_path: As in `TargetModel.load`; the other arguments too.

        Raises:
            ValueError: It cannot be found, loaded or served; says what to do.
        """
        torch_dtype = parse_dtype(dtype)
        source = resolve_target(name_or_path)
        arguments = loading_arguments(
            source, trust_remote_code=trust_remote_code, revision=revision
        )
        whole = text_config_of(read_config(name_or_path, source, arguments))
        config = read_config(name_or_path, source, arguments)
        text_config_of(config).num_hidden_layers = 0
        model = _load_causal_lm(
            name_or_path,
            source,
            arguments,
            config=config,
            dtype=torch_dtype,
            device=device,
            quiet=True,  # transformers would list every tensor of every layer as unused.
        )
        return cls(model, find_structure(model, has_layers=False), config=whole)

    @property
    def weight(self) -> Tensor:
        """[vocab, hidden]: the head's matrix."""
        return self.matrix.weight

    @property
    def bias(self) -> Tensor | None:
        """[vocab], where the head has one."""
        return getattr(self.matrix, "bias", None)

    def forward(self, final_hidden: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocab]."""
        return self.matrix(final_hidden) if self.is_plain else self.path(final_hidden)

    def transform(self, raw_logits: Tensor) -> Tensor:
        """What the target does to raw logits (final_hidden @ weight.T + bias), element by element.

        Args:
            raw_logits: [..., any columns of vocab], in any float dtype.

        Returns:
            Logits of the same shape; the argument itself where the head is plain.
        """
        return raw_logits if self.is_plain else self.path.transform(raw_logits)

    def _check(self, name: str, structure: TargetStructure) -> bool:
        """Compares the head's path with the model's logits; returns whether it is plain."""
        with torch.no_grad():
            if not _close(self.path(structure.probe_hidden), structure.probe_logits):
                raise ValueError(
                    f"{name}: the head applied to the final hidden state does not give the model's "
                    "logits. This target is not supported."
                )
            raw = self.matrix(structure.probe_hidden)
            # Raw logits of up to 100: a soft-cap that small logits would not show must be seen.
            factor = 100.0 / float(raw.abs().max().clamp(min=1e-6))
            hidden = torch.cat([structure.probe_hidden, structure.probe_hidden * factor])
            raw, logits = self.matrix(hidden), self.path(hidden)
            if raw.shape == logits.shape and torch.equal(raw, logits):
                return True
            part = slice(1, self.vocab_size // 2)
            transformed = self.path.transform(raw)
            if not (
                _close(transformed, logits)
                and _close(self.path.transform(raw[..., part]), logits[..., part])
            ):
                raise ValueError(
                    f"{name}: its logits are not an elementwise function of hidden @ weight.T. "
                    "This target is not supported."
                )
        return False


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equality up to the rounding of the coarser dtype, relative to the largest entry."""
    if found.shape != expected.shape:
        return False
    tolerance = 1e-4 if found.dtype == torch.float32 else 5e-2
    largest = float(expected.abs().max().clamp(min=1e-6))
    return float((found.float() - expected.float()).abs().max()) <= tolerance * largest
