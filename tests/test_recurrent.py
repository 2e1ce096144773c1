"""Targets with recurrent layers: exact rollback, lossless chains, batches, and what is refused.

References run the transformers model over whole texts, without any cache.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    Qwen3_5Config,
    RecurrentGemmaConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

sys.path.append(str(Path(__file__).parent))

import mtp_support

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
from draftsmith.models.packed import PackedModel, Segment
from draftsmith.models.recurrent_states import MOST_WAITING
from draftsmith.models.sequence_cache import SequenceCache
from draftsmith.models.small_model import SmallModelDraft
from draftsmith.models.target import Fingerprint, TargetModel

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
GAMMA = 4
TREES: list[Policy] = [
    StaticTreePolicy(),
    SampledTreePolicy((2, 1)),
    DynamicTreePolicy(total_tokens=6, depth=2, top_k=2),
]
Make = Callable[..., Any]


def ids(length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(seed))


def wrap(tiny: Any, config: Any, *, scale: float = 0.2) -> TargetModel:
    """A random target of any configuration, every weight moved."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return TargetModel(
        model, tiny.make_tiny_tokenizer(), name_or_path="tiny", fingerprint=Fingerprint("", "", "")
    )


def read_prompt(model: PackedModel, prompt: Tensor) -> SequenceCache:
    cache = model.new_cache(len(prompt) + 40)
    model.forward([Segment(cache, prompt, 0)])
    cache.keep(range(len(prompt)))
    return cache


def states_of(cache: SequenceCache) -> list[Tensor]:
    """Every committed state of every recurrent layer."""
    assert cache.recurrent is not None
    cache.recurrent.settle()
    layers = [layer for layer in cache.recurrent.cache.layers if hasattr(layer, "conv_states")]
    kinds = [kind for layer in layers for kind in (layer.conv_states, layer.recurrent_states)]
    return [state for kind in kinds for state in kind.values() if state is not None]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Rounding is magnified by these weights (up to 1e-4 here); a rejected token that stays in a
    state changes it by 2 % and more."""
    assert (found - expected).abs().max() <= 5e-4 * expected.abs().max()


@functools.cache
def greedy_text(target: TargetModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """The target's own greedy answer, every token from the whole text."""
    text = list(prompt)
    for _ in range(tokens):
        logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits
        text.append(int(logits[0, -1].argmax()))
        if text[-1] in target.eos_token_ids:
            break
    return text[len(prompt) :]


def prompts(count: int = 5) -> list[list[int]]:
    return [ids(length, seed=length).tolist() for length in (3, 9, 5, 14, 1)[:count]]


def answers(
    target: TargetModel, draft: Any, *, batch_size: int = 1, tokens: int = 16
) -> list[Generation]:
    engine = Engine(target, draft, ChainPolicy(GAMMA), batch_size=batch_size)
    return engine.run([Request(prompt, tokens) for prompt in prompts()])


def assert_own_text(target: TargetModel, made: list[Generation], tokens: int = 16) -> None:
    for prompt, answer in zip(prompts(), made, strict=True):
        assert answer.token_ids == greedy_text(target, tuple(prompt), tokens)


# --- rollback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_mixers_are_found_by_watching(family: str, tiny_target: Make) -> None:
    target = tiny_target(family)
    assert sorted(target.mixers) == [0, 1, 2]
    assert all(type(mixer).__name__.endswith("DeltaNet") for mixer in target.mixers.values())
    assert target.chain_only
    assert not tiny_target("qwen3").chain_only


@pytest.mark.lossless
@pytest.mark.parametrize("kept", range(GAMMA + 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_states_after_a_rejection_never_saw_the_rejected_tokens(
    family: str, kept: int, tiny_target: Make
) -> None:
    """Also twice in a row, as the second round's state comes from a replay."""
    model = PackedModel.of(tiny_target(family))
    prompt, chain, more = ids(7), ids(GAMMA + 1, seed=1), ids(6, seed=2)
    cache, expected = read_prompt(model, prompt), read_prompt(model, prompt)
    for read, count in ((chain, kept), (more, 2)):
        before = [state.clone() for state in states_of(cache)]
        model.forward([Segment(cache, read, cache.committed)])
        cache.keep(range(count))
        if count == 0:
            assert all(map(torch.equal, before, states_of(cache)))
        if count:
            model.forward([Segment(expected, read[:count], expected.committed)])
            expected.keep(range(count))
        for state, wanted in zip(states_of(cache), states_of(expected), strict=True):
            assert_close(state, wanted)
    text = torch.cat([prompt, chain[:kept], more[:2], ids(3, seed=4)])
    found = model.forward([Segment(cache, text[-3:], cache.committed)], logits="all").logits
    assert found is not None
    whole = model.model.forward(text[None], logits="all").logits
    assert whole is not None
    assert_close(found[0], whole[0, -3:])


def test_a_round_of_several_forwards_is_taken_back_as_one(tiny_target: Make) -> None:
    """As a small draft model reads: token by token, then three of five stay."""
    model = PackedModel.of(tiny_target("qwen3_5"))
    prompt, chain = ids(7), ids(5, seed=1)
    cache, expected = read_prompt(model, prompt), read_prompt(model, prompt)
    for place in range(5):
        model.forward([Segment(cache, chain[place : place + 1], cache.committed + place)])
    cache.keep(range(3))
    model.forward([Segment(expected, chain[:3], expected.committed)])
    expected.keep(range(3))
    for state, wanted in zip(states_of(cache), states_of(expected), strict=True):
        assert_close(state, wanted)


def test_transformers_own_crop_leaves_the_rejected_tokens_in_the_state(tiny_target: Make) -> None:
    """Why this is not its recording of the past. When this fails, use that instead."""
    target = tiny_target("qwen3_5")
    text, wrong = ids(12), ids(4, seed=1)
    cache = DynamicCache(config=target.model.config)
    cache.activate_past_recording()
    target.forward(text[None, :8], cache=cache)
    target.forward(wrong[None], cache=cache)
    assert not cache.is_croppable
    cache.crop(-4)
    found = target.forward(text[None, 8:], cache=cache, logits="all").logits
    expected = target.forward(text[None], logits="all").logits[:, 8:]
    assert (found - expected).abs().max() > 0.02 * expected.abs().max()


@pytest.mark.lossless
@pytest.mark.parametrize("family", FAMILIES)
def test_many_rejections_in_a_row(family: str, tiny_target: Make) -> None:
    """Accepted rows wait through several rounds, with rounds of other sizes between."""
    model = PackedModel.of(tiny_target(family))
    text = ids(7)
    cache = read_prompt(model, text)
    states = cache.recurrent
    assert states is not None
    waiting = []
    for step, kept in enumerate((1, 2, 1, 5, 1, 1, 0, 3, 2, 1, 4, 2, 3, 1, 2, 1)):
        count = 1 if step == 5 else 5
        read = ids(count, seed=step)
        found = model.forward([Segment(cache, read, cache.committed)], logits="all").logits
        expected = model.model.forward(torch.cat([text, read])[None], logits="all").logits
        assert found is not None
        assert expected is not None
        assert_close(found[0], expected[0, -count:])
        cache.keep(range(kept))
        text = torch.cat([text, read[:kept]])
        waiting.append(max((rows.shape[1] for _, rows in states._waiting.values()), default=0))
    assert waiting == [1, 3, 4, 0, 1, 0, 0, 3, 5, 6, 10, 12, 15, MOST_WAITING, 0, 1]


def test_little_of_a_round_is_held_after_it(tiny_target: Make) -> None:
    model = PackedModel.of(tiny_target("qwen3_5"))
    cache = model.new_cache(60)
    states = cache.recurrent
    assert states is not None
    model.forward([Segment(cache, ids(9), 0)])
    assert {held.inputs for held in states._round.values()} == {None}, "a prompt is not recorded"
    cache.keep(range(9))
    for round_ in range(12):
        model.forward([Segment(cache, ids(4), cache.committed)])
        held = next(iter(states._round.values()))
        if round_ == 0:
            assert [tuple(rows.shape) for rows in held.inputs or []] == [(1, 4, 32)]
        assert not any(isinstance(value, Tensor) for value in held.call.kwargs.values())
        cache.keep(range(2))
        assert not states._round
        for _, rows in states._waiting.values():
            assert rows.shape[1] <= MOST_WAITING
            assert rows.untyped_storage().nbytes() == rows.nbytes, "no view of a longer tensor"


def test_what_a_state_cannot_do_is_said(tiny_target: Make) -> None:
    model = PackedModel.of(tiny_target("qwen3_5"))
    cache = model.new_cache(60)
    model.forward([Segment(cache, ids(9), 0)])
    with pytest.raises(ValueError, match="4 of the 9 rows of a prompt"):
        cache.keep(range(4))
    cache.keep(range(9))
    model.forward([Segment(cache, ids(4), 9)])
    with pytest.raises(ValueError, match="call keep"):
        model.forward([Segment(cache, ids(4), 9)])
    with pytest.raises(ValueError, match=r"Rows \[0, 2\] of a round"):
        cache.keep([0, 2])


def test_a_copy_is_independent(tiny_target: Make) -> None:
    model = PackedModel.of(tiny_target("qwen3_5"))
    cache = read_prompt(model, ids(7))
    other, before = cache.copy(), copy.deepcopy(states_of(cache))
    model.forward([Segment(other, ids(3, seed=1), 7)])
    other.keep(range(3))
    assert cache.committed == 7
    assert all(map(torch.equal, before, states_of(cache)))
    assert not any(map(torch.equal, before, states_of(other)))


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.lossless
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_that_is_sometimes_right_writes_the_targets_text(
    family: str, batch_size: int, tiny_target: Make, noisy_copy: Any
) -> None:
    target = tiny_target(family)
    made = answers(target, noisy_copy(target, 0.25), batch_size=batch_size)
    assert_own_text(target, made)
    accepted = {record.accepted for one in made for record in one.rounds}
    assert accepted == set(range(GAMMA + 1)), "every acceptance must occur here"


@pytest.mark.lossless
@pytest.mark.parametrize("batch_size", [1, 4])
def test_plain_decoding_and_an_untrained_eagle3(batch_size: int, tiny_target: Make) -> None:
    target = tiny_target("qwen3_5")
    assert_own_text(target, answers(target, None, batch_size=batch_size))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = Eagle3Draft(
            Eagle3Config(
                hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=320, draft_vocab_size=320, max_position_embeddings=256,
                aux_layer_ids=[0, 1],
            )
        )  # fmt: skip
    draft.attach_target(embed_tokens=target.embed_tokens)
    assert_own_text(target, answers(target, draft.eval(), batch_size=batch_size))


@pytest.mark.lossless
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_small_recurrent_model_drafts(
    noise: float, tiny: Any, tiny_target: Make, tmp_path: Path
) -> None:
    """The target as its own draft model, exact and with noise: its states roll back as well."""
    model = tiny.make_tiny_model("qwen3_5", vocab_size=tiny.PADDED_VOCAB_SIZE)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    target = tiny_target("qwen3_5")
    draft = SmallModelDraft.load(str(tmp_path), dtype="float32")
    draft.attach_target(embed_tokens=target.embed_tokens)
    made = answers(target, draft, batch_size=2)
    assert_own_text(target, made)
    accepted = {record.accepted for one in made for record in one.rounds if record.proposed == 4}
    if noise == 0.0:
        assert accepted == {GAMMA}
    else:
        assert len(accepted) > 2
    with pytest.raises(ValueError, match="The draft model has recurrent layers"):
        Engine(tiny_target("llama"), draft, TREES[0])


@pytest.mark.lossless
@pytest.mark.parametrize("attention", ["chain", "full"])
def test_the_familys_own_mtp_head_drafts(attention: str, tiny_target: Make, tmp_path: Path) -> None:
    target = tiny_target("qwen3_5")
    target.model.save_pretrained(tmp_path)
    draft = mtp_support.make_draft(tmp_path, "qwen3_5", depth_attention=attention)
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    assert_own_text(target, answers(target, draft, batch_size=2))


def test_a_multimodal_folder_is_read_as_its_text_part(tiny: Any, tmp_path: Path) -> None:
    """Published Qwen3.5 folders: text_config nested, vision weights, and mtp.* beside."""
    text = tiny.FAMILIES["qwen3_5"](vocab_size=320).to_dict()
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = modeling_qwen3_5.Qwen3_5ForConditionalGeneration(config).float().eval()
    whole.save_pretrained(tmp_path)
    tiny.make_tiny_tokenizer().save_pretrained(tmp_path)
    target = TargetModel.load(str(tmp_path), dtype="float32")
    text_ids = ids(9)[None]
    with torch.no_grad():
        expected = whole(input_ids=text_ids).logits
    found = target.forward(text_ids, logits="all").logits
    assert found is not None
    assert_close(found, expected)
    assert_own_text(target, answers(target, None, batch_size=3))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", TREES, ids=lambda policy: policy.name)
def test_trees_are_refused_before_work_starts(
    policy: Policy, tiny_target: Make, noisy_copy: Any
) -> None:
    target = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match=r"target has recurrent layers.*drafting=chain"):
        Engine(target, noisy_copy(target, 1.0), policy)
    Engine(target, None, policy)  # Plain decoding drafts nothing.


def test_a_tree_that_comes_all_the_same_is_refused(tiny_target: Make) -> None:
    target = tiny_target("qwen3_5")
    model = PackedModel.of(target)
    cache = read_prompt(model, ids(5))
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    tree = Segment(cache, ids(3), 5, torch.tensor([5, 6, 6]), ancestors)
    with pytest.raises(ValueError, match="cannot read a tree"):
        model.forward([tree])
    with pytest.raises(ValueError, match="cannot read a tree"):
        target.forward(ids(3)[None], attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_a_model_whose_layers_read_padding_is_refused(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        modeling_qwen3_5, "apply_mask_to_padding_states", lambda hidden, _mask: hidden
    )
    with pytest.raises(ValueError, match="recurrent layers read padding"):
        wrap(tiny, tiny.FAMILIES["qwen3_5"](vocab_size=320), scale=0.0)


SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}


def test_a_mixer_that_forgets_its_state_is_refused(tiny: Any) -> None:
    """Jamba's starts from nothing when it reads several tokens, whatever its cache holds."""
    config = JambaConfig(
        **SIZES, num_hidden_layers=2, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        mamba_d_state=8,
    )  # fmt: skip
    # Weights so small that no logit would show it.
    target = wrap(tiny, config, scale=0.0)
    with pytest.raises(ValueError, match=r"JambaMambaMixer \(layer 0\) that forgets its state"):
        Engine(target, None, ChainPolicy(2))


def test_a_state_outside_the_cache_is_refused(tiny: Any) -> None:
    config = RecurrentGemmaConfig(
        **SIZES, num_hidden_layers=3, lru_width=32, attention_window_size=16
    )
    with pytest.raises(ValueError, match="does not keep the recurrent state of layer 0"):
        wrap(tiny, config)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "config",
    [
        BambaConfig(**SIZES, **MAMBA, num_hidden_layers=2, attn_layer_indices=[1]),
        FalconH1Config(**SIZES, **MAMBA, num_hidden_layers=2, mamba_d_ssm=64),
        Lfm2Config(**SIZES, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    ],
    ids=["bamba", "falcon_h1", "lfm2"],
)
def test_other_recurrent_families_need_no_code_of_their_own(
    config: Any, tiny: Any, noisy_copy: Any
) -> None:
    """State spaces beside attention, both in one layer, and a short convolution without a state."""
    target = wrap(tiny, config)
    made = answers(target, noisy_copy(target, 0.5), batch_size=3, tokens=10)
    assert_own_text(target, made, tokens=10)
    assert len({record.accepted for one in made for record in one.rounds}) > 2
