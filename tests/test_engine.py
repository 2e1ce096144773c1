"""Batches: every row equals its single run; rows leave and enter; cost follows the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import (
    ChainPolicy,
    DynamicTreePolicy,
    Policy,
    SampledTreePolicy,
    StaticTreePolicy,
)
from draftsmith.inference.records import Generation
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import SamplingSettings

NOISE = {"llama": 1.5, "gemma3": 0.3, "qwen3": 1.5, "gpt2": 1.5}
"""By family (their logits differ in scale): the draft model is then right about half the time."""

POLICIES: dict[str, Policy] = {
    "chain": ChainPolicy(3),
    "static_tree": StaticTreePolicy(),
    "sampled_tree": SampledTreePolicy((2, 2, 1)),
    "dynamic_tree": DynamicTreePolicy(total_tokens=10, depth=3, top_k=3),
}


def make_draft(target: Any, *, seed: int = 0, positions: int = 256) -> Eagle3Draft:
    """A random draft model whose logits are those of the target's head on its own states."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(
            Eagle3Config(
                hidden_size=target.hidden_size,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=target.vocab_size,
                draft_vocab_size=target.vocab_size,
                max_position_embeddings=positions,
                aux_layer_ids=[0, 1],
            )
        )
    draft.attach_target(embed_tokens=target.embed_tokens)
    return draft.eval()


def prompts(count: int, vocab: int = 60) -> list[list[int]]:
    """Lengths 3, 9, 5, 14, 4, ..."""
    lengths = [3, 9, 5, 14, 4, 7, 11]
    return [
        torch.randint(
            4, vocab, (lengths[i % 7],), generator=torch.Generator().manual_seed(i)
        ).tolist()
        for i in range(count)
    ]


def requests(
    texts: list[list[int]], sampling: SamplingSettings, *, tokens: int = 20
) -> list[Request]:
    """Each with its own seed and its own length limit."""
    return [
        Request(text, tokens + 3 * i, sampling, generator=torch.Generator().manual_seed(i))
        for i, text in enumerate(texts)
    ]


def shape(generation: Generation) -> Any:
    """All of a generation but its times."""
    rounds = [(r.proposed, r.depth, r.accepted, r.emitted) for r in generation.rounds]
    return generation.token_ids, generation.finish_reason, rounds


@pytest.mark.lossless
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt2"])
@pytest.mark.parametrize("name", POLICIES)
def test_batched_rows_equal_their_single_runs(
    name: str, family: str, tiny_target: Callable[..., Any], noisy_copy: Any
) -> None:
    """I10, I09: other prompt lengths, accepted lengths and limits; Gemma's windows of 8 fill."""
    target = tiny_target(family)
    draft = noisy_copy(target, NOISE[family])
    policy = POLICIES[name]
    texts = prompts(5)
    greedy = SamplingSettings()
    single = [
        Engine(target, draft, policy).run([request])[0] for request in requests(texts, greedy)
    ]
    batched = Engine(target, draft, policy, batch_size=3).run(requests(texts, greedy))
    plain = Engine(target, None, policy, batch_size=4).run(requests(texts, greedy))
    for alone, together, without in zip(single, batched, plain, strict=True):
        assert shape(alone) == shape(together)
        assert alone.token_ids == without.token_ids
        drafted = [origin.depth for origin in together.origins]
        assert len(drafted) == len(together.token_ids)
    accepted = {record.accepted for one in batched for record in one.rounds}
    assert len(accepted) > 1, "rows must advance by different lengths here"
    # What the draft model read and the target kept is told to it, so that it need not read again.
    assert any(kept for state in draft.states for kept in state.kept)


@pytest.mark.parametrize("name", POLICIES)
def test_an_eagle3_batch_equals_its_single_runs(name: str, tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    draft = make_draft(target)
    work = requests(prompts(5), SamplingSettings())
    single = [Engine(target, draft, POLICIES[name]).run([request])[0] for request in work]
    batched = Engine(target, draft, POLICIES[name], batch_size=3).run(work)
    assert [shape(one) for one in single] == [shape(one) for one in batched]


@pytest.mark.lossless
@pytest.mark.parametrize("name", POLICIES)
def test_batched_sampling_equals_the_single_runs(
    name: str, tiny_target: Callable[..., Any], noisy_copy: Any
) -> None:
    """Every request draws from its own generator, whoever shares the batch."""
    target = tiny_target("llama")
    draft = noisy_copy(target, 1.0)
    sampling = SamplingSettings(temperature=0.8, top_k=20, repetition_penalty=1.2)
    texts = prompts(4)
    single = [
        Engine(target, draft, POLICIES[name]).run([request])[0]
        for request in requests(texts, sampling)
    ]
    batched = Engine(target, draft, POLICIES[name], batch_size=3).run(requests(texts, sampling))
    assert [shape(one) for one in single] == [shape(one) for one in batched]


def test_finished_rows_leave_and_waiting_ones_enter(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama")
    limits = [2, 30, 4, 6]
    work = [Request(p, limit) for p, limit in zip(prompts(4), limits, strict=True)]
    expected = [Engine(target, None, ChainPolicy(0)).run([one])[0].token_ids for one in work]
    order: list[int] = []
    answers = Engine(target, None, ChainPolicy(0), batch_size=2).run(
        work, on_finished=lambda index, _answer: order.append(index)
    )
    assert [one.token_ids for one in answers] == expected
    lengths = {index: len(text) for index, text in enumerate(expected)}
    assert sorted(order) == [0, 1, 2, 3]
    if lengths[1] > lengths[0] + lengths[2] + lengths[3]:
        assert order[-1] == 1, "the long row stays while the others come and go"


def test_a_round_reads_as_many_tokens_as_it_needs(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No padding: one row of all prompts, then one row of all roots and drafts."""
    target = tiny_target("llama")
    seen: list[tuple[int, ...]] = []
    real = target.forward

    def counting(input_ids: Any, **settings: Any) -> Any:
        seen.append(tuple(input_ids.shape))
        return real(input_ids, **settings)

    engine = Engine(target, make_draft(target), ChainPolicy(3), batch_size=3)
    monkeypatch.setattr(target, "forward", counting)
    work = [Request(p, 9 + 2 * i) for i, p in enumerate(prompts(3))]
    answers = engine.run(work)
    assert seen[0] == (1, 3 + 9 + 5)
    read = sum(1 + record.proposed for one in answers for record in one.rounds)
    assert sum(shape[1] for shape in seen[1:]) == read
    assert all(shape[0] == 1 for shape in seen)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_repetition_penalty_gives_transformers_own_text(
    penalty: float, tiny_target: Callable[..., Any], noisy_copy: Any
) -> None:
    """I17: chains and trees equal generate(repetition_penalty=...) token for token."""
    target = tiny_target("llama")
    draft = noisy_copy(target, 1.0)
    changed, accepted = 0, 0
    for text in prompts(3):
        settings = GenerationConfig(
            max_new_tokens=24, do_sample=False, repetition_penalty=penalty,
            eos_token_id=list(target.eos_token_ids), pad_token_id=0,
        )  # fmt: skip
        ids = torch.tensor([text])
        expected = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )[0, len(text) :].tolist()
        sampling = SamplingSettings(repetition_penalty=penalty)
        for policy in POLICIES.values():
            found = Engine(target, draft, policy).run([Request(text, 24, sampling)])[0]
            assert found.token_ids == expected
            accepted += sum(record.accepted for record in found.rounds)
        changed += (
            Engine(target, None, ChainPolicy(0)).run([Request(text, 24)])[0].token_ids != expected
        )
    assert changed, "the penalty must change something here"
    assert accepted, "the draft model is penalised too, so that its tokens are kept"


def test_a_target_that_repeats_itself_accepts_a_draft_of_itself(
    tiny_target: Callable[..., Any],
) -> None:
    """Origins: 0 for the target's own tokens, 1, 2, ... within a round for drafted ones."""
    target = tiny_target("llama")
    draft = make_draft(target)
    answer = Engine(target, draft, ChainPolicy(3)).run([Request(prompts(1)[0], 30)])[0]
    expected = [0]
    for record in answer.rounds:
        block = [*range(1, record.accepted + 1), 0]
        expected += block[: record.emitted]
    assert [origin.depth for origin in answer.origins] == expected
    assert all(0 <= origin.target_prob <= 1 for origin in answer.origins)
    known = [origin.draft_prob is not None for origin in answer.origins]
    assert known == [depth > 0 for depth in expected]


def test_target_probabilities_are_those_of_a_plain_forward(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    text = prompts(1)[0]
    answer = Engine(target, make_draft(target), POLICIES["dynamic_tree"]).run([Request(text, 12)])
    ids = torch.tensor([[*text, *answer[0].token_ids]])
    logits = target.forward(ids, logits="all").logits[0, len(text) - 1 : -1]
    expected = logits.softmax(-1).gather(-1, ids[0, len(text) :, None]).squeeze(-1)
    found = torch.tensor([origin.target_prob for origin in answer[0].origins])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_and_a_batch_of_nothing_are_handled(
    tiny_target: Callable[..., Any],
) -> None:
    target = tiny_target("llama")
    assert Engine(target, None, ChainPolicy(2)).run([]) == []
    with pytest.raises(ValueError, match="batch_size is 0"):
        Engine(target, None, ChainPolicy(2), batch_size=0)


def test_a_hopeless_request_stops_the_batch_before_anything_is_decoded(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    engine = Engine(target, None, ChainPolicy(2), batch_size=2)
    monkeypatch.setattr(target, "forward", lambda *_a, **_k: pytest.fail("decoded something"))
    too_long = Request(list(range(4, 60)) * 10, 5)
    with pytest.raises(ValueError, match="leaves no room"):
        engine.run([Request([5, 6], 5), too_long])


def test_a_cache_layer_that_cannot_go_back_is_refused_by_name() -> None:
    """What cannot be rolled back cannot be decoded with."""
    from draftsmith.models.rollback import require_exact_rollback

    class Layer(nn.Module):
        is_croppable = False

    class Forgetful:
        layers = (Layer(),)

    with pytest.raises(ValueError, match="Layer 0 of the cache is a Layer"):
        require_exact_rollback(Forgetful())  # type: ignore[arg-type]
