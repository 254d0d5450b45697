# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2",
#     "deepspeed==0.19.8", "datasets==5.2.0", "bitsandbytes==0.50.2", "psutil", "pyyaml",
# ]
# ///
"""gpt-oss-20B, LoRA on attention, to reason in a language of choice (Multilingual-Thinking), with DDP.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/gpt-oss-20b/train.py

Loss on what the assistant writes, its reasoning included. Defaults stand in config.yaml; any TRL argument may follow:

    ... recipes/gpt-oss-20b/train.py --learning_rate 1e-4 --dataset_name my_rows.jsonl
    ... recipes/gpt-oss-20b/train.py --config expert_lora
"""

import json
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import fused_experts
import guard
import inputs
import keeper


def load_model(model_args: ModelConfig, training_args: SFTConfig, quantization_config) -> torch.nn.Module:
    """The model on this process's device: MXFP4 is dequantized there, in seconds; on a CPU thread it takes minutes.

    With load_in_4bit the experts are packed to NF4, layer by layer: bitsandbytes' own loading packs Linear layers only.
    """
    device = "cpu" if model_args.load_in_4bit else training_args.device
    threads = torch.get_num_threads()  # the launcher allows one; loading can use what lies idle
    torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        quantization_config=quantization_config,
        device_map={"": device},
        **training_args.model_init_kwargs,
    )
    torch.set_num_threads(threads)
    if model_args.load_in_4bit:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for module in model.modules():
            if type(module).__name__ == "GptOssExperts":
                module.to(training_args.device)
                replace_parameter_4bit(module, "gate_up_proj", quant_type="nf4")
                replace_parameter_4bit(module, "down_proj", quant_type="nf4")
    return model


def main():
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    guard.check_launch(parser, __file__, ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload"))
    script_args, training_args, model_args, recipe_args = parser.parse_args_and_config()
    keeper.open_run(script_args, training_args, model_args, recipe_args)
    fused_experts.register()  # a choice for model_init_kwargs, as its first lines say

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    stock_template = tokenizer.chat_template
    train_rows, eval_rows = inputs.load_rows(script_args, training_args, recipe_args, tokenizer)

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    is_mxfp4 = (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"
    training_args.model_init_kwargs = (training_args.model_init_kwargs or {}) | {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    # The published weights are MXFP4, which cannot be trained: they are turned into bf16, on purpose, while loading.
    quantization_config = Mxfp4Config(dequantize=True) if is_mxfp4 else None
    model = model_args.model_name_or_path
    if model_args.load_in_4bit or (is_mxfp4 and not (is_fsdp_enabled() or is_deepspeed_zero3_enabled())):
        model, quantization_config = load_model(model_args, training_args, quantization_config), None
        training_args.model_init_kwargs = None
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        quantization_config=quantization_config,
        peft_config=get_peft_config(model_args),
    )
    keeper.watch(trainer)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    if trainer.is_fsdp_enabled:  # checkpoints are sharded; the result is one whole adapter
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    origin = Path(model_args.model_name_or_path, "cookbook.json")  # written by scripts/export.py --bf16
    if origin.is_file() and model_args.use_peft:  # the adapter names the published model, not a folder of this machine
        published = json.loads(origin.read_text())["base_model_name_or_path"]
        trainer.model.peft_config["default"].base_model_name_or_path = published
    tokenizer.chat_template = stock_template  # without the tags and the pinned date that only training needs
    final = str(Path(training_args.output_dir, "final"))
    trainer.save_model(final)
    keeper.close_run(trainer, final)
    trainer.end()


if __name__ == "__main__":
    main()
