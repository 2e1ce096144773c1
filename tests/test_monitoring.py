"""What training reports against what decoding measures, on a tiny pair that is right half the time.

float32. The walk through the rounds must give decoding's own rounds; the mean over all starts is an
estimate and must come within a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.conf.schema import TargetConfig
from draftsmith.inference.decode import generate
from draftsmith.inference.policies import ChainPolicy
from draftsmith.models.dflash import DFlashMethod
from draftsmith.models.dspark import DSparkMethod
from draftsmith.models.eagle import EagleMethod
from draftsmith.models.eagle3 import Eagle3Method
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.simulated_rounds import simulated_rounds
from draftsmith.models.small_model import SmallModelMethod
from draftsmith.models.target import TargetModel
from draftsmith.train.objectives import make_objective
from draftsmith.train.sums import Sums, as_metrics

TEXTS, PROMPT, ANSWER, STEPS = 12, 6, 30, 3
MASK = 319
"""The last id of the target's embeddings, which no answer contains."""


@dataclass
class Vocabulary:
    draft_to_target: Tensor


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> TargetModel:
    return tiny_target("llama", seed=4)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> Tensor:
    """[TEXTS, PROMPT + ANSWER] prompts with the target's greedy answers."""
    prompts = torch.randint(4, 300, (TEXTS, PROMPT), generator=torch.Generator().manual_seed(0))
    answers = []
    for prompt in prompts:
        made = generate(target, None, prompt[None], max_new_tokens=ANSWER)
        answers.append(made.token_ids)
    assert all(len(answer) == ANSWER for answer in answers), "no answer may end early"
    return torch.cat([prompts, torch.tensor(answers)], dim=1)


def make_batch(target: TargetModel, texts: Tensor) -> TrainBatch:
    output = target.forward(texts, aux_layer_ids=[0, 1, 2])
    seq = texts.shape[1]
    return TrainBatch(
        input_ids=texts,
        supervised_mask=(torch.arange(seq) >= PROMPT).expand_as(texts),
        keep_mask=torch.ones_like(texts, dtype=torch.bool),
        position_ids=torch.arange(seq).expand_as(texts),
        aux_hidden_states=output.aux_hidden_states,
        final_hidden_states=output.final_hidden_states,
    )


def eagle3(target: TargetModel) -> Any:
    # A vocabulary that lacks tokens of the answers: they count as misses.
    ids = torch.tensor([token for token in range(320) if token % 7])
    method = Eagle3Method(num_steps=STEPS, draft_vocab_size=len(ids))
    return method.build(target.head(), Vocabulary(ids), [0, 1, 2])


def eagle(target: TargetModel) -> Any:
    method = EagleMethod(num_steps=STEPS, intermediate_size=128, feature_noise="none")
    return method.build(target.head(), None, [])


def small_model(target: TargetModel) -> Any:
    settings = asdict(TargetConfig(name_or_path=target.name_or_path, dtype="float32"))
    method = SmallModelMethod(num_hidden_layers=2, num_steps=STEPS)
    return method.build(target.head(), None, (), target=settings)


def dflash(target: TargetModel) -> Any:
    method = DFlashMethod(num_hidden_layers=1, block_size=STEPS + 1, mask_token_id=MASK)
    return method.build(target.head(), None, [0, 1, 2])


def dspark(target: TargetModel) -> Any:
    method = DSparkMethod(num_hidden_layers=1, block_size=STEPS, markov_rank=8, mask_token_id=MASK)
    return method.build(target.head(), None, [0, 1, 2])


METHODS = {
    "eagle3": (eagle3, 50),
    "eagle": (eagle, 60),
    "small_model": (small_model, 20),
    "dflash": (dflash, 70),
    "dspark": (dspark, 40),
}


class OneProcess:
    """The accelerator's part that `Sums.reduced` uses."""

    num_processes = 1

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:  # noqa: ARG002
        return tensor


def metrics_of(draft: Any, target: TargetModel, batch: TrainBatch) -> dict[str, Any]:
    """The validation row of a batch."""
    sums = Sums()
    with torch.no_grad():
        output = draft.eval()(batch, target_head=target.head(), objective=make_objective("kl"))
    sums.add(output, batch, draft.normaliser(batch), counted=True)
    return as_metrics(sums.reduced(OneProcess()))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_the_simulation_predicts_what_decoding_measures(
    name: str, target: TargetModel, texts: Tensor
) -> None:
    build, updates = METHODS[name]
    torch.manual_seed(0)
    draft = build(target)
    batch = make_batch(target, texts)
    optimizer = torch.optim.AdamW(draft.train().parameters(), lr=1e-2)
    for _ in range(updates):
        output = draft(batch, target_head=target.head(), objective=make_objective("kl"))
        (output.loss_sum / draft.normaliser(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    row = metrics_of(draft, target, batch)
    emitted, rounds = 0, 0
    for text in texts:
        made = generate(
            target, draft, text[None, :PROMPT], max_new_tokens=ANSWER, policy=ChainPolicy(STEPS)
        )
        assert made.token_ids == text[PROMPT:].tolist()
        emitted += sum(record.emitted for record in made.rounds)
        rounds += len(made.rounds)
    measured = emitted / rounds
    assert 1.3 < measured < STEPS + 0.7, "the draft must be right sometimes, not always"
    assert row["simulated_accepted_length_rounds"] == pytest.approx(measured, rel=1e-9)
    assert row["simulated_accepted_length_greedy"] == pytest.approx(measured, rel=0.1)


def walk(starts: list[int], accepted: list[int]) -> tuple[int, int]:
    found = simulated_rounds(torch.tensor([starts]).bool(), torch.tensor([accepted]))
    return int(found["rounds"]), int(found["round_tokens"])


def test_the_walk_starts_rounds_where_decoding_would() -> None:
    # The example of the module: a chain of two gets b c, then e, then g.
    assert walk([0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 2, 1, 0, 1, 0, 1]) == (3, 6)
    # Nothing is ever right: one round per token, the answer's first token apart.
    assert walk([0, 0, 1, 1, 1, 1], [0] * 6) == (3, 3)
    # Two answers in one row, each with a first token from prefill.
    assert walk([1, 1, 1, 0, 1, 1], [0] * 6) == (3, 3)
    # An answer of one token needs no round; a chain that runs to the end has no bonus token.
    assert walk([0, 1, 0, 0], [0, 1, 0, 0]) == (0, 0)
    assert walk([0, 1, 1, 1, 0], [0, 3, 2, 1, 0]) == (1, 2)
