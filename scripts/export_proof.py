"""Proves an export in a process of its own; export.py starts it before it gives DEST its name.

Loads one after another, on the CPU: the base model, the trained model (its weights as the checkpoint holds them, or the
base with the adapter), and DEST, with transformers and peft alone. Same token ids, all logits compared:

- all weights, or an adapter: DEST gives the trained model's logits (to 1e-5), and not the base's;
- merged: in fp32 arithmetic, less than half of what training changed is lost by rounding the sums to DEST's dtype;
- MXFP4: DEST gives the logits of the trained model whose experts were rounded in memory (to 1e-5). What that rounding
  costs is measured and told.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import init_empty_weights
from export_files import ExportError, read_config
from export_mxfp4 import EXPERTS, dequantize_mxfp4, quantize_mxfp4
from export_run import PROOF_LINE, Job, MergedReader, empty_model, plan_full
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.utils import logging

TOKENS = 64


def load(folder: Path, dtype: torch.dtype | None) -> torch.nn.Module:
    """A model folder; MXFP4 is dequantized. Raises ExportError where tensors are missing, spare or of another shape."""
    packed = (read_config(folder).get("quantization_config") or {}).get("quant_method") == "mxfp4"
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if packed else dtype or "auto", output_loading_info=True, **options
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := told.get(kind):
            raise ExportError(f"{folder} does not load: {kind} {sorted(map(str, found))[:3]}.")
    return model.to(dtype) if dtype else model


def build(folder: Path, reader, plan: dict, change=lambda name, tensor: tensor) -> torch.nn.Module:
    """The model of `folder`'s config.json with the tensors of `reader`, whole in memory."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):  # buffers that are not saved, such as rotary frequencies, are real
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: change(name, reader.read(name)) for name in plan}
    tensors = {
        name: tensor.to(config.dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    model.load_state_dict(
        tensors, strict=False, assign=True
    )  # a tied tensor is there once: plan_full looked at the rest
    model.tie_weights()
    return model


def adapted(job: Job, dtype: torch.dtype | None) -> torch.nn.Module:
    """The base with the adapter of the checkpoint beside it, not merged."""
    from peft import get_peft_model, set_peft_model_state_dict

    model = get_peft_model(load(job.base_folder, dtype), job.lora_config())
    result = set_peft_model_state_dict(model, job.adapter())
    if result.unexpected_keys:
        raise ExportError(
            f"{job.weights}: the adapter has {result.unexpected_keys[0]}, which the base has no place for."
        )
    return model


def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An expert weight as MXFP4 keeps it, any other tensor as it is."""
    return dequantize_mxfp4(*quantize_mxfp4(tensor)) if name.endswith(EXPERTS) else tensor


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Logits of fixed token ids, fp32 (2, TOKENS / 2, vocabulary)."""
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, size, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids).logits.float()


def rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """Largest difference. Raises ExportError where it is above 1e-5 of the largest logit, or not a number."""
    most = (found - expected).abs().max().item()
    if not most <= 1e-5 * max(1.0, expected.abs().max().item()):
        raise ExportError(f"its logits are up to {most:.2e} away from those of {what}.")
    return most


def prove(job: Job, folder: Path) -> dict:
    """{"largest_difference", "moved" (rms from the base), "lost" (share of it, where something was rounded)}.

    Raises ExportError where the export is not what was trained.
    """
    merged = job.mode == "merged"
    dtype = torch.float32 if merged else None
    before = logits(load(job.base_folder, dtype)) if job.base_folder else None
    report = {}
    if job.mode == "adapter":
        from peft import PeftModel

        trained = logits(adapted(job, dtype))
        found = logits(PeftModel.from_pretrained(load(job.base_folder, dtype), str(folder)))
        report["largest_difference"] = same(found, trained, "the trained adapter")
    else:
        found = logits(load(folder, dtype))
        model = empty_model(folder)
        reader = MergedReader(job, model) if merged else job.reader
        plan = plan_full(reader, empty_model(folder), job.weights)
        trained = logits(adapted(job, dtype)) if merged else logits(build(folder, reader, plan))
        if job.mxfp4:
            model = build(folder, reader, plan, rounded)
            expected = logits(model.to(dtype) if dtype else model)
            report["largest_difference"] = same(found, expected, "the trained model with rounded experts")
        elif not merged:
            report["largest_difference"] = same(found, trained, "the trained model")
    AutoTokenizer.from_pretrained(folder)
    if before is not None:
        report["moved"] = rms(found - before)
        if not report["moved"] > 0:
            raise ExportError("its logits are those of the base model: nothing that was trained is in it.")
        if merged or job.mxfp4:
            report["lost"] = rms(found - trained) / max(rms(trained - before), 1e-12)
            if merged and not job.mxfp4 and not report["lost"] < 0.5:
                raise ExportError(
                    f"rounding the merged weights loses {report['lost']:.0%} of what training changed in the logits. "
                    "Merge with --dtype float32, or keep the adapter unmerged."
                )
    return report


def main() -> None:
    asked = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        report = prove(Job(**asked["job"]), Path(asked["folder"]))
    except (ExportError, OSError) as error:
        sys.exit(str(error))
    print(PROOF_LINE + json.dumps(report))


if __name__ == "__main__":
    main()
