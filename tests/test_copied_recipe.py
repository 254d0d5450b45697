"""A recipe folder is its own: copied elsewhere it runs, and with the guard's lines deleted it is a plain TRL script."""

import ast
import shutil
from pathlib import Path

import launching
import pytest
import smoke

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
STEPS = 3


def copy(recipe: str, destination: Path, *beside: str) -> Path:
    """The recipe's folder under `destination`/recipes, with folders of the cookbook's root beside it."""
    ignore = shutil.ignore_patterns("__pycache__", "run", "run-*")
    for name in beside:
        shutil.copytree(ROOT / name, destination / name)
    return shutil.copytree(ROOT / "recipes" / recipe, destination / "recipes" / recipe, ignore=ignore)


def without_guard(source: str) -> str:
    """train.py without the imports of guard and keeper and without the statements that call them."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        imports = isinstance(node, ast.Import) and {name.name for name in node.names} <= {"guard", "keeper"}
        calls = isinstance(node, ast.Expr) and ast.unparse(node).startswith(("guard.", "keeper."))
        if imports or calls:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "".join(lines)


@pytest.mark.parametrize(("recipe", "strategy"), [("llama-3.2-1b", "zero3"), ("qwen3-8b-invoice", "fsdp")])
def test_copy_elsewhere_trains_as_the_original(benches, tmp_path, recipe, strategy):
    folder = copy(recipe, tmp_path, "accelerate_configs", "deepspeed_configs")
    bench, run = benches(recipe), tmp_path / "run"
    arguments = [*bench.arguments(run, 2), "--max_steps", str(STEPS)]
    assert launching.launch_root(folder) == tmp_path
    result = launching.launch(folder, strategy, *arguments, log=tmp_path / "log")
    assert result.rc == 0, smoke.reason(result.output)
    assert launching.losses(run) == pytest.approx(bench.reference[:STEPS], rel=smoke.TOLERANCE["fp32"])
    assert smoke.sharding_problem(run / f"checkpoint-{STEPS}", strategy, 2) is None
    assert (run / "final").is_dir()


def distinct() -> list[str]:
    """The first recipe of each train.py, docstrings aside."""
    first = {}
    for recipe in RECIPES:
        source = ast.parse((ROOT / "recipes" / recipe / "train.py").read_text(encoding="utf-8"))
        first.setdefault(ast.unparse(ast.Module(source.body[1:], [])), recipe)
    return [*first.values()]


@pytest.mark.parametrize("recipe", distinct())
def test_without_the_guards_lines_it_is_a_plain_trl_script(benches, tmp_path, recipe):
    folder = copy(recipe, tmp_path)
    (folder / "guard.py").unlink()
    (folder / "keeper.py").unlink()
    source = without_guard((folder / "train.py").read_text(encoding="utf-8"))
    assert "guard" not in source and "keeper" not in source
    (folder / "train.py").write_text(source, encoding="utf-8")
    bench, run = benches(recipe), tmp_path / "run"
    arguments = [*bench.arguments(run, 1), "--max_steps", str(STEPS)]
    arguments[1] = "config.yaml"  # TRL's own parser takes a path, and the paths in the file from the working directory
    result = launching.launch(folder, "single", *arguments, log=tmp_path / "log", processes=1, cwd=folder)
    assert result.rc == 0, smoke.reason(result.output)
    assert f"'loss': '{bench.reference[STEPS - 1]:.4g}'" in result.output
    assert (run / "final").is_dir()
