"""The shape of the code base: imports point one way, the core stays small, the index is true."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedloom"
# Each layer may import itself and those before it. Engines know types and clients only: `run` hands them the rest.
LAYERS = [
    {"batches", "copies", "errors", "encoding", "hints", "seeds", "recent"},
    {"wire", "registry"},
    {"settings", "types"},
    {"units", "models", "data", "augment"},
    {"network"},
    {"client"},
    {"fleet", "readings", "questions"},
    {"policies", "steps", "engine"},
    {"method"},
    {"methods"},
    {"runs", "bench"},
    {"deploy"},
    {"report"},
    {"cli"},
]
# What a method and an engine need of each other, and the plainest engine. Policies, methods and the other engines
# (processes, ray, deployment) are its users; `runs` drives it.
CORE = [
    "types.py", "encoding.py", "wire.py", "seeds.py", "network.py", "client.py", "steps.py", "readings.py",
    "questions.py", "method.py", "fleet/fleet.py", "engine/worker.py", "engine/reference.py", "engine/local.py",
    "runs/serverless.py",
]  # fmt: skip
LOOP = ["runs/experiment.py", "runs/store.py", "runs/signals.py"]


def layer_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else ""
    return next((number for number, layer in enumerate(LAYERS) if part in layer), -1)


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports when it is itself imported."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedloom":
                parts = (
                    [f"{node.module}.{alias.name}" for alias in node.names]
                    if node.module == "fedloom"
                    else [node.module]
                )
                found.update(part for part in parts if part.split(".")[1] != "__version__")
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body)

    visit(ast.parse(path.read_text()).body)
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    module = "fedloom." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    own = layer_of(module)
    if path.name != "__init__.py" or path.parent != ROOT:
        assert own >= 0, f"{module} is in no layer"
        later = {other for other in imports(path) if layer_of(other) > own}
        assert not later, f"{module} imports {later}"


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (
            tokenize.ENDMARKER,
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            text = node.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def test_core_is_small():
    assert sum(code_lines(ROOT / name) for name in CORE) < 1500
    assert sum(code_lines(ROOT / name) for name in LOOP) < 350


def test_fedavg_reads_in_a_glance():
    source = (ROOT / "methods" / "fedavg.py").read_text()
    imported = sum(
        len(ast.unparse(node).splitlines()) for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)
    )
    assert code_lines(ROOT / "methods" / "fedavg.py") - imported <= 25


def test_own_method_takes_twenty_lines():
    assert code_lines(ROOT.parents[1] / "examples" / "mymethod.py") <= 20 + 4  # and its four imports
