# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2", "deepspeed==0.19.8",
#     "datasets==5.2.0", "bitsandbytes==0.50.2", "jsonschema", "psutil", "pyyaml",
# ]
# ///
"""Qwen3-8B, all weights, from the text of an invoice to JSON that follows a schema, with DeepSpeed ZeRO-3.

    accelerate launch --config_file accelerate_configs/zero3.yaml recipes/qwen3-8b-invoice/train.py

The schema file decides prompt, order of the answer's keys, and checks; the loss covers the answer's JSON and its end of
turn. Your own documents need no code, only a schema and the names of two columns:

    ... recipes/qwen3-8b-invoice/train.py --dataset_name receipts.jsonl --schema_file my_schema.json \\
        --text_column text --target_column fields

Scores, before and after: score.py.
"""

from functools import partial
from pathlib import Path

from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

import documents
import guard
import inputs
import invoice
import keeper


def unlabel_after_end(row: dict, end: int) -> dict:
    """No loss on what follows the end-of-turn token `end`: ChatML templates put a newline there, which is no answer."""
    before = [None, *row["input_ids"][:-1]]
    return {"labels": [-100 if token == end else label for token, label in zip(before, row["labels"], strict=True)]}


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    guard.check_launch(parser, __file__, ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload"))
    script_args, training_args, model_args, recipe_args = parser.parse_args_and_config()
    documents.as_rows(script_args, training_args, recipe_args)
    keeper.open_run(script_args, training_args, model_args, recipe_args)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    to_conversation = partial(
        invoice.to_prompt_completion,
        schema=invoice.load_schema(recipe_args.schema_file),
        text_column=recipe_args.text_column,
        target_column=recipe_args.target_column,
    )
    train_rows, eval_rows = inputs.load_rows(script_args, training_args, recipe_args, tokenizer, to_conversation)

    training_args.model_init_kwargs = (training_args.model_init_kwargs or {}) | {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    end = {"end": tokenizer.eos_token_id}
    trainer.train_dataset = trainer.train_dataset.map(unlabel_after_end, fn_kwargs=end)
    if trainer.eval_dataset is not None:
        trainer.eval_dataset = trainer.eval_dataset.map(unlabel_after_end, fn_kwargs=end)
    keeper.watch(trainer)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    if trainer.is_fsdp_enabled:  # checkpoints are sharded; the result is one whole model
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.model.config.use_cache = True  # training switched it off, and generation would be many times slower
    final = str(Path(training_args.output_dir, "final"))
    trainer.save_model(final)
    keeper.close_run(trainer, final)
    trainer.end()


if __name__ == "__main__":
    main()
