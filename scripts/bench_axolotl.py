"""The peer for gpt-oss: axolotl on the same rows, with the same clock; an arm of benchmark.py. Not needed for anything else.

    BENCH_OPTIONS='{...}' python scripts/bench_axolotl.py MODEL_FOLDER '{"rank": 8, "batch": 4, ...}'

axolotl 0.19.0 pins other versions of the libraries (transformers 5.16.1, trl 1.9.0, peft 0.20.0), so it has an environment of
its own; see `--axolotl-site` of benchmark.py. Settings: its example for gpt-oss-20b on one GPU, with what it offers for
speed where its wheel holds it: packing, FlashAttention 4, ScatterMoE for the experts. Its example recomputes activations
and offloads them; `checkpointing` says whether the arm recomputes them, and nothing is offloaded.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
options = json.loads(os.environ["BENCH_OPTIONS"])

import bench_run  # noqa: E402
import yaml  # noqa: E402
from axolotl.cli.args import TrainerCliArgs  # noqa: E402
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.cli.train import do_train  # noqa: E402
from axolotl.core.trainers.base import AxolotlTrainer  # noqa: E402
from datasets import Dataset  # noqa: E402


def masked_rows(path: Path) -> Path:
    """The rows with the column of ones by which axolotl knows rows that are tokenized."""
    rows = Dataset.from_parquet(options["rows"])
    ones = [[1] * len(ids) for ids in rows["input_ids"]]
    rows.add_column("attention_mask", ones).to_parquet(path)
    return path


def settings_file(folder: str, settings: dict) -> Path:
    """axolotl's own configuration file for this arm."""
    work = Path(options["result"]).with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model": folder,
        "datasets": [{"path": str(masked_rows(work / "train.parquet")), "ds_type": "parquet", "type": ""}],
        "dataset_prepared_path": str(work / "prepared"),
        "output_dir": str(work / "run"),
        "val_set_size": 0,
        "sequence_len": settings["length"],
        "sample_packing": True,
        "pad_to_sequence_len": False,
        "micro_batch_size": settings["batch"],
        "gradient_accumulation_steps": settings["accumulation"],
        "max_steps": 10_000,
        "adapter": "lora",
        "lora_r": settings["rank"],
        "lora_alpha": 2 * settings["rank"],
        "lora_dropout": 0.0,
        "lora_target_modules": list(settings["modules"]),
        "lora_target_parameters": list(settings.get("parameters", [])) or None,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "constant_with_warmup",
        "learning_rate": 2e-4,
        "warmup_steps": 10,
        "bf16": settings.get("bf16", True),
        "tf32": settings.get("bf16", True),
        "gradient_checkpointing": settings.get("checkpointing", False),
        "attn_implementation": settings["attention"],
        "logging_steps": 5,
        "save_strategy": "no",
        "use_wandb": False,
    }
    if settings["experts"] == "scattermoe":
        config |= {
            "plugins": ["axolotl.integrations.kernels.KernelsPlugin"],
            "use_kernels": True,
            "use_scattermoe": True,
        }
    path = work / "axolotl.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


def exchange_trainer() -> None:
    """axolotl's trainer gets the clock."""
    init = AxolotlTrainer.__init__

    def init_with_clock(self, *args, **kwargs):
        bench_run.MARKS.set("building")
        init(self, *args, **kwargs)
        self.add_callback(bench_run.make_clock(options, self))

    AxolotlTrainer.__init__ = init_with_clock


def main() -> None:
    bench_run.MARKS.set("imported")
    bench_run.wait_for_device(options)
    exchange_trainer()
    do_train(load_cfg(str(settings_file(sys.argv[1], json.loads(sys.argv[2])))), TrainerCliArgs())


if __name__ == "__main__":  # axolotl's processes that prepare rows read this file anew
    main()
