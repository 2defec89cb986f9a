"""Which module imports which: the direction of imports, no bare names, no torch where plans are made."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "planner": {"planner", "executor", "costmodel", "kernels", "profiles"},
    "executor": {"executor", "costmodel", "kernels", "profiles"},
    "costmodel": {"costmodel", "profiles"},
    "kernels": {"kernels", "profiles"},
    "profiles": {"profiles"},
}
SOURCES = sorted(
    path
    for folder in (*MAY_IMPORT, "tests", "examples", "benchmarks", "docs")
    for path in (REPOSITORY / folder).rglob("*.py")
)
PRODUCT = [path for path in SOURCES if path.relative_to(REPOSITORY).parts[0] in MAY_IMPORT]


@dataclass(frozen=True)
class Import:
    """One imported name, as ``trainplan.costmodel.model``."""

    name: str
    line: int
    runs_on_import: bool  # at module level, and not only for a type checker


def imports(source: str) -> list[Import]:
    """Every import of a module's source; a relative one keeps its leading dots."""
    found: list[Import] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from trainplan import costmodel` names a folder in its last part
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "trainplan" else [base]
            found.extend(Import(name, node.lineno, runs) for name in names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for guarded in node.body:
                visit(guarded, False)
            for other in node.orelse:
                visit(other, runs)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, runs and not deferred)

    visit(ast.parse(source), True)
    return found


def faults(folder: str, source: str) -> list[str]:
    """What the imports of a module of ``folder`` do against the rules, one line each."""
    broken = []
    for found in imports(source):
        parts = found.name.split(".")
        if found.name.startswith("."):
            broken.append(f"line {found.line}: {found.name} is relative")
        if parts[0] in MAY_IMPORT:
            broken.append(f"line {found.line}: bare {found.name}, should be trainplan.{found.name}")
        if folder not in MAY_IMPORT:
            continue
        target = parts[1] if parts[0] == "trainplan" and len(parts) > 1 else ""
        if target in MAY_IMPORT and target not in MAY_IMPORT[folder]:
            broken.append(f"line {found.line}: {folder} must not import {target}")
        never_torch = folder in ("costmodel", "profiles")
        if parts[0] == "torch" and (never_torch or (folder == "planner" and found.runs_on_import)):
            broken.append(f"line {found.line}: {folder} must not import torch")
    return broken


@pytest.mark.parametrize(
    ("folder", "source", "fault"),
    [
        ("costmodel", "import kernels", "line 1: bare kernels, should be trainplan.kernels"),
        ("tests", "from planner.cli import main", "line 1: bare planner.cli, should be trainplan.planner.cli"),
        ("costmodel", "from . import model", "line 1: . is relative"),
        ("costmodel", "from trainplan import kernels", "line 1: costmodel must not import kernels"),
        ("kernels", "import trainplan.costmodel.model", "line 1: kernels must not import costmodel"),
        (
            "executor",
            "def f():\n    from trainplan.planner.cli import main",
            "line 2: executor must not import planner",
        ),
        ("profiles", "from trainplan.costmodel import errors", "line 1: profiles must not import costmodel"),
        ("costmodel", "def f():\n    import torch", "line 2: costmodel must not import torch"),
        ("costmodel", "if TYPE_CHECKING:\n    import torch", "line 2: costmodel must not import torch"),
        ("planner", "try:\n    import torch.cuda\nexcept ImportError: pass", "line 2: planner must not import torch"),
    ],
)
def test_the_check_finds_each_kind_of_fault(folder: str, source: str, fault: str) -> None:
    assert faults(folder, source) == [fault]


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("planner", "from trainplan import __version__\nfrom trainplan.kernels import ops"),
        ("planner", "def run():\n    import torch"),
        ("planner", "if typing.TYPE_CHECKING:\n    import torch"),
        ("executor", "import torch\nimport kernelspec\nfrom trainplan.costmodel.model import ModelSpec"),
        ("tests", "import torch\nfrom trainplan.planner.cli import main"),
    ],
)
def test_the_check_passes_what_is_allowed(folder: str, source: str) -> None:
    assert faults(folder, source) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imports_keep_the_rules(path: Path) -> None:
    assert faults(path.relative_to(REPOSITORY).parts[0], path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_sources_are_ascii(path: Path) -> None:
    strange = [number for number, line in enumerate(path.read_bytes().splitlines(), 1) if not line.isascii()]
    assert strange == [], "lines with characters outside ASCII"


def test_planning_modules_load_no_torch() -> None:
    """Whatever they import in turn: a laptop plans without torch installed."""
    names = [
        "trainplan." + ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in PRODUCT
        if path.relative_to(REPOSITORY).parts[0] in ("planner", "costmodel", "profiles") and path.stem != "__init__"
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
