"""The benchmark measures what it says: the arms' settings, the tokens, the gate, the fit; rehearsed on the CPU."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import bench_gate  # noqa: E402
import benchmark  # noqa: E402
import torch  # noqa: E402

import inputs  # noqa: E402


def test_arms_are_one_lever_apart_and_parse():
    """add: one more lever than the arm before; drop: all but one; and every flag is one that the recipes take."""
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    known = {action.dest for action in parser._actions} | {"env", "strategy", "bf16_weights"}
    for name, target in benchmark.TARGETS.items():
        arms, recipe = benchmark.arms(target), ROOT / "recipes" / target.recipe
        assert (recipe / f"{target.config}.yaml").is_file()
        assert (ROOT / "accelerate_configs" / f"{target.strategy}.yaml").is_file()
        settings = dict(target.base)
        assert arms["seed"] == settings
        for lever, change in target.levers.items():
            assert any(settings.get(key) != value for key, value in change.items()), f"{name}: {lever} changes nothing"
            settings |= change
            assert arms.get(f"add: {lever}", arms["full"]) == settings
            dropped = arms[f"drop: {lever}"]
            assert {k for k in dropped if dropped[k] != arms["full"].get(k)} <= change.keys()
        for arm, flags in arms.items():
            if arm not in benchmark.PEERS:
                assert set(flags) <= known, f"{name}, {arm}"
    assert benchmark.chosen_arms(benchmark.TARGETS["llama"], ["seed", "full"]) == ["seed", "full"]
    alone = ["full, fused experts"]  # and not the arms whose names go on from there
    assert benchmark.chosen_arms(benchmark.TARGETS["gpt-oss-20b-lora"], alone) == alone
    assert len(benchmark.chosen_arms(benchmark.TARGETS["llama"], ["drop"])) == len(benchmark.TARGETS["llama"].levers)


def test_a_plan_is_measured_in_its_order(tmp_path):
    """Single arms of many targets, and not what is there already."""
    plan = tmp_path / "plan.jsonl"
    wanted = [
        {"target": "qwen-full", "arm": "trl", "repeat": 1},
        {"target": "llama", "arm": "full", "rows": "dense:1024"},
    ]
    plan.write_text("".join(json.dumps(line) + "\n" for line in [*wanted, {"target": "llama", "arm": "seed"}]))
    options = argparse.Namespace(plan=plan, weights="device", rehearse=False)
    first, second, third = benchmark.planned(options, [])
    assert (first["target"], first["rows"], first["repeat"]) == ("qwen-full", "real", 1)
    assert (second["arm"], second["rows"], second["depth"]) == ("full", "dense:1024", None)
    assert benchmark.planned(options, [first, third]) == [second]
    plan.write_text(json.dumps({"target": "llama", "arm": "fastest"}))
    with pytest.raises(SystemExit, match="line 1: no such target or arm"):
        benchmark.read_plan(plan)


def test_lengths_are_frozen():
    """Whoever measures again, with another budget, meets the same documents in the same order."""
    short, long = (benchmark.document_lengths("real", tokens, 4096) for tokens in (100_000, 2_000_000))
    assert list(long[: len(short)]) == list(short)
    assert short.sum() >= 100_000 and long.sum() >= 2_000_000
    assert 550 < long.mean() < 610 and long.min() >= 16 and long.max() == 4096  # the cut at 4096 takes some of 600
    assert list(benchmark.document_lengths("dense:1024", 3000, 4096)) == [1024] * 3
    longer = benchmark.settings_of(benchmark.TARGETS["llama"], "full", "dense:16384")
    assert (longer["max_length"], longer["per_device_train_batch_size"]) == (16384, 2)  # as many tokens a micro-step


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """One arm on the CPU for one whole epoch: each row is seen exactly once, so tokens can be counted by hand."""
    work = tmp_path_factory.mktemp("benchmark")
    count = len(benchmark.document_lengths("real", 4000, 256))
    steps = math.ceil(count / 2)
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "run", str(work), "--target", "llama"]
    command += ["--arms", "seed", "--warmup", "0", "--steps", str(steps), "--rehearse"]
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    again = subprocess.run([*command, "--no-gate"], capture_output=True, text=True, cwd=ROOT)
    assert first.returncode == again.returncode == 0, first.stdout + first.stderr
    lines = [json.loads(line) for line in (work / "benchmark.jsonl").read_text().splitlines()]
    return work, lines, first, again, steps


def test_tokens_are_counted_without_padding(rehearsal):
    work, (line,), _, _, steps = rehearsal
    rows = pyarrow.parquet.read_table(next(work.glob("rows/*/train.parquet")))["input_ids"].to_pylist()
    tokens = sum(map(len, rows))
    assert line["steps"] == steps
    assert line["tokens_per_step"] * steps == pytest.approx(tokens)
    share = line["trained_tokens_per_second"] / line["tokens_per_second"]
    assert share == pytest.approx((tokens - len(rows)) / tokens)  # the first token of a document is predicted by none
    assert line["micro_batch"] == [2, 1] and line["attention"] == "sdpa"


def test_startup_is_split_and_result_complete(rehearsal):
    _, (line,), *_ = rehearsal
    startup = line["startup"]
    assert list(startup) == ["import", "arguments", "load", "prepare", "first_step", "total"]
    assert all(seconds > 0 for seconds in startup.values())
    assert sum(startup.values()) - startup["total"] == pytest.approx(startup["total"], abs=0.01)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * line["flops_per_token"] / 989e12)
    assert next(iter(line["loss"].values())) == pytest.approx(
        math.log(448), rel=0.05
    )  # of random weights: ln(vocabulary)


def test_gate_comes_first_and_what_is_there_is_not_run_again(rehearsal):
    work, lines, first, again, _ = rehearsal
    assert first.stdout.index("gate:") < first.stdout.index("tok/s")
    assert json.loads((work / "gate.jsonl").read_text())["passed"]
    assert len(lines) == 1 and "tok/s" not in again.stdout


@pytest.mark.parametrize("forgets", ["nothing", "clamps", "bias"])
def test_gate_sees_what_fused_experts_forget(monkeypatch, forgets):
    config = bench_gate.tiny_model.build_config("gpt-oss", bench_gate.tiny_model.build_tokenizer("gpt-oss"))
    experts = bench_gate.drawn(bench_gate.AutoModelForCausalLM.from_config(config).model.layers[0].mlp.experts)
    clamped = bench_gate.fused_experts.clamped

    def forgetful(rows, bias, *others):
        gate, up, *limited = clamped(rows, 0 * bias if forgets == "bias" else bias, *others)
        return (gate, up, gate, up) if forgets == "clamps" else (gate, up, *limited)

    monkeypatch.setattr(bench_gate.fused_experts, "clamped", forgetful)
    error = bench_gate.experts_error(experts, fused=True, tokens=200)
    assert (error < 1e-5) == (forgets == "nothing") and (error > 0.1) == (forgets != "nothing")


@pytest.mark.parametrize(("family", "leaks"), [("llama", False), ("gpt-oss", True)])
def test_gate_sees_documents_that_leak(family, leaks):
    """gpt-oss with eager attention attends across packed documents (transformers 39997): the gate has to see that."""
    tokenizer = bench_gate.tiny_model.build_tokenizer(family)
    config = bench_gate.tiny_model.build_config(family, tokenizer)
    torch.manual_seed(0)
    model = bench_gate.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    documents = [list(range(1, 40)), list(range(50, 150)), [7, 8, 9]]
    alone, together = (bench_gate.logits_and_gradients(model, documents, packed) for packed in (False, True))
    errors = (
        bench_gate.relative(together[0], alone[0]),
        bench_gate.relative(list(together[1].values()), list(alone[1].values())),
    )
    assert (max(errors) > bench_gate.LIMITS[torch.float32]) == leaks, errors


def test_gate_allows_what_rounding_costs_eager_attention_too():
    found = {"limit": 0.05, "packed_logits": 0.02, "logits": 0.1, "gradients": 0.15}
    assert not bench_gate.passes(found)
    assert bench_gate.passes(found | {"eager": {"logits": 0.09, "gradients": 0.14}})
    assert not bench_gate.passes(found | {"eager": {"logits": 0.09, "gradients": 0.1}})
    # Packed and unpacked rows go through the same attention: that has no such excuse.
    assert not bench_gate.passes(found | {"packed_logits": 0.06, "eager": {"logits": 0.09, "gradients": 0.14}})


def result(arm: str, rate: float, depth=None, repeat=0) -> dict:
    """A measured line, as run() writes it, with invented numbers."""
    key = {"target": "gpt-oss-120b" if depth else "llama", "arm": arm, "rows": "real", "depth": depth}
    return {
        "steps": 30,
        "key": key | {"repeat": repeat, "weights": "device", "rehearse": False},
        "tokens_per_second": rate,
        "trained_tokens_per_second": rate,
        "mfu": 0.5,
        "share_of_ceiling": 0.6,
        "peak_gib": {"allocated": 10.0},
        "startup": {"total": 30.0},
        "loss": {"5": 11.5},
        "device": "a GPU",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
    }


def test_table_takes_medians_keeps_failures_and_calls_the_fit_extrapolated():
    lines = [result("full", 100.0), result("full", 110.0, repeat=1)]
    lines += [result("full", 1 / (1e-5 + 2e-6 * depth), depth) for depth in (4, 8, 12)]
    lines.append({"key": result("seed", 0)["key"], "error": "exit code 1"})
    text = benchmark.table(lines)
    assert "| llama | full | 30 + 30 | 105 | 9.5% |" in text
    assert "| llama | seed | - | exit code 1 |" in text
    assert "10.0 + 2.00 L from depths 4, 8, 12; extrapolated, not measured, to 36 layers: 12,195 tok/s" in text


def test_results_are_kept_and_written_between_the_marks(tmp_path, monkeypatch):
    """A line that was measured again takes the place of the old one; the table and the plot come from the file."""
    monkeypatch.setattr(benchmark, "KEPT", tmp_path / "benchmark.json")
    for rate in (100.0, 120.0):
        (tmp_path / "lines.jsonl").write_text(json.dumps(result("full", rate)) + "\n")
        assert benchmark.keep(argparse.Namespace(files=[tmp_path / "lines.jsonl"])) == 0
    assert [line["tokens_per_second"] for line in benchmark.read_kept()["results"]] == [120.0]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark table -->\nold\n<!-- end of benchmark table -->\nafter\n")
    assert benchmark.write_table(argparse.Namespace(file=page)) == 0
    assert "| llama | full | 30 | 120 |" in page.read_text() and "old" not in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="benchmark table"):
        benchmark.write_table(argparse.Namespace(file=page))
    benchmark.plot(argparse.Namespace(picture=tmp_path / "bars.svg"))
    assert "<svg" in (tmp_path / "bars.svg").read_text()


def test_budget_ends_the_call_with_what_it_has(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "run", str(tmp_path), "--target", "llama"]
    command += ["--rehearse", "--no-gate", "--budget", "10", "--reserve", "60", "--arms", "seed", "trl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ, timeout=120)
    assert done.returncode == 0 and "budget: 2 arms are not run" in done.stdout


def test_an_arm_that_is_stopped_leaves_no_process(tmp_path):
    """A rank that is left behind would hold its GPU memory, and the next arm would be measured beside it."""
    import psutil

    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "run", str(tmp_path), "--target", "llama"]
    command += [
        "--rehearse",
        "--no-gate",
        "--arm-limit",
        "12",
        "--steps",
        "100000",
        "--seconds",
        "1000",
        "--arms",
        "seed",
    ]
    # DeepSpeed locks its compiled files while it loads them: one that is killed then must not hold those of others.
    variables = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=300)
    assert done.returncode == 1 and "no result after 12 s" in done.stdout
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left


def test_rows_hold_no_special_token(tmp_path):
    """Padding is told from data by its id."""
    path = benchmark.write_rows(tmp_path / "rows.parquet", np.array([50, 3]), 128256)
    ids = pyarrow.parquet.read_table(path)["input_ids"].to_pylist()
    assert [len(row) for row in ids] == [50, 3]
    assert min(map(min, ids)) >= 1000 and max(map(max, ids)) < 127256
