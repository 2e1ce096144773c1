"""The chunked objectives against the equations written out, with autograd over whole tensors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.models.protocols import ObjectiveOutput, Predictions
from draftsmith.train import objective_chunks
from draftsmith.train.objectives import OBJECTIVES, make_objective

STEPS, ROWS, HIDDEN, TARGET_HIDDEN, VOCAB = 3, 7, 6, 5, 20
SUBSET = [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16]


class PlainHead(nn.Linear):
    """What objectives know of a `TargetHead` without soft-capping."""

    is_plain = True

    def transform(self, raw_logits: Tensor) -> Tensor:
        return raw_logits


class CappedHead(nn.Linear):
    """A head with soft-capping, as Gemma has it."""

    is_plain = False

    def forward(self, hidden: Tensor) -> Tensor:
        return self.transform(super().forward(hidden))

    def transform(self, raw_logits: Tensor) -> Tensor:
        return 2.0 * torch.tanh(raw_logits / 2.0)


def make_case(
    *,
    reduced: bool,
    dtype: torch.dtype = torch.float32,
    capped: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> tuple[Predictions, nn.Module]:
    """Random predictions with a few unsupervised places and uneven weights.

    Drawn in float64, so that both dtypes get the same numbers up to rounding. With `shared`, the
    draft predicts with the target's head, which has a bias then.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = (CappedHead if capped else PlainHead)(TARGET_HIDDEN, VOCAB, bias=shared, dtype=dtype)
    head.requires_grad_(False)
    head.weight.copy_(draw(VOCAB, TARGET_HIDDEN))
    if shared:
        head.bias.copy_(draw(VOCAB))
    supervised = torch.rand(STEPS, ROWS, generator=generator) < 0.8
    supervised[:, 0] = torch.tensor([True, False, False])
    rows = len(SUBSET) if reduced else VOCAB
    own_weight = draw(rows, HIDDEN).requires_grad_()
    return Predictions(
        draft_hidden=draw(STEPS, ROWS, TARGET_HIDDEN if shared else HIDDEN).requires_grad_(),
        draft_head_weight=head.weight[SUBSET if reduced else slice(None)] if shared else own_weight,
        target_hidden=draw(ROWS, TARGET_HIDDEN),
        supervised=supervised,
        weights=supervised * torch.rand(STEPS, ROWS, generator=generator).to(dtype),
        draft_to_target=torch.tensor(SUBSET) if reduced else None,
        labels=3 * torch.arange(ROWS),  # 12, 15 and 18 are not in SUBSET.
        shares_target_head=shared,
    ), head


def written_out(made: Predictions, head: nn.Module, name: str) -> ObjectiveOutput:
    """The equations on whole tensors."""
    assert made.labels is not None
    ids = torch.arange(VOCAB) if made.draft_to_target is None else made.draft_to_target
    target_logits = head(made.target_hidden)
    target_full = target_logits.softmax(-1)
    restricted = target_logits[:, ids].log_softmax(-1)
    draft_logits = made.draft_hidden @ made.draft_head_weight.T
    if made.shares_target_head:
        draft_logits = draft_logits + head.bias[ids]
        draft_logits = draft_logits if head.is_plain else head.transform(draft_logits)
    log_probs = draft_logits.log_softmax(-1)
    draft_full = draft_logits.new_zeros(STEPS, ROWS, VOCAB)
    draft_full[..., ids] = log_probs.exp()
    full_log_probs = draft_logits.new_zeros(STEPS, ROWS, VOCAB)
    full_log_probs[..., ids] = log_probs
    acceptance = torch.minimum(target_full, draft_full).sum(-1)
    top = target_logits.argmax(-1)
    in_vocabulary = torch.isin(made.labels if name in ("ce", "ce_l1") else top, ids)
    counted = made.supervised & in_vocabulary
    cross_entropy = -(restricted.exp() * log_probs).sum(-1)
    mean = (acceptance.detach() * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True)
    share = torch.exp(-mean)
    labelled = -full_log_probs[:, torch.arange(ROWS), made.labels]
    losses = {
        "kl": cross_entropy,
        "reverse_kl": (log_probs.exp() * (log_probs - restricted)).sum(-1),
        "tv": 1 - acceptance,
        "lk_alpha": -acceptance.log(),
        "lk_lambda": share * cross_entropy + (1 - share) * (1 - acceptance),
        "ce": labelled,
        "ce_l1": 0.1 * labelled + 0.9 * 2 * (1 - acceptance),
    }[name]
    sums = (made.weights * in_vocabulary * losses).sum(-1)
    correct = (ids[draft_logits.argmax(-1)] == top) & made.supervised & in_vocabulary
    return ObjectiveOutput(sums.sum(), sums, correct, acceptance, in_vocabulary)


def trained(made: Predictions) -> list[Tensor]:
    """What takes a gradient: the draft's states, and its head unless it is frozen."""
    return [x for x in (made.draft_hidden, made.draft_head_weight) if x.requires_grad]


def gradients(output: ObjectiveOutput, made: Predictions) -> list[Tensor]:
    """Of half of the loss, so that a gradient from above is honoured."""
    return list(torch.autograd.grad(output.loss_sum * 0.5, trained(made)))


def assert_close(found: Tensor, exact: Tensor, tolerance: float) -> None:
    """Equality relative to the largest entry."""
    assert found.shape == exact.shape
    difference = (found.detach().double() - exact.detach().double()).abs().max()
    assert float(difference) <= tolerance * float(exact.detach().abs().max().clamp(min=1e-3))


def assert_same(
    one: ObjectiveOutput,
    its: Predictions,
    other: ObjectiveOutput,
    others: Predictions,
    *,
    tolerance: float = 1e-6,
) -> None:
    """All fields and the gradients."""
    assert_close(one.loss_sum, other.loss_sum, tolerance)
    assert_close(one.step_loss_sums, other.step_loss_sums, tolerance)
    assert_close(one.acceptance, other.acceptance, tolerance)
    assert torch.equal(one.correct, other.correct)
    assert torch.equal(one.in_vocabulary, other.in_vocabulary)
    for left, right in zip(gradients(one, its), gradients(other, others), strict=True):
        assert_close(left, right, tolerance)


HEADS: dict[str, dict[str, Any]] = {
    "own head": {},
    "own head, capped target": {"capped": True},
    "shared head": {"shared": True},
    "shared capped head": {"shared": True, "capped": True},
}


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_statistics_and_gradients_equal_the_equations(
    name: str, kind: str, reduced: bool
) -> None:
    exact, exact_head = make_case(reduced=reduced, dtype=torch.float64, **HEADS[kind])
    made, head = make_case(reduced=reduced, **HEADS[kind])
    expected = written_out(exact, exact_head, name)
    assert expected.in_vocabulary.all() != reduced
    assert expected.in_vocabulary.any()
    assert_same(make_objective(name)(made, head), made, expected, exact)


@pytest.mark.parametrize("kind", ["own head", "shared capped head"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_sizes_of_chunk_and_tile_change_nothing(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, head = make_case(reduced=True, **HEADS[kind])
    two_places = 2 * STEPS * len(SUBSET)
    for chunk, tile in ((1, 1), (two_places, 10**9), (10**9, two_places), (10**9, 1)):
        whole = make_objective(name, chunk_elements=10**9)(made, head)
        with monkeypatch.context() as patch:
            patch.setattr(objective_chunks, "TILE_ELEMENTS", {"cpu": tile})
            parts = make_objective(name, chunk_elements=chunk)(made, head)
        assert_same(parts, made, whole, made)


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("kind", ["own head", "shared capped head"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_pass_gradcheck_in_float64(name: str, kind: str, reduced: bool) -> None:
    made, head = make_case(reduced=reduced, dtype=torch.float64, **HEADS[kind])
    inputs = trained(made)

    def loss(hidden: Tensor, *weight: Tensor) -> Tensor:
        made.draft_hidden = hidden
        if weight:
            (made.draft_head_weight,) = weight
        return make_objective(name)(made, head).loss_sum

    if name != "lk_lambda":  # Its share depends on the draft, but carries no gradient.
        assert torch.autograd.gradcheck(loss, inputs)
    else:
        exact = torch.autograd.grad(written_out(made, head, name).loss_sum, inputs)
        torch.testing.assert_close(torch.autograd.grad(loss(*inputs), inputs), exact)


def test_the_frozen_head_that_a_draft_shares_gets_no_gradient() -> None:
    made, head = make_case(reduced=True, capped=True, shared=True)
    make_objective("kl")(made, head).loss_sum.backward()
    assert made.draft_hidden.grad is not None
    assert made.draft_hidden.grad.any()
    assert head.weight.grad is None
    assert head.bias.grad is None


def test_the_l1_distance_is_twice_the_total_variation() -> None:
    made, head = make_case(reduced=False, dtype=torch.float64)
    target_probs = head(made.target_hidden).softmax(-1)
    draft_probs = (made.draft_hidden @ made.draft_head_weight.T).softmax(-1)
    distance = ((target_probs - draft_probs).abs().sum(-1) * made.weights).sum()
    found = make_objective("tv")(made, head).loss_sum
    torch.testing.assert_close(2 * found, distance)
    for left, right in zip(
        torch.autograd.grad(2 * found, trained(made)),
        torch.autograd.grad(distance, trained(made)),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def certain_target(draft_logits: Tensor, target_logits: Tensor) -> Predictions:
    """One prediction with these logits; the heads are identities."""
    return Predictions(
        draft_hidden=draft_logits[None, None].requires_grad_(),
        draft_head_weight=torch.eye(len(draft_logits)),
        target_hidden=target_logits[None],
        supervised=torch.ones(1, 1, dtype=torch.bool),
        weights=torch.ones(1, 1),
        draft_to_target=None,
    )


def test_reverse_kl_prices_tokens_that_the_target_never_says() -> None:
    infinity = float("inf")
    target = torch.tensor([2.0, 1.0, -infinity, -500.0])
    made = certain_target(torch.zeros(4), target)
    output = make_objective("reverse_kl")(made, nn.Identity())
    log_target = torch.tensor([2.0, 1.0, -infinity, -500.0]).log_softmax(-1).clamp_min(-100.0)
    expected = float((0.25 * (-torch.log(torch.tensor(4.0)) - log_target)).sum())
    assert float(output.loss_sum.detach()) == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(output.loss_sum, made.draft_hidden)
    assert gradient.isfinite().all()
    assert (gradient[0, 0, 2:] > 10).all()
    assert (gradient[0, 0, :2] < -10).all()


def test_lk_alpha_stays_steep_and_finite_where_hardly_anything_is_accepted() -> None:
    for distance in (5.0, 40.0, 80.0):
        made = certain_target(torch.tensor([distance, 0.0]), torch.tensor([0.0, distance]))
        output = make_objective("lk_alpha")(made, nn.Identity())
        acceptance = 2.0 / (1.0 + torch.exp(torch.tensor(distance, dtype=torch.float64)))
        assert float(output.loss_sum.detach()) == pytest.approx(-acceptance.log().item(), rel=1e-6)
        (gradient,) = torch.autograd.grad(output.loss_sum, made.draft_hidden)
        assert gradient.abs().max() <= 1.0
        # Half of the overlap is the token that the target means: its share of the pull.
        assert float(gradient[0, 0, 1]) == pytest.approx(-0.5, abs=0.01)
    made = certain_target(torch.tensor([500.0, 0.0]), torch.tensor([0.0, 500.0]))
    output = make_objective("lk_alpha")(made, nn.Identity())
    assert output.loss_sum.isfinite()
    assert not torch.autograd.grad(output.loss_sum, made.draft_hidden)[0].any()


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
    for name in OBJECTIVES:
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
    for name in OBJECTIVES:
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


@pytest.mark.parametrize("name", OBJECTIVES)
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
    for name in OBJECTIVES:
        output = make_objective(name)(empty, head)
        assert output.loss_sum.item() == 0.0
        assert not any(gradient.any() for gradient in gradients(output, made))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_half_precision_logits_keep_the_gradient_within_a_percent(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 64, 512
    draft_logits = (torch.randn(1, rows, vocab, generator=generator) * 2).bfloat16()
    target_logits = (torch.randn(rows, vocab, generator=generator) * 2).bfloat16()
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        made = Predictions(
            draft_logits.to(dtype).requires_grad_(),
            torch.eye(vocab, dtype=dtype).requires_grad_(),  # Products with it are exact.
            target_logits.to(dtype),
            torch.ones(1, rows, dtype=torch.bool),
            torch.ones(1, rows),
            None,
            torch.arange(rows),
        )
        found[dtype] = gradients(make_objective(name)(made, nn.Identity()), made)
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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kept", [1000, 20])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_tensor_grows_with_rows_times_vocabulary(name: str, kept: int, shared: bool) -> None:
    steps, rows, hidden, vocab = 4, 512, 4, 1000
    head = CappedHead(hidden, vocab, bias=True).requires_grad_(False)
    made = Predictions(
        torch.randn(steps, rows, hidden).requires_grad_(),
        head.weight[:kept] if shared else torch.randn(kept, hidden).requires_grad_(),
        torch.randn(rows, hidden),
        torch.ones(steps, rows, dtype=torch.bool),
        torch.ones(steps, rows),
        torch.arange(kept) if kept < vocab else None,
        torch.randint(0, vocab, (rows,)),
        shares_target_head=shared,
    )
    limit = 16 * steps * vocab
    with LargestTensor() as largest:
        make_objective(name, chunk_elements=limit)(made, head).loss_sum.backward()
    assert largest.elements <= limit < rows * vocab


PEAK_OF_LONG_ROWS = """
import resource, sys, torch
from torch import nn
from draftsmith.models.protocols import Predictions
from draftsmith.train.objectives import OBJECTIVES, make_objective

steps, rows, hidden, vocab = 4, 4096, 8, 32000
made = Predictions(
    torch.randn(steps, rows, hidden).requires_grad_(),
    torch.randn(vocab, hidden).requires_grad_(),
    torch.randn(rows, hidden),
    torch.ones(steps, rows, dtype=torch.bool),
    torch.ones(steps, rows),
    None,
    torch.zeros(rows, dtype=torch.long),
)
head = nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
make_objective(sys.argv[1])(made, head).loss_sum.backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_long_rows_over_a_large_vocabulary_stay_small(name: str) -> None:
    command = [sys.executable, "-P", "-c", PEAK_OF_LONG_ROWS, name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    unit = 1 if sys.platform == "darwin" else 1024
    all_logits = 4 * 4096 * 32000 * 4  # Bytes: 2 GiB, and plain code holds them several times.
    assert int(output) * unit < all_logits / 10


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
