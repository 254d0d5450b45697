"""Runs a recipe's train.py as it is, one process, and keeps what a reloaded model can be compared with; for smoke.py.

    accelerate launch --config_file accelerate_configs/single.yaml scripts/record_run.py train.py ... --output_dir RUN

RUN/record.pt holds the batches of evaluation, or of one epoch where nothing was held out (input_ids, attention_mask,
labels), and, after the last step, the logits of the first batch.
"""

from pathlib import Path

import fsdp_on_cpu
import torch
from transformers import Trainer

_train = Trainer.train


def _train_and_record(self, *args, **kwargs):
    result = _train(self, *args, **kwargs)
    names = ("input_ids", "attention_mask", "labels")
    loader = self.get_eval_dataloader() if self.eval_dataset else self.get_train_dataloader()
    batches = [{name: batch[name].cpu() for name in names} for batch in loader]
    self.model.eval()
    with torch.no_grad():
        first = {name: batches[0][name].to(self.args.device) for name in names[:2]}
        logits = self.model(**first).logits.float().cpu()
    torch.save({"batches": batches, "logits": logits}, Path(self.args.output_dir, "record.pt"))
    return result


if __name__ == "__main__":
    Trainer.train = _train_and_record
    fsdp_on_cpu.run_wrapped()
