"""All weights in bf16 without fp32 masters: refused, but for torchao's Adam on one GPU, which rounds by chance."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import launching  # noqa: E402
import tiny_model  # noqa: E402

LLAMA = ROOT / "recipes" / "llama-3.2-1b"
TORCHAO = "torchao==0.18.0"  # the version that README.md names
ROUNDED = ("--dtype", "bfloat16", "--optim", "adamw_torch_8bit", "--optim_args", "bf16_stochastic_round=True")
STEPS = 30


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Launches the recipe with torchao, which no other test has: peft and transformers import it where it is there."""
    work = tmp_path_factory.mktemp("bf16_weights")
    site, model = work / "site", tiny_model.write_tiny_model("llama", work / "model")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), TORCHAO]
    subprocess.run(pip, check=True)
    rows = launching.tiny_rows(work / "rows.jsonl", LLAMA)
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    common = ("--model_name_or_path", model, "--dataset_name", rows, "--eval_strategy", "no", "--packing", "false")
    common += ("--max_length", 512, "--per_device_train_batch_size", 2, "--max_steps", STEPS, "--logging_steps", 1)
    # So small that nearly every update is less than half the distance of a weight to its neighbour in bf16.
    common += (
        "--learning_rate",
        3e-5,
        "--warmup_steps",
        1,
        "--lr_scheduler_type",
        "constant",
        "--save_steps",
        STEPS // 2,
    )

    def launch(name, *arguments, strategy="single", **options):
        run = work / name
        options = {"processes": 1, "timeout": 300, "fresh": True, "environment": {"PYTHONPATH": paths}} | options
        log = work / f"{name}.log"
        result = launching.launch(LLAMA, strategy, *common, "--output_dir", run, *arguments, log=log, **options)
        return run, result

    return launch


@pytest.fixture(scope="module")
def rounded(start):
    run, result = start("rounded", *ROUNDED)
    assert result.rc == 0, result.output
    return run


def test_loss_falls_as_with_fp32_weights(start, rounded):
    """Rounded to the nearest, half of the way is lost: 0.13 of 0.33 in 60 steps of the same."""
    weights = load_file(rounded / "final" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    run, result = start("fp32", "--dtype", "float32")
    assert result.rc == 0, result.output
    exact, found = launching.losses(run), launching.losses(rounded)
    assert len(exact) == len(found) == STEPS
    fell, expected = (sum(losses[:5]) - sum(losses[-5:]) for losses in (found, exact))
    assert expected > 0.1 and fell == pytest.approx(expected, rel=0.1)


def test_a_killed_run_continues_with_the_same_draws(start, rounded):
    """Codes, scales and the generator that rounds come back: to the last bit."""

    def late():
        return len(launching.metrics(killed)) > STEPS // 2 + 3

    killed = rounded.parent / "killed"
    start("killed", *ROUNDED, stop_when=late, kill_rank=0)
    assert not (killed / "final").exists()
    _, result = start("killed", *ROUNDED)
    assert result.rc == 0, result.output
    assert f"checkpoint-{STEPS // 2}" in result.output
    assert launching.losses(killed) == launching.losses(rounded)
    expected = load_file(rounded / "final" / "model.safetensors")
    for name, weight in load_file(killed / "final" / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name


def test_ranks_that_would_round_by_their_own_draws_are_refused(start):
    _, result = start("ddp", *ROUNDED, strategy="ddp", processes=2)
    assert result.rc != 0 and "the ranks would drift apart" in " ".join(result.output.split())
