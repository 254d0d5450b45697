"""What is run on several GPUs names recipes that exist, and the time in collectives is counted right. No GPU here."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import collectives  # noqa: E402
import several_gpus  # noqa: E402
import smoke  # noqa: E402


def test_every_cell_is_a_configuration_of_a_recipe_that_fits_the_strategy():
    for recipe, config, strategy, *_ in several_gpus.CORRECT + several_gpus.SPEED:
        folder = ROOT / "recipes" / recipe
        assert (folder / f"{config}.yaml").is_file() and strategy in smoke.fitting(folder)
    recipes = {path.parent.name for path in (ROOT / "recipes").glob("*/train.py")}
    assert {several_gpus.on_one_gpu(cell)[0] for cell in several_gpus.SPEED} < recipes


def test_a_collective_is_exposed_only_while_nothing_else_runs():
    kernels = [
        ("gemm", 0, 4),
        ("ncclDevKernel_AllGather", 3, 7),
        ("gemm", 6, 9),
        ("ncclDevKernel_ReduceScatter", 20, 21),
    ]
    found = collectives.summary(kernels, step=0.03)
    assert found == {"step_ms": 30, "busy_ms": 10, "collectives_ms": 5, "exposed_ms": 3}
    assert collectives.merged([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]


def test_the_profile_is_of_the_wanted_step_and_a_run_is_read_without_it(tmp_path):
    """train.py through collectives.py on one CPU process: there are no kernels there, but the file and the figures are."""
    recipe, out = ROOT / "recipes" / "llama-3.2-1b", tmp_path / "run"
    bench = smoke.Bench(recipe, tmp_path / "bench")
    environment = {"COLLECTIVES": str(tmp_path / "run.profile.json"), "COLLECTIVES_STEP": "6"}
    words = [*bench.arguments(out, 1), "--max_steps", "6", "--save_strategy", "no", "--eval_strategy", "no"]
    options = {"wrapper": ROOT / "scripts" / "collectives.py", "environment": environment, "log": tmp_path / "log"}
    result = smoke.launching.launch(recipe, "single", *words, processes=1, **options)
    assert result.rc == 0, result.output
    found = several_gpus.read_run(out, 1)
    assert len(found["losses"]) == 6 and found["profile"]["collectives_ms"] == 0 < found["profile"]["step_ms"]
    rates = [
        line["tokens_per_second"]
        for line in smoke.launching.metrics(out)
        if line.get("step", 0) > several_gpus.WARM_UP and "loss" in line
    ]
    assert min(rates) <= found["tokens_per_second_per_gpu"] <= max(rates)


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "several_gpus.py"), str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "no GPU is visible" in done.stderr and "--rehearse" in done.stderr


def test_the_tables_hold_every_cell_failures_too():
    report = json.loads(several_gpus.KEPT.read_text(encoding="utf-8"))
    run = {"tokens_per_second_per_gpu": 1000, "mfu": 0.3, "peak_gib": 12.0}
    run |= {"profile": {"step_ms": 100, "busy_ms": 90, "collectives_ms": 40, "exposed_ms": 10}}
    cell = {"recipe": "gpt-oss-20b", "config": "config", "strategy": "ddp", "layers": 8, "error": None}
    measured = cell | {
        "all_gpus": run,
        "one_gpu": run,
        "predicted_gib": 11.0,
        "efficiency": 0.9,
        "loss_deviation": 1e-3,
    }
    made = several_gpus.table(report | {"speed": [measured, cell | {"error": "exit code 1"}]})
    assert "| gpt-oss-20b | ddp | 8 layers | 1,000 | 0.90 | 30.0% | 40% | 10% | 11.0 | 12.0 | 1e-03 |" in made
    assert "exit code 1" in made and made.count("| killed") == 1
    assert all(f"| {one['recipe']}" in made for one in report["correct"])
