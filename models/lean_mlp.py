"""The gated MLP of a Llama-type layer, with a backward pass written by hand.

Autograd keeps four tensors of [rows, intermediate]: both projections, the activated gate, and its
product with the other. The last two follow from the first two by elementwise work, which is little
beside the products of matrices, so they are made again on the way back.

    y = W_d h,   h = silu(g) u,   g = W_g x,   u = W_u x
    backward  du = dh silu(g),   dg = dh u silu'(g),   dh = W_d^T dy,   dx = W_g^T dg + W_u^T du

Check: tests/test_lean_mlp.py compares with transformers and by gradcheck.

Axes: rows, hidden, intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

SILU = ("silu", "swish")
"""What transformers calls it."""


def gated_mlp(mlp: nn.Module, states: Tensor) -> Tensor:
    """[rows, hidden] -> [rows, hidden], what `mlp(states)` gives.

    Args:
        mlp: One of another class (routed experts), with biases, or with another activation than
            SiLU is called as it is.
        states: What it reads.
    """
    if not torch.is_grad_enabled() or type(mlp) is not LlamaMLP:
        called: Tensor = mlp(states)
        return called
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if mlp.config.hidden_act not in SILU or any(layer.bias is not None for layer in layers):
        return mlp(states)
    found: Tensor = _GatedMlp.apply(states, *(layer.weight for layer in layers))
    return found


class _GatedMlp(torch.autograd.Function):
    """Products run in the dtype of autocast or of the states; of the weights no copy is kept."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
    ) -> Tensor:
        device = states.device.type
        ctx.dtype = states.dtype
        if torch.is_autocast_enabled(device):
            states = states.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            gate = F.linear(states, gate_weight.to(states.dtype))
            up = F.linear(states, up_weight.to(states.dtype))
            ctx.save_for_backward(states, gate, up, gate_weight, up_weight, down_weight)
            return F.linear(F.silu(gate).mul_(up), down_weight.to(states.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        states, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        upstream = grad_outputs[0].to(states.dtype)
        with torch.autocast(states.device.type, enabled=False):
            activated = F.silu(gate)
            product = activated * up
            d_down = upstream.T @ product
            d_product = torch.mm(upstream, down_weight.to(states.dtype), out=product)
            d_up = activated.mul_(d_product)
            d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
            d_states = d_gate @ gate_weight.to(states.dtype)
            d_states.addmm_(d_up, up_weight.to(states.dtype))
            d_weights = (d_gate.T @ states, d_up.T @ states, d_down)
        weights = (gate_weight, up_weight, down_weight)
        return (
            d_states.to(ctx.dtype),
            *(one.to(weight.dtype) for one, weight in zip(d_weights, weights, strict=True)),
        )
