"""Typed settings of a training run; no torch import, so that --help and composing stay instant.

Values come from conf/train.yaml and its groups. The parent turns the composed config into these
dataclasses and writes it to RUN_DIR/config.yaml; the ranks read that file and never see Hydra.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from draftsmith.conf.entry import near_matches, refuse_added_keys
from draftsmith.conf.schema import DTYPES, TargetConfig, require_at_least, require_choice

CONFIG_FILE = "config.yaml"


class DraftMethod(Protocol):
    """What the `method` node of a config builds: the settings of one way of drafting."""

    aux_layer_ids: list[int] | None
    draft_vocab_size: int | None
    objective: dict[str, Any]

    def validate(self, num_target_layers: int, vocab_size: int) -> None:
        """Raises ValueError when the settings do not fit the target."""

    def build(self, target_head: Any, vocabulary: Any, aux_layer_ids: Sequence[int]) -> Any:
        """Returns a fresh draft model (a `TrainableDraft`)."""


def _require_share(name: str, value: float, *, below: float = 1.0) -> None:
    if not 0.0 <= value <= below:
        raise ValueError(f"{name} is {value}; it is a share and must lie between 0 and {below}.")


@dataclass
class DataConfig:
    """Which conversations are trained on, and which are held out."""

    prepared: str | None = None
    """Folder written by draftsmith-prepare; needed by features=live and features=tokens. With
    features=cached the cache holds the tokens; a folder given here must then be the one that the
    cache was made from."""
    validation: str | None = None
    """Held-out set of its own: a cache (cached) or a prepared folder (else). Null: see below."""
    validation_share: float = 0.05
    """Share of the rows held out when `validation` is null, by the hash of their prompts: all
    answers to a prompt are held out together, the same ones from cached and live features. 0 trains
    on everything."""

    def __post_init__(self) -> None:
        _require_share("data.validation_share", self.validation_share, below=0.9)

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.validation_share > 0.0


@dataclass
class FeaturesConfig:
    """Where the target's hidden states come from."""

    source: str = "cached"
    """cached (written by draftsmith-cache), live (the target runs inside the loop) or tokens (none:
    for methods that train the target itself)."""
    cache: str | None = None
    """Folder of the cache; needed by cached, not read by the others."""
    dtype: str | None = None
    """Live only: round the states to this dtype first, as a cache of that dtype would; null keeps
    the target's own."""

    def __post_init__(self) -> None:
        require_choice("features.source", self.source, ("cached", "live", "tokens"))
        if self.dtype is not None:
            require_choice("features.dtype", self.dtype, DTYPES)
        if self.source == "tokens" and self.dtype is not None:
            raise ValueError(
                f"features.dtype is {self.dtype!r}, but features=tokens has no states to round. "
                "Drop features.dtype."
            )
        if self.source == "cached" and self.dtype is not None:
            raise ValueError(
                f"features.dtype is {self.dtype!r}, but a cache has the dtype that it was written "
                "with. Drop features.dtype, or set features=live."
            )


@dataclass
class OptimizerConfig:
    """AdamW over the trainable draft parameters; its learning rate is train.lr."""

    name: str = "adamw"
    """adamw."""
    beta1: float = 0.9
    beta2: float = 0.95
    """0.9 and 0.95 are those of the EAGLE-3 training code."""
    weight_decay: float = 0.0
    """Decoupled weight decay; 0 as in the published EAGLE-3 trainers."""
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_choice("optimizer.name", self.name, ("adamw",))
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"optimizer.{name} is {getattr(self, name)}; it must be at least 0 and below 1."
                )
        require_at_least("optimizer.weight_decay", self.weight_decay, 0.0)


@dataclass
class ScheduleConfig:
    """The learning rate over the steps, as a share of train.lr (train/schedules.py)."""

    name: str = "cosine"
    """constant, linear, cosine or wsd (warm-up, stable, decay)."""
    warmup_steps: int | None = None
    """Optimizer steps of linear warm-up; null takes warmup_share."""
    warmup_share: float = 0.04
    """Share of all steps that warms up, when warmup_steps is null (DeepSpec's EAGLE-3: 0.04)."""
    decay_share: float = 0.2
    """wsd only: share of all steps over which the rate falls at the end."""
    min_share: float = 0.0
    """Where linear, cosine and wsd end, as a share of train.lr."""

    def __post_init__(self) -> None:
        require_choice("schedule.name", self.name, ("constant", "linear", "cosine", "wsd"))
        require_at_least("schedule.warmup_steps", self.warmup_steps, 0)
        for name in ("warmup_share", "decay_share", "min_share"):
            _require_share(f"schedule.{name}", getattr(self, name))


@dataclass
class LoopConfig:
    """The loop itself."""

    lr: float = 1e-4
    """Peak learning rate (SpecForge's and ModelOpt's EAGLE-3 default)."""
    epochs: int = 1
    """Passes over the training rows."""
    max_steps: int | None = None
    """Exactly this many optimizer steps, in as many epochs as they take; null goes by `epochs`."""
    max_length: int = 2048
    """Tokens per row; what lies beyond is cut off (exact: the states are causal) and counted."""
    batch_tokens: int = 4096
    """Padded tokens of one micro-batch on one process; rows of like length share a micro-batch."""
    micro_batch_size: int | None = None
    """At most this many rows in a micro-batch; null leaves it to batch_tokens."""
    gradient_accumulation: int = 1
    """Micro-batches per process and optimizer step."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this global norm (EAGLE-3: 0.5)."""
    precision: str = "bf16"
    """bf16 (autocast over float32 weights; with zero2 bf16 weights, float32 masters) or fp32."""
    seed: int = 0
    """Weights, order of the rows, noise."""
    num_threads: int | None = None
    """CPU threads per process; null leaves them (single) or shares the cores out (several)."""
    log_every: int = 10
    """Optimizer steps between rows of metrics.jsonl."""
    eval_every: int | None = None
    """Optimizer steps between validations; null validates once, at the end."""
    save_every: int | None = None
    """Optimizer steps between checkpoints; null saves one, at the end."""
    keep_last: int = 2
    """Checkpoints kept."""

    def __post_init__(self) -> None:
        require_choice("train.precision", self.precision, ("bf16", "fp32"))
        for name in (
            "epochs",
            "max_steps",
            "batch_tokens",
            "micro_batch_size",
            "gradient_accumulation",
            "num_threads",
            "log_every",
            "eval_every",
            "save_every",
            "keep_last",
        ):
            require_at_least(f"train.{name}", getattr(self, name), 1)
        require_at_least("train.max_length", self.max_length, 2)
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be above 0.")


@dataclass
class LaunchConfig:
    """How many processes, and how they share the work."""

    name: str = "single"
    """single, ddp or zero2 (DeepSpeed ZeRO stage 2)."""
    num_processes: int | None = None
    """Processes on this machine; null takes one per GPU. On the CPU it must be given."""
    device: str = "auto"
    """auto (cuda when there is one, else cpu), cpu or cuda."""
    offload_optimizer: bool = False
    """zero2 only: the optimizer's states stay in CPU memory."""

    def __post_init__(self) -> None:
        require_choice("launch.name", self.name, ("single", "ddp", "zero2"))
        require_choice("launch.device", self.device, ("auto", "cpu", "cuda"))
        require_at_least("launch.num_processes", self.num_processes, 1)
        if self.name == "single" and self.num_processes not in (None, 1):
            raise ValueError(
                f"launch.num_processes is {self.num_processes}, but launch=single runs one. Set "
                "launch=ddp or launch=zero2."
            )
        if self.offload_optimizer and self.name != "zero2":
            raise ValueError(
                f"launch.offload_optimizer has no effect with launch={self.name}; set launch=zero2."
            )


@dataclass
class LoggerConfig:
    """Where metrics go besides RUN_DIR/metrics.jsonl, which is always written."""

    name: str = "none"
    """none, wandb or tensorboard."""
    project: str = "draftsmith"
    """wandb project."""
    mode: str | None = None
    """wandb: online or offline; null leaves it to WANDB_MODE and the login."""

    def __post_init__(self) -> None:
        require_choice("logger.name", self.name, ("none", "wandb", "tensorboard"))
        if self.mode is not None:
            require_choice("logger.mode", self.mode, ("online", "offline"))


@dataclass
class TrainConfig:
    """draftsmith-train: one draft model for one frozen target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    method: Any = MISSING
    """Settings of the method: `_target_` names its class, the rest are that class's fields."""
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    run_dir: str | None = None
    """Run folder; null makes runs/train/TIME-METHOD."""
    resume: str | None = None
    """null: a new run in a new folder. auto: go on from the newest complete checkpoint of run_dir,
    or start there. A path (run or checkpoint folder): a new run that starts from that state."""
    init_from: str | None = None
    """Start from the weights of this draft (same method and layout) instead of random ones: a draft
    or run of ours, or an EAGLE-1/3 folder that draftsmith-import reads. With resume=auto it holds
    until there is a checkpoint."""
    init_vocabulary: str = "same"
    """The draft vocabulary with init_from. same: this run's data must give the checkpoint's.
    rebuild: take this run's; the head's rows go with their tokens. keep: the checkpoint's."""

    def __post_init__(self) -> None:
        if self.resume == "auto" and self.run_dir is None:
            raise ValueError(
                "resume=auto continues a run folder, but run_dir is null. Add run_dir=FOLDER."
            )
        require_choice("init_vocabulary", self.init_vocabulary, ("same", "keep", "rebuild"))
        if self.init_vocabulary != "same" and self.init_from is None:
            raise ValueError(
                f"init_vocabulary={self.init_vocabulary} has no effect without init_from. Name the "
                "draft to start from, or drop it."
            )
        # resume=auto goes on with a run that may have started so, and starts one where none is.
        if self.resume not in (None, "auto") and self.init_from is not None:
            raise ValueError(
                f"resume={self.resume} brings its own weights, so init_from has no effect. Set "
                "only one of them."
            )
        if self.train.eval_every is not None and not self.data.has_validation:
            raise ValueError(
                f"train.eval_every is {self.train.eval_every}, but nothing is held out. Set "
                "data.validation_share or data.validation, or train.eval_every=null."
            )
        if self.features.source == "cached" and self.features.cache is None:
            raise ValueError(
                "features=cached needs features.cache=FOLDER (written by draftsmith-cache). "
                "features=live needs none."
            )
        if self.features.source != "cached" and self.data.prepared is None:
            raise ValueError(
                f"features={self.features.source} needs data.prepared=FOLDER (written by "
                "draftsmith-prepare)."
            )


def method_name(node: dict[str, Any]) -> str:
    """The short name of a method node: draftsmith.models.eagle3.Eagle3Method gives eagle3."""
    module = str(node["_target_"]).rpartition(".")[0]
    return module.rpartition(".")[2]


def build_method(node: Any) -> DraftMethod:
    """Turns the `method` node into its dataclass; that class checks its own values.

    Raises:
        ValueError: `_target_` is missing or names nothing; a key is unknown (near matches are
            listed) or a needed one is missing.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise ValueError(
            "method has no _target_. Choose a preset (method=eagle3), or name your own class in a "
            "preset of your own."
        )
    target = str(node["_target_"])
    module_name, _, class_name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"method._target_ is {target!r}; no module {error.name!r}.") from error
    method_class = getattr(module, class_name, None)
    if not (isinstance(method_class, type) and is_dataclass(method_class)):
        choices = [name for name, value in vars(module).items() if is_dataclass(value)]
        matches = near_matches(class_name, choices)
        hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
        raise ValueError(f"method._target_ is {target!r}; that is not a dataclass.{hint}")
    settings = {key: value for key, value in node.items() if key != "_target_"}
    names = [entry.name for entry in fields(method_class) if entry.init]
    for key in settings:
        if key not in names:
            matches = near_matches(str(key), names)
            hint = f"Did you mean {' or '.join(matches)}?" if matches else f"It has {names}."
            raise ValueError(f"method.{key} is not a setting of {class_name}. {hint}")
    needed = [
        entry.name
        for entry in fields(method_class)
        if entry.init and entry.default is NO_DEFAULT and entry.default_factory is NO_DEFAULT
    ]
    missing = [name for name in needed if name not in settings]
    if missing:
        raise ValueError(f"No value for method.{missing[0]}. Set it: method.{missing[0]}=...")
    method: Any = method_class(**settings)  # a user's own class: its protocol is checked by use
    return method


def write_config(settings: TrainConfig, run_dir: Path, *, exclusive: bool = True) -> None:
    """Writes the resolved settings; `exclusive` makes an existing file an error.

    Raises:
        FileExistsError: the folder is taken by another run.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(settings)))
    with (run_dir / CONFIG_FILE).open("x" if exclusive else "w", encoding="utf-8") as file:
        file.write(text)


def read_config(run_dir: Path) -> TrainConfig:
    """Reads RUN_DIR/config.yaml back into the dataclasses, with all their checks.

    Raises:
        ValueError: no such file, an unknown key, a wrong type or a failed check.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not a run folder: it has no {CONFIG_FILE}.")
    try:
        loaded = OmegaConf.load(path)
        refuse_added_keys(loaded, TrainConfig)
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), loaded))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from error
    assert isinstance(settings, TrainConfig), "merging into a schema keeps its type"
    return settings


def changed_settings(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; run_dir and resume are left out."""
    changes: dict[str, tuple[Any, Any]] = {}

    def walk(prefix: str, before: Any, after: Any) -> None:
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted({*before, *after}):
                walk(f"{prefix}.{key}" if prefix else key, before.get(key), after.get(key))
        elif before != after and prefix not in ("run_dir", "resume"):
            changes[prefix] = (before, after)

    walk("", asdict(old), asdict(new))
    return changes
