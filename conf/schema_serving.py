"""Typed settings of the verbs about serving many requests; without torch, so help is instant.

Each field has its unit and origin below it. Values come from the YAML files beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from draftsmith.conf.schema import TargetConfig, require_at_least


@dataclass
class ProfileConfig:
    """draftsmith-profile: how long the target's forward takes, by number of tokens."""

    target: TargetConfig = field(default_factory=TargetConfig)
    output: str = MISSING
    """Folder for profile.json, profile.txt and profile.html."""
    token_counts: list[int] = field(
        default_factory=lambda: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    )
    """Tokens per forward, all requests' together; 1 must be among them (our choice)."""
    context_lengths: list[int] = field(default_factory=lambda: [128, 512])
    """Tokens that every request has in its cache (our choice)."""
    tokens_per_request: int = 4
    """Tokens of one request in a forward, at most: its root and its drafted tokens. More tokens
    belong to more requests, evenly."""
    repeats: int = 7
    """Timed forwards of every kind, after an untimed one."""
    seed: int = 0
    """Of the tokens that are read, and of the order of the forwards."""

    def __post_init__(self) -> None:
        self.token_counts = sorted(set(self.token_counts))
        self.context_lengths = sorted(set(self.context_lengths))
        if self.token_counts[:1] != [1]:
            raise ValueError(
                f"token_counts is {self.token_counts}; the smallest must be 1, where the curve "
                "starts."
            )
        if not self.context_lengths:
            raise ValueError("context_lengths is empty; name at least one, in tokens.")
        require_at_least("context_lengths", self.context_lengths[0], 1)
        require_at_least("tokens_per_request", self.tokens_per_request, 1)
        require_at_least("repeats", self.repeats, 1)


@dataclass
class ExecuteConfig:
    """Loads that are served for real: the engine on a real target with a real draft model, greedy.

    Policies, answer lengths, requests per slot, drafted tokens and the seed are those of the
    simulation.
    """

    draft: str | None = None
    """Folder of a draft model, or of a training run; null: loads are only simulated."""
    prompts: str = "bundled"
    """As of draftsmith-evaluate: the held-out prompts that come with draftsmith, a JSONL file or a
    `datasets` name. Only the first turn of each is asked."""
    num_slots: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Closed loop: requests that are always in flight, one load each (our choice)."""
    requests_per_second: list[float] = field(default_factory=list)
    """Open loop: arrival rates, one load each, with the largest of num_slots as limit."""
    repeats: int = 1
    """Times that every policy serves every load, in turns and in another order each time."""
    record_rounds: str | None = None
    """JSONL file to write: the rounds of all prompts with every drafted token verified, for the
    setting `rounds` of later simulations; null writes none."""

    def __post_init__(self) -> None:
        self.num_slots = sorted(set(self.num_slots))
        require_at_least("execute.num_slots", min(self.num_slots, default=0), 1)
        require_at_least("execute.repeats", self.repeats, 1)
        if min(self.requests_per_second, default=1.0) <= 0.0:
            raise ValueError("execute.requests_per_second must be above 0.")


@dataclass
class SimulateConfig:
    """draftsmith-simulate: throughput against load for several verification policies."""

    target: TargetConfig = field(default_factory=lambda: TargetConfig(name_or_path=""))
    """What is executed on; read with execute.draft only."""
    execute: ExecuteConfig = field(default_factory=ExecuteConfig)
    target_profile: str | None = None
    """profile.json of draftsmith-profile; null takes the made-up curve of the next three fields."""
    floor_ms: float = 20.0
    """Made-up curve: milliseconds of a forward of few tokens (our choice)."""
    flat_tokens: int = 128
    """Made-up curve: tokens up to which a forward takes no longer (our choice)."""
    token_ms: float = 0.15
    """Made-up curve: milliseconds that each further token adds (our choice)."""
    context_length: int = 512
    """Of a measured curve: tokens in every request's cache. Executed loads take their own mean."""
    rounds: str | None = None
    """JSONL file of recorded rounds, {"confidences": [...], "accepted": n} a line, each with all
    its drafted tokens verified; null draws calibrated ones from the next three fields."""
    num_draft_tokens: int = 7
    """Tokens drafted per round, when rounds are drawn or executed (DSpark: 7)."""
    acceptance: float = 0.75
    """Drawn rounds: mean confidence (our choice)."""
    certainty: float = 0.4
    """Drawn rounds: in (0, 1); near 1 each confidence is near 0 or near 1 (our choice)."""
    num_slots: list[int] = field(default_factory=lambda: [1, 4, 16, 64, 256, 1024])
    """Closed loop: requests that are always in flight, one simulation each."""
    requests_per_second: list[float] = field(default_factory=list)
    """Open loop: arrival rates, one simulation each, with the largest of num_slots as limit."""
    fixed_lengths: list[int] = field(default_factory=lambda: [1, 3, 5, 7])
    """Fixed verification lengths to compare with; decoding without a draft is always there."""
    thresholds: list[float] = field(default_factory=lambda: [0.6])
    """Static confidence thresholds to compare with."""
    draft_ms: float = 2.0
    """Milliseconds of drafting per step (our choice); measured where loads are executed."""
    num_tokens: int = 96
    """Mean length of an answer; lengths (executed: length limits) are spread evenly from half of it
    to one and a half."""
    requests_per_slot: int = 3
    """Requests that each slot serves on average."""
    seed: int = 0
    output: str = MISSING
    """Folder for simulate.json, simulate.txt and simulate.html; executed: execute.json, ..."""

    def __post_init__(self) -> None:
        self.num_slots = sorted(set(self.num_slots))
        if not self.num_slots:
            raise ValueError("num_slots is empty; name at least one load.")
        require_at_least("num_slots", self.num_slots[0], 1)
        for name, value in (("acceptance", self.acceptance), ("certainty", self.certainty)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} is {value}; it must lie between 0 and 1.")
        for name, minimum in (
            ("num_draft_tokens", 1),
            ("num_tokens", 2),
            ("requests_per_slot", 1),
            ("draft_ms", 0.0),
            ("flat_tokens", 1),
            ("token_ms", 0.0),
            ("context_length", 1),
        ):
            require_at_least(name, getattr(self, name), minimum)
        require_at_least("fixed_lengths", min(self.fixed_lengths, default=None), 1)
        if self.execute.draft is not None:
            self._check_execution()
        elif self.target.name_or_path or self.execute.record_rounds is not None:
            raise ValueError(
                "target or execute.record_rounds is set, but no execute.draft: nothing is "
                "executed. Give execute.draft=FOLDER, or leave them out."
            )
        if self.floor_ms <= 0.0 or min(self.requests_per_second, default=1.0) <= 0.0:
            raise ValueError("floor_ms and requests_per_second must be above 0.")

    def _check_execution(self) -> None:
        """Raises ValueError for what an execution needs and has not, or has and does not read."""
        if not self.target.name_or_path:
            raise ValueError(
                "execute.draft is set, but no target. Give target=... (target=smollm2)."
            )
        if self.target_profile is None:
            raise ValueError(
                "execute.draft is set, but no target_profile: the schedulers need the measured "
                "curve of this target on this machine. Make it with draftsmith-profile target=... "
                "output=FOLDER and give target_profile=FOLDER/profile.json."
            )
        if self.rounds is not None:
            raise ValueError(
                "execute.draft and rounds are both set; an execution records rounds of its own. "
                "Leave one out."
            )
