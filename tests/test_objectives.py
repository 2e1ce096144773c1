"""The chunked objectives against the equations written out, with autograd over whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.models.protocols import ObjectiveOutput, Predictions
from draftsmith.train.objectives import make_objective

STEPS, ROWS, HIDDEN, TARGET_HIDDEN, VOCAB = 3, 7, 6, 5, 20
SUBSET = [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16]


class CappedHead(nn.Linear):
    """A head with soft-capping, as Gemma has it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2.0 * torch.tanh(super().forward(hidden) / 2.0)


def make_case(
    *, reduced: bool, dtype: torch.dtype = torch.float32, capped: bool = False, seed: int = 0
) -> tuple[Predictions, nn.Module]:
    """Random predictions with a few unsupervised places and uneven weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = (CappedHead if capped else nn.Linear)(TARGET_HIDDEN, VOCAB, bias=False, dtype=dtype)
        nn.init.normal_(head.weight)
        head.requires_grad_(False)
        supervised = torch.rand(STEPS, ROWS) < 0.8
        supervised[:, 0] = torch.tensor([True, False, False])
        return Predictions(
            draft_hidden=torch.randn(STEPS, ROWS, HIDDEN, dtype=dtype).requires_grad_(),
            draft_head_weight=torch.randn(
                len(SUBSET) if reduced else VOCAB, HIDDEN, dtype=dtype
            ).requires_grad_(),
            target_hidden=torch.randn(ROWS, TARGET_HIDDEN, dtype=dtype),
            supervised=supervised,
            weights=supervised * torch.rand(STEPS, ROWS, dtype=dtype),
            draft_to_target=torch.tensor(SUBSET) if reduced else None,
            labels=3 * torch.arange(ROWS),  # 12, 15 and 18 are not in SUBSET.
        ), head


def written_out(
    made: Predictions,
    head: nn.Module,
    shares: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    labelled: bool = False,
) -> ObjectiveOutput:
    """CE and TV of whole tensors; `shares` maps the steps' mean acceptance to their shares.

    With `labelled`, CE is taken towards the labels instead of the target's distribution.
    """
    ids = torch.arange(VOCAB) if made.draft_to_target is None else made.draft_to_target
    target_logits = head(made.target_hidden)
    target_full = target_logits.softmax(-1)
    restricted = target_logits[:, ids].softmax(-1)
    draft_logits = made.draft_hidden @ made.draft_head_weight.T
    draft_full = torch.zeros(STEPS, ROWS, VOCAB, dtype=draft_logits.dtype)
    draft_full[..., ids] = draft_logits.softmax(-1)
    if labelled:
        assert made.labels is not None
        full_log_probs = torch.zeros(STEPS, ROWS, VOCAB, dtype=draft_logits.dtype)
        full_log_probs[..., ids] = draft_logits.log_softmax(-1)
        cross_entropy = -full_log_probs[:, torch.arange(ROWS), made.labels]
    else:
        cross_entropy = -(restricted * draft_logits.log_softmax(-1)).sum(-1)
    acceptance = torch.minimum(target_full, draft_full).sum(-1)
    top = target_logits.argmax(-1)
    in_vocabulary = torch.isin(made.labels if labelled else top, ids)
    counted = made.supervised & in_vocabulary
    mean = (acceptance.detach() * counted).sum(-1) / counted.sum(-1)
    first, second = shares(mean)
    losses = first[:, None] * cross_entropy + second[:, None] * (1 - acceptance)
    sums = (made.weights * in_vocabulary * losses).sum(-1)
    correct = (ids[draft_logits.argmax(-1)] == top) & made.supervised & in_vocabulary
    return ObjectiveOutput(sums.sum(), sums, correct, acceptance, in_vocabulary)


SHARES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "kl": lambda mean: (torch.ones_like(mean), torch.zeros_like(mean)),
    "tv": lambda mean: (torch.zeros_like(mean), torch.ones_like(mean)),
    "lk_lambda": lambda mean: (torch.exp(-mean), 1 - torch.exp(-mean)),
    "ce": lambda mean: (torch.ones_like(mean), torch.zeros_like(mean)),
}


def gradients(output: ObjectiveOutput, made: Predictions) -> list[Tensor]:
    """Towards the draft's states and its head."""
    wanted = [made.draft_hidden, made.draft_head_weight]
    return list(torch.autograd.grad(output.loss_sum * 0.5, wanted))


def assert_same(one: ObjectiveOutput, other: ObjectiveOutput, made: Predictions) -> None:
    """All fields and both gradients."""
    torch.testing.assert_close(one.loss_sum, other.loss_sum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        one.step_loss_sums.float(), other.step_loss_sums.float(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(one.acceptance, other.acceptance, rtol=1e-5, atol=1e-6)
    assert torch.equal(one.correct, other.correct)
    assert torch.equal(one.in_vocabulary, other.in_vocabulary)
    for left, right in zip(gradients(one, made), gradients(other, made), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("name", SHARES)
def test_losses_statistics_and_gradients_equal_the_equations(
    name: str, capped: bool, reduced: bool
) -> None:
    made, head = make_case(reduced=reduced, capped=capped)
    expected = written_out(made, head, SHARES[name], labelled=name == "ce")
    assert expected.in_vocabulary.all() != reduced
    assert_same(make_objective(name)(made, head), expected, made)


@pytest.mark.parametrize("name", SHARES)
def test_the_chunk_size_changes_nothing(name: str) -> None:
    made, head = make_case(reduced=True)
    for elements in (1, 2 * STEPS * len(SUBSET), 10**9):
        whole = make_objective(name)(made, head)
        assert_same(make_objective(name, chunk_elements=elements)(made, head), whole, made)


@pytest.mark.parametrize("name", SHARES)
def test_gradients_pass_gradcheck_in_float64(name: str) -> None:
    made, head = make_case(reduced=True, dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        made.draft_hidden, made.draft_head_weight = hidden, weight
        return make_objective(name)(made, head).loss_sum

    inputs = made.draft_hidden, made.draft_head_weight
    if name != "lk_lambda":  # Its share depends on the draft, but carries no gradient.
        assert torch.autograd.gradcheck(loss, inputs)
    else:
        expected = written_out(made, head, SHARES[name])
        exact = torch.autograd.grad(expected.loss_sum, inputs)
        found = torch.autograd.grad(loss(*inputs), inputs)
        torch.testing.assert_close(found, exact)


def test_an_argmax_outside_the_draft_vocabulary_teaches_nothing_and_is_a_miss() -> None:
    # The target puts 0.9 on token 6; the draft knows tokens 0 to 3 and agrees on their shares.
    target_probs = torch.tensor([[0.025] * 4 + [0.0] * 2 + [0.9, 0.0]])
    made = Predictions(
        draft_hidden=torch.zeros(1, 1, 2).requires_grad_(),
        draft_head_weight=torch.ones(4, 2).requires_grad_(),
        target_hidden=target_probs.log().clamp_min(-100),
        supervised=torch.ones(1, 1, dtype=torch.bool),
        weights=torch.ones(1, 1),
        draft_to_target=torch.arange(4),
        labels=torch.tensor([6]),
    )
    for name in SHARES:
        output = make_objective(name)(made, nn.Identity())
        assert output.loss_sum.item() == 0.0
        assert not any(gradient.any() for gradient in gradients(output, made))
        assert not output.in_vocabulary.any()
        assert not output.correct.any()
        assert float(output.acceptance) == pytest.approx(0.1, abs=1e-6)


def test_a_draft_vocabulary_without_any_mass_keeps_everything_finite() -> None:
    made, _ = make_case(reduced=True)
    made.target_hidden = torch.full((ROWS, VOCAB), -1000.0)
    made.target_hidden[:, 1] = 0.0  # Not in SUBSET.
    made.labels = torch.ones(ROWS, dtype=torch.long)
    for name in SHARES:
        output = make_objective(name)(made, nn.Identity())
        assert output.loss_sum.item() == 0.0
        assert not any(gradient.any() for gradient in gradients(output, made))


def test_an_unknown_following_token_has_no_weight_and_a_sampled_one_leaves_the_statistics() -> None:
    made, head = make_case(reduced=False)
    assert made.labels is not None
    whole = make_objective("ce")(made, head)
    # The statistics of acceptance belong to the target's distribution, not to the text.
    torch.testing.assert_close(whole.acceptance, make_objective("kl")(made, head).acceptance)
    made.labels = made.labels.clone()
    made.labels[2] = -1
    made.weights[:, 2] = 1.0
    without = make_objective("ce")(made, head)
    kept = [row for row in range(ROWS) if row != 2]
    assert not without.in_vocabulary[2]
    assert not without.correct[:, 2].any()
    d_hidden, _ = gradients(without, made)
    assert not d_hidden[:, 2].any()
    assert torch.equal(d_hidden[:, kept], gradients(whole, made)[0][:, kept])


def test_ce_without_following_tokens_says_which_objective_to_take() -> None:
    made, head = make_case(reduced=False)
    made.labels = None
    with pytest.raises(ValueError, match=r"Set method.objective.name=kl"):
        make_objective("ce")(made, head)


@pytest.mark.parametrize("name", SHARES)
def test_a_frozen_head_costs_no_product_and_leaves_the_gradient_of_the_states(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, head = make_case(reduced=True)
    expected, _ = gradients(make_objective(name)(made, head), made)
    made.draft_head_weight = made.draft_head_weight.detach()
    monkeypatch.delattr("draftsmith.train.objective_chunks._add_product")
    output = make_objective(name)(made, head)
    (found,) = torch.autograd.grad(output.loss_sum * 0.5, [made.draft_hidden])
    assert torch.equal(found, expected)


def test_no_row_gives_a_zero_loss_with_zero_gradients() -> None:
    made, head = make_case(reduced=True)
    empty = Predictions(
        made.draft_hidden[:, :0],
        made.draft_head_weight,
        made.target_hidden[:0],
        made.supervised[:, :0],
        made.weights[:, :0],
        made.draft_to_target,
        torch.zeros(0, dtype=torch.long),
    )
    for name in SHARES:
        output = make_objective(name)(empty, head)
        assert output.loss_sum.item() == 0.0
        assert not any(gradient.any() for gradient in gradients(output, made))


def test_half_precision_input_keeps_the_gradient_within_a_percent() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, hidden, vocab = 64, 64, 512

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    head_weight, target = draw(vocab, hidden, scale=0.2), draw(rows, hidden)
    states, weight = draw(1, rows, hidden), draw(vocab, hidden, scale=0.2)
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        head = nn.Linear(hidden, vocab, bias=False, dtype=dtype).requires_grad_(False)
        head.weight.copy_(head_weight)
        made = Predictions(
            states.to(dtype).requires_grad_(),
            weight.to(dtype).requires_grad_(),
            target.to(dtype),
            torch.ones(1, rows, dtype=torch.bool),
            torch.ones(1, rows),
            None,
        )
        found[dtype] = gradients(make_objective("kl")(made, head), made)
    for rounded, exact in zip(*found.values(), strict=True):
        assert float((rounded.double() - exact).norm() / exact.norm()) < 0.01


def test_autocast_multiplies_in_half_precision_and_returns_float32_gradients() -> None:
    made, head = make_case(reduced=True)
    exact = gradients(make_objective("kl")(made, head), made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = make_objective("kl")(made, head)
    assert output.loss_sum.dtype == torch.float32
    for rounded, expected in zip(gradients(output, made), exact, strict=True):
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, expected)
        assert float((rounded - expected).norm() / expected.norm()) < 0.02


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204, ARG002
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("kept", [1000, 20])
@pytest.mark.parametrize("name", SHARES)
def test_no_tensor_grows_with_rows_times_vocabulary(name: str, kept: int) -> None:
    steps, rows, hidden, vocab = 4, 512, 4, 1000
    made = Predictions(
        torch.randn(steps, rows, hidden).requires_grad_(),
        torch.randn(kept, hidden).requires_grad_(),
        torch.randn(rows, hidden),
        torch.ones(steps, rows, dtype=torch.bool),
        torch.ones(steps, rows),
        torch.arange(kept) if kept < vocab else None,
        torch.randint(0, vocab, (rows,)),
    )
    head = nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
    limit = 16 * steps * vocab
    with LargestTensor() as largest:
        make_objective(name, chunk_elements=limit)(made, head).loss_sum.backward()
    assert largest.elements <= limit < rows * vocab


def test_the_first_of_equal_logits_is_the_argmax() -> None:
    """The two-stage argmax must agree with torch's, ties and a last short block included."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (256, 300, 1000):
        logits = torch.randint(0, 4, (40, vocab), generator=generator).float()
        logits[0] = 0.0
        logits[1, -1] = 9.0
        made = Predictions(
            logits[None],
            torch.eye(vocab),
            logits,
            torch.ones(1, len(logits), dtype=torch.bool),
            torch.ones(1, len(logits)),
            torch.arange(vocab),
        )
        output = make_objective("kl")(made, nn.Identity())
        assert output.correct.all()
        shifted = make_objective("kl")(
            Predictions(
                logits[None].roll(1, -1), made.draft_head_weight, logits, made.supervised,
                made.weights, None,
            ),
            nn.Identity(),
        )  # fmt: skip
        expected = logits.roll(1, -1).argmax(-1) == logits.argmax(-1)
        assert torch.equal(shifted.correct[0], expected)


def test_evaluation_without_gradients_gives_the_same_numbers() -> None:
    made, head = make_case(reduced=True)
    trained = make_objective("lk_lambda")(made, head)
    with torch.no_grad():
        evaluated = make_objective("lk_lambda")(made, head)
    assert not evaluated.loss_sum.requires_grad
    assert torch.equal(evaluated.loss_sum, trained.loss_sum)
    assert torch.equal(evaluated.acceptance, trained.acceptance)


def test_unknown_names_and_bad_options_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="Did you mean 'lk_lambda'"):
        make_objective("lk_lamda")
    with pytest.raises(ValueError, match="Did you mean 'kl_decay'"):
        make_objective("lk_lambda", kl_decy=3.0)
    with pytest.raises(ValueError, match="kl_scale is 2.0, expected 0 to 1"):
        make_objective("lk_lambda", kl_scale=2.0)
    with pytest.raises(ValueError, match="divisor is 0"):
        make_objective("lk_lambda", divisor=0)
    with pytest.raises(ValueError, match="kl_decay is -1.0"):
        make_objective("lk_lambda", kl_decay=-1.0)
