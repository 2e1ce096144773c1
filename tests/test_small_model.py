"""Small-model draft, training: students of every family, alignment, losses, whole runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parent))

import train_support as support

from draftsmith.conf.entry import compose_settings
from draftsmith.conf.schema import TargetConfig
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import ObjectiveOutput, TrainBatch, TrainOutput
from draftsmith.models.small_model import (
    SmallModelDraft,
    SmallModelMethod,
    chain_sums,
    supervised_next,
)
from draftsmith.models.student import spread_layers, take_layers
from draftsmith.models.target import TargetHead, TargetModel
from draftsmith.models.target_structure import find_structure
from draftsmith.train.objectives import make_objective

METHOD = "draftsmith.models.small_model.SmallModelMethod"
FAMILIES = (
    "llama", "llama_tied", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "phi", "gpt_neox",
    "gpt2", "qwen3_moe",
)  # fmt: skip


def build(folder: Path, **settings: Any) -> tuple[SmallModelDraft, TargetHead]:
    """A student of a saved target, and that target's head."""
    target = TargetConfig(str(folder), dtype="float32", device="cpu")
    head = TargetHead.load(str(folder), dtype="float32")
    return SmallModelMethod(**settings).build(head, None, (), target=asdict(target)), head


def make_batch(target: TargetModel, *, seed: int = 0) -> TrainBatch:
    """Two conversations of 12 and 9 tokens, each with two supervised spans, and their states."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, target.vocab_size, (2, 12), generator=generator)
    keep_mask = torch.ones(2, 12, dtype=torch.bool)
    keep_mask[1, 9:] = False
    input_ids[1, 9:] = 0
    supervised = torch.zeros(2, 12, dtype=torch.bool)
    supervised[0, 3:6] = supervised[0, 8:] = supervised[1, 1:4] = supervised[1, 7:9] = True
    states = target.forward(input_ids, attention_mask=keep_mask).final_hidden_states
    positions = torch.arange(12).expand(2, 12)
    return TrainBatch(input_ids, supervised, keep_mask, positions, states[..., :0], states)


# --- students -------------------------------------------------------------------------------------


def without_layers(model: Any, left_out: set[int]) -> Any:
    """The model, some of its layers handing on what they are given."""

    def hand_on(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    for index, layer in enumerate(find_structure(model).layers):
        if index in left_out:
            layer.register_forward_hook(hand_on, with_kwargs=True)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_computes_what_the_chosen_layers_compute(
    family: str, tiny_model: Callable[..., Any]
) -> None:
    # Of Gemma's layers 1 and 3 are full ones, 0 and 2 slide: [0, 3] takes one of each.
    ids = torch.arange(3, 23)[None]
    student = take_layers(tiny_model(family), [0, 3])
    assert student.config.num_hidden_layers == 2
    target = without_layers(tiny_model(family), {1, 2})
    expected, found = target(ids).logits, student(ids).logits
    cap = getattr(target.config, "final_logit_softcapping", None)
    if cap is not None:
        found = cap * torch.tanh(found / cap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, tiny_model(family)(ids).logits, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_objectives_see_of_a_head_gives_the_models_own_logits(
    family: str, tiny_folder: Callable[..., Path]
) -> None:
    draft, _ = build(tiny_folder(family), num_hidden_layers=2)
    ids = torch.arange(3, 15)[None]
    states = draft._decoder[0](ids).last_hidden_state[0]
    hidden, weight = draft._head_inputs(states)
    expected = draft.language_model(ids).logits[0]
    torch.testing.assert_close(hidden @ weight.T, expected, rtol=1e-5, atol=1e-5)


def test_layers_are_spread_evenly_with_the_first_and_the_last() -> None:
    assert spread_layers(30, 4) == [0, 10, 19, 29]
    assert spread_layers(30, 2) == [0, 29]
    assert spread_layers(5, 5) == [0, 1, 2, 3, 4]
    assert spread_layers(30, 1) == [0]
    for total in range(2, 40):
        for count in range(2, total + 1):
            chosen = spread_layers(total, count)
            assert sorted({0, total - 1, *chosen}) == chosen
            assert len(chosen) == count


def test_a_student_may_start_at_random_or_with_frozen_embeddings(
    tiny_llama_folder: Path,
) -> None:
    copied, head = build(tiny_llama_folder, num_hidden_layers=2, freeze_embeddings=True)
    embeddings = copied.language_model.get_input_embeddings().weight
    assert torch.equal(embeddings, head.embed_tokens.weight)
    frozen = {n for n, p in copied.named_parameters() if not p.requires_grad}
    assert frozen == {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}
    drawn, _ = build(tiny_llama_folder, num_hidden_layers=2, init_from_target=False)
    assert not torch.equal(drawn.language_model.get_input_embeddings().weight, embeddings)
    assert all(parameter.requires_grad for parameter in drawn.parameters())
    assert {p.dtype for p in drawn.parameters()} == {torch.float32}
    names = [name for name, _ in drawn.named_parameters()]
    assert names == [name for name, _ in copied.named_parameters()]


def test_an_existing_model_is_taken_whole_and_must_have_the_targets_tokenizer(
    tiny: ModuleType, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    small = tiny_folder("qwen2", seed=5, num_hidden_layers=2)
    draft, _ = build(tiny_folder("llama"), student=str(small))
    own = AutoModelForCausalLM.from_pretrained(small).state_dict()
    found = draft.language_model.state_dict()
    assert all(torch.equal(own[name], found[name]) for name in own)
    assert all(parameter.requires_grad for parameter in draft.parameters())

    other = tiny.save_tiny_target(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"1 of 312 entries differ \('<\|extra\|>' is 312 there"):
        build(tiny_folder("llama"), student=str(other))


def test_settings_that_contradict_each_other_or_the_target_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method.num_hidden_layers and method.layers each say"):
        SmallModelMethod(num_hidden_layers=2, layers=[0, 1])
    with pytest.raises(ValueError, match=r"method.layers and method.student each say"):
        SmallModelMethod(layers=[0, 1], student="folder")
    with pytest.raises(ValueError, match=r"would keep random embeddings"):
        SmallModelMethod(freeze_embeddings=True, init_from_target=False)
    with pytest.raises(ValueError, match=r"method.num_steps is 0, expected an integer >= 1"):
        SmallModelMethod(num_steps=0)
    with pytest.raises(ValueError, match=r"expected a mapping with a name"):
        SmallModelMethod(objective={"nme": "kl"})
    for settings in ({"layers": [0, 4]}, {"layers": [1, 0]}, {"num_hidden_layers": 5}):
        with pytest.raises(ValueError, match=r"but the target has 4 \(0 to 3\)"):
            SmallModelMethod(**settings).validate(4, 320)
    SmallModelMethod(num_hidden_layers=4).validate(4, 320)
    assert SmallModelMethod().chosen_layers(3) == [0, 1, 2]


# --- places, losses, statistics -------------------------------------------------------------------


def test_a_place_is_taught_where_the_token_after_it_is_the_targets_own(
    tiny_target: Callable[..., TargetModel],
) -> None:
    batch = make_batch(tiny_target("llama"))
    places = [row.nonzero().flatten().tolist() for row in supervised_next(batch)]
    # Tokens 3-5 and 8-11 of the first row, 1-3 and 7-8 of the second are supervised.
    assert places == [[2, 3, 4, 7, 8, 9, 10], [0, 1, 2, 6, 7]]


@pytest.mark.parametrize("family", ["llama", "phi", "granite"])
@pytest.mark.parametrize("name", ["kl", "ce", "tv"])
def test_loss_and_gradients_equal_those_of_the_models_own_logits(
    family: str, name: str, tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any]
) -> None:
    draft, head = build(tiny_folder(family), num_hidden_layers=2)
    target = tiny_target(family)
    batch = make_batch(target)
    output = draft(batch, target_head=head, objective=make_objective(name))
    found = torch.autograd.grad(output.loss_sum, list(draft.parameters()))

    places = supervised_next(batch)
    logits = draft.language_model(batch.input_ids, attention_mask=batch.keep_mask.long()).logits
    log_q = logits[places].log_softmax(-1)
    teacher = target.model(batch.input_ids, attention_mask=batch.keep_mask.long()).logits
    p = teacher[places].softmax(-1)
    labels = batch.input_ids.roll(-1, dims=1)[places]
    losses = {
        "kl": -(p * log_q).sum(-1),
        "ce": nn.functional.nll_loss(log_q, labels, reduction="none"),
        "tv": 1 - torch.minimum(p, log_q.exp()).sum(-1),
    }
    expected = losses[name].sum()
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-4)
    exact = torch.autograd.grad(expected, list(draft.parameters()))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert float(draft.normaliser(batch)) == 12.0
    correct = (log_q.argmax(-1) == p.argmax(-1)).sum()
    assert float(output.sums["correct"][0]) == float(correct)


def test_the_reported_steps_are_chains_over_consecutive_places() -> None:
    generator = torch.Generator().manual_seed(3)
    places = torch.rand(3, 9, generator=generator) < 0.75
    rows = int(places.sum())
    correct = torch.rand(1, rows, generator=generator) < 0.7
    acceptance = torch.rand(1, rows, generator=generator)
    known = torch.rand(rows, generator=generator) < 0.9
    losses = torch.tensor([5.0], dtype=torch.float64)
    output = ObjectiveOutput(losses.sum(), losses, correct, acceptance, known)
    steps = 4
    found = chain_sums(places, output, num_steps=steps)

    row_of = {tuple(place): row for row, place in enumerate(places.nonzero().tolist())}
    names = (
        "supervised",
        "correct",
        "acceptance",
        "in_vocabulary",
        "greedy_joint",
        "sampled_joint",
    )
    expected = {name: [0.0] * steps for name in names}
    for batch, start in row_of:
        greedy = sampled = 1.0
        for step in range(steps):
            row = row_of.get((batch, start + step))
            if row is None:
                break
            greedy *= float(correct[0, row])
            sampled *= float(acceptance[0, row])
            values = (1.0, float(correct[0, row]), float(acceptance[0, row]), float(known[row]))
            for name, value in zip(names, (*values, greedy, sampled), strict=True):
                expected[name][step] += value
    for name in names:
        torch.testing.assert_close(found[name], torch.tensor(expected[name]).double(), msg=name)
    assert float(found["chains"]) == rows
    assert found["loss"].tolist() == [5.0] * steps


def test_a_batch_that_teaches_nothing_or_is_shorter_than_a_chain_gives_zero_sums(
    tiny_target: Callable[..., TargetModel], tiny_llama_folder: Path
) -> None:
    draft, head = build(tiny_llama_folder, num_hidden_layers=1, num_steps=20)
    batch = make_batch(tiny_target("llama"))
    batch.supervised_mask[:] = False
    output = draft(batch, target_head=head, objective=make_objective("kl"))
    assert isinstance(output, TrainOutput)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert all(value.shape in ((), (20,)) and not value.any() for value in output.sums.values())


@pytest.mark.parametrize("rows", [300, 340])
def test_a_head_padded_otherwise_than_the_targets_teaches_the_shared_tokens(
    rows: int, tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any]
) -> None:
    # Both models pad one tokenizer's 312 entries: the target to 320 rows. 300 is below the
    # tokenizer's size, which no loader lets through; here it only makes the shorter case visible.
    draft, head = build(tiny_folder("llama"), num_hidden_layers=1)
    draft.language_model.resize_token_embeddings(rows, mean_resizing=False)
    wrapped = draft._wrapped[0]
    wrapped.vocab_size = rows
    wrapped._head.matrix = draft.language_model.get_output_embeddings()
    draft.attach_target(embed_tokens=head.embed_tokens)
    batch = make_batch(tiny_target("llama"))
    batch.input_ids.clamp_(max=min(rows, 320) - 1)
    output = draft(batch, target_head=head, objective=make_objective("ce"))
    places = supervised_next(batch)
    logits = draft.language_model(batch.input_ids).logits[places][:, :320]
    labels = batch.input_ids.roll(-1, dims=1)[places]
    expected = nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-5, atol=1e-4)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> support.Inputs:
    """A target, prepared rows, and a cache with three layers (none of which is needed)."""
    return support.make_inputs(tmp_path_factory.mktemp("inputs"), tiny, family="llama_tied")


def final_state_cache(inputs: support.Inputs, folder: Path) -> Path:
    """A cache that holds no layer, only final hidden states."""
    from draftsmith.data import capture

    settings = [
        "target=local", f"target.name_or_path={inputs.target}", "target.dtype=float32",
        "target.device=cpu", f"data={inputs.prepared}", f"cache={folder}", "dtype=float32",
        "aux_layer_ids=[]",
    ]  # fmt: skip
    capture.run(compose_settings("cache", "draftsmith.conf.schema:CacheConfig", settings))
    return folder


def method(**settings: Any) -> dict[str, Any]:
    return {"_target_": METHOD, "num_hidden_layers": 2} | settings


def weights_of(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_run_learns_and_leaves_an_ordinary_language_model(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    settings = support.compose(
        inputs, "train.epochs=4", "train.eval_every=10", method=method(num_steps=3)
    )
    rows = support.run_in_process(settings, tmp_path)
    found = support.losses(rows)
    assert sum(found[-8:]) < 0.97 * sum(found[:8])
    assert len(rows[0]["acceptance_greedy"]) == 3
    validations = [row for row in rows if "validation_loss" in row]
    assert validations[-1]["validation_loss"] < validations[0]["validation_loss"]

    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").chat_template is not None
    draft = load_draft(tmp_path / "draft")
    assert isinstance(draft, SmallModelDraft)
    ids = torch.arange(5, 25)[None]
    assert torch.equal(draft.language_model(ids).logits, model.eval()(ids).logits)
    assert draft.config.target_fingerprint["weights"]
    assert draft.config.eos_token_id == [3]
    assert draft.config.training["method"]["num_steps"] == 3
    saved = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert saved["draftsmith_class"] == "draftsmith.models.small_model.SmallModelDraft"


def test_cached_states_without_any_layer_and_live_ones_train_the_same_student(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    steps = ("train.max_steps=4", "data.validation_share=0.0")
    no_layer = final_state_cache(inputs, tmp_path / "cache")
    runs = {
        "three layers": steps,
        "none": (*steps, f"features.cache={no_layer}"),
        "live": (*steps, "features=live", f"data.prepared={inputs.prepared}"),
    }
    found = {
        name: support.losses(
            support.run_in_process(
                support.compose(inputs, *overrides, method=method()), tmp_path / name
            )
        )
        for name, overrides in runs.items()
    }
    assert found["none"] == found["three layers"]
    assert found["live"] == pytest.approx(found["none"], rel=1e-5)


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    whole = support.compose(inputs, "train.max_steps=6", "schedule=constant", method=method())
    support.run_in_process(whole, tmp_path / "whole")
    first = support.compose(inputs, "train.max_steps=3", "schedule=constant", method=method())
    support.run_in_process(first, tmp_path / "parts")
    rows = support.run_in_process(whole, tmp_path / "parts")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    expected, found = weights_of(tmp_path / "whole" / "draft"), weights_of(tmp_path / "parts/draft")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_student_can_start_from_a_finished_one_by_init_from_or_by_name(
    inputs: support.Inputs, tmp_path: Path
) -> None:
    one_step = ("train.max_steps=1", "train.lr=1e-9", "data.validation_share=0.0")
    support.run_in_process(
        support.compose(inputs, "train.max_steps=5", method=method()), tmp_path / "first"
    )
    finished = tmp_path / "first" / "draft"
    expected = weights_of(finished)
    ways = {
        "init_from": support.compose(
            inputs, *one_step, f"init_from={finished}", method=method(init_from_target=False)
        ),
        "student": support.compose(
            inputs, *one_step, method={"_target_": METHOD, "student": str(finished)}
        ),
    }
    for name, settings in ways.items():
        support.run_in_process(settings, tmp_path / name)
        found = weights_of(tmp_path / name / "draft")
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="was trained with num_hidden_layers=2"):
        support.run_in_process(
            support.compose(
                inputs, *one_step, f"init_from={finished}", method=method(num_hidden_layers=3)
            ),
            tmp_path / "other",
        )


def test_frozen_embeddings_come_out_as_they_went_in(inputs: support.Inputs, tmp_path: Path) -> None:
    settings = support.compose(
        inputs,
        "train.max_steps=3",
        "train.precision=bf16",
        method=method(freeze_embeddings=True, objective={"name": "ce"}),
    )
    rows = support.run_in_process(settings, tmp_path)
    assert len(support.losses(rows)) == 3
    found, own = weights_of(tmp_path / "draft"), weights_of(inputs.target)
    name = "model.embed_tokens.weight"
    assert torch.equal(found[name], own[name].to(found[name].dtype))
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found[layer], own[layer].to(found[layer].dtype))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma3"])
def test_a_saved_student_of_any_family_loads_as_a_language_model_of_that_family(
    family: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    from draftsmith.train.checkpoint import save_draft

    draft, _ = build(tiny_folder(family), num_hidden_layers=2)
    save_draft(draft, draft.state_dict(), tmp_path, dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(model(ids).logits, draft.language_model(ids).logits)
    # The names are those of the family's published checkpoints.
    from safetensors import safe_open

    published = safe_open(tiny_folder(family) / "model.safetensors", "pt").keys()
    written = safe_open(tmp_path / "model.safetensors", "pt").keys()
    assert set(written) <= set(published)
