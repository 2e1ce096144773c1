"""Fixtures shared by all tests: offline, two threads, tiny targets made on the spot.

`tiny` is the module tests/tiny.py itself (its import mode keeps tests from importing each other).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Set before transformers is imported: a test that asks the hub would wait for its time-outs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

TESTS_FOLDER = Path(__file__).parent


def _load(file: str) -> ModuleType:
    """Loads a file of this folder by a name of its own: importlib mode keeps it off sys.path."""
    name = f"draftsmith_tests_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS_FOLDER / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tests/tiny.py: FAMILIES, make_tiny_model, make_tiny_tokenizer, ..."""
    return _load("tiny")


@pytest.fixture(scope="session")
def noisy_copy() -> Any:
    """The class of tests/noisy_copy.py: a draft model that is right about as often as asked."""
    return _load("noisy_copy").NoisyCopy


@pytest.fixture(scope="session")
def page_results() -> ModuleType:
    """The module tests/page_results.py: results as an evaluation writes them."""
    return _load("page_results")


@pytest.fixture(scope="session")
def eagle1_reference() -> Any:
    """The class of tests/eagle1_reference.py: EAGLE-1 straight from its formulas."""
    return _load("eagle1_reference").Eagle1Reference


@pytest.fixture(scope="session")
def tiny_model(tiny: ModuleType) -> Callable[..., Any]:
    """Factory `tiny_model(family="llama", *, seed=0, **config)`: a fresh transformers model."""
    return tiny.make_tiny_model


@pytest.fixture
def tiny_tokenizer(tiny: ModuleType) -> Any:
    """A fresh tiny tokenizer with a ChatML template (312 entries; pad 0, bos 1, eos 3)."""
    return tiny.make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory `tiny_folder(family="llama", **settings)`: a saved target; made once per settings.

    Tests must not write into the folder: it is shared by the whole session.
    """
    folders: dict[str, Path] = {}

    def make(family: str = "llama", **settings: Any) -> Path:
        key = f"{family} {sorted(settings.items())}"
        if key not in folders:
            folder = tmp_path_factory.mktemp(f"tiny-{family}-")
            folders[key] = tiny.save_tiny_target(folder, family, **settings)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama_folder(tiny_folder: Callable[..., Path]) -> Path:
    """A saved 4-layer Llama target with its tokenizer (shared: read only)."""
    return tiny_folder("llama")


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Callable[..., Path]) -> Callable[..., Any]:
    """Factory `tiny_target(family="llama", **settings)`: a loaded float32 `TargetModel`.

    Loaded once per settings and shared; a target is frozen, so tests cannot disturb each other.
    """
    from draftsmith.models.target import TargetModel

    targets: dict[Path, Any] = {}

    def make(family: str = "llama", **settings: Any) -> Any:
        folder = tiny_folder(family, **settings)
        if folder not in targets:
            targets[folder] = TargetModel.load(str(folder), dtype="float32")
        return targets[folder]

    return make


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The folder of recorded numbers: DRAFTSMITH_GOLDEN, else tests/golden."""
    folder = Path(os.environ.get("DRAFTSMITH_GOLDEN", TESTS_FOLDER / "golden"))
    if not folder.is_dir():
        pytest.fail(f"No golden numbers at {folder}: set DRAFTSMITH_GOLDEN to their folder.")
    return folder


@pytest.fixture(scope="session")
def draft_chain() -> Callable[..., Any]:
    """`draft_chain(draft, context, count)`: a greedy chain from a fresh state, as the decoder asks
    for it."""
    from draftsmith.inference.policies import ChainPolicy, DraftRequest
    from draftsmith.models.protocols import SamplingSettings

    def draft_once(draft: Any, context: Any, count: int) -> Any:
        length = context.token_ids.shape[1]
        request = DraftRequest(
            context, draft.start(length + count), min(count, draft.max_depth(length)),
            SamplingSettings(), None, draft.config.vocab_size,
        )  # fmt: skip
        return ChainPolicy(count).draft(draft, [request])[0]

    return draft_once
