"""The main job on real receipts: SmolLM2-135M-Instruct, recipes/qwen3-8b-invoice, SROIE; scored before and after.

    python scripts/sroie.py MODEL DATA WORK                       # on the visible GPUs: 626 receipts, the whole test split
    python scripts/sroie.py MODEL DATA WORK --cpu ddp zero2       # two CPU processes a strategy, 40 steps, 12 receipts

MODEL is the folder that scripts/smollm2.py writes, DATA holds train.jsonl, test.jsonl and near_duplicates.json (rows with
`text` and `entities`). Writes WORK/sroie.json: the scores of the base model and of each tuned one, the loss curve, what it
ran on. Hyperparameters were not chosen on the test split.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/qwen3-8b-invoice"
COLUMNS = ["--schema_file", f"{RECIPE}/schema_receipt.json", "--text_column", "text", "--target_column", "entities"]
FULL = ["--num_train_epochs", "6", "--learning_rate", "3e-4", "--warmup_steps", "0.05", "--eval_fraction", "0.05"]
FULL += [
    "--per_device_train_batch_size",
    "16",
    "--gradient_accumulation_steps",
    "1",
    "--activation_checkpointing",
    "false",
]
FULL += ["--eval_steps", "40", "--save_steps", "100", "--max_length", "2048", "--unfit_rows", "error"]
CPU = ["--use_cpu", "true", "--learning_rate", "3e-4", "--warmup_steps", "2", "--per_device_train_batch_size", "1"]
CPU += ["--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--max_length", "1024"]
CPU += ["--activation_checkpointing", "false", "--unfit_rows", "drop"]


def run(words: list[str], log: Path) -> float:
    """Run a program from the cookbook's root; return its seconds. Stops with the end of its output where it fails."""
    print("$", " ".join(words), flush=True)
    start = time.monotonic()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with open(log, "w", encoding="utf-8") as output:
        code = subprocess.run(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit(f"error: exit code {code}; the end of {log}:\n{log.read_text(errors='replace')[-4000:]}")
    return time.monotonic() - start


def score(model: Path, data: Path, work: Path, name: str, options: list[str]) -> dict:
    """Scores of a model by the recipe's score.py, without the list of worst documents."""
    out = work / f"{name}.json"
    words = [sys.executable, f"{RECIPE}/score.py", str(model), str(data), *COLUMNS, "--max_new_tokens", "160"]
    run(
        [*words, "--chat_template_kwargs", '{"enable_thinking": false}', "--output", str(out), *options],
        work / f"{name}.log",
    )
    report = json.loads(out.read_text())
    kept = ("documents", "strict_json", "unparseable", "limit_hits", "micro_f1", "micro_f1_interval", "micro_f1_exact")
    fields = {field: {"exact": row["f1_exact"], "normalised": row["f1"]} for field, row in report["fields"].items()}
    return {key: report[key] for key in kept if key in report} | {"fields": fields}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--cpu", nargs="+", metavar="STRATEGY", help="launch files to run on two CPU processes")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps on the CPU; default 40")
    parser.add_argument("--score", type=int, default=12, help="test receipts to score on the CPU; default 12")
    arguments = parser.parse_args()
    data, work = arguments.data.absolute(), arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": gpus or f"{os.cpu_count()} CPU cores, {platform.machine()}",
    }
    report["versions"] = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "deepspeed")}
    options = (
        ["--limit", str(arguments.score), "--batch_size", "4", "--dtype", "bfloat16"]
        if arguments.cpu
        else ["--batch_size", "64"]
    )
    report["base"] = score(arguments.model, data / "test.jsonl", work, "base", options)
    report["tuned"] = {}
    for strategy in arguments.cpu or ["single"]:
        out = work / f"run-{strategy}"
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
        launch += [
            "--config_file",
            f"accelerate_configs/{strategy}.yaml",
            *(["--num_processes", "2"] if arguments.cpu else []),
        ]
        words = [*launch, f"{RECIPE}/train.py", "--model_name_or_path", str(arguments.model), *COLUMNS]
        words += ["--dataset_name", str(data / "train.jsonl"), "--output_dir", str(out)]
        words += [*CPU, "--max_steps", str(arguments.steps)] if arguments.cpu else FULL
        seconds = run(words, work / f"train-{strategy}.log")
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        tuned = {"seconds": round(seconds), "steps": len(losses), "loss": [round(loss, 4) for loss in losses]}
        tuned |= score(out / "final", data / "test.jsonl", work, f"tuned-{strategy}", options)
        if not arguments.cpu and (data / "near_duplicates.json").is_file():
            near = {pair[0] for pair in json.loads((data / "near_duplicates.json").read_text())["pairs_test_train"]}
            rows = (data / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            apart = [row for row in rows if json.loads(row)["id"] not in near]
            (work / "test-apart.jsonl").write_text("".join(apart), encoding="utf-8")
            tuned["without_near_duplicates"] = score(out / "final", work / "test-apart.jsonl", work, "apart", options)
        report["tuned"][strategy] = tuned
        (work / "sroie.json").write_text(json.dumps(report, indent=1) + "\n")
        print(
            f"{strategy}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, field F1 {report['base']['micro_f1']:.3f} -> "
            f"{tuned['micro_f1']:.3f} (exact {tuned['micro_f1_exact']:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
