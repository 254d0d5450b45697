"""What one training step of each recipe does: operators, host syncs, bytes allocated, matrix-product FLOPs.

    python scripts/step_counts.py                      # all recipes, compared with docs/step_counts.json
    python scripts/step_counts.py llama-3.2-1b         # one
    python scripts/step_counts.py --keep               # and write the file, after a change that is meant

Counted by torch's profiler on a CPU, through the recipe's own train.py and trainer, with a tiny model: the third step,
from the end of the second to its own end, so the data loader, the logging and the recipe's own callbacks are in it. One
micro-batch of two rows; everything else is as in config.yaml. A speed is not measured, but what makes a step slow on
every machine is: more operators, more waiting for the device, more memory traffic. Exit code 1 where a count grew by
more than its share in LIMITS.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "step_counts.json"
LIMITS = {"operators": 0.03, "host_syncs": 0.0, "bytes": 0.05, "matmul_flops": 0.01}  # growth that is let pass
LENGTHS = [96] * 16  # tokens of the documents; all the same, so that their order counts for nothing
STEPS = 3


class Finished(BaseException):
    """Raised out of the trainer after the counted step; no Exception, so that nothing on the way handles it."""


def count(profiler) -> dict[str, int]:
    """The counts of a finished profile."""
    events = profiler.key_averages()
    calls = {event.key: event.count for event in events}
    return {
        "operators": sum(number for name, number in calls.items() if name.startswith("aten::")),
        # Values that Python reads from the device, and shapes that depend on values: each waits for the device.
        "host_syncs": sum(calls.get(f"aten::{name}", 0) for name in ("_local_scalar_dense", "nonzero")),
        "bytes": sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events()),
        "matmul_flops": sum(event.flops for event in events),
    }


def measure(recipe: Path, work: Path, *arguments: str) -> dict[str, int]:
    """Train three steps of `recipe` (a folder) in this process, and return the counts of the third.

    arguments: further words after train.py. Raises RuntimeError where the training ends early.
    """
    import bench_run
    import benchmark
    import launching
    import numpy as np
    import tiny_model
    import torch
    import trl
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

    family = launching.model_family(recipe)
    model = tiny_model.write_tiny_model(family, work / "model")
    rows = benchmark.write_rows(work / "rows" / "train.parquet", np.array(LENGTHS), vocabulary=400)
    counted = {}

    class Counter(TrainerCallback):
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_flops=True, acc_events=True
        )

        def on_step_end(self, args, state, control, **_):
            if state.global_step == STEPS - 1:
                self.profiler.start()
            elif state.global_step == STEPS:
                self.profiler.stop()
                counted.update(count(self.profiler))
                raise Finished

    train = trl.SFTTrainer.train

    def counted_train(self, *args, **kwargs):
        self.add_callback(Counter())  # after the recipe's own, which are then inside the counted step
        return train(self, *args, **kwargs)

    words = ["--use_cpu", "true", "--model_name_or_path", str(model), "--output_dir", str(work / "run")]
    words += ["--dataset_name", str(rows), "--assistant_only_loss", "false", "--eval_strategy", "no"]
    words += ["--save_strategy", "no", "--max_length", "128", "--max_steps", str(STEPS + 1)]
    if not launching.read_config(recipe).get("use_peft"):  # one process has no sharded fp32 masters
        words += ["--dtype", "float32"]
    words += [
        "--per_device_train_batch_size",
        "2",
        "--disable_tqdm",
        "true",
        "--gradient_accumulation_steps",
        "1",
        *arguments,
    ]
    kept_argv, kept_path, kept_hook, modules = sys.argv, list(sys.path), sys.excepthook, set(sys.modules)
    sys.argv, sys.path[0] = [str(recipe / "train.py"), *words], str(recipe)
    trl.SFTTrainer.train = counted_train
    try:
        bench_run.exchange_rows({"rows": str(rows)}, recipe)
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(recipe / "train.py"), run_name="__main__")
    except Finished:
        return counted
    finally:
        trl.SFTTrainer.train = train
        sys.argv, sys.path[:], sys.excepthook = kept_argv, kept_path, kept_hook
        for name in set(sys.modules) - modules:  # the next recipe has files of the same names
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(recipe)):
                del sys.modules[name]
        AcceleratorState._reset_state(reset_partial_state=True)
    raise RuntimeError(f"{recipe.name} ended before step {STEPS}")


def grown(name: str, found: dict[str, int], kept: dict[str, int]) -> list[str]:
    """One sentence for each count of `found` that is above the kept one by more than its share."""
    return [
        f"{name}: {key} a step rose from {kept[key]:,} to {found[key]:,} ({found[key] / max(kept[key], 1) - 1:+.1%}); "
        f"{limit:.0%} is let pass."
        for key, limit in LIMITS.items()
        if found[key] > kept[key] * (1 + limit)
    ]


def measure_all(names: list[str]) -> dict[str, dict[str, int]]:
    """Counts of each named recipe."""
    with tempfile.TemporaryDirectory() as work:
        return {name: measure(ROOT / "recipes" / name, Path(work, name)) for name in names}


def main() -> int:
    recipes = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(recipes)}; default: all")
    parser.add_argument("--keep", action="store_true", help="write docs/step_counts.json")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(recipes):
        sys.exit(f"error: {', '.join(unknown)} is no recipe. There are: {', '.join(recipes)}.")
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = measure_all(options.recipes or recipes)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {"recipes": {}}
    problems = []
    for name, counts in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in counts.items()))
        problems += grown(name, counts, kept["recipes"][name]) if name in kept["recipes"] else []
    if options.keep:
        names = ("torch", "transformers", "trl", "accelerate", "peft")
        kept["versions"] = {name: importlib.metadata.version(name) for name in names}
        kept["recipes"] |= found
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return 0
    if problems:
        print("\n".join(problems) + "\nWhere that is meant: python scripts/step_counts.py --keep", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
