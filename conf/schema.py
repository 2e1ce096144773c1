"""Typed settings of every verb but training (train/config.py); without torch, so help is instant.

Each field has its unit and origin below it. Values come from the YAML groups beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig

DTYPES = ("float32", "bfloat16", "float16")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError naming the setting, what was found and what is allowed."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """Raises ValueError when a number lies below its minimum; None passes."""
    if value is not None and value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}.")


def open_dict(element_type: Any = Any) -> Any:
    """Default of a setting that is a dictionary with keys of the user's own.

    Hydra closes dictionaries against keys that its YAML does not have; this one stays open, so that
    key={a: 1} works without a plus sign. Entries are checked as `element_type`.
    """
    return DictConfig(
        {},
        key_type=str,
        element_type=element_type,
        ref_type=dict[str, element_type],  # type: ignore[valid-type]
        flags={"struct": False},
    )


@dataclass
class TargetConfig:
    """Which frozen target model, and how it is loaded."""

    name_or_path: str = MISSING
    """A local Hugging Face folder, a hub id, a .gguf file, or package:NAME (a GGUF inside an
    installed Python package)."""
    dtype: str = "bfloat16"
    """float32, bfloat16 or float16. Compare greedy outputs in float32."""
    device: str = "auto"
    """auto (cuda when there is one, else cpu), cpu, cuda, cuda:1, ..."""
    attn_implementation: str = "sdpa"
    """sdpa or eager; what transformers calls it."""
    trust_remote_code: bool = False
    """Runs Python code that comes with the model. Only when you trust its author."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    def __post_init__(self) -> None:
        require_choice("target.dtype", self.dtype, DTYPES)


@dataclass
class PrepareConfig:
    """draftsmith-prepare: conversations to input_ids and loss_mask."""

    target: TargetConfig = field(default_factory=TargetConfig)
    input: str = MISSING
    """A .jsonl, .json or .parquet file, a folder or glob of them, or a name for `datasets`."""
    input_format: str = "auto"
    """auto, messages (OpenAI), sharegpt, alpaca, prompt_response or text."""
    split: str = "train"
    """Split of a `datasets` name."""
    output: str = MISSING
    """Folder to write."""
    max_length: int = 2048
    """Tokens per row; what lies beyond is cut off."""
    train_on: str = "all"
    """all or last: which assistant turns are supervised."""
    max_dropped_share: float = 0.2
    """Stop when more than this share of the rows had to be dropped."""
    on_bad_row: str = "skip"
    """skip (count and report) or strict (stop at the first, naming it)."""
    num_workers: int = 1
    """Processes that tokenise."""
    limit: int | None = None
    """Read only this many rows."""
    shuffle_seed: int | None = None
    """Shuffle the rows with this seed before `limit`; null keeps file order."""
    template_kwargs: dict[str, Any] = field(default_factory=open_dict)
    """Passed to the chat template, for example {enable_thinking: false}."""
    overwrite: bool = False
    """Replace an output folder that was made with other settings."""

    def __post_init__(self) -> None:
        self.template_kwargs = dict(self.template_kwargs)
        formats = ("auto", "messages", "sharegpt", "alpaca", "prompt_response", "text")
        require_choice("input_format", self.input_format, formats)
        require_choice("train_on", self.train_on, ("all", "last"))
        require_choice("on_bad_row", self.on_bad_row, ("skip", "strict"))
        require_at_least("max_length", self.max_length, 2)
        require_at_least("num_workers", self.num_workers, 1)
        require_at_least("limit", self.limit, 1)


@dataclass
class RegenerateConfig:
    """draftsmith-regenerate: the target writes the answers itself."""

    target: TargetConfig = field(default_factory=TargetConfig)
    prompts: str = "bundled"
    """bundled (the training prompts that come with draftsmith) or a JSONL file of prompts."""
    output: str = MISSING
    """JSONL file to write; rows that are already in it are kept and not generated again."""
    max_new_tokens: int = 256
    """Answer length limit, in tokens; cut answers carry finish_reason length."""
    batch_size: int = 32
    """Rows decoded at a time; a finished row makes room for the next one."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    samples_per_prompt: int = 1
    """Answers per prompt; more than one needs a temperature above 0."""
    seed: int = 0
    limit: int | None = None
    """Only the first N prompts."""
    template_kwargs: dict[str, Any] = field(default_factory=open_dict)
    """Passed to the chat template."""

    def __post_init__(self) -> None:
        self.template_kwargs = dict(self.template_kwargs)
        require_at_least("max_new_tokens", self.max_new_tokens, 1)
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("temperature", self.temperature, 0.0)
        require_at_least("samples_per_prompt", self.samples_per_prompt, 1)
        if self.samples_per_prompt > 1 and self.temperature == 0.0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but temperature 0 gives the "
                "same answer each time. Set temperature above 0, or samples_per_prompt=1."
            )


@dataclass
class CacheConfig:
    """draftsmith-cache: the target's hidden states, stored once."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: str = MISSING
    """Folder written by draftsmith-prepare."""
    cache: str = MISSING
    """Folder to write, or to verify."""
    aux_layer_ids: list[int] | None = None
    """Layers to store (0-based outputs, ascending); null takes EAGLE-3's default for the target."""
    dtype: str = "bfloat16"
    """Stored dtype: bfloat16, float32 or float16 (refused when a state would overflow)."""
    shard_tokens: int = 16384
    """Tokens per shard file; a killed run loses at most one shard per process."""
    batch_tokens: int = 4096
    """Padded tokens per target forward."""
    max_bad_share: float = 0.01
    """Stop when more than this share of the rows has non-finite states."""
    dry_run: bool = False
    """Only print the size, the time and the free disk space."""

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, DTYPES)
        require_at_least("shard_tokens", self.shard_tokens, 1)
        require_at_least("batch_tokens", self.batch_tokens, 1)


@dataclass
class DraftingConfig:
    """How a draft model spends its budget in a round (conf/drafting; inference/policies.py).

    Each policy reads its own fields; a draft model that proposes whole blocks by itself only takes
    the depth.
    """

    policy: str = "chain"
    """chain, static_tree (EAGLE-1), dynamic_tree (EAGLE-2), sampled_tree, or block_tree (a block's
    slots, for drafts that propose blocks)."""
    num_draft_tokens: int = 4
    """chain: its length in tokens; block_tree: its deepest drafted token."""
    num_nodes: int = 16
    """block_tree: drafted tokens (our choice)."""
    total_tokens: int = 60
    """dynamic_tree: tokens that the target reads per round, the root included (EAGLE-2: 60)."""
    depth: int = 5
    """dynamic_tree: expansions after the first level (EAGLE-2: 5)."""
    top_k: int = 10
    """dynamic_tree: nodes expanded per level, and children of each (EAGLE-2: 10); block_tree:
    children of a node."""
    widths: list[int] = field(default_factory=lambda: [3, 2, 1, 1])
    """sampled_tree: children per node, level by level (our choice)."""
    paths: list[list[int]] | None = None
    """static_tree: its nodes as ranks from the root, such as [[0], [1], [0, 0]]; null takes 16
    nodes."""
    confidence_threshold: float | None = None
    """chain: verify a round's tokens up to the first whose confidence is below this probability
    (DSpark's confidence head; other drafts: their own probability, greedy only); null: all."""

    def __post_init__(self) -> None:
        policies = ("chain", "static_tree", "dynamic_tree", "sampled_tree", "block_tree")
        require_choice("drafting.policy", self.policy, policies)
        require_at_least("drafting.num_draft_tokens", self.num_draft_tokens, 1)
        require_at_least("drafting.num_nodes", self.num_nodes, 1)
        require_at_least("drafting.total_tokens", self.total_tokens, 2)
        require_at_least("drafting.depth", self.depth, 0)
        require_at_least("drafting.top_k", self.top_k, 1)
        threshold = self.confidence_threshold
        if threshold is None:
            return
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(
                f"drafting.confidence_threshold is {threshold}; expected a probability, 0 to 1."
            )
        if self.policy != "chain":
            raise ValueError(
                f"drafting.confidence_threshold is set, but drafting is {self.policy}: only chains "
                "are cut. Use drafting=chain, or leave the threshold out."
            )


@dataclass
class PromptsConfig:
    """What evaluations decode; shared by draftsmith-evaluate and draftsmith-compare."""

    prompts: str = "bundled"
    """bundled (the held-out prompts that come with draftsmith), a JSONL file (draftsmith's,
    OpenAI messages, MT-Bench's or Spec-Bench's question.jsonl), a folder written by `datasets`'
    save_to_disk, or a name for `datasets`."""
    prompts_subset: str | None = None
    """Configuration of a `datasets` name, such as main of openai/gsm8k."""
    prompts_split: str | None = None
    """Split of a `datasets` name or folder; may be null when there is only one."""
    prompts_column: str | None = None
    """Column that holds the prompt, the turns or the messages; null: prompt, messages or turns."""
    limit_per_category: int | None = None
    """Prompts per category; null takes all."""
    max_new_tokens: int = 64
    """Tokens per answer."""
    seed: int = 0
    """Of sampled answers; an answer's own seed also depends on its prompt, not on the others."""
    baseline_prompts_per_category: int | None = 2
    """Prompts per category that are also decoded plainly, for the tokens/s of the same run; null
    takes all. With batch_size above 1 at least so many that the batch is full."""
    check_lossless: bool = True
    """Greedy: compare every answer with the target's own greedy answer."""
    template_kwargs: dict[str, Any] = field(default_factory=open_dict)
    """Passed to the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        self.template_kwargs = dict(self.template_kwargs)
        require_at_least("limit_per_category", self.limit_per_category, 1)
        require_at_least("max_new_tokens", self.max_new_tokens, 1)
        require_at_least("baseline_prompts_per_category", self.baseline_prompts_per_category, 0)


@dataclass
class EvaluateConfig(PromptsConfig):
    """draftsmith-evaluate: what a draft model is worth."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: str | None = None
    """Folder of a draft model, or of a training run; null measures plain decoding only."""
    output: str = MISSING
    """Folder for report.html, results.json, results.txt and spec_bench.jsonl."""
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Sampling among the k most likely tokens; 0 keeps all. (A tree's k is drafting.top_k.)"""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    use_generation_config: bool = False
    """Sample as the target's generation_config.json says, instead of the five settings above."""
    batch_size: int = 1
    """Answers decoded at a time; above 1 the speeds are throughput."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("temperature", self.temperature, 0.0)
        require_at_least("batch_size", self.batch_size, 1)
        given = (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
        )
        if self.use_generation_config and given != (0.0, 0, 1.0, 0.0, 1.0):
            raise ValueError(
                "use_generation_config is true, but temperature, top_k, top_p, min_p or "
                "repetition_penalty is set as well. Set one or the other."
            )


@dataclass
class CompareSetting(DraftingConfig):
    """One way to decode in a comparison: a drafting policy and how the target samples."""

    temperature: float = 0.0
    """0 is greedy."""
    sampling_top_k: int = 0
    """Sampling among the k most likely tokens; 0 keeps all. (top_k is the dynamic tree's.)"""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("temperature", self.temperature, 0.0)


@dataclass
class CompareConfig(PromptsConfig):
    """draftsmith-compare: several draft models and ways to decode, in one run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafts: dict[str, str | None] = field(default_factory=open_dict)
    """Name -> folder of a draft model or of a training run; none is plain decoding."""
    settings: dict[str, CompareSetting] = field(default_factory=lambda: open_dict(CompareSetting))
    """Name -> how to decode; empty takes default_settings."""
    default_settings: dict[str, CompareSetting] = field(
        default_factory=lambda: open_dict(CompareSetting)
    )
    """What is compared when `settings` is empty (conf/compare.yaml)."""
    output: str = MISSING
    """Folder for compare.json, compare.txt and compare.html."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafts = dict(self.drafts)
        self.settings = dict(self.settings)
        self.default_settings = dict(self.default_settings)
        if not self.drafts:
            raise ValueError(
                "drafts is empty: name the draft models to compare, for example "
                "'drafts={a: runs/a, b: runs/b}'."
            )
        if not self.settings and not self.default_settings:
            raise ValueError("settings is empty: name at least one way to decode.")


@dataclass
class QuickstartConfig:
    """make quickstart: prepare, cache, train and evaluate, in one go."""

    target: TargetConfig = field(default_factory=TargetConfig)
    output: str = MISSING
    """Folder for everything that the run makes."""
    recipe: str = MISSING
    """Training recipe (conf/recipe)."""
    compare_recipes: list[str] = field(default_factory=list)
    """Further recipes to train on the same cache and to compare with the first, side by side."""
    compare_prompts_per_category: int = 2
    """Held-out prompts per category in that comparison."""
    train_overrides: list[str] = field(default_factory=list)
    """Further settings of draftsmith-train, for every recipe, such as train.epochs=4."""
    answer_tokens: int = 192
    """Length limit of the answers that are generated when the target is not the bundled one."""
    limit_answers: int | None = None
    """Train on the first N conversations only; null takes all."""
    limit_per_category: int | None = None
    """Held-out prompts per category; null takes all."""
    max_new_tokens: int = 40
    """Tokens per evaluated answer."""
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    baseline_prompts_per_category: int = 2
    """Prompts per category that are also decoded plainly and with an untrained draft."""

    def __post_init__(self) -> None:
        require_at_least("limit_answers", self.limit_answers, 1)
        require_at_least("limit_per_category", self.limit_per_category, 1)
        require_at_least("compare_prompts_per_category", self.compare_prompts_per_category, 1)
        require_at_least("max_new_tokens", self.max_new_tokens, 1)
        require_at_least("baseline_prompts_per_category", self.baseline_prompts_per_category, 1)


@dataclass
class ExportConfig:
    """draftsmith-export: a trained draft as a folder that another program loads."""

    draft: str = MISSING
    """Folder of a draft model, or of a training run."""
    format: str = MISSING
    """vllm, sglang or speculators; EAGLE: eagle (SafeAILab's own code); DFlash: transformers (its
    assistant); DSpark: deepspec."""
    output: str = MISSING
    """Folder to make; it must not exist, or be empty."""
    target: TargetConfig = field(default_factory=lambda: TargetConfig(name_or_path=""))
    """Only its name, revision and trust_remote_code are read. Left out: the one that the draft
    records, where it is to be found."""
    full_vocabulary: bool = False
    """EAGLE-1: leave out the draft vocabulary, which engines cannot serve; no weight changes."""
    num_draft_tokens: int | None = None
    """speculators: drafted tokens per round that `vllm serve FOLDER` is to use; null: 3, and of a
    block draft the whole block, which is the only choice there."""

    def __post_init__(self) -> None:
        formats = ("vllm", "sglang", "eagle", "speculators", "transformers", "deepspec")
        require_choice("format", self.format, formats)
        if self.num_draft_tokens is not None:
            require_at_least("num_draft_tokens", self.num_draft_tokens, 1)


@dataclass
class ImportConfig:
    """draftsmith-import: a checkpoint of another program as a draft of ours."""

    checkpoint: str = MISSING
    """Folder with config.json and weights (safetensors or pytorch_model.bin)."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The target that the checkpoint was trained for; its dtype and device are not read."""
    output: str = MISSING
    """Folder to make; it must not exist, or be empty."""
    aux_layer_ids: list[int] | None = None
    """Target layers that the draft reads (0-based outputs, ascending), where the checkpoint does
    not say; not for EAGLE-1."""
