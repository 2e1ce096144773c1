"""The structure that DESIGN fixes: who imports whom, and what a wheel must hold."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("conf", "data", "models", "train", "inference", "eval")

ALLOWED = {
    "conf": {"conf"},
    "data": {"conf", "data"},
    "models": {"models"},
    "inference": {"inference", "models"},
    "train": {"conf", "train", "data", "models"},
    "eval": {"conf", "eval", "inference", "models", "data"},
}
TARGET_SIDE = {"target", "target_source", "generation", "protocols", "cpu_precision"}
"""What data/ may use of models/: the target side and its device, never a draft model."""
SHIPPED = {".py", ".yaml", ".jsonl", ".html", ".css", ".js"}


def draftsmith_imports(path: Path) -> set[tuple[str, str]]:
    """(folder, module) of every draftsmith import in a file, late ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "draftsmith" and len(parts) > 1:
                found.add((parts[1], parts[2] if len(parts) > 2 else ""))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_in_the_allowed_direction(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for other, module in draftsmith_imports(path):
            target_side = folder == "data" and other == "models" and module in TARGET_SIDE
            assert other in ALLOWED[folder] or target_side, (
                f"{path.relative_to(ROOT)} imports draftsmith.{other}.{module}"
            )


def test_every_package_folder_is_flat_and_listed() -> None:
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for folder in FOLDERS:
        assert f'"draftsmith.{folder}" = "{folder}"' in listed
        nested = [p for p in (ROOT / folder).rglob("__init__.py") if p.parent != ROOT / folder]
        assert not nested, f"a subpackage would be missing from the wheel: {nested}"


def test_no_python_file_is_longer_than_600_lines() -> None:
    for folder in (*FOLDERS, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 600, f"{path.relative_to(ROOT)} has {lines} lines"


def test_the_wheel_holds_every_module_every_yaml_and_every_prompt(tmp_path: Path) -> None:
    # Built from a copy: setuptools leaves a build folder beside the sources, and whatever lies in
    # an old one would get into the wheel.
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in tracked:
        source, copy = ROOT / name, tmp_path / "source" / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(tmp_path), str(tmp_path / "source")], check=True)
    (wheel,) = tmp_path.glob("draftsmith-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED or path.name == "py.typed":
                inside = f"draftsmith/{path.relative_to(ROOT)}"
                assert inside in names, f"{inside} is missing from the wheel"


def test_importing_draftsmith_needs_no_deepspeed() -> None:
    modules = [
        f"draftsmith.{folder}.{path.stem}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.stem not in {"__init__", "__main__"}
    ]
    # A finder that refuses deepspeed stands for a machine without it.
    script = (
        "import sys, importlib, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "hide = lambda name, *a: None if name.split('.')[0] == 'deepspeed' else real(name, *a)\n"
        "importlib.util.find_spec = hide\n"
        "sys.modules['deepspeed'] = None\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, cwd=ROOT.parent)


@pytest.mark.parametrize(
    "verb",
    [
        "prepare",
        "regenerate",
        "cache",
        "train",
        "evaluate",
        "compare",
        "calibrate",
        "profile",
        "simulate",
        "export",
        "import",
        "stitch",
    ],
)
def test_each_verb_answers_help_without_loading_torch(verb: str, tmp_path: Path) -> None:
    script = (
        "import sys, importlib.metadata as m\n"
        f"(entry,) = [e for e in m.entry_points(group='console_scripts') "
        f"if e.name == 'draftsmith-{verb}']\n"
        "main = entry.load()\n"
        f"sys.argv = ['draftsmith-{verb}', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'help must not wait for torch'\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "target" in result.stdout
    assert not list(tmp_path.iterdir()), "asking for help leaves no files behind"
