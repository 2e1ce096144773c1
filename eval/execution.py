"""draftsmith-simulate execute.draft=...: loads served for real, beside what simulation expects.

    draftsmith-simulate execute.draft=runs/dspark target=smollm2 target.dtype=float32 \\
        target_profile=runs/profile/profile.json output=runs/executed

For every load and every verification policy the engine answers the same requests with the real
target and the real draft model, greedily: closed loop with `execute.num_slots` requests always in
flight, open loop with Poisson arrivals. In order:

1. Every prompt is answered plainly: the texts that all others must equal.
2. Every prompt is answered with all drafted tokens verified, which records its rounds.
3. Per load, a short untimed run warms up and measures the time of drafting. The schedulers get it,
   with the measured curve at the mean context length of the requests.
4. All policies serve the load in turns, `execute.repeats` times.
5. `draftsmith.eval.load_simulation` serves the same requests on paper: their own recorded rounds
   and lengths, the same curve, the same time of drafting.

What is measured contains what the simulation leaves out: prompts are read, contexts grow, the host
needs its time. The report tells their shares.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from draftsmith.conf.schema_serving import SimulateConfig
from draftsmith.eval.conditions import describe_conditions
from draftsmith.eval.curve import StepsPerSecond
from draftsmith.eval.evaluate import load_draft_for
from draftsmith.eval.execution_report import write_execution
from draftsmith.eval.load_simulation import (
    DraftRound,
    LoadResult,
    OfferedRequest,
    ServedRequest,
    StepRecord,
    percentile,
    poisson_arrivals,
    simulate_closed_loop,
    simulate_open_loop,
)
from draftsmith.eval.prompts import encode_turn, load_prompts
from draftsmith.eval.report import report_console
from draftsmith.eval.simulate import (
    beside_best_fixed,
    continued_curve,
    load_row,
    make_policies,
)
from draftsmith.inference.engine import Engine, Request, Serving
from draftsmith.inference.length_policies import LengthPolicy, StaticThreshold
from draftsmith.inference.plain import find_divergence
from draftsmith.inference.policies import ChainPolicy
from draftsmith.inference.records import EngineStep, Generation
from draftsmith.models.protocols import Drafter
from draftsmith.models.target import TargetModel

WARM_UP_TOKENS = 24
"""Length limit of the untimed answers whose drafting is clocked (our choice)."""
WARM_UP_STEPS = 2
"""Of these, steps that are not clocked: first calls allocate."""


@dataclass(frozen=True)
class Asked:
    """One request of a load."""

    prompt: int
    """Which prompt."""
    limit: int
    """Length limit in tokens."""


@dataclass
class Executed:
    """What serving one load with one policy took; several runs add up."""

    result: LoadResult
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    """Of every served request, from its arrival on (closed loop: from entering)."""
    texts: list[tuple[Asked, list[int]]] = field(default_factory=list)
    """Of all requests, those behind the last full step included."""

    def count(self, step: EngineStep, seconds: float) -> None:
        """Adds a step that took `seconds`; reading prompts emits nothing that counts."""
        self.result.seconds += seconds
        if step.reads_prompts:
            self.prefill_s += step.seconds
            return
        self.draft_s += step.draft_seconds
        self.verify_s += step.verify_seconds
        self.result.steps.append(
            StepRecord(seconds, step.num_requests, step.verified, step.emitted)
        )

    def serve(self, generation: Generation, arrived_s: float, *, closed: bool) -> None:
        """Adds a request that got its whole answer."""
        waited = generation.waited_seconds
        admitted = arrived_s + waited
        self.result.served.append(
            ServedRequest(
                len(generation.token_ids) - 1,
                admitted if closed else arrived_s,
                admitted,
                admitted + generation.seconds,
                len(generation.rounds),
                sum(one.proposed for one in generation.rounds),
            )
        )
        self.first_token_s.append(generation.first_token_seconds - (waited if closed else 0.0))

    def add(self, other: Executed) -> None:
        """Adds another run of the same load and policy."""
        self.result.steps += other.result.steps
        self.result.served += other.result.served
        self.result.seconds += other.result.seconds
        self.prefill_s += other.prefill_s
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s
        self.first_token_s += other.first_token_s
        self.texts += other.texts


def serve_closed_loop(
    engine: Engine, requests: Sequence[Request], asked: Sequence[Asked], *, name: str
) -> Executed:
    """All slots taken until no request is left to take a free one; then the rest ends uncounted.

    Args:
        engine: its batch size is the number of slots.
        requests: at least as many as slots.
        asked: what each of them is.
        name: of the policy.
    """
    slots = engine.batch_size
    found = Executed(LoadResult(name, slots))
    serving = engine.serve()
    for request in requests:
        serving.submit(request)
    while serving.busy:
        full = serving.num_active + serving.num_waiting >= slots
        before = time.perf_counter()
        step = serving.step()
        if full:
            found.count(step, time.perf_counter() - before)
        for number, generation in step.finished.items():
            found.texts.append((asked[number], generation.token_ids))
            if full:
                found.serve(generation, 0.0, closed=True)
    return found


def serve_open_loop(
    engine: Engine,
    requests: Sequence[Request],
    asked: Sequence[Asked],
    arrivals_s: Sequence[float],
    *,
    name: str,
) -> Executed:
    """Requests come at their times, ascending; the first starts the clock. Until all are answered.

    Args:
        engine, requests, asked, name: see `serve_closed_loop`.
        arrivals_s: [requests].
    """
    found = Executed(LoadResult(name, engine.batch_size))
    serving: Serving = engine.serve()
    coming = deque((at - arrivals_s[0], one) for at, one in zip(arrivals_s, requests, strict=True))
    came: list[float] = []
    started = before = time.perf_counter()
    while coming or serving.busy:
        now = time.perf_counter() - started
        while coming and coming[0][0] <= now:
            at, request = coming.popleft()
            came.append(at)
            serving.submit(request, arrived=started + at)
        if not serving.busy:
            time.sleep(max(0.0, coming[0][0] - now))
            continue
        step = serving.step()
        after = time.perf_counter()
        found.count(step, after - before)  # Idle time before the step counts too.
        before = after
        for number, generation in step.finished.items():
            found.texts.append((asked[number], generation.token_ids))
            found.serve(generation, came[number], closed=False)
    return found


class Execution:
    """A target, a draft model and the loads of one configuration."""

    def __init__(
        self,
        config: SimulateConfig,
        target: TargetModel,
        draft: Drafter,
        prompts: Sequence[Sequence[int]],
        curve: StepsPerSecond,
    ) -> None:
        """Chooses the requests of the largest load; smaller ones take the first of them.

        Args:
            config: with execute.draft.
            target: the frozen target.
            draft: with the target attached.
            prompts: token ids, at least one.
            curve: of this target on this machine.
        """
        self.config, self.target, self.draft, self.curve = config, target, draft, curve
        self.prompts = [list(prompt) for prompt in prompts]
        source = random.Random(config.seed)
        source.shuffle(self.prompts)
        self.most = config.execute.num_slots[-1]
        half = config.num_tokens // 2
        self.asked = [
            Asked(
                number % len(self.prompts),
                source.randint(config.num_tokens - half, config.num_tokens + half),
            )
            for number in range(config.requests_per_slot * self.most)
        ]
        self.used = sorted({one.prompt for one in self.asked})
        self.longest = config.num_tokens + half
        self.texts: dict[int, list[int]] = {}
        """Plain greedy answers, by prompt."""
        self.rounds: dict[int, list[DraftRound]] = {}
        """With every drafted token verified, by prompt; blocks that the end of a text cut short are
        left out."""

    def request(self, asked: Asked) -> Request:
        return Request(self.prompts[asked.prompt], asked.limit)

    def engine(self, slots: int, lengths: LengthPolicy) -> Engine:
        return Engine(
            self.target,
            self.draft,
            ChainPolicy(self.config.num_draft_tokens),
            batch_size=slots,
            lengths=lengths,
        )

    def record(self) -> Executed:
        """Answers every prompt plainly, and with every drafted token verified.

        Raises:
            ValueError: nothing is ever drafted.
        """
        asked = [Asked(prompt, self.longest) for prompt in self.used]
        work = [self.request(one) for one in asked]
        plain = Engine(self.target, None, ChainPolicy(), batch_size=self.most).run(work)
        drafted = self.engine(self.most, StaticThreshold(0.0)).run(work)
        found = Executed(LoadResult("recording", self.most))
        whole = max(one.proposed for text in drafted for one in text.rounds)
        if not whole:
            raise ValueError(
                "The draft model drafted no token for any prompt: there is nothing to schedule."
            )
        for one, without, made in zip(asked, plain, drafted, strict=True):
            self.texts[one.prompt] = without.token_ids
            self.rounds[one.prompt] = [
                DraftRound(record.confidences, record.accepted)
                for record in made.rounds
                if record.proposed == whole
            ]
            found.texts.append((one, made.token_ids))
        return found

    @property
    def all_rounds(self) -> list[DraftRound]:
        """Of all prompts."""
        return [one for rounds in self.rounds.values() for one in rounds]

    def expected_text(self, asked: Asked) -> list[int]:
        """The plain answer up to the limit: a greedy text does not depend on its limit."""
        return self.texts[asked.prompt][: asked.limit]

    @property
    def context_length(self) -> float:
        """Mean tokens in a request's cache halfway through its answer, as far as the curve goes."""
        lengths = [
            len(self.prompts[one.prompt]) + len(self.expected_text(one)) / 2 for one in self.asked
        ]
        return min(statistics.fmean(lengths), self.curve.context_lengths[-1])

    def rates(self, num_tokens: int) -> tuple[list[float], list[float]]:
        """[num_tokens] steps per second as measured, and their envelope."""
        at = self.context_length
        return (
            continued_curve(self.curve.rates(at, raw=True), num_tokens),
            continued_curve(self.curve.rates(at), num_tokens),
        )

    def draft_seconds(self, slots: int) -> float:
        """Median of a step that drafts for all slots, in an untimed run."""
        serving = self.engine(slots, StaticThreshold(0.0)).serve()
        for one in self.asked[:slots]:
            serving.submit(replace(self.request(one), max_new_tokens=WARM_UP_TOKENS))
        steps = []
        while serving.busy:
            steps.append(serving.step())
        drafting = [one for one in steps if one.drafted and one.num_requests == slots]
        clocked = drafting[WARM_UP_STEPS:] or drafting or steps
        return statistics.median(one.draft_seconds for one in clocked)

    def offered(self, asked: Sequence[Asked], arrivals_s: Sequence[float]) -> list[OfferedRequest]:
        """The same requests for the simulation; texts that end with prefill have no rounds."""
        every = self.all_rounds
        found = []
        for one, at in zip(asked, arrivals_s, strict=True):
            tokens = len(self.expected_text(one)) - 1
            if tokens > 0:
                found.append(OfferedRequest(tokens, self.rounds[one.prompt] or every, at))
        return found

    def check(self, runs: Sequence[Executed]) -> dict[str, int]:
        """How many texts equal the plain ones, or differ from them at a near tie or clearly."""
        counts = {"equal": 0, "near_ties": 0, "different": 0}
        known: dict[tuple[int, ...], str] = {}
        for run in runs:
            for asked, text in run.texts:
                expected = self.expected_text(asked)
                if text == expected:
                    counts["equal"] += 1
                    continue
                key = (asked.prompt, asked.limit, *text)
                if key not in known:
                    prompt = self.prompts[asked.prompt]
                    place = find_divergence(self.target, prompt, text, expected)
                    tie = place is not None and place.near_tie
                    known[key] = "near_ties" if tie else "different"
                counts[known[key]] += 1
        return counts


@dataclass(frozen=True)
class _Load:
    loop: str
    load: float
    slots: int
    asked: list[Asked]
    arrivals_s: list[float]

    def serve(self, work: Execution, policy: LengthPolicy) -> Executed:
        engine = work.engine(self.slots, policy)
        requests = [work.request(one) for one in self.asked]
        if self.loop == "closed":
            return serve_closed_loop(engine, requests, self.asked, name=policy.name)
        return serve_open_loop(engine, requests, self.asked, self.arrivals_s, name=policy.name)

    def simulate(
        self, work: Execution, policy: LengthPolicy, rates: Sequence[float], draft_seconds: float
    ) -> LoadResult:
        run: Callable[..., LoadResult] = (
            simulate_closed_loop if self.loop == "closed" else simulate_open_loop
        )
        offered = work.offered(self.asked, self.arrivals_s)
        return run(offered, policy, rates, num_slots=self.slots, draft_seconds=draft_seconds)


def make_loads(work: Execution) -> list[_Load]:
    """Closed loops, then open ones."""
    config = work.config
    loads = []
    for slots in config.execute.num_slots:
        asked = work.asked[: config.requests_per_slot * slots]
        loads.append(_Load("closed", slots, slots, asked, [0.0] * len(asked)))
    for rate in config.execute.requests_per_second:
        times = poisson_arrivals(len(work.asked), requests_per_second=rate, seed=config.seed)
        loads.append(_Load("open", rate, work.most, work.asked, times))
    return loads


def execute_load(work: Execution, load: _Load, done: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per policy: measured, and as simulated (`expected`).

    Args:
        work: recorded.
        load: which.
        done: told the name of the policy after every run.
    """
    config = work.config
    longest = len(work.all_rounds[0].confidences)
    rates, envelope = work.rates(load.slots * (longest + 1))
    draft_seconds = work.draft_seconds(load.slots)

    def policies() -> list[LengthPolicy]:
        return make_policies(config, rates, envelope, draft_seconds=draft_seconds)

    count = len(policies())
    found: dict[int, Executed] = {}
    for repeat in range(config.execute.repeats):
        for turn in range(count):
            place = (turn + repeat) % count
            # Each run gets a fresh policy: they remember earlier rounds.
            run = load.serve(work, policies()[place])
            done(run.result.policy)
            if place in found:
                found[place].add(run)
            else:
                found[place] = run
    measured = [load_row(load.loop, load.load, found[place].result) for place in range(count)]
    simulated = [
        load_row(load.loop, load.load, load.simulate(work, policy, rates, draft_seconds))
        for policy in policies()
    ]
    measured = beside_best_fixed(measured, policies())
    simulated = beside_best_fixed(simulated, policies())
    return [
        row
        | _beside_expected(row, expected, found[place])
        | {"draft_seconds": draft_seconds, "texts": work.check([found[place]])}
        for place, (row, expected) in enumerate(zip(measured, simulated, strict=True))
    ]


def _beside_expected(
    row: dict[str, Any], expected: dict[str, Any], run: Executed
) -> dict[str, Any]:
    """What a measured row has beyond a simulated one."""
    seconds = run.result.seconds
    shares = {
        "prompts": run.prefill_s / seconds,
        "draft": run.draft_s / seconds,
        "target": run.verify_s / seconds,
    }
    in_rounds = row["tokens_per_second"] / (1.0 - shares["prompts"])
    first = {str(share): percentile(run.first_token_s, share) for share in (0.5, 0.9, 0.99)}
    return {
        "first_token_s": first,
        "shares": shares | {"other": 1.0 - sum(shares.values())},
        "round_tokens_per_second": in_rounds,
        "expected": expected,
        "of_expected": in_rounds / expected["tokens_per_second"],
    }


def write_rounds(path: Path, rounds: Sequence[DraftRound]) -> None:
    """Writes what the setting `rounds` reads."""
    lines = [
        json.dumps({"confidences": list(one.confidences), "accepted": one.accepted})
        for one in rounds
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(config: SimulateConfig) -> None:
    """Loads everything, records, executes all loads, and writes the report.

    Raises:
        ValueError: what cannot be read or decoded; no round that drafts.
    """
    assert config.execute.draft is not None, "the verb asked for it"
    assert config.target_profile is not None, "checked with the settings"
    curve = StepsPerSecond.load(Path(config.target_profile))
    texts = load_prompts(config.execute.prompts)
    target = TargetModel.load(**asdict(config.target))
    draft = load_draft_for(config.execute.draft, target)
    prompts = [encode_turn(target.tokenizer, one, [], template_kwargs={}) for one in texts]
    work = Execution(config, target, draft, prompts, curve)
    loads = make_loads(work)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        policies = 3 + len(config.fixed_lengths) + len(config.thresholds)
        task = progress.add_task(
            "executing", total=1 + len(loads) * policies * config.execute.repeats
        )
        recorded = work.record()
        progress.advance(task)
        if config.execute.record_rounds is not None:
            write_rounds(Path(config.execute.record_rounds), work.all_rounds)
        rows: list[dict[str, Any]] = []
        for load in loads:
            rows += execute_load(work, load, lambda _: progress.advance(task))
            # Loads can take hours: a run that is stopped keeps those that are done.
            _write(work, rows, recorded, Console(quiet=True))
    _write(work, rows, recorded, report_console())


def _write(
    work: Execution, rows: Sequence[dict[str, Any]], recorded: Executed, console: Console
) -> None:
    """Reports the loads that are done.

    Args:
        work: whose settings and recorded rounds the report tells of.
        rows: of these loads.
        recorded: the run that recorded the rounds.
        console: where the tables are shown.
    """
    rounds = work.all_rounds
    needed = work.most * (len(rounds[0].confidences) + 1)
    write_execution(
        rows,
        work.config,
        folder=Path(work.config.output),
        console=console,
        conditions=describe_conditions(work.target) | {"target": work.target.name_or_path},
        recorded={
            "rounds": len(rounds),
            "prompts": len(work.used),
            "draft_tokens": len(rounds[0].confidences),
            "mean_accepted": statistics.fmean(one.accepted for one in rounds),
            "texts": work.check([recorded]),
        },
        curve={
            "context_length": work.context_length,
            "max_tokens": work.curve.max_tokens,
            "tokens_needed": needed,
        },
    )
