"""The decoding loop: the target's own text, whatever the draft model does.

References are computed without any cache, from the transformers model directly. Draft models here
are rules over the committed tokens, so that rejections happen exactly where a test wants them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import DynamicCache, StaticCache

from draftsmith.inference.decode import generate
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import Generation, cut_block
from draftsmith.inference.sampling import target_probs
from draftsmith.models.kv_cache import drop_last
from draftsmith.models.protocols import Draft, DraftContext, SamplingSettings
from draftsmith.models.rollback import require_exact_rollback

Rule = Callable[[tuple[int, ...]], int]
"""Committed and drafted tokens so far -> the next drafted token."""

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt_neox", "gpt2", "qwen3_moe"]
FAMILIES += ["qwen3_next", "qwen3_5"]


class RuleDraft:
    """A draft model that follows a rule and notes what the decoder tells it."""

    aux_layer_ids = (0, 1)

    def __init__(self, rule: Rule, *, last_position: int | None = None) -> None:
        self.rule = rule
        self.last_position = last_position
        self.contexts: list[DraftContext] = []

    def start(self, max_length: int) -> list[int]:  # noqa: ARG002
        self.contexts.clear()
        return []

    def propose(
        self,
        contexts: Sequence[DraftContext],
        states: Sequence[list[int]],
        *,
        num_draft_tokens: Sequence[int],
        sampling: Sequence[SamplingSettings],  # noqa: ARG002
        generators: Sequence[torch.Generator | None],
    ) -> list[Draft]:
        return [
            self.propose_one(context, state, count, generator)
            for context, state, count, generator in zip(
                contexts, states, num_draft_tokens, generators, strict=True
            )
        ]

    def propose_one(
        self,
        context: DraftContext,
        state: list[int],
        num_draft_tokens: int,
        generator: torch.Generator | None,  # noqa: ARG002
    ) -> Draft:
        state.append(context.token_ids.shape[1])
        self.contexts.append(context)
        text = tuple(context.token_ids[0].tolist())
        if self.last_position is not None:
            num_draft_tokens = max(0, min(num_draft_tokens, self.last_position - len(text)))
        for _ in range(num_draft_tokens):
            text += (self.rule(text),)
        drafted = text[len(text) - num_draft_tokens :] if num_draft_tokens else ()
        return Draft(tokens=torch.tensor(drafted, dtype=torch.long), probs=None)


@functools.lru_cache(maxsize=20000)
@torch.inference_mode()
def next_logits(target: Any, text: tuple[int, ...]) -> Tensor:
    """The target's logits after a text, from the transformers model and without a cache."""
    return target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def plain_text(target: Any, prompt: list[int], length: int) -> list[int]:
    """Greedy continuation, stopped by nothing but `length`."""
    text = tuple(prompt)
    for _ in range(length):
        text += (int(next_logits(target, text).argmax()),)
    return list(text[len(prompt) :])


def perfect(prompt: list[int], text: list[int]) -> Rule:
    """Drafts the known answer (and 5 behind its end)."""
    return lambda seen: (text + [5] * 9)[len(seen) - len(prompt)]


def hopeless(prompt: list[int], text: list[int]) -> Rule:
    """Drafts another token than the known answer at every place."""
    right = perfect(prompt, text)
    return lambda seen: (right(seen) + 1) % 300


def changeable(prompt: list[int], text: list[int]) -> Rule:
    """Right, but for every third place of the text."""
    right, wrong = perfect(prompt, text), hopeless(prompt, text)
    return lambda seen: right(seen) if len(seen) % 3 else wrong(seen)


RULES = {"always": perfect, "never": hopeless, "sometimes": changeable}


def decode(target: Any, draft: Any, prompt: list[int], **settings: Any) -> Generation:
    defaults = {"max_new_tokens": 24, "policy": ChainPolicy(3)}
    return generate(target, draft, torch.tensor([prompt]), **(defaults | settings))


def random_prompt(seed: int, length: int = 9) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 300, (length,), generator=generator).tolist()


@pytest.fixture
def llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama")


def lasting_prompt(
    target: Any, *, length: int = 9, tokens: int = 24
) -> tuple[list[int], list[int]]:
    """A prompt whose greedy answer does not end within `tokens`, and that answer."""
    for seed in range(50):
        prompt = random_prompt(seed, length)
        text = plain_text(target, prompt, tokens)
        if not set(text) & set(target.eos_token_ids):
            return prompt, text
    raise AssertionError("no prompt has a long answer")


@pytest.mark.lossless
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", RULES)
def test_greedy_text_is_the_targets_own(
    tiny_target: Callable[..., Any], family: str, kind: str
) -> None:
    """I03, I08, I09: sliding windows of 8 fill up, and most rounds end in a rollback."""
    target = tiny_target(family)
    prompt, expected = lasting_prompt(target, length=6)
    result = decode(target, RuleDraft(RULES[kind](prompt, expected)), prompt)
    assert result.token_ids == expected
    assert result.finish_reason == "length"
    accepted = sum(record.accepted for record in result.rounds)
    proposed = sum(record.proposed for record in result.rounds)
    if kind == "always":
        assert accepted == proposed
    elif kind == "never":
        assert accepted == 0
    else:
        assert 0 < accepted < proposed


@pytest.mark.lossless
def test_greedy_text_is_the_targets_own_on_twenty_prompts(small_llama: Any) -> None:
    for seed in range(20):
        prompt = random_prompt(seed, length=4 + seed)
        plain = decode(small_llama, None, prompt, max_new_tokens=64)
        assert plain.token_ids == plain_text(small_llama, prompt, len(plain.token_ids))
        for rule in (perfect, hopeless):
            draft = RuleDraft(rule(prompt, plain.token_ids))
            result = decode(small_llama, draft, prompt, max_new_tokens=64)
            assert result.token_ids == plain.token_ids
            assert result.finish_reason == plain.finish_reason


def test_text_ends_at_a_stop_token_anywhere_in_a_block(llama: Any) -> None:
    """I01: each token of the text is made the stop token once; blocks are 5 long."""
    prompt, text = lasting_prompt(llama)
    for stop in dict.fromkeys(text):
        result = decode(
            llama,
            RuleDraft(perfect(prompt, text)),
            prompt,
            policy=ChainPolicy(4),
            stop_token_ids=[stop],
        )
        assert result.token_ids == text[: text.index(stop) + 1]
        assert result.finish_reason == "stop"
        assert sum(record.emitted for record in result.rounds) == len(result.token_ids) - 1


def test_stop_and_limit_in_one_block() -> None:
    """I02."""
    block, stops = [10, 11, 99, 20, 21, 22], frozenset({99})
    assert cut_block(block, room=5, stop_ids=stops) == ([10, 11, 99], "stop")
    assert cut_block(block, room=3, stop_ids=stops) == ([10, 11, 99], "stop")
    assert cut_block(block, room=2, stop_ids=stops) == ([10, 11], "length")
    assert cut_block([10, 11], room=2, stop_ids=stops) == ([10, 11], "length")
    assert cut_block([10, 11], room=3, stop_ids=stops) == ([10, 11], None)
    assert cut_block([7, 99, 9, 9], room=9, stop_ids=stops) == ([7, 99], "stop")


def test_length_limit_is_exact_for_every_limit(llama: Any) -> None:
    """I14: also where a whole block no longer fits."""
    prompt, text = lasting_prompt(llama)
    for limit in range(1, 13):
        result = decode(
            llama,
            RuleDraft(perfect(prompt, text)),
            prompt,
            max_new_tokens=limit,
            policy=ChainPolicy(4),
        )
        assert result.token_ids == text[:limit]
        assert result.finish_reason == "length"


def test_drafted_end_of_text_ends_nothing_before_verification(llama: Any) -> None:
    """I19."""
    prompt, text = lasting_prompt(llama)
    eos = llama.eos_token_ids[0]
    assert decode(llama, RuleDraft(lambda _text: eos), prompt).token_ids == text


def test_any_of_several_end_of_text_ids_ends_the_text(llama: Any, monkeypatch: Any) -> None:
    """I15: the ids of the generation settings and of the tokenizer count alike."""
    prompt, text = lasting_prompt(llama)
    first, second = text[11], text[5]
    for ids in ((first, second), (second, first)):
        monkeypatch.setattr(llama, "eos_token_ids", ids)
        result = decode(llama, RuleDraft(perfect(prompt, text)), prompt)
        assert result.finish_reason == "stop"
        assert result.token_ids == text[: min(text.index(first), text.index(second)) + 1]


def test_features_told_to_the_draft_model_are_those_of_the_committed_text(llama: Any) -> None:
    """I08: every committed position once, in order, equal to a forward without any cache."""
    prompt, answer = lasting_prompt(llama)
    draft = RuleDraft(changeable(prompt, answer))
    result = decode(llama, draft, prompt)
    text = [*prompt, *result.token_ids]
    seen = draft.contexts[-1].token_ids.shape[1]
    assert draft.contexts[-1].token_ids[0].tolist() == text[:seen]
    whole = llama.forward(torch.tensor([text[: seen - 1]]), aux_layer_ids=(0, 1))
    for name in ("aux_hidden_states", "final_hidden_states"):
        told = torch.cat([getattr(context, name) for context in draft.contexts], dim=1)
        assert torch.allclose(told, getattr(whole, name), atol=1e-4, rtol=1e-4)
    for context in draft.contexts[1:]:
        assert context.aux_hidden_states.shape[1] < context.token_ids.shape[1] - len(prompt) + 1


def test_rounds_add_up_to_the_text_and_to_the_time(llama: Any) -> None:
    prompt, answer = lasting_prompt(llama)
    result = decode(llama, RuleDraft(changeable(prompt, answer)), prompt)
    assert 1 + sum(record.emitted for record in result.rounds) == len(result.token_ids)
    in_rounds = sum(r.draft_seconds + r.verify_seconds + r.other_seconds for r in result.rounds)
    assert all(r.draft_seconds > 0 and r.verify_seconds > 0 for r in result.rounds)
    assert in_rounds + result.prefill_seconds == pytest.approx(result.seconds, rel=0.05)


def test_decoding_ends_at_the_targets_last_position(tiny_target: Callable[..., Any]) -> None:
    """I13: 32 positions, 20 of them prompt, 60 tokens asked for."""
    target = tiny_target("gpt2", n_positions=32)
    prompt, expected = lasting_prompt(target, length=20, tokens=12)
    for rule in (perfect, hopeless):
        result = decode(target, RuleDraft(rule(prompt, expected)), prompt, max_new_tokens=60)
        assert result.token_ids == expected
        assert result.finish_reason == "length"
    with pytest.raises(ValueError, match=r"32 positions, which leaves no room"):
        decode(target, None, random_prompt(4, length=32))


def test_draft_model_that_runs_out_of_positions_falls_back_to_plain_steps(llama: Any) -> None:
    """I13: the draft model returns fewer tokens, then none."""
    prompt, text = lasting_prompt(llama)
    draft = RuleDraft(perfect(prompt, text), last_position=len(prompt) + 11)
    result = decode(llama, draft, prompt, policy=ChainPolicy(4))
    assert result.token_ids == text
    proposed = [record.proposed for record in result.rounds]
    assert proposed[0] == 4
    assert proposed[-5:] == [0] * 5
    assert {record.emitted for record in result.rounds[-5:]} == {1}


def test_no_draft_model_is_plain_decoding(llama: Any) -> None:
    prompt, text = lasting_prompt(llama)
    result = decode(llama, None, prompt)
    assert result.token_ids == text
    assert {(r.proposed, r.accepted, r.emitted) for r in result.rounds} == {(0, 0, 1)}


def test_requests_that_cannot_be_served_are_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        generate(llama, None, torch.ones(2, 3, dtype=torch.long), max_new_tokens=4)
    with pytest.raises(ValueError, match="at least one to start from"):
        generate(llama, None, torch.ones(1, 0, dtype=torch.long), max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decode(llama, None, [5, 6], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"stop_token_ids has \[5000\]"):
        decode(llama, None, [5, 6], stop_token_ids=[5000])


# --- sampling ---------------------------------------------------------------------------------


class SampledDraft(RuleDraft):
    """Draws from a table q over the whole vocabulary, computed once per text."""

    aux_layer_ids = (0,)

    def __init__(self, law: Callable[[tuple[int, ...]], Tensor], *, honest: bool = True) -> None:
        super().__init__(lambda _text: 0)
        self.law = law
        self.honest = honest

    def propose_one(
        self,
        context: DraftContext,
        state: list[int],  # noqa: ARG002
        num_draft_tokens: int,
        generator: torch.Generator | None,
    ) -> Draft:
        text = tuple(context.token_ids[0].tolist())
        tokens, probs = [], []
        for _ in range(num_draft_tokens):
            q = self.law(text)
            drawn = torch.multinomial(q, 1, generator=generator) if self.honest else q.argmax()
            tokens.append(int(drawn))
            probs.append(q)
            text += (tokens[-1],)
        return Draft(torch.tensor(tokens), torch.stack(probs) if probs else None)


SAMPLING = SamplingSettings(temperature=2.0, top_k=3, top_p=0.98)


def laws(target: Any) -> dict[str, Callable[[tuple[int, ...]], Tensor]]:
    """Draft distributions: the target's own, one it never draws from, and one in between."""
    known: dict[tuple[int, ...], Tensor] = {}

    def logits(text: tuple[int, ...]) -> Tensor:
        if text not in known:
            known[text] = next_logits(target, text)
        return known[text]

    def never(text: tuple[int, ...]) -> Tensor:
        return torch.nn.functional.one_hot(logits(text).argmin(), target.vocab_size).float()

    def sometimes(text: tuple[int, ...]) -> Tensor:
        noise = torch.randn(target.vocab_size, generator=torch.Generator().manual_seed(len(text)))
        return (logits(text) / 2.0 + noise).softmax(-1)

    return {
        "always": lambda text: target_probs(logits(text), SAMPLING),
        "never": never,
        "sometimes": sometimes,
    }


def sampled_counts(target: Any, draft: Any, prompt: list[int], samples: int) -> dict[Any, int]:
    generator = torch.Generator().manual_seed(17)
    counts: dict[Any, int] = {}
    for _ in range(samples):
        result = decode(
            target, draft, prompt, max_new_tokens=3, sampling=SAMPLING, generator=generator
        )
        text = tuple(result.token_ids)
        counts[text] = counts.get(text, 0) + 1
    return counts


def text_law(target: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every answer of at most 3 tokens under plain sampling."""
    finished: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for text, chance in open_texts.items():
            law = target_probs(next_logits(target, (*prompt, *text)).double(), SAMPLING)
            for token in law.nonzero().flatten().tolist():
                goes_on = token not in target.eos_token_ids
                (grown if goes_on else finished)[(*text, token)] = chance * float(law[token])
        open_texts = grown
    return finished | open_texts


def p_value(counts: dict[Any, int], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square p-value over whole texts; texts with an expected count below 5 share a bin."""
    samples = sum(counts.values())
    if set(counts) - set(law):
        return 0.0
    common = [text for text, chance in law.items() if chance * samples >= 5]
    expected = [law[text] * samples for text in common]
    observed = [float(counts.get(text, 0)) for text in common]
    if len(common) < len(law):
        expected.append(samples - sum(expected))
        observed.append(samples - sum(observed))
    return float(chisquare(observed, expected).pvalue)


@pytest.fixture
def small_llama(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", num_hidden_layers=2)


@pytest.mark.lossless
@pytest.mark.parametrize("kind", ["always", "never", "sometimes"])
def test_sampled_text_has_the_targets_law(small_llama: Any, kind: str) -> None:
    prompt = random_prompt(8, length=5)
    draft = SampledDraft(laws(small_llama)[kind])
    assert (
        p_value(sampled_counts(small_llama, draft, prompt, 600), text_law(small_llama, prompt))
        > 1e-3
    )


@pytest.mark.lossless
def test_sampled_text_of_a_recurrent_target_has_its_law(tiny_target: Callable[..., Any]) -> None:
    kinds = ["linear_attention", "full_attention"]
    target = tiny_target("qwen3_5", num_hidden_layers=2, layer_types=kinds)
    prompt = random_prompt(8, length=5)
    draft = SampledDraft(laws(target)["sometimes"])
    counts = sampled_counts(target, draft, prompt, 600)
    assert p_value(counts, text_law(target, prompt)) > 1e-3


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["always", "never", "sometimes"])
def test_sampled_text_has_the_targets_law_at_length(small_llama: Any, kind: str) -> None:
    prompt = random_prompt(9, length=5)
    draft = SampledDraft(laws(small_llama)[kind])
    counts = sampled_counts(small_llama, draft, prompt, 2500)
    assert p_value(counts, text_law(small_llama, prompt)) > 1e-3


@pytest.mark.lossless
def test_a_draft_model_that_misstates_its_distribution_is_seen(small_llama: Any) -> None:
    """Negative control: tokens chosen greedily, q reported as if they had been drawn."""
    prompt = random_prompt(8, length=5)
    draft = SampledDraft(laws(small_llama)["always"], honest=False)
    assert (
        p_value(sampled_counts(small_llama, draft, prompt, 600), text_law(small_llama, prompt))
        < 1e-6
    )


def test_a_seed_repeats_a_sampled_text(small_llama: Any) -> None:
    prompt = random_prompt(8, length=5)
    draft = SampledDraft(laws(small_llama)["sometimes"])
    texts = [
        decode(
            small_llama,
            draft,
            prompt,
            sampling=SamplingSettings(temperature=1.0),
            generator=torch.Generator().manual_seed(seed),
        ).token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


# --- rollback ---------------------------------------------------------------------------------


def full_cache(_model: Any) -> Any:
    return DynamicCache()


def recording_sliding_cache(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    assert any(cache.is_sliding), "this model was meant to slide"
    cache.activate_past_recording()
    return cache


def static_cache(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=64)


@pytest.mark.parametrize(
    ("family", "make_cache"),
    [
        ("llama", full_cache),
        ("gemma2", full_cache),
        ("gemma2", recording_sliding_cache),
        ("llama", static_cache),
        ("llama", None),
        ("gemma3", None),
    ],
    ids=["full", "full_gemma2", "recording_sliding", "static", "own", "own_gemma3"],
)
@torch.inference_mode()
def test_rejected_tokens_leave_no_trace_in_the_cache(
    tiny_target: Callable[..., Any], family: str, make_cache: Callable[[Any], Any] | None
) -> None:
    """I08, I16: read 3 wrong tokens, take 2 back, and go on; windows of 8 are full by then."""
    target = tiny_target(family)
    text = random_prompt(10, length=16)
    cache = make_cache(target.model) if make_cache is not None else target.new_cache()
    prefix = torch.tensor([text[:12]])
    target.model(input_ids=prefix, past_key_values=cache, use_cache=True)
    require_exact_rollback(cache)
    for _ in range(2):
        wrong = torch.tensor([[text[12], 7, 8]])
        held = int(cache.get_seq_length())
        target.model(input_ids=wrong, past_key_values=cache, use_cache=True)
        drop_last(cache, 3)
        assert int(cache.get_seq_length()) == held
    rest = torch.tensor([text[12:]])
    logits = target.model(input_ids=rest, past_key_values=cache, use_cache=True).logits
    whole = target.model(input_ids=torch.tensor([text]), use_cache=False).logits
    assert torch.allclose(logits, whole[:, 12:], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_cache_that_forgets_is_refused(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("gemma2")
    cache = DynamicCache(config=target.model.config)
    target.model(input_ids=torch.tensor([random_prompt(1)]), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer, which cannot take back"):
        require_exact_rollback(cache)
    with pytest.raises(ValueError, match="holds"):
        drop_last(target.new_cache(), 1)


def test_all_texts_of_the_law_add_up_to_one(small_llama: Any) -> None:
    law = text_law(small_llama, random_prompt(8, length=5))
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert len(list(itertools.islice(law, 5))) == 5
