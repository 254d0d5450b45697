# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2",
#     "deepspeed==0.19.8", "datasets==5.2.0", "bitsandbytes==0.50.2", "psutil", "pyyaml",
# ]
# ///
"""Olmo 3 7B Instruct, QLoRA on all linear layers, on chats, with DDP.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/olmo-3-7b/train.py

Loss on every assistant turn and on nothing else. Defaults stand in config.yaml; any TRL argument may follow:

    ... recipes/olmo-3-7b/train.py --lora_r 64 --dataset_name my_chats.jsonl
"""

from pathlib import Path

from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config

import guard
import inputs
import keeper


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    guard.check_launch(parser, __file__, ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload"))
    script_args, training_args, model_args, recipe_args = parser.parse_args_and_config()
    keeper.open_run(script_args, training_args, model_args, recipe_args)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    stock_template = tokenizer.chat_template
    if tokenizer.pad_token is None:  # as Llama's; TRL would take the end of turn, where generation then could not stop
        tokenizer.pad_token = "<|finetune_right_pad_id|>"
    train_rows, eval_rows = inputs.load_rows(script_args, training_args, recipe_args, tokenizer)

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
    keeper.watch(trainer)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    if trainer.is_fsdp_enabled:  # checkpoints are sharded; the result is one whole model
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    # Without the tags that only training needs. A base model has no template of its own: it gets the one it learned.
    tokenizer.chat_template = stock_template or inputs.without_tags(tokenizer.chat_template)
    trainer.model.config.use_cache = True  # training switched it off, and generation would be many times slower
    final = str(Path(training_args.output_dir, "final"))
    trainer.save_model(final)
    keeper.close_run(trainer, final)
    trainer.end()


if __name__ == "__main__":
    main()
