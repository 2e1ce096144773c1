"""The gated MLP by hand: the values of transformers, gradients by gradcheck and by autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.models.lean_mlp import gated_mlp

HIDDEN, INTERMEDIATE, ROWS = 6, 10, 5


def made(dtype: torch.dtype, *, act: str = "silu", bias: bool = False) -> LlamaMLP:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=1,
        hidden_act=act,
        mlp_bias=bias,
    )
    return LlamaMLP(config).to(dtype)


def drawn(rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def gradients(mlp: LlamaMLP, call: Callable[[Tensor], Tensor], states: Tensor) -> list[Tensor]:
    """Value, then the gradients towards states and weights."""
    states = states.clone().requires_grad_()
    value = call(states)
    upstream = drawn(ROWS, value.dtype).flip(0)
    return [value, *torch.autograd.grad(value, [states, *mlp.parameters()], upstream)]


@pytest.mark.parametrize("act", ["silu", "swish", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_of_transformers(act: str, bias: bool) -> None:
    mlp = made(torch.float32, act=act, bias=bias)
    states = drawn(ROWS, torch.float32)
    found = gradients(mlp, lambda x: gated_mlp(mlp, x), states)
    for one, other in zip(found, gradients(mlp, mlp, states), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(gated_mlp(mlp, states), mlp(states), rtol=0.0, atol=0.0)


def test_an_mlp_of_another_class_is_called_as_it_is() -> None:
    class Doubled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    mlp = Doubled(made(torch.float32).config)
    states = drawn(ROWS, torch.float32)
    torch.testing.assert_close(gated_mlp(mlp, states), mlp(states), rtol=0.0, atol=0.0)


def test_gradients_pass_gradcheck() -> None:
    mlp = made(torch.float64)

    def call(states: Tensor, *weights: Tensor) -> Tensor:
        names = [name for name, _ in mlp.named_parameters()]
        for name, weight in zip(names, weights, strict=True):
            layer = mlp.get_submodule(name.removesuffix(".weight"))
            layer._parameters["weight"] = weight  # type: ignore[assignment]
        return gated_mlp(mlp, states)

    weights = [one.detach().clone().requires_grad_() for one in mlp.parameters()]
    assert torch.autograd.gradcheck(call, (drawn(3, torch.float64).requires_grad_(), *weights))


def test_products_run_in_the_dtype_of_autocast() -> None:
    mlp = made(torch.float32)
    states = drawn(ROWS, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = gated_mlp(mlp, states.requires_grad_())
    assert value.dtype == torch.bfloat16

    def in_half(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def called(given: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(given)

        return called

    found = gradients(mlp, in_half(lambda x: gated_mlp(mlp, x)), states)
    for one, other in zip(found, gradients(mlp, in_half(mlp), states), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.01)


def test_two_of_the_four_tensors_are_kept() -> None:
    mlp = made(torch.float32)

    def kept(call: Callable[[Tensor], Tensor]) -> int:
        """How many different tensors of [rows, intermediate] the graph holds."""
        found = set()

        def pack(saved: Tensor) -> Tensor:
            if saved.shape == (ROWS, INTERMEDIATE):
                found.add(saved.data_ptr())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            call(drawn(ROWS, torch.float32).requires_grad_())
        return len(found)

    assert kept(mlp) == 4
    assert kept(lambda states: gated_mlp(mlp, states)) == 2
