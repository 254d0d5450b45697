"""Loads results of training in a fresh process, with transformers or peft alone, and compares them; for smoke.py.

    python scripts/reload_final.py RECORD BASE FINAL [FINAL ...]

RECORD is record_run.py's file, BASE the model that was trained from. Prints a JSON object, for each FINAL its
`eval_loss` on the recorded batches, `logits_error` (distance of its logits to the recorded ones, as a share of the
distance that training moved them) and `learned` (that distance itself, root mean square).
"""

import json
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder: str) -> torch.nn.Module:
    """The model of a folder, an adapter on its base, in fp32."""
    kind = AutoPeftModelForCausalLM if Path(folder, "adapter_config.json").is_file() else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()


def eval_loss(model: torch.nn.Module, batches: list[dict]) -> float:
    """Mean over rows of the mean negative log-likelihood of the labels that are not -100, as the trainer reports it."""
    rows = []
    for batch in batches:
        scores, labels = logits_of(model, batch)[:, :-1], batch["labels"][:, 1:]
        rows.append(torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).item())
    return sum(rows) / len(rows)


def main() -> None:
    record, base, *finals = sys.argv[1:]
    record = torch.load(record)
    first, wanted = record["batches"][0], record["logits"]
    start, report = logits_of(load(base), first), {}
    for final in finals:
        AutoTokenizer.from_pretrained(final)
        model = load(final)
        found = logits_of(model, first)
        learned = (found - start).square().mean().sqrt().item()
        moved = (wanted - start).square().mean().sqrt().item()
        report[final] = {
            "eval_loss": eval_loss(model, record["batches"]),
            "logits_error": (found - wanted).square().mean().sqrt().item() / max(moved, 1e-12),
            "learned": learned,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
