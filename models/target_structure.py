"""What draftsmith needs to know of a target's insides, found by watching one forward pass.

Axes used in this file: batch, seq, hidden, vocab.

There are no lists of model families. The causal language model is run once on a few tokens with
hooks: the decoder layers are the longest list of modules that the decoder calls in order, the input
of the first one is what the layers read, and what the decoder returns is the final hidden state
that the head reads. The head itself is the causal language model's own forward pass with a stub in
the place of its backbone, so soft-capping and logit scaling are the model's own code.

How to check: `tests/test_target.py` compares states and logits with those of the model itself.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

PROBE_TOKENS = 4
"""Enough for every layer to attend to something, few enough to cost little at load."""

# Loose enough for one rounding of the product in each dtype, and far below any real scale.
SCALE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class TargetStructure:
    """The parts of a causal language model, and what one probing forward pass showed."""

    decoder: nn.Module
    """Maps token ids to the final hidden states."""
    layers: list[nn.Module]
    """The decoder layers in order; empty when the model was built without them."""
    backbone_name: str
    """The child of the causal language model that is, or contains, the decoder."""
    backbone_output: type
    """Class of what that child returns."""
    head_name: str
    """Dotted name of the module that holds the head's weight."""
    final_norm: nn.Module | None
    """The module whose output is the final hidden state, where there is one."""
    embed_tokens: nn.Module
    """Maps ids to the embeddings that the layers read, scale included."""
    embedding_scale: float
    """Factor that the decoder applies outside its embedding module (1.0 mostly)."""
    probe_hidden: Tensor
    """[1, seq, hidden]: final hidden states of the probe."""
    probe_logits: Tensor
    """[1, seq, vocab]: the model's own logits of the probe."""


class ScaledEmbedding(nn.Module):
    """Embeddings times a constant, for targets that scale them outside the embedding module."""

    def __init__(self, embedding: nn.Module, scale: float) -> None:
        super().__init__()
        self.embedding: Any = embedding  # An Embedding, or shaped like it.
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        """[vocab, hidden]: the unscaled table."""
        return self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """[...] ids -> [..., hidden]."""
        return self.embedding(input_ids) * self.scale


def first_tensor(value: Any) -> Tensor | None:  # layers return a tensor, a tuple or an output class
    """The tensor that a module returned, or the first of several."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "last_hidden_state"):
        return value.last_hidden_state
    if isinstance(value, tuple | list) and value:
        return first_tensor(value[0])
    return None


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a decoder layer was called with, by position or by name."""
    found = first_tensor(args) if args else kwargs.get("hidden_states")
    if found is None:
        raise ValueError(
            "The target's decoder layers are called without hidden_states as their first argument, "
            f"but with {sorted(kwargs)}: this architecture is not supported."
        )
    return found


def find_structure(model: PreTrainedModel, *, has_layers: bool = True) -> TargetStructure:
    """Watches one forward pass of a few tokens and finds the parts of a target.

    Args:
        model: The causal language model, in eval mode.
        has_layers: False for a model built without its decoder layers (head and embeddings only).

    Raises:
        ValueError: A part cannot be found; the message names it and the architecture.
    """
    name = type(model).__name__
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head_name = _name_of(model, head)
    lists = _layer_lists(model)
    paths = {owner: _path_to(model, owner) for owner, _ in lists}
    watched = _Watch()
    for layer in (layer for _, layers in lists for layer in layers):
        watched.add(layer)
    for module in (m for path in paths.values() for _, m in path):
        watched.add(module)
        for child in module.children():
            watched.add(child)
    watched.add(embedding)
    watched.add(head)
    probe = probe_tokens(head.weight)
    try:
        with torch.no_grad():
            logits = model(input_ids=probe, use_cache=False).logits
    finally:
        watched.remove()
    owner, layers = _called_in_order(name, lists, paths, watched, has_layers=has_layers)
    decoder = model.get_submodule(owner)
    final_hidden = first_tensor(watched.output_of(decoder))
    per_token = final_hidden is not None and final_hidden.shape[:2] == probe.shape
    if final_hidden is None or not per_token or not accepts(decoder, "input_ids"):
        raise ValueError(
            f"{name}: {owner} does not map token ids to one hidden state per token. This "
            "architecture is not supported."
        )
    _check_head_input(name, watched.input_of(head), final_hidden)
    norm = _producer(decoder, watched, final_hidden)
    first = watched.input_of(layers[0] if layers else norm)
    scale = _embedding_scale(
        model, watched.output_of(embedding), final_hidden if first is None else first
    )
    backbone_name, backbone = _outermost_called(paths[owner], watched, head)
    return TargetStructure(
        decoder=decoder,
        layers=layers,
        backbone_name=backbone_name,
        backbone_output=type(watched.output_of(backbone)),
        head_name=head_name,
        final_norm=norm,
        embed_tokens=embedding if scale == 1.0 else ScaledEmbedding(embedding, scale),
        embedding_scale=scale,
        probe_hidden=final_hidden,
        probe_logits=logits,
    )


def probe_tokens(head_weight: Tensor) -> Tensor:
    """[1, PROBE_TOKENS] ids that every vocabulary has, on the device of the weights."""
    ids = torch.arange(3, 3 + PROBE_TOKENS, device=head_weight.device)
    return ids[None] % head_weight.shape[0]


class _Watch:
    """Records the calls of chosen modules during one forward pass."""

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self._inputs: dict[int, Tensor | None] = {}
        self._outputs: dict[int, Any] = {}
        self._watched: set[int] = set()
        self._handles: list[Any] = []

    def add(self, module: nn.Module) -> None:
        """Starts to watch a module (once, however often it is asked for)."""
        if id(module) not in self._watched:
            self._watched.add(id(module))
            self._handles.append(module.register_forward_hook(self._record, with_kwargs=True))

    def _record(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.calls.append(module)
        self._inputs[id(module)] = first_tensor(args) if args else kwargs.get("hidden_states")
        self._outputs[id(module)] = output

    def output_of(self, module: nn.Module) -> Any:
        return self._outputs.get(id(module))

    def input_of(self, module: nn.Module | None) -> Tensor | None:
        """The hidden states that went into a module, if it was called with any."""
        return None if module is None else self._inputs.get(id(module))

    def remove(self) -> None:
        """Takes all hooks off again."""
        for handle in self._handles:
            handle.remove()


def _name_of(model: PreTrainedModel, head: nn.Module | None) -> str:
    for name, module in model.named_modules():
        if module is head and isinstance(getattr(module, "weight", None), Tensor):
            return name
    raise ValueError(f"{type(model).__name__} has no language-model head with a weight matrix.")


def _layer_lists(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """(name of the owner, items) of the outermost module lists, longest first.

    Lists inside other lists are left out: those are the experts of a layer.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    names = [name for name, _ in lists]
    outer = [
        (name.rpartition(".")[0], list(module))
        for name, module in lists
        if not any(name.startswith(f"{other}.") for other in names)
    ]
    return sorted(outer, key=lambda entry: len(entry[1]), reverse=True)


def _path_to(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from the model (left out) to one of its parts (included)."""
    parts = name.split(".") if name else []
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return [(prefix, model.get_submodule(prefix)) for prefix in prefixes]


def _called_in_order(
    name: str,
    lists: list[tuple[str, list[nn.Module]]],
    paths: dict[str, list[tuple[str, nn.Module]]],
    watched: _Watch,
    *,
    has_layers: bool,
) -> tuple[str, list[nn.Module]]:
    """The longest list whose items were all called, once each and in order, and its owner.

    Without layers it is the empty list whose owner was called.
    """
    for owner, layers in lists:
        if bool(layers) != has_layers or not owner:
            continue
        members = {id(layer) for layer in layers}
        called = [id(module) for module in watched.calls if id(module) in members]
        owner_called = watched.output_of(paths[owner][-1][1]) is not None
        if owner_called and called == [id(layer) for layer in layers]:
            return owner, layers
    raise ValueError(
        f"{name}: no list of decoder layers that are called once each and in order. This "
        "architecture is not supported."
    )


def _outermost_called(
    path: list[tuple[str, nn.Module]], watched: _Watch, head: nn.Module
) -> tuple[str, nn.Module]:
    """The backbone: the outermost called module on the way to the decoder, without the head."""
    return next(
        (name, module)
        for name, module in path
        if watched.output_of(module) is not None and all(m is not head for m in module.modules())
    )


def _check_head_input(name: str, head_input: Tensor | None, final_hidden: Tensor) -> None:
    """Insists that the head reads the final hidden states, up to a constant factor.

    Raises:
        ValueError: Something stands between them (the transform of a BERT-like head).
    """
    if head_input is not None and head_input.shape == final_hidden.shape:
        found, expected = head_input.double(), final_hidden.double()
        factor = (found * expected).sum() / (expected * expected).sum()
        tolerance = SCALE_TOLERANCE[final_hidden.dtype] * found.abs().max()
        if (found - factor * expected).abs().max() <= tolerance:
            return
    raise ValueError(
        f"{name}: its head does not read the decoder's final hidden states. This architecture is "
        "not supported."
    )


def _producer(decoder: nn.Module, watched: _Watch, final_hidden: Tensor) -> nn.Module | None:
    """The decoder's child that wrote the final hidden states (a view of its output counts)."""
    for module in decoder.children():
        output = first_tensor(watched.output_of(module))
        if output is not None and output.data_ptr() == final_hidden.data_ptr():
            return module
    return None


def _embedding_scale(model: PreTrainedModel, embedded: Tensor | None, first: Tensor) -> float:
    """Constant factor between the embedding module's output and what the first layer reads.

    Targets that add something of their own there (learned positions) get 1.0: then the embeddings
    without it are what a draft reads.

    Raises:
        ValueError: The layers read another width than the embeddings have.
    """
    if embedded is None or embedded.shape[-1] != first.shape[-1]:
        width = "none" if embedded is None else embedded.shape[-1]
        raise ValueError(
            f"{type(model).__name__}: embeddings of width {width}, but the layers read width "
            f"{first.shape[-1]}. Targets that project their embeddings are not supported."
        )
    before, after = embedded.double().flatten(), first.double().flatten()
    estimate = float(before @ after / (before @ before))
    tolerance = SCALE_TOLERANCE[embedded.dtype]
    if float((after - estimate * before).abs().max()) > tolerance * float(after.abs().max()):
        return 1.0
    # The estimate carries the rounding of the dtype. The exact factor is one that the configuration
    # states, or the root of the width; so it is the same in every dtype.
    text_config = model.config.get_text_config(decoder=True)
    stated = [
        float(value)
        for value in text_config.to_dict().values()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    exact = [1.0, *stated, math.sqrt(first.shape[-1])]
    nearest = min(exact, key=lambda value: abs(value - estimate))
    return nearest if abs(nearest - estimate) <= tolerance * abs(estimate) else estimate


def norm_factor(norm: nn.Module | None) -> Tensor | None:
    """[hidden]: what a norm multiplies normalised states with, or None where it has no weight.

    Found by running the norm, because the stored weight does not say it: Gemma's norms multiply
    with 1 + weight. Alternating signs have mean 0 and mean square 1, so RMS and layer norms leave
    them as they are; the difference of both signs drops a layer norm's bias.
    """
    weight = getattr(norm, "weight", None)
    if norm is None or not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    signs = torch.ones_like(weight)
    signs[1::2] = -1.0
    with torch.no_grad():
        factor = (norm(signs[None])[0] - norm(-signs[None])[0]) / (2.0 * signs)
    # The stored weight is exact where it is the factor itself; the probe carries a rounding.
    tolerance = SCALE_TOLERANCE[weight.dtype] * float(factor.abs().max())
    return weight if float((factor - weight).abs().max()) <= tolerance else factor


# --- the head -------------------------------------------------------------------------------------


class _BackboneStub(nn.Module):
    """Stands in the place of the backbone and returns the states that it is given.

    What the head's path reads of the backbone besides (Falcon-H1: its multiplier of the logits) is
    the backbone's own.
    """

    def __init__(self, backbone: nn.Module, output_class: Any) -> None:
        super().__init__()
        self.output_class = output_class
        self._backbone = (backbone,)  # A tuple keeps its weights out of the module tree.

    def __getattr__(self, name: str) -> Any:
        """Called for what the stub itself does not have."""
        return getattr(self.__dict__["_backbone"][0], name)

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Any:
        """[batch, seq, hidden] -> the backbone's output class around the same tensor."""
        if inputs_embeds is None:
            raise ValueError(
                "The target's causal language model does not hand inputs_embeds to its backbone. "
                "This architecture is not supported."
            )
        if issubclass(self.output_class, tuple):
            return (inputs_embeds,)
        return self.output_class(last_hidden_state=inputs_embeds)


def _with_module(root: nn.Module, name: str, replacement: nn.Module) -> nn.Module:
    """A shallow copy of a module tree in which one module is another; nothing else is copied."""
    first, _, rest = name.partition(".")
    copied = copy.copy(root)
    copied._modules = dict(root._modules)
    copied._modules[first] = (
        _with_module(root._modules[first], rest, replacement)  # type: ignore[arg-type]
        if rest
        else replacement
    )
    return copied


class HeadForward(nn.Module):
    """The causal language model's own path from final hidden states to logits.

    The shell is the model itself without its backbone: it shares the head's weights.
    """

    def __init__(self, model: nn.Module, structure: TargetStructure) -> None:
        super().__init__()
        backbone = model.get_submodule(structure.backbone_name)
        stub = _BackboneStub(backbone, structure.backbone_output)
        self.shell = _with_module(model, structure.backbone_name, stub)
        # The same path with the matrix product left out: what is done to raw logits.
        self.after_head = _with_module(self.shell, structure.head_name, nn.Identity())

    def forward(self, final_hidden: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocab]."""
        return self._run(self.shell, final_hidden)

    def transform(self, raw_logits: Tensor) -> Tensor:
        """[..., any part of vocab] raw logits -> logits (soft-capping, scaling; elementwise)."""
        return self._run(self.after_head, raw_logits)

    @staticmethod
    def _run(shell: nn.Module, states: Tensor) -> Tensor:
        rows = states.reshape(1, -1, states.shape[-1])  # [1, rows, width]
        logits = shell(inputs_embeds=rows).logits
        return logits.reshape(*states.shape[:-1], logits.shape[-1])


def accepts(module: nn.Module, name: str) -> bool:
    """Whether a module's forward has a parameter of this name."""
    return name in inspect.signature(module.forward).parameters


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration (nested text_config of multimodal targets)."""
    return config.get_text_config(decoder=True)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two ways of computing one row of logits differ by rounding only.

    In float32 to 1e-4 of the largest. Half-precision layers each round by their own order of
    summation: measured on SmolLM2-135M in bfloat16, two right ways differ by up to 0.2 standard
    deviations of the logits, a wrong one by 0.3 to 5. What is wrong in structure shows in float32.
    """
    difference = (found - expected).float()
    if found.dtype == torch.float32:
        return float(difference.abs().max()) <= 1e-4 * float(expected.abs().max().clamp(min=1e-6))
    return float(difference.pow(2).mean().sqrt()) <= 0.5 * float(expected.float().std())
