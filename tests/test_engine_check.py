"""What `make engine-check` decides, without the engines: rounds by vLLM's rules, and complaints."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import RoundRecord
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Draft
from draftsmith.models.protocols import (
    DraftContext,
    ObjectiveOutput,
    Predictions,
    SamplingSettings,
)
from draftsmith.models.target import TargetModel
from draftsmith.models.vocabulary_map import set_draft_vocabulary

BENCH = Path(__file__).parent.parent / "bench"
DEPTH = 3


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("engine_check", BENCH / "engine_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_check"] = module  # Dataclasses look their module up there.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare(check: ModuleType) -> ModuleType:  # noqa: ARG001 (it puts bench on the path)
    return sys.modules["engine_compare"]


@pytest.fixture(scope="module")
def ours(check: ModuleType) -> ModuleType:  # noqa: ARG001 (it puts bench on the path)
    return sys.modules["engine_ours"]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., TargetModel]) -> TargetModel:
    return tiny_target("llama")


def prompts(count: int = 6) -> list[list[int]]:
    """Of 5 to 9 tokens, no end-of-text among them."""
    numbers = torch.Generator().manual_seed(1)
    return [
        torch.randint(4, 300, (5 + index % 5,), generator=numbers).tolist()
        for index in range(count)
    ]


def record(accepted: int, *, depth: int = DEPTH, emitted: int | None = None) -> RoundRecord:
    emitted = accepted + 1 if emitted is None else emitted
    return RoundRecord(depth, depth, accepted, emitted, 0.0, 0.0, 0.0)


def counts(rounds: list[RoundRecord]) -> list[tuple[int, int, int, int]]:
    return [(one.proposed, one.depth, one.accepted, one.emitted) for one in rounds]


# Rounds.


def test_rounds_that_begin_behind_the_limit_are_dropped_and_the_last_one_is_whole(
    compare: ModuleType,
) -> None:
    # Text lengths before the rounds: 1, 3, 7, 8; a text of 8 needs the first three only.
    rounds = [record(1), record(3), record(0), record(2)]
    assert compare.rounds_until(rounds, 8) == rounds[:3]
    assert compare.rounds_until(rounds, 7) == rounds[:2]
    assert compare.rounds_until(rounds, 1) == []


@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 16])
def test_limited_rounds_are_those_of_a_decoder_that_knows_the_limit(
    compare: ModuleType, target: TargetModel, noisy_copy: Any, tokens: int
) -> None:
    draft = noisy_copy(target, 1.0)
    engine = Engine(target, draft, ChainPolicy(DEPTH))
    roomy = engine.run([Request(prompt, tokens + DEPTH) for prompt in prompts()])
    exact = engine.run([Request(prompt, tokens) for prompt in prompts()])
    kept = [compare.rounds_until(one.rounds, tokens) for one in roomy]
    assert any(one.accepted for rounds in kept for one in rounds), "the draft is sometimes right"
    for rounds, one in zip(kept, exact, strict=True):
        assert counts(compare.rounds_with_limit(rounds, tokens)) == counts(one.rounds)


def test_our_answers_have_full_drafts_in_every_round_and_plain_ones_none(
    ours: ModuleType, target: TargetModel, noisy_copy: Any
) -> None:
    tokens = 16
    answers, reported = ours.decode_ours(
        target, noisy_copy(target, 1.0), prompts(), tokens=tokens, depth=DEPTH
    )
    plain, _ = ours.decode_ours(target, None, prompts(), tokens=tokens, depth=0)
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
    assert all(one.num_drafts == 0 for one in plain)
    assert reported.accepted_length_vllm is not None
    for answer in answers:
        # What the counters promise: the rounds' tokens, cut or not, reach the end of the text.
        rounds, accepted = answer.num_drafts, sum(answer.accepted_by_position)
        assert len(answer.token_ids) - 1 <= rounds + accepted < len(answer.token_ids) + DEPTH
        assert answer.accepted_by_position == sorted(answer.accepted_by_position, reverse=True)


def test_totals_follow_vllms_definition(compare: ModuleType) -> None:
    answers = [compare.Answer([5], 4, [2, 1, 0]), compare.Answer([6], 6, [3, 1, 1])]
    total = compare.add_up(answers)
    assert (total.drafts, total.accepted) == (10, 8)
    assert total.accepted_length == pytest.approx(1.8)
    assert total.by_position == pytest.approx([0.5, 0.2, 0.1])


# Complaints.


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([], [7], 0),
    ],
)
def test_first_difference(
    compare: ModuleType, ours: list[int], theirs: list[int], place: int | None
) -> None:
    assert compare.first_difference(ours, theirs) == place


def test_a_text_may_part_at_a_near_tie_only(
    compare: ModuleType, ours: ModuleType, target: TargetModel
) -> None:
    plain, _ = ours.decode_ours(target, None, prompts(2), tokens=6, depth=0)
    ids = plain[0].token_ids
    other = [*ids[:3], (ids[3] + 1) % 300, *ids[4:]]
    changed = [compare.Answer(other, 0, []), compare.Answer(plain[1].token_ids[:4], 0, [])]
    partings = ours.find_partings(target, prompts(2), plain, changed)
    assert [(one.prompt, one.token) for one in partings] == [(0, 3), (1, 4)]
    text = torch.tensor([[*prompts(2)[0], *ids[:3]]])
    logits = target.model(input_ids=text).logits[0, -1]
    assert partings[0].logit_gap == pytest.approx(
        float(logits[ids[3]] - logits[other[3]]), rel=1e-4
    )
    found = compare.text_problems("eagle3, vLLM", partings)
    assert len(found) == 2
    assert "prompt 0 parts from our plain text at token 3" in found[0]
    partings[0].logit_gap, partings[1].logit_gap = compare.TIE / 2, float("nan")
    assert len(compare.text_problems("eagle3, vLLM", partings)) == 1, "a tie is none, nan is one"


def totals(compare: ModuleType, drafts: int, by_position: list[int], prompts: int = 8) -> Any:
    empty = [compare.Answer([], 0, [0] * len(by_position))] * (prompts - 1)
    return compare.add_up([compare.Answer([], drafts, by_position), *empty])


def test_counts_must_agree_in_total_and_prompt_by_prompt(compare: ModuleType) -> None:
    ours, near, far = (
        totals(compare, drafts, by_position)
        for drafts, by_position in ((100, [50, 20]), (100, [47, 20]), (100, [44, 20]))
    )
    assert compare.count_problems("eagle3", ours, ours, 8) == []
    assert compare.count_problems("eagle3", ours, near, 6) == [], "1.8 % and a near tie or two"
    (problem,) = compare.count_problems("eagle3", ours, near, 5)
    assert "only 5 of 8 prompts" in problem
    (problem,) = compare.count_problems("eagle3", ours, far, 8)
    assert "1.640 in vLLM, 1.700 here (-3.5%, allowed 3%)" in problem
    assert compare.count_problems("eagle3", ours, totals(compare, 0, [0, 0]), 0)
    assert compare.count_problems("eagle3", compare.add_up([]), compare.add_up([]), 0)


def test_prompts_with_equal_counts(compare: ModuleType) -> None:
    one, other, third = (
        compare.Answer([1], drafts, [accepted]) for drafts, accepted in ((4, 2), (4, 1), (5, 2))
    )
    assert compare.equal_counts([one, one, one], [one, other, third]) == 1


def test_losses_must_agree_step_by_step_over_the_same_predictions(compare: ModuleType) -> None:
    assert compare.loss_problems("eagle3", [2.0, 3.0], [2.0001, 3.0], [9, 9], 9) == []
    (problem,) = compare.loss_problems("eagle3", [2.0, 3.0], [2.0, 3.001], [9, 9], 9)
    assert "step 1 has loss 3.001000, ours is 3.000000" in problem
    assert compare.loss_problems("eagle3", [2.0], [float("nan")], [9], 9)
    (problem,) = compare.loss_problems("eagle3", [2.0], [2.0], [8], 9)
    assert "step 0 counts 8 predictions, ours 9" in problem


def test_vllms_counters_are_read_and_must_agree_among_themselves(
    check: ModuleType, compare: ModuleType
) -> None:
    one = {
        "token_ids": [4, 5],
        "num_drafts": 3,
        "num_accepted_tokens": 2,
        "accepted_by_position": [2, 0],
    }
    assert check.read_vllm({"answers": [one]}) == [compare.Answer([4, 5], 3, [2, 0])]
    with pytest.raises(AssertionError, match="counts each token once"):
        check.read_vllm({"answers": [one | {"num_accepted_tokens": 3}]})


# Our side of the loss.


class PlainDivergence:
    """An objective straight from the definition: KL(target || draft) over the draft vocabulary."""

    def __call__(self, predictions: Predictions, target_head: nn.Module) -> ObjectiveOutput:
        ids = predictions.draft_to_target
        assert ids is not None
        logits = target_head(predictions.target_hidden)
        known = torch.isin(logits.argmax(-1), ids)
        target = torch.log_softmax(logits[:, ids].double(), -1)
        draft = predictions.draft_hidden @ predictions.draft_head_weight.T
        draft = torch.log_softmax(draft.double(), -1)
        loss = (target.exp() * (target - draft)).sum(-1) * known  # [steps, rows]
        flat = torch.zeros_like(loss)
        return ObjectiveOutput(loss.sum(), loss.sum(-1), flat.bool(), flat, known)


def make_draft(target: TargetModel) -> Eagle3Draft:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = Eagle3Draft(
            Eagle3Config(
                hidden_size=target.hidden_size, intermediate_size=48, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=target.vocab_size, draft_vocab_size=200,
                aux_layer_ids=[0, 2], step_weights=[1.0, 0.5], mask_alignment="feature",
            )
        )  # fmt: skip
    set_draft_vocabulary(draft, torch.arange(200) + 20)
    draft.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    return draft.eval()


def test_our_losses_are_the_plain_divergence_at_the_places_handed_over(
    ours: ModuleType, target: TargetModel
) -> None:
    answers, _ = ours.decode_ours(target, None, prompts(3), tokens=12, depth=0)
    draft = make_draft(target)
    batch, before_norm = ours.make_batch(target, draft.aux_layer_ids, prompts(3), answers)
    found, places = ours.our_losses(target, draft, batch)
    with torch.no_grad():
        sums = draft(batch, target_head=target.head(), objective=PlainDivergence()).sums
    count = int(places.sum())
    assert 0 < count < int(batch.supervised_mask.sum()), (
        "some best tokens are not in the vocabulary"
    )
    assert sums["in_vocabulary"].tolist() == [count] * ours.LOSS_STEPS
    expected = [loss / count for loss in sums["loss"].tolist()]
    assert found == pytest.approx(expected, rel=1e-5)

    normed: Tensor = target.model.model.norm(before_norm)
    keep = batch.keep_mask
    torch.testing.assert_close(normed[keep], batch.final_hidden_states[keep], rtol=1e-5, atol=1e-5)
    for row, (prompt, answer) in enumerate(zip(prompts(3), answers, strict=True)):
        text = [*prompt, *answer.token_ids]
        assert batch.input_ids[row, : len(text)].tolist() == text
        assert batch.supervised_mask[row].nonzero().flatten().tolist() == list(
            range(len(prompt), len(text))
        )
        # The last token of the prompt teaches first, the last one of the text never.
        assert set(places[row].nonzero().flatten().tolist()) <= set(
            range(len(prompt) - 1, len(text) - 1)
        )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@torch.no_grad()
def test_a_blocks_loss_is_the_weighted_divergence_over_all_predictions(
    ours: ModuleType, target: TargetModel, kind: str
) -> None:
    answers, _ = ours.decode_ours(target, None, prompts(2), tokens=10, depth=0)
    method = {
        "dflash": lambda: DFlashMethod(block_size=5, **BLOCK),
        "dspark": lambda: DSparkMethod(block_size=4, markov_rank=6, **BLOCK),
    }[kind]()
    torch.manual_seed(0)
    draft = method.build(target.head(), None, (0, 2)).eval()
    batch, _ = ours.make_batch(target, (0, 2), prompts(2), answers)
    found, count, anchors, mask = ours.block_loss(target, draft, batch)
    # DFlash: every token of both answers; DSpark: the one before each. Not the last block's.
    first = int(kind == "dspark")
    assert anchors == 2 * 10 - draft.config.block_size + first
    assert int(mask.sum()) == 2 * 10
    assert bool(mask[0, len(prompts(2)[0]) - first])
    total, places = 0.0, 0
    for row, (prompt, answer) in enumerate(zip(prompts(2), answers, strict=True)):
        text = [*prompt, *answer.token_ids]
        last = len(text) - (draft.config.block_size if row == 1 else 0)
        for anchor in range(len(prompt) - first, min(last, len(text) - first)):
            state = draft.start(64)
            context = DraftContext(
                torch.tensor([text[: anchor + 1]]),
                batch.aux_hidden_states[row : row + 1, :anchor],
                batch.final_hidden_states[row : row + 1, :anchor],
            )
            hidden = block_states(draft, context, state)
            for step, label in enumerate(range(anchor + 1, min(anchor + 5, len(text)))):
                logits = target.head()(hidden[step])
                if kind == "dspark":  # Follows the text, not what was drafted.
                    read = draft.markov_head.markov_w1.weight[text[label - 1]]
                    logits = logits + draft.markov_head.markov_w2.weight @ read
                q = logits.double().log_softmax(-1)
                p = target.head()(batch.final_hidden_states[row, label - 1]).double()
                p = p.log_softmax(-1)
                weight = float(torch.exp(torch.tensor(-step / 4.0)))
                total += weight * float((p.exp() * (p - q)).sum())
                places += 1
    assert count == places
    assert found == pytest.approx(total / places, rel=1e-4)


BLOCK: dict[str, Any] = {"num_hidden_layers": 1, "mask_token_id": 319, "head_dim": 16}


def block_states(draft: Any, context: DraftContext, state: Any) -> Tensor:
    """[steps, hidden] that a block's predictions are made of."""
    found: list[Tensor] = []
    hook = draft.norm.register_forward_hook(lambda *call: found.append(call[2]))
    draft.propose(
        [context],
        [state],
        num_draft_tokens=[draft.config.num_steps],
        sampling=[SamplingSettings()],
        generators=[None],
    )
    hook.remove()
    return found[0][draft.config.first_slot :]


# The child processes.


def run(check: ModuleType, tmp_path: Path, text: str) -> Any:
    script = tmp_path / "child.py"
    script.write_text(text)
    settings = argparse.Namespace(work=tmp_path, engine_python=Path(sys.executable), threads=1)
    return check.run_child(settings, str(script), {"number": 4}, name="child")


def test_a_child_gets_the_request_and_gives_the_answer(check: ModuleType, tmp_path: Path) -> None:
    answer = run(
        check,
        tmp_path,
        "import json, os, sys\n"
        "request = json.load(open(sys.argv[1]))\n"
        "answer = {'twice': 2 * request['number'], 'threads': os.environ['OMP_NUM_THREADS']}\n"
        "json.dump(answer, open(sys.argv[2], 'w'))\n",
    )
    assert answer == {"twice": 8, "threads": "1"}


@pytest.mark.parametrize("ending", ["sys.exit(3)", "pass"])
def test_a_child_that_fails_or_leaves_no_answer_shows_the_end_of_its_log(
    check: ModuleType, tmp_path: Path, ending: str
) -> None:
    with pytest.raises(RuntimeError, match="the engine said this"):
        run(check, tmp_path, f"import sys\nprint('the engine said this')\n{ending}\n")


def test_a_child_that_hangs_is_ended(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CHILD_SECONDS", 1)
    with pytest.raises(RuntimeError, match="nothing after 1 s"):
        run(check, tmp_path, "import time\ntime.sleep(60)\n")
