"""MTP modules of DeepSeek-V3 and GLM-4-MoE against transformers' use_mtp, in float32.

Sets of tests/golden (its README says how they were recorded): transformers/mtp-deepseek-{1,2} and
mtp-glm4-{1,2}, transformers 5.24.0: a module's states and logits at two depths, and whole greedy
runs, round by round. transformers then decodes what draftsmith-stitch makes of the same modules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import MTPCandidateGenerator

sys.path.append(str(Path(__file__).parent))

import mtp_support as support

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.foreign_files import read_tensors, write_folder
from draftsmith.models.format_mtp import LAYOUTS, draft_tensors, read_native
from draftsmith.models.mtp_native import NativeMtpDraft, native_config
from draftsmith.models.target import TargetModel
from draftsmith.models.target_source import Fingerprint

pytestmark = pytest.mark.golden
SETS = ("mtp-deepseek-1", "mtp-deepseek-2", "mtp-glm4-1", "mtp-glm4-2")
TOLERANCE = 1e-5


def target_of(folder: Path) -> TargetModel:
    """The recorded target; its tokenizer has one word per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = {f"w{token}": token for token in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    )
    fingerprint = Fingerprint(weights="golden", tokenizer="golden", chat_template="golden")
    model.requires_grad_(False)
    return TargetModel(model, tokenizer, name_or_path=str(folder), fingerprint=fingerprint)


def draft_of(folder: Path, target: TargetModel, *, steps: int) -> NativeMtpDraft:
    """The modules that the recorded target carries, with a cache for each of `steps` depths."""
    text, head = read_native(folder)
    config = native_config(
        text,
        num_modules=len(head.modules),
        concat=LAYOUTS[head.layout].concat,
        step_weights=[1.0] * steps,
        depth_attention="full",
    )
    draft = NativeMtpDraft(config).eval()
    draft.load_state_dict(draft_tensors(head.modules), strict=True)
    draft.check_block()
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    return draft


def close(found: Tensor, wanted: Tensor) -> bool:
    scale = float(wanted.abs().max())
    return float((found - wanted).detach().abs().max()) <= TOLERANCE * scale


@pytest.mark.parametrize("name", SETS)
@torch.no_grad()
def test_depths_equal_transformers(golden_folder: Path, name: str) -> None:
    folder = golden_folder / "transformers" / name
    out = load_file(folder / "golden.safetensors")
    target = target_of(folder)
    draft = draft_of(folder, target, steps=2)
    recorded = out["in.hidden_states"]
    length, embedded = recorded.shape[1], target.embed_tokens(out["in.input_ids"])
    # Tokens were recorded beyond the states: slots there see the others, not the other way round.
    state = F.pad(recorded, (0, 0, 0, embedded.shape[1] - length))
    for depth in range(2):
        normed, state = draft.depth_over_texts(depth, embedded, state)
        assert close(state[:, :length], out[f"out.depth{depth + 1}.hidden"])
        assert close(target.logits(normed[:, :length]), out[f"out.depth{depth + 1}.logits"])


class Recorder:
    """Keeps the logits of every call, a list per round."""

    def __init__(self, draft: NativeMtpDraft) -> None:
        self.rounds: list[list[Tensor]] = []
        self._read, self._extend = draft.read, draft.extend
        draft.read, draft.extend = self.read, self.extend  # type: ignore[method-assign]

    def read(self, contexts: Any, states: Any) -> Tensor:
        self.rounds.append([self._read(contexts, states)])
        return self.rounds[-1][-1]

    def extend(self, states: Any, frontiers: Any) -> Tensor:
        self.rounds[-1].append(self._extend(states, frontiers))
        return self.rounds[-1][-1]


@pytest.mark.parametrize("name", SETS)
def test_greedy_runs_equal_transformers_round_by_round(golden_folder: Path, name: str) -> None:
    folder = golden_folder / "transformers" / name
    out = load_file(folder / "golden.safetensors")
    recorded: dict[str, Any] = json.loads((folder / "golden.json").read_text())
    target = target_of(folder)
    steps = recorded["num_mtp_layers"]
    draft = draft_of(folder, target, steps=steps)
    recorder = Recorder(draft)
    for index, case in enumerate(recorded["decode"]["cases"]):
        recorder.rounds.clear()
        prompt = out[f"case{index}.prompt"][0].tolist()
        request = Request(prompt, max_new_tokens=case["max_new_tokens"])
        (made,) = Engine(target, draft, ChainPolicy(steps)).run([request])
        assert prompt + made.token_ids == out[f"case{index}.output_ids"][0].tolist()
        assert [one.accepted for one in made.rounds] == case["n_matches"]
        assert [one.emitted for one in made.rounds] == [
            len(one["new_tokens"]) for one in case["rounds"]
        ]
        assert len(recorder.rounds) >= len(made.rounds) - 1
        for number, logits in enumerate(recorder.rounds):
            # Near the end of the text ours are as many as can still be used.
            found = torch.cat(logits)
            assert close(found, out[f"case{index}.round{number}.draft_logits"][: len(found)])


@pytest.mark.parametrize("name", SETS)
def test_a_stitched_head_is_the_recorded_checkpoint_and_transformers_decodes_it(
    golden_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = golden_folder / "transformers" / name
    recorded = json.loads((folder / "golden.json").read_text())
    steps, layers = recorded["num_mtp_layers"], recorded["num_hidden_layers"]
    whole = load_file(folder / "model.safetensors")
    modules = tuple(f"model.layers.{layers + index}." for index in range(steps))
    bare = {name: tensor for name, tensor in whole.items() if not name.startswith(modules)}
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    write_folder(tmp_path / "bare", config, bare)
    draft_of(folder, target_of(folder), steps=steps).save_pretrained(tmp_path / "draft")
    made = support.stitched(
        tmp_path / "draft", tmp_path / "bare", tmp_path / "made", layout="deepseek"
    )

    found = read_tensors(made.folder)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    out = load_file(folder / "golden.safetensors")
    for index, case in enumerate(recorded["decode"]["cases"]):
        tokens, matches = use_mtp(made.folder, out[f"case{index}.prompt"], case["max_new_tokens"])
        assert torch.equal(tokens, out[f"case{index}.output_ids"])
        assert matches == case["n_matches"]


def use_mtp(folder: Path, prompt: Tensor, max_new_tokens: int) -> tuple[Tensor, list[int]]:
    """transformers' greedy tokens with the modules of a checkpoint, and the matches per round."""
    config = AutoConfig.from_pretrained(folder)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_mtp_layers)
    matches: list[int] = []

    def note(_self: Any, _ids: Any, _scores: Any, num_matches: int) -> None:
        matches.append(int(num_matches))

    with pytest.MonkeyPatch.context() as patch:
        # It finds the modules by the layer numbers of the published models alone.
        names = [rf"model\.layers\.{number}\..*" for number in layers]
        patch.setattr(kind, "_keys_to_ignore_on_load_unexpected", names)
        patch.setattr(MTPCandidateGenerator, "update_candidate_strategy", note)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = model.generate(
            prompt, use_mtp=True, do_sample=False, max_new_tokens=max_new_tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return tokens, matches[1:]  # The first forward reads the prompt and drafts nothing.
