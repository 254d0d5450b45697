"""What a step of each recipe does stays within docs/step_counts.json; the check is seen to fail where it should."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import step_counts  # noqa: E402


@pytest.fixture(scope="module")
def report():
    """All recipes in one process, as a person would run it."""
    command = [sys.executable, str(ROOT / "scripts" / "step_counts.py")]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_no_recipe_does_more_in_a_step_than_was_kept(report):
    assert report.returncode == 0, report.stderr[-3000:]
    kept = json.loads(step_counts.KEPT.read_text())["recipes"]
    assert set(kept) == {path.parent.name for path in (ROOT / "recipes").glob("*/train.py")}
    for name, counts in kept.items():
        assert f"{name}: operators" in report.stdout
        assert min(counts.values()) > 0


def test_a_heavier_step_is_noticed(tmp_path):
    """Recomputed activations: more operators and more matrix products, which is what the guard is there to see."""
    kept = json.loads(step_counts.KEPT.read_text())["recipes"]["llama-3.2-1b"]
    recipe = ROOT / "recipes" / "llama-3.2-1b"
    with contextlib.chdir(ROOT):
        found = step_counts.measure(recipe, tmp_path, "--activation_checkpointing", "true")
    problems = step_counts.grown("llama-3.2-1b", found, kept)
    assert any("operators" in problem for problem in problems), found
    assert any("matmul_flops" in problem for problem in problems), found
    assert not step_counts.grown("llama-3.2-1b", kept, kept)
    synced = kept | {"host_syncs": kept["host_syncs"] + 1}
    assert "host_syncs" in step_counts.grown("llama-3.2-1b", synced, kept)[0]
