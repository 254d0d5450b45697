"""smoke.py fails where it should, says what is wrong in one line, and takes a copied folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import launching
import pytest
import smoke
import strategy_table
import tiny_model

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "recipes" / "llama-3.2-1b"


def run_smoke(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "smoke.py"), str(folder), *arguments]
    environment = os.environ | {"TMPDIR": str(folder.parent)}  # a failed run is kept, and goes with the test's folder
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def copy(destination: Path, replace: dict[str, str] | None = None) -> Path:
    """The Llama recipe under another name, elsewhere, with texts in train.py and config.yaml replaced."""
    folder = shutil.copytree(
        LLAMA, destination / "my-recipe", ignore=shutil.ignore_patterns("__pycache__", "run", "run-*")
    )
    for old, new in (replace or {}).items():
        files = [file for file in (folder / "train.py", folder / "config.yaml") if old in file.read_text()]
        assert files, old
        for file in files:
            file.write_text(file.read_text().replace(old, new))
    return folder


def test_unknown_model_family_is_named_with_the_known_ones(tmp_path):
    done = run_smoke(copy(tmp_path, {"meta-llama/Llama-3.2-1B-Instruct": "mistralai/Mistral-7B"}))
    assert done.returncode == 1
    (told,) = done.stdout.splitlines()
    assert told.startswith("FAIL") and "mistralai/Mistral-7B" in told
    assert all(family in told for family in tiny_model.FAMILIES)


@pytest.mark.matrix
def test_a_loss_that_differs_from_one_process_fails(tmp_path):
    seed = "training_args.learning_rate *= training_args.process_index + training_args.world_size"
    folder = copy(tmp_path, {"    trainer = SFTTrainer(": f"    {seed}\n    trainer = SFTTrainer("})
    done = run_smoke(folder, "--strategy", "zero2")
    assert done.returncode == 1
    told = done.stdout.splitlines()[0]
    assert told.startswith("FAIL zero2") and "away from those of one process" in told


@pytest.mark.matrix
def test_a_result_that_was_not_trained_fails(tmp_path):
    save = "trainer.save_model(final)"
    other = f"{save}; import transformers as t"
    other += "; t.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path).save_pretrained(final)"
    done = run_smoke(copy(tmp_path, {save: other}), "--strategy", "single")
    assert done.returncode == 1
    told = done.stdout.splitlines()[0]
    assert told.startswith("FAIL single") and "untrained model" in told


def test_checkpoint_of_plain_data_parallel_is_not_taken_for_sharded(tmp_path):
    for name in ("model.safetensors", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / name).touch()
    assert smoke.sharding_problem(tmp_path, "ddp", 2) is None
    for strategy in ("single", "fsdp", "zero1", "zero2", "zero3", "zero3_offload"):
        assert smoke.sharding_problem(tmp_path, strategy, 2 if strategy != "single" else 1)


def test_a_step_that_was_not_logged_is_an_error_and_a_repeated_one_counts_once(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "eval_loss": 9.0},
        {"step": 2, "loss": 2.5},
        {"step": 2, "loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    assert launching.losses(tmp_path) == [3.0, 2.0]
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 2.0}\n')
    with pytest.raises(launching.LaunchError, match="step 1"):
        launching.losses(tmp_path)


def test_strategies_come_from_the_recipe(tmp_path):
    assert smoke.fitting(ROOT / "recipes" / "gpt-oss-120b") == ("single", "fsdp", "zero3", "zero3_offload")
    assert smoke.fitting(ROOT / "recipes" / "gpt-oss-120b", "expert_parallel") == ("single", "fsdp")
    assert smoke.fitting(ROOT / "recipes" / "gpt-oss-20b", "qlora") == ("single", "ddp", "zero1", "zero2")
    assert "fsdp" not in smoke.fitting(ROOT / "recipes" / "llama-3.2-3b", "qlora")
    (tmp_path / "train.py").write_text("print('no guard')\n")
    (tmp_path / "config.yaml").write_text("learning_rate: 1.0e-5\n")
    assert smoke.fitting(tmp_path) == launching.STRATEGIES


def test_table_is_made_from_the_file_alone(tmp_path):
    measured = [
        smoke.Cell("a", "config", "ddp", "fp32", 2, loss_deviation=1e-7),
        smoke.Cell("a", "config", "ddp", "shipped", 2, loss_deviation=2e-3),
        smoke.Cell("a", "lora", "fsdp", "fp32", 2, error="it broke; log: somewhere"),
    ]
    file = tmp_path / "matrix.json"
    strategy_table.write(measured[2:], file)
    strategy_table.write(measured[:2], file)
    told = json.loads(file.read_text())
    assert len(told["cells"]) == 3 and "somewhere" not in file.read_text()
    lines = strategy_table.markdown(told).splitlines()
    assert lines[2] == "| a |  | 1e-07 / 2e-03 |  |  |  |  |  |"
    assert lines[3] == "| a `--config lora` |  |  | failed / - |  |  |  |  |"
    assert "3 cells, 1 failed" in lines[-1] and told["date"] in lines[-1]
