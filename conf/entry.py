"""How every verb starts: Hydra composes, the schema checks, plain dataclasses go on.

Nothing below an entry point sees omegaconf. A mistake in the settings is one readable message and
exit code 2; DRAFTSMITH_TRACEBACK=1 shows the full trace.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import hydra
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIG_MODULE = "draftsmith.conf"
VERSION_BASE = "1.3"


def load_named(name: str) -> Any:
    """Imports what 'package.module:name' names, at the time of the call."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """All dotted keys of a dataclass schema, nested ones included."""
    keys: list[str] = []
    hints = get_type_hints(schema)
    for entry in fields(schema):
        keys.append(prefix + entry.name)
        inner = hints[entry.name]
        if isinstance(inner, type) and is_dataclass(inner):
            keys.extend(known_keys(inner, f"{prefix}{entry.name}."))
    return keys


def near_matches(word: str, choices: Sequence[str]) -> list[str]:
    """Up to three of `choices` that `word` may have meant, compared with and without prefixes."""
    close = difflib.get_close_matches(word, choices, n=3, cutoff=0.6)
    last = {choice.rsplit(".", 1)[-1]: choice for choice in choices}
    leaf = word.rsplit(".", 1)[-1]
    close += [last[name] for name in difflib.get_close_matches(leaf, list(last), n=3, cutoff=0.7)]
    return list(dict.fromkeys(close))[:3]


def preset_keys(group: str) -> dict[str, list[str]]:
    """Preset of a group of draftsmith's own -> its top-level keys, those it builds on left out."""
    folder = importlib.resources.files(CONFIG_MODULE) / group
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            keys = OmegaConf.create(file.read_text(encoding="utf-8"))
            found[file.name.removesuffix(".yaml")] = [
                str(key) for key in keys if key not in ("_target_", "defaults")
            ]
    return found


def about_method_key(word: str) -> str:
    """What to say of a setting that the chosen method does not have, such as method.nois."""
    if word.startswith("method.objective."):
        return (
            "\nAn option of the objective is added with a plus sign, for example "
            f"+{word}=...; a wrong name is refused with the choices."
        )
    presets = preset_keys("method")
    key = word.removeprefix("method.")
    owners = [preset for preset, keys in presets.items() if key in keys]
    if owners:
        return f"\n{word} is a setting of method={' and method='.join(owners)} only."
    matches = near_matches(key, sorted({name for keys in presets.values() for name in keys}))
    return f"\nDid you mean method.{' or method.'.join(matches)}?" if matches else ""


def explain(error: Exception, schema: type) -> str:
    """The text of a configuration error, with near matches for a key that does not exist."""
    text = re.sub(r"\nTo append to your config use \S+", "", str(error).strip())
    cause = error.__cause__
    if cause is not None and str(cause).strip() not in text:
        text = f"{text}\n{str(cause).strip()}"
    found = re.search(r"Key '([^']+)'", text) or re.search(r"override '?\+?([\w./@]+)", text)
    full_key = re.search(r"full_key: ([\w.]+)", text)
    word = full_key.group(1) if full_key else found.group(1) if found else ""
    if word.startswith("method."):
        text += about_method_key(word)
    elif word:
        matches = near_matches(word, known_keys(schema))
        if matches and word not in matches:
            text += f"\nDid you mean {' or '.join(matches)}?"
    if any(sign in text for sign in ("mismatched input", "token recognition", "no viable")):
        text += (
            "\nHydra reads = , { } [ ] and spaces in a value itself: quote the value twice, "
            "for example 'data.path=\"dir/a=b,c.jsonl\"'."
        )
    return text


def register_schema(root: str, schema: type) -> None:
    """Stores the dataclass under the name that the root YAML lists first."""
    ConfigStore.instance().store(name=f"{root}_schema", node=schema)


def refuse_added_keys(config: Any, schema: type, prefix: str = "") -> None:
    """Hydra's +key=value gets past a structured config in silence; the schema has the last word."""
    hints = get_type_hints(schema)
    names = {entry.name for entry in fields(schema)}
    for key in config:
        if key not in names:
            matches = near_matches(prefix + str(key), known_keys(schema, prefix))
            hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
            raise ValueError(f"{prefix}{key} is not a setting of {schema.__name__}.{hint}")
        inner = hints[key]
        if (
            isinstance(inner, type)
            and is_dataclass(inner)
            and not OmegaConf.is_missing(config, key)
        ):
            refuse_added_keys(config[key], inner, f"{prefix}{key}.")


def to_settings(config: DictConfig, schema: type) -> Any:
    """Resolves a composed config into plain dataclasses (their own checks run here)."""
    refuse_added_keys(config, schema)
    OmegaConf.resolve(config)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        of_target = missing[0].startswith("target.")
        hint = " (or choose a preset: target=smollm2)" if of_target else ""
        names = ", ".join(missing)
        raise ValueError(
            f"No value for {names}. Give it on the command line: {missing[0]}=...{hint}"
        )
    return OmegaConf.to_object(config)


def compose_settings(root: str, schema: str, overrides: Sequence[str]) -> Any:
    """Composes root YAML + overrides into dataclasses, as a command line would.

    Raises:
        ValueError: an unknown key, a wrong type or a failed check, with near matches.
    """
    schema_type = load_named(schema)
    register_schema(root, schema_type)
    try:
        with initialize_config_module(config_module=CONFIG_MODULE, version_base=VERSION_BASE):
            return to_settings(compose(config_name=root, overrides=list(overrides)), schema_type)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, schema_type)) from error


def fail(message: str) -> None:
    """Prints one readable message and ends the process with exit code 2."""
    sys.stderr.write(f"draftsmith: {message}\n")
    raise SystemExit(2)


def _in_sweep() -> bool:
    configured = HydraConfig.initialized()
    return configured and HydraConfig.get().mode == RunMode.MULTIRUN


def run_verb(run: Callable[[Any], None] | str, *, root: str, schema: str) -> None:
    """Runs one verb: `run` gets the settings object; user errors are printed without a trace.

    Args:
        run: the verb's work, called with an instance of the schema; as 'package.module:function'
            it is imported only after the settings were found right.
        root: name of the root YAML in conf/ (prepare, cache, train, ...).
        schema: 'package.module:ClassName' of the settings dataclass.
    """
    schema_type = load_named(schema)
    register_schema(root, schema_type)
    # Hydra would wrap and shorten our texts; its own switch shows its part of the trace.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")

    def job(config: DictConfig) -> None:
        try:
            settings = to_settings(config, schema_type)
            work = load_named(run) if isinstance(run, str) else run
            work(settings)
        except ValueError as error:
            # Ends here, before Hydra adds its own lines; in a sweep Hydra goes on with the next job
            # and reports at the end.
            if os.environ.get("DRAFTSMITH_TRACEBACK") or _in_sweep():
                raise
            fail(str(error))

    decorated = hydra.main(
        version_base=VERSION_BASE, config_path=f"pkg://{CONFIG_MODULE}", config_name=root
    )(job)
    try:
        decorated()
    except (HydraException, OmegaConfBaseException) as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        fail(explain(error, schema_type))
    except ValueError as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        fail(str(error))
