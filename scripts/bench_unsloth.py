"""The peer: Unsloth on the same rows, with the same clock; an arm of benchmark.py. Not needed for anything else.

    BENCH_OPTIONS='{...}' python scripts/bench_unsloth.py MODEL_FOLDER '{"rank": 16, "batch": 4, ...}'

Unsloth 2026.10.9 needs other versions of the libraries (transformers <= 5.17, trl <= 1.15, datasets < 5), so it has an
environment of its own; see `--unsloth-site` of benchmark.py. Settings: Unsloth's published ones for bf16, packed.
"""

import json
import os
import sys

os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"  # it would fetch a file from the Hub
options, folder, settings = json.loads(os.environ["BENCH_OPTIONS"]), sys.argv[1], json.loads(sys.argv[2])

import unsloth  # noqa: E402, I001 before transformers, which it patches
import bench_run  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

bench_run.MARKS.set("imported")
bench_run.wait_for_device(options)
bench_run.exchange_weights(options)
model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
    folder,
    max_seq_length=settings["length"],
    dtype=None,
    load_in_4bit=False,
    full_finetuning=settings.get("full", False),
    use_exact_model_name=True,
    local_files_only=True,
)
if not settings.get("full"):
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=settings["rank"],
        lora_alpha=2 * settings["rank"],
        lora_dropout=0,
        target_modules=list(settings["modules"]),
        use_gradient_checkpointing="unsloth" if settings.get("checkpointing", True) else False,
    )
bench_run.MARKS.set("building")
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_parquet(options["rows"]),
    args=SFTConfig(
        output_dir=os.path.join(os.path.dirname(options["result"]), "unsloth"),
        packing=True,
        max_length=settings["length"],
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings["accumulation"],
        max_steps=10_000,
        optim=settings.get("optim", "adamw_torch_fused"),
        learning_rate=2e-5,
        bf16=True,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    ),
)
trainer.add_callback(bench_run.make_clock(options, trainer))
trainer.train()
