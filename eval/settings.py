"""How an evaluation decodes: typed settings, made from the configuration, and told in reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from draftsmith.conf.schema import CompareSetting, DraftingConfig, EvaluateConfig
from draftsmith.inference.length_policies import StaticThreshold
from draftsmith.inference.policies import POLICIES, ChainPolicy, Policy, make_policy
from draftsmith.models.protocols import SamplingSettings
from draftsmith.models.sampling import sampling_from_generation_config
from draftsmith.models.target import TargetModel


@dataclass(frozen=True)
class EvaluationSettings:
    """How an evaluation decodes; see conf/schema.py, class EvaluateConfig, for each field."""

    max_new_tokens: int = 64
    policy: Policy = ChainPolicy()
    sampling: SamplingSettings = SamplingSettings()
    seed: int = 0
    baseline_prompts_per_category: int | None = 2
    check_lossless: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    confidence_threshold: float | None = None

    @property
    def drafting_name(self) -> str:
        """The policy, and where chains are cut, as reports call them."""
        if self.confidence_threshold is None:
            return self.policy.name
        return f"{self.policy.name} cut at confidence {self.confidence_threshold:g}"

    def lengths(self) -> StaticThreshold | None:
        """How many tokens of each chain are verified; None: all."""
        threshold = self.confidence_threshold
        return None if threshold is None else StaticThreshold(threshold)

    @property
    def timed_prompts_per_category(self) -> int | None:
        """Prompts of a category that are decoded plainly too: enough of them to fill a batch."""
        wanted = self.baseline_prompts_per_category
        return wanted if not wanted else max(wanted, self.batch_size)


def make_settings(config: EvaluateConfig, target: TargetModel) -> EvaluationSettings:
    """The settings of draftsmith-evaluate.

    Raises:
        ValueError: a policy or sampling setting out of range, or a generation configuration of the
            target that cannot be followed exactly.
    """
    if config.use_generation_config:
        sampling = sampling_from_generation_config(target.model.generation_config)
    else:
        sampling = SamplingSettings(
            config.temperature,
            config.top_k,
            config.top_p,
            config.min_p,
            config.repetition_penalty,
        )
    return EvaluationSettings(
        max_new_tokens=config.max_new_tokens,
        policy=policy_from_config(config.drafting),
        sampling=sampling,
        seed=config.seed,
        baseline_prompts_per_category=config.baseline_prompts_per_category,
        check_lossless=config.check_lossless,
        template_kwargs=config.template_kwargs,
        batch_size=config.batch_size,
        confidence_threshold=config.drafting.confidence_threshold,
    )


def policy_from_config(drafting: DraftingConfig) -> Policy:
    """The drafting policy that a configuration names, made of the fields that it reads."""
    names = [entry.name for entry in fields(POLICIES[drafting.policy])]
    return make_policy(drafting.policy, **{name: getattr(drafting, name) for name in names})


def sampling_from_setting(setting: CompareSetting) -> SamplingSettings:
    """How the target samples in one setting of a comparison."""
    return SamplingSettings(
        setting.temperature,
        setting.sampling_top_k,
        setting.top_p,
        setting.min_p,
        setting.repetition_penalty,
    )


def describe_policy(policy: Policy) -> dict[str, Any]:
    """Name, kind (its name in a configuration) and fields of a policy; JSON types only."""
    kinds = [name for name, kind in POLICIES.items() if type(policy) is kind]
    options: dict[str, Any] = asdict(policy)  # type: ignore[call-overload]  # all are dataclasses
    return {"name": policy.name, "kind": kinds[0] if kinds else type(policy).__name__} | options


def describe_sampling(sampling: SamplingSettings) -> str:
    """'greedy', or the settings that are not neutral."""
    neutral = SamplingSettings(temperature=1.0)
    parts = [
        f"{entry.name} {getattr(sampling, entry.name):g}"
        for entry in fields(sampling)
        if entry.name != "temperature"
        and getattr(sampling, entry.name) != getattr(neutral, entry.name)
    ]
    first = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    return ", ".join([first, *parts])


def describe_settings(settings: EvaluationSettings) -> dict[str, Any]:
    """All settings as JSON types."""
    found = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    found["policy"] = describe_policy(settings.policy)
    found["sampling"] = asdict(settings.sampling)
    found["template_kwargs"] = dict(settings.template_kwargs)
    return found
