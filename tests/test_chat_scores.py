"""Held-out loss and answers of a run: the trainer's own rows, every labelled token once, base and tuned."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import launching
import peft
import pytest
import tiny_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "llama-3.2-1b"
DATE = {"date_string": "26 Jul 2024"}  # config.yaml pins it


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the Llama recipe with LoRA, three steps, five of its rows held out."""
    work = tmp_path_factory.mktemp("chat")
    tiny_model.main(["llama", str(work / "tiny")])
    rows = launching.tiny_rows(work / "rows.jsonl", RECIPE)
    words = ["--config", "lora", "--model_name_or_path", work / "tiny", "--dataset_name", rows, "--max_steps", "3"]
    words += [
        "--output_dir",
        work / "run",
        "--eval_fraction",
        "0.2",
        "--learning_rate",
        "0.05",
        "--save_strategy",
        "no",
    ]
    result = launching.launch(RECIPE, "single", *words, log=work / "train.log", processes=1)
    assert result.rc == 0, result.output[-3000:]
    return work / "run"


def chat_scores(*words, processes=1):
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    command = [*launcher, str(ROOT / "scripts" / "chat_scores.py"), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)


def loss_by_hand(model, tokenizer, conversations):
    """Mean loss over the answers' tokens, by a plain reading: text up to each answer, and the answer with its end."""
    total = count = 0
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **DATE)
        with torch.inference_mode():
            losses = torch.nn.functional.cross_entropy(
                model(torch.tensor([ids])).logits[0, :-1].float(), torch.tensor(ids[1:]), reduction="none"
            )
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = {"add_generation_prompt": True, "return_dict": False}
                start = len(tokenizer.apply_chat_template(messages[:turn], **prompt, **DATE))
                end = len(tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False, **DATE))
                total, count = total + losses[start - 1 : end - 1].sum().item(), count + end - start
    return total / count, count


def models(run):
    """(base, tuned) in the run's precision."""
    base = AutoModelForCausalLM.from_pretrained(run.parent / "tiny", dtype=torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(run.parent / "tiny", dtype=torch.bfloat16)
    return base.eval(), peft.PeftModel.from_pretrained(again, run / "final").eval()


def test_two_processes_score_base_and_tuned_adapter_on_the_held_out_rows(run):
    result = chat_scores("--max_new_tokens", 8, run, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))["held-out loss"]
    held_out = json.loads((run / "eval_rows.json").read_text())
    assert len(held_out) == 5
    rows = [json.loads(line) for line in (run.parent / "rows.jsonl").read_text().splitlines()]
    conversations = [rows[number - 1]["messages"] for number in held_out]
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    for label, model in zip(("base", "tuned"), models(run), strict=True):
        loss, tokens = loss_by_hand(model, tokenizer, conversations)
        assert scores[label]["tokens"] == tokens and scores[label]["rows"] == 5
        assert scores[label]["loss"] == pytest.approx(loss, rel=2e-3)  # bf16 rounds sums in another order
        assert scores[label]["perplexity"] == pytest.approx(math.exp(scores[label]["loss"]))
        low, high = scores[label]["loss_interval"]
        assert low < scores[label]["loss"] < high
    assert abs(scores["tuned"]["loss"] - scores["base"]["loss"]) > 0.05  # the steps were large on purpose
    prompts = [json.loads(line) for line in (ROOT / "scripts" / "chat_prompts.jsonl").read_text().splitlines()]
    for label in ("base", "tuned"):
        assert [row["id"] for row in scores[label]["answers"]] == [prompt["id"] for prompt in prompts]
    assert result.stdout.count("base: loss") == 1  # one process reports

    # Greedy, in the model's own template and with the run's date.
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompts[0]["prompt"]}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **DATE,
    )
    output = models(run)[1].generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    answer = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert scores["tuned"]["answers"][0]["answer"] == answer and scores["tuned"]["answers"][0]["limit_hit"]


def test_whole_weights_are_scored_and_the_base_is_not_scored_again(run, tmp_path):
    """The same run as if it had trained all weights: its result is a model of its own."""
    whole = tmp_path / "run"
    whole.mkdir()
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    record["command"] += ["--use_peft", "false"]
    (whole / "run.json").write_text(json.dumps(record))
    (whole / "eval_rows.json").write_text((run / "eval_rows.json").read_text())
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    scores["held-out loss"]["base"]["loss"] = 1.25  # a mark: it would be overwritten by a second scoring
    (whole / "scores.json").write_text(json.dumps(scores | {"other rows": {"base": 1}}))
    tuned = models(run)[1].merge_and_unload()
    tuned.save_pretrained(whole / "final")
    AutoTokenizer.from_pretrained(run / "final").save_pretrained(whole / "final")
    result = chat_scores("--max_new_tokens", 8, whole)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads((whole / "scores.json").read_text(encoding="utf-8"))
    assert found["other rows"] == {"base": 1}  # of score.py, in the same file
    assert found["held-out loss"]["base"]["loss"] == 1.25
    assert found["held-out loss"]["tuned"]["loss"] == pytest.approx(scores["held-out loss"]["tuned"]["loss"], rel=1e-2)


def test_other_data_than_the_runs_is_refused(run, tmp_path, monkeypatch, capsys):
    import chat_scores as program

    def other_rows(record, extra, scratch):
        Path(scratch, "eval_rows.json").write_text("[1, 2, 3]")
        return None, None, None

    before = (run / "scores.json").read_text() if (run / "scores.json").exists() else None
    monkeypatch.setattr(program, "prepare", other_rows)
    monkeypatch.setattr(sys, "argv", ["chat_scores.py", str(run)])
    assert program.main() == 1
    assert "names other rows than the data gives now" in capsys.readouterr().err
    assert ((run / "scores.json").read_text() if (run / "scores.json").exists() else None) == before
