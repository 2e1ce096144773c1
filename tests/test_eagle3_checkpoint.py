"""EAGLE-3 checkpoints, options and what is taken over from the target."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.draft_sizes import draft_layer_sizes, draft_rope_parameters
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft, Eagle3Method
from draftsmith.models.load import load_draft
from draftsmith.models.protocols import (
    DraftContext,
)
from draftsmith.models.vocabulary_map import set_draft_vocabulary

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 40, 24, 32, 2


def make_draft(*, seed: int = 0, **overrides: Any) -> Eagle3Draft:
    """A random float32 draft over three of five tokens, with random embeddings."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 128,
        "aux_layer_ids": list(range(LAYERS)),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(Eagle3Config(**(settings | overrides)))
        for parameter in draft.parameters():
            if parameter.ndim == 1:  # A forgotten norm weight must show.
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        embeddings = nn.Embedding(VOCAB, HIDDEN)
    if draft.config.draft_vocab_size < VOCAB:
        ids = [token for token in range(VOCAB) if token % 5 not in (1, 4)]
        set_draft_vocabulary(draft, torch.tensor(ids))
    draft.attach_target(embed_tokens=embeddings.requires_grad_(False))
    return draft.eval()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_layers": {"num_hidden_layers": 2},
    "qk_norm_and_bias": {"qk_norm": True, "attention_bias": True},
    "norm_output": {"norm_output": True},
    "own_head_dim": {"head_dim": 16},
    "full_vocabulary": {"draft_vocab_size": VOCAB},
}


def make_context(length: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random committed tokens [1, length] and features of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, length), generator=generator)
    return ids, torch.randn(1, length - 1, LAYERS * HIDDEN, generator=generator)


def context_of(ids: Tensor, features: Tensor, new: int) -> DraftContext:
    """The context of a round that commits the last `new` features."""
    aux = features[:, features.shape[1] - new :]
    return DraftContext(ids, aux, aux[..., :HIDDEN])


def saved(draft: Eagle3Draft, folder: Path) -> Path:
    """The draft saved as the training loop saves it."""
    draft.save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the stored tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_draft_loads_bit_for_bit_and_drafts_the_same(
    variant: str, tmp_path: Path, draft_chain: Callable[..., Any]
) -> None:
    draft = make_draft(**VARIANTS[variant])
    draft.config.target_fingerprint = {"weights": "a", "tokenizer": "b", "chat_template": "c"}
    draft.config.training = {"lr": 1e-3}  # What the training loop notes down comes along.
    loaded = load_draft(saved(draft, tmp_path))
    assert loaded.config.training == {"lr": 1e-3}
    assert loaded.config.target_fingerprint == draft.config.target_fingerprint
    assert loaded.aux_layer_ids == draft.aux_layer_ids
    own, other = draft.state_dict(), loaded.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    loaded.attach_target(embed_tokens=draft._target_embeddings[0])
    ids, features = make_context(8)
    made = [draft_chain(model, context_of(ids, features, 7), 4) for model in (draft, loaded)]
    assert torch.equal(made[0].tokens, made[1].tokens)


def test_the_file_has_the_published_names_and_the_config_every_field(tmp_path: Path) -> None:
    draft = make_draft(head_dim=16, qk_norm=True, norm_output=True)
    folder = saved(draft, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"self_attn.{n}_proj" for n in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    names = {f"layers.0.{name}.weight" for name in layer}
    names |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors.keys() == names
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    marked = tensors["t2d"].nonzero().squeeze(-1)
    assert torch.equal(marked, torch.arange(DRAFT_VOCAB) + tensors["d2t"])
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "head_dim": 16, "norm_output": True, "qk_norm": True, "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB, "vocab_size": VOCAB, "target_hidden_size": HIDDEN,
        "num_hidden_layers": 1, "max_position_embeddings": 128, "aux_layer_ids": [0, 1],
        "draftsmith_class": "draftsmith.models.eagle3.Eagle3Draft",
    }  # fmt: skip
    assert {name: config.get(name) for name in expected} == expected
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_a_full_vocabulary_has_no_map_and_an_old_config_no_norm_output(tmp_path: Path) -> None:
    folder = saved(make_draft(draft_vocab_size=VOCAB), tmp_path)
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
    config = json.loads((folder / "config.json").read_text())
    del config["norm_output"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_draft(folder).config.norm_output is False


def test_a_file_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    def check(change: Callable[[dict[str, Tensor]], None], message: str) -> None:
        folder = saved(make_draft(), tmp_path)
        rewrite(folder, change)
        with pytest.raises(ValueError, match=message):
            load_draft(folder)

    def replace(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
        return lambda tensors: tensors.update({name: value})

    check(lambda tensors: tensors.pop("lm_head.weight"), "Missing: lm_head.weight")
    check(lambda tensors: tensors.pop("t2d"), "Missing: t2d")
    check(replace("extra", torch.zeros(1)), "Unexpected: extra")
    check(replace("norm.weight", torch.zeros(0)), r"norm.weight is \[0\], expected \[32\]")
    absolute = make_draft().t2d.nonzero().squeeze(-1)
    check(replace("d2t", absolute), "d2t holds absolute target ids")
    check(replace("t2d", torch.zeros(VOCAB, dtype=torch.bool)), "d2t and t2d disagree")


def test_a_folder_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config.json"):
        load_draft(tmp_path)
    folder = saved(make_draft(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, message in (
        ("os.path.Eagle3Draft", "not a draft model saved by draftsmith"),
        ("draftsmith.models.eagle3.Eagle9Draft", "does not have"),
        ("draftsmith.models.eagle9.Eagle3Draft", "does not have"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"draftsmith_class": name}))
        with pytest.raises(ValueError, match=message):
            load_draft(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing"):
        load_draft(folder)


def test_sharded_checkpoints_and_other_dtypes_load(
    tmp_path: Path, draft_chain: Callable[..., Any]
) -> None:
    draft = make_draft()
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = load_draft(tmp_path, dtype="bfloat16")
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert loaded.d2t.dtype == torch.int64
    assert torch.equal(loaded.fc.weight, draft.fc.weight.bfloat16())
    loaded.attach_target(embed_tokens=draft._target_embeddings[0])
    ids, features = make_context(8)
    made = draft_chain(loaded, context_of(ids, features, 7), 3)
    assert len(made.tokens) == 3


def test_a_draft_vocabulary_that_does_not_fit_is_refused() -> None:
    draft = make_draft()
    with pytest.raises(ValueError, match="ascending, distinct"):
        set_draft_vocabulary(draft, torch.arange(DRAFT_VOCAB).flip(0))
    with pytest.raises(ValueError, match=f"from 0 to {VOCAB - 1}"):
        set_draft_vocabulary(draft, torch.arange(VOCAB - DRAFT_VOCAB + 1, VOCAB + 1))
    with pytest.raises(ValueError, match=r"has \(3,\) entries, the draft model 24"):
        set_draft_vocabulary(draft, torch.arange(3))
    with pytest.raises(ValueError, match="draft_vocab_size is 41, expected 1 to 40"):
        make_draft(draft_vocab_size=VOCAB + 1)


# Rotary embeddings of the target.


def test_scaled_rotary_embeddings_of_the_target_are_kept() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    target = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=VOCAB, max_position_embeddings=1024, rope_parameters=rope,
    )  # fmt: skip
    config = Eagle3Config(
        **draft_layer_sizes(target, {}), aux_layer_ids=[1], vocab_size=VOCAB, num_hidden_layers=1
    )
    draft = Eagle3Draft(config)
    cos, sin = LlamaRotaryEmbedding(target)(torch.zeros(1), torch.tensor([[300]]))
    own_cos, own_sin = draft._rope_table(301)
    torch.testing.assert_close(own_cos[300], cos[0])
    torch.testing.assert_close(own_sin[300], sin[0])
    plain, _ = LlamaRotaryEmbedding(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4))(
        torch.zeros(1), torch.tensor([[300]])
    )
    assert not torch.allclose(own_cos[300], plain[0], atol=1e-2)
    assert config.max_position_embeddings == 1024


def test_rotary_settings_per_layer_type_give_those_of_full_attention() -> None:
    """M03; M10: the three rows of mrope are equal on text, so its sections are dropped."""

    class Config:
        rope_parameters: Any = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }

    assert draft_rope_parameters(Config())["rope_theta"] == 1e6
    Config.rope_parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="none for full_attention"):
        draft_rope_parameters(Config())
    Config.rope_parameters = {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 2, 1],
    }  # fmt: skip
    assert draft_rope_parameters(Config()) == {"rope_type": "default", "rope_theta": 1e4}


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": "7"}, r"method.num_steps is '7', expected an integer >= 1"),
        ({"num_steps": True}, "method.num_steps is True"),
        ({"num_hidden_layers": 0}, "method.num_hidden_layers is 0"),
        ({"draft_vocab_size": 0}, "expected an integer >= 1 or null"),
        ({"qk_norm": 1}, "method.qk_norm is 1, expected true or false"),
        ({"mask_alignment": "labels"}, "Did you mean 'label'"),
        ({"normalisation": "tokens"}, "expected one of supervised, batch_tokens"),
        ({"init_head": "zero"}, "expected one of target, random"),
        ({"aux_layer_ids": [1, 2.5]}, "expected a list of integers"),
        ({"step_decay": 0}, "method.step_decay is 0"),
        ({"step_weights": [1.0, 0.5]}, "expected 7 numbers >= 0"),
        ({"objective": "kl"}, "expected a mapping with a name"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3Method(**options)


def test_options_that_do_not_fit_the_target_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_vocab_size is 32000, but the target has 320"):
        Eagle3Method().validate(8, 320)
    with pytest.raises(ValueError, match="40"):
        Eagle3Method(aux_layer_ids=[1, 40], draft_vocab_size=None).validate(36, 320)
    Eagle3Method(aux_layer_ids=[1, 17, 32]).validate(36, 151936)


def test_the_preset_holds_exactly_the_defaults_of_the_method() -> None:
    from omegaconf import OmegaConf

    import draftsmith.conf

    folder = Path(draftsmith.conf.__path__[0])
    node: Any = OmegaConf.to_container(OmegaConf.load(folder / "method" / "eagle3.yaml"))
    assert node.pop("_target_") == "draftsmith.models.eagle3.Eagle3Method"
    assert node == dataclasses.asdict(Eagle3Method())
