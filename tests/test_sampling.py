"""The processors against transformers' own list, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import TopPLogitsWarper

from draftsmith.inference.sampling import choose_token, target_probs
from draftsmith.models import sampling as module
from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import (
    draw_token,
    process_logits,
    sampling_from_generation_config,
    warp_logits,
)

GREEDY = SamplingSettings()
PENALISED = SamplingSettings(repetition_penalty=1.3)


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def list_of_generate(model: Any, config: GenerationConfig, num_tokens: int) -> Any:
    """The processors with which `generate` would decode: its own defaults, its own order."""
    prepared, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(prepared, True, device="cpu")
    return model._get_logits_processor(
        prepared, input_ids_seq_length=num_tokens, device="cpu", model_kwargs={}
    )


SETTINGS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product(
        (0.6, 1.0, 1.7), (0, 7), (1.0, 0.8), (None, 0.1), (1.0, 1.3)
    )
]


def test_warped_logits_equal_the_processor_list_of_generate(
    tiny_model: Callable[..., Any],
) -> None:
    model = tiny_model("llama")
    for seed, settings in enumerate([{}, {"top_p": 0.5}, {"top_k": None}, *SETTINGS]):
        config = GenerationConfig(do_sample=True, **settings)
        logits = random_logits(6, 96, seed=seed)
        seen = torch.randint(96, (6, 20), generator=torch.Generator().manual_seed(seed))
        expected = list_of_generate(model, config, 20)(seen, logits.clone())
        sampling = sampling_from_generation_config(config)
        assert torch.equal(warp_logits(logits, sampling, seen), expected), settings
        assert torch.equal(target_probs(logits, sampling, seen), expected.softmax(-1))


def test_processed_logits_equal_the_processor_list_of_greedy_generate(
    tiny_model: Callable[..., Any],
) -> None:
    model = tiny_model("llama")
    seen = torch.randint(96, (6, 20), generator=torch.Generator().manual_seed(0))
    logits = random_logits(6, 96)
    config = GenerationConfig(do_sample=False, repetition_penalty=1.4)
    sampling = sampling_from_generation_config(config)
    assert sampling.greedy
    found = process_logits(logits, sampling, seen)
    assert torch.equal(found, list_of_generate(model, config, 20)(seen, logits.clone()))
    assert not torch.equal(found.argmax(-1), logits.argmax(-1))
    for row in range(6):
        token = choose_token(logits[row], sampling, None, seen[row : row + 1])
        assert token == int(found[row].argmax())


def test_scores_equal_those_that_generate_reports(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama").eval()
    prompt = torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.2
    )
    made = model.generate(
        prompt,
        generation_config=config,
        max_new_tokens=6,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sampling = sampling_from_generation_config(config)
    for step, (raw, scores) in enumerate(zip(made.logits, made.scores, strict=True)):
        seen = made.sequences[:, : prompt.shape[1] + step]
        assert torch.equal(warp_logits(raw, sampling, seen), scores)


def test_top_k_comes_before_top_p() -> None:
    """I06: the reverse order keeps {0, 1, 2, 3}."""
    logits = torch.tensor([0.35, 0.25, 0.20, 0.05, 0.03, *[0.02] * 6]).log()
    sampling = SamplingSettings(temperature=1.0, top_k=4, top_p=0.82)
    probs = target_probs(logits, sampling)
    assert (probs > 0).nonzero().flatten().tolist() == [0, 1, 2]
    assert probs[:3].tolist() == pytest.approx([0.35 / 0.8, 0.25 / 0.8, 0.20 / 0.8])


def test_all_shapes_give_the_same_rows() -> None:
    """I05: top-p crashed on one-dimensional logits."""
    logits = random_logits(2, 3, 50)
    sampling = SamplingSettings(0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2)
    seen = torch.randint(50, (6, 8), generator=torch.Generator().manual_seed(2))
    found = target_probs(logits, sampling, seen)
    assert found.shape == logits.shape
    for index, row in enumerate(logits.flatten(0, 1)):
        expected, own = found.flatten(0, 1)[index], seen[index : index + 1]
        assert torch.equal(target_probs(row, sampling, own), expected)
        assert torch.equal(target_probs(row[None], sampling, own)[0], expected)
        assert torch.equal(target_probs(row[None, None], sampling, own)[0, 0], expected)


# --- top-p without a full sort --------------------------------------------------------------------


def awkward_logits(vocab: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[rows, vocab]: flat to sharp, rounded to ties, cut by top-k, nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(24, vocab, generator=generator, dtype=dtype)
    scales = torch.tensor([0.01, 0.3, 1.0, 2.0, 3.0, 4.0, 6.0, 20.0], dtype=dtype).repeat(3)
    logits = noise * scales[:, None]
    logits[8:16] = (logits[8:16] * 2).round() / 2
    logits[16:20] = logits[16:20].masked_fill(
        logits[16:20] < logits[16:20].topk(50).values[:, -1:], float("-inf")
    )
    logits[20] = 0.0
    logits[21, 5] = 80.0
    logits[22, :3] = 30.0
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [40, 2049, 9000])
def test_top_p_keeps_exactly_what_transformers_keeps(vocab: int, dtype: torch.dtype) -> None:
    if vocab < 50:
        cases = [random_logits(24, vocab, seed=seed).to(dtype) for seed in range(2)]
    else:
        cases = [awkward_logits(vocab, seed, dtype) for seed in range(2)]
    for logits, top_p in itertools.product(cases, (1e-6, 0.1, 0.5, 0.8, 0.9, 0.95, 0.999)):
        found = warp_logits(logits, SamplingSettings(1.0, top_p=top_p))
        assert torch.equal(found, TopPLogitsWarper(top_p)(None, logits)), top_p


def test_top_p_at_the_very_mass_of_the_first_tokens_keeps_what_transformers_keeps() -> None:
    """Such a limit is decided by the rounding of float32 sums: it must go to the full sort."""
    for logits in awkward_logits(9000, 3, torch.float32)[4:8]:
        ahead = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
        for top_p in ahead[ahead < 0.99][:12].tolist():
            found = warp_logits(logits, SamplingSettings(1.0, top_p=top_p))
            assert torch.equal(found, TopPLogitsWarper(top_p)(None, logits[None])[0]), top_p


def test_top_p_sorts_only_rows_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []

    class Counting(TopPLogitsWarper):
        def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
            sorted_rows.append(len(scores))
            return super().__call__(input_ids, scores)

    monkeypatch.setattr(module, "TopPLogitsWarper", Counting)
    logits = random_logits(20, 20_000, scale=8.0)
    warp_logits(logits, SamplingSettings(1.0, top_p=0.9))
    assert sum(sorted_rows) <= 1
    sorted_rows.clear()
    logits[4] = 0.0
    warp_logits(logits, SamplingSettings(1.0, top_p=0.9))
    assert 1 <= sum(sorted_rows) <= 2


# --- the repetition penalty -----------------------------------------------------------------------


def test_a_penalty_without_the_text_is_refused() -> None:
    logits = random_logits(4, 20)
    for call in (
        lambda: process_logits(logits, PENALISED),
        lambda: warp_logits(logits, SamplingSettings(1.0, repetition_penalty=1.3)),
        lambda: target_probs(logits, SamplingSettings(1.0, repetition_penalty=1.3)),
        lambda: choose_token(logits[0], PENALISED, None),
    ):
        with pytest.raises(ValueError, match="no token ids came with the logits"):
            call()


def test_a_text_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3, 5\]; it must be \[4, n\]"):
        process_logits(random_logits(4, 20), PENALISED, torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"must be \[1, n\]"):
        process_logits(random_logits(20), PENALISED, torch.zeros(5, dtype=torch.long))


def test_repeated_and_foreign_ids_in_the_text_change_nothing() -> None:
    logits = random_logits(2, 20)
    seen = torch.tensor([[3, 7], [1, 1]])
    padded = torch.tensor([[3, 7, 3, 3, 7], [1, 1, 1, 99, 1]])
    assert torch.equal(
        process_logits(logits, PENALISED, seen), process_logits(logits, PENALISED, padded)
    )
    assert torch.equal(process_logits(logits, PENALISED, seen[:, :0]), logits)


def test_without_a_penalty_greedy_logits_are_left_alone() -> None:
    logits = random_logits(4, 20).bfloat16()
    assert process_logits(logits, GREEDY) is logits
    assert process_logits(logits, PENALISED, torch.zeros(4, 1, dtype=torch.long)).dtype == (
        torch.float32
    )


def test_whole_numbers_as_settings_work() -> None:
    sampling = SamplingSettings(2, top_p=1, min_p=0, repetition_penalty=2)
    found = warp_logits(torch.tensor([[4.0, 2.0]]), sampling, torch.tensor([[0]]))
    assert found.tolist() == [[1.0, 1.0]]


# --- draws ----------------------------------------------------------------------------------------


def test_drawn_tokens_have_the_law_of_the_probabilities() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    rows = probs.expand(20_000, -1)
    counts = draw_token(rows, torch.Generator().manual_seed(0)).bincount(minlength=7)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = (probs[kept].double() / probs[kept].double().sum()) * len(rows)
    assert chisquare(counts[kept].double().numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("value", [0.0, 1.0 - 2.0**-53])
def test_extreme_random_numbers_never_draw_an_impossible_token(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "rand", lambda shape, dtype, **_: torch.full(shape, value, dtype=dtype)
    )
    for probs in (
        torch.tensor([0.0, 0.25, 0.75, 0.0]),
        torch.tensor([0.0, 0.1, 0.2, 0.7, 0.0, 0.0]),
        torch.tensor([0.0, 1.0 / 3, 1.0 / 3, 1.0 / 3, 1e-30, 0.0]),
    ):
        token = draw_token(probs)
        assert token.shape == ()
        assert probs[token] > 0


def test_plain_draws_repeat_with_the_seed() -> None:
    logits, sampling = random_logits(30), SamplingSettings(1.0, top_k=5)
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    draws = [choose_token(logits, sampling, first) for _ in range(20)]
    assert draws == [choose_token(logits, sampling, second) for _ in range(20)]
    assert set(draws) <= set(logits.topk(5).indices.tolist())
    assert len(set(draws)) > 1


# --- generation configurations --------------------------------------------------------------------

REFUSED = {
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "top_h": 0.4,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "bad_words_ids": [[5]],
    "sequence_bias": [[[5], 1.0]],
    "guidance_scale": 1.5,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "min_length": 5,
    "min_new_tokens": 5,
    "suppress_tokens": [1],
    "begin_suppress_tokens": [1],
    "exponential_decay_length_penalty": (5, 1.2),
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "watermarking_config": {"greenlist_ratio": 0.3},
    "stop_strings": ["end"],
    "token_healing": True,
}
NEUTRAL = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1,
    "min_length": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "suppress_tokens": [],
    "token_healing": False,
    "renormalize_logits": True,
    "max_new_tokens": 7,
    "eos_token_id": [1, 2],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_law_is_refused_by_name(name: str) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.8)
    setattr(config, name, REFUSED[name])  # The constructor would check values we do not care about.
    with pytest.raises(ValueError, match=f"sets {name} = "):
        sampling_from_generation_config(config)


def test_neutral_values_pass_and_all_offenders_are_named() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.8, **NEUTRAL)
    assert sampling_from_generation_config(config) == SamplingSettings(0.8, top_k=50)
    config.num_beams, config.top_h = 3, 0.5
    with pytest.raises(ValueError, match=r"num_beams = 3, top_h = 0.5"):
        sampling_from_generation_config(config)


def test_greedy_configurations_ignore_what_only_sampling_reads() -> None:
    config = GenerationConfig(do_sample=False, temperature=0.3, top_k=5, typical_p=0.5)
    assert sampling_from_generation_config(config) == GREEDY
    assert sampling_from_generation_config(GenerationConfig()) == GREEDY
    penalised = GenerationConfig(repetition_penalty=1.3)
    assert sampling_from_generation_config(penalised) == PENALISED


def test_every_processor_of_transformers_is_either_supported_or_refused(
    tiny_model: Callable[..., Any],
) -> None:
    """A configuration that passes must build only the five processors."""
    known = {"RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper"}
    known |= {"TopPLogitsWarper", "MinPLogitsWarper"}
    config = GenerationConfig(do_sample=True, temperature=0.8, min_p=0.1, top_p=0.5, **NEUTRAL)
    config.repetition_penalty, config.renormalize_logits, config.suppress_tokens = 1.2, False, None
    sampling_from_generation_config(config)
    names = {type(p).__name__ for p in list_of_generate(tiny_model("llama"), config, 4)}
    assert names == known


def test_sampling_at_temperature_zero_is_refused() -> None:
    config = GenerationConfig(do_sample=True)
    config.temperature = 0.0
    with pytest.raises(ValueError, match="do_sample = True and temperature = 0"):
        sampling_from_generation_config(config)
