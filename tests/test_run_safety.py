"""A run is not lost to bad numbers, a small disk, a broken tracker, other process counts; and it tells no secret."""

import copy
import errno
import json
import os
import pickle
import re
import shutil
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes
import launching
import pytest
import smoke
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes" / "llama-3.2-1b"))
import guard  # noqa: E402
import keeper  # noqa: E402
import ranks  # noqa: E402
import run_log  # noqa: E402
import watcher  # noqa: E402

TROUBLED = Path(__file__).with_name("troubled_run.py")
SECRETS = {
    "HF_TOKEN": "hf_environmenttoken",
    "WANDB_API_KEY": "0123456789abcdef0123",
    "AWS_SECRET_ACCESS_KEY": "AKsecret99",
}
SECRETS |= {"MLFLOW_TRACKING_URI": "https://someone:pass-word@tracker.example"}


def errors(output: str) -> str:
    """The paragraphs of errors in what a launch printed."""
    return " ".join(re.findall(r"^error: .+?(?=\n\n)", output, re.MULTILINE | re.DOTALL))


# ---------------------------------------------------------------------------------------------------- bad numbers


def test_a_loss_that_is_no_number_stops_the_run_and_its_rows_are_kept(benches, tmp_path):
    bench, run = benches("llama-3.2-1b"), tmp_path / "run"
    arguments = [*bench.arguments(run, 2), "--save_steps", "1"]
    result = launching.launch(
        bench.folder,
        "ddp",
        *arguments,
        log=tmp_path / "log",
        wrapper=TROUBLED,
        environment={"TROUBLE": "nan", "HF_HOME": str(bench.work / "cache")},
    )
    said = errors(result.output)
    assert (
        result.rc != 0 and "step 3: the loss is nan" in said and "(rank 1 of 2)" in said and said.count("error:") == 1
    )
    kept = json.loads((run / "_bad_step_3_rank_1.json").read_text())
    assert len(kept["rows"]) == 2
    for row in kept["rows"]:  # decoded, with each labelled turn in the text
        turns = row["labelled"].split("<|eot_id|>")
        assert any(turns) and all(turn in row["text"] for turn in turns)
    assert not (run / "_bad_step_3_rank_0.json").exists()
    assert result.output.count("step 1/9  loss") == result.output.count("strategy ddp over 2 process(es)") == 1
    assert [watcher.is_complete(path) for path in watcher.checkpoints(run)] == [None, None]
    assert watcher.checkpoints(run)[0].name == "checkpoint-2"
    assert json.loads((run / "run.json").read_text())["outcome"] == "failed"


def test_a_step_without_a_label_stops_the_run(benches, tmp_path):
    bench, run = benches("llama-3.2-1b"), tmp_path / "run"
    result = launching.launch(
        bench.folder,
        "single",
        *bench.arguments(run, 1),
        log=tmp_path / "log",
        processes=1,
        wrapper=TROUBLED,
        environment={"TROUBLE": "unlabelled", "HF_HOME": str(bench.work / "cache")},
    )
    assert result.rc != 0 and "step 2: no token of this step carries a label" in errors(result.output)
    assert all(row["labelled"] == "" for row in json.loads((run / "_bad_step_2_rank_0.json").read_text())["rows"])


# ------------------------------------------------------------------------------------------------- process counts


def test_fsdp_continues_on_another_number_of_processes(benches, tmp_path):
    bench, run = benches("llama-3.2-1b"), tmp_path / "run"

    def start(processes: int, *words: str, stop: int | None = None):
        def reached():
            return any("loss" in line and line["step"] >= stop for line in launching.metrics(run))

        return launching.launch(
            bench.folder,
            "fsdp",
            *bench.arguments(run, processes),
            *words,
            log=tmp_path / "log",
            processes=processes,
            stop_when=reached if stop else None,
            environment={"HF_HOME": str(bench.work / "cache")},
        )

    for _ in range(3):  # on a busy machine the run may be done before the signal arrives
        shutil.rmtree(run, ignore_errors=True)
        start(2, stop=3)
        newest = str(watcher.checkpoints(run)[0])
        refused = start(1)
        assert refused.rc != 0 and "world_size was 2, now 1" in errors(refused.output)
        assert "add --resume_from_checkpoint" in errors(refused.output)
        start(1, "--resume_from_checkpoint", newest, stop=keeper.number(newest) + 1)
        assert "over 1 process(es)" in (tmp_path / "log").read_text()
        second = str(watcher.checkpoints(run)[0])
        if keeper.number(second) < smoke.STEPS:
            break
    assert keeper.number(newest) < keeper.number(second) < smoke.STEPS
    last = start(2, "--resume_from_checkpoint", second)
    assert last.rc == 0, smoke.reason(last.output)
    assert launching.losses(run) == pytest.approx(bench.reference, rel=1e-4)


def test_what_cannot_continue_on_other_processes_is_told_the_ways_forward():
    before = {"strategy": "zero3", "world_size": 8, "global_batch": 32}
    asked = before | {"world_size": 4}
    assert not keeper.can_move(before, asked, ["world_size"])
    told = keeper.changes(before, asked, ["world_size"])
    assert "world_size was 8, now 4" in told and "scripts/export.py" in told and "global batch 32" in told
    ddp = {"strategy": "ddp", "world_size": 2, "global_batch": 32}
    assert keeper.can_move(ddp, {"strategy": "single", "world_size": 1, "global_batch": 32}, ["strategy", "world_size"])
    assert not keeper.can_move(ddp, ddp | {"global_batch": 16}, ["global_batch"])
    assert not keeper.can_move(ddp, ddp | {"learning_rate": 1}, ["learning_rate", "world_size"])


# ---------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(folder: Path, *names: str) -> Path:
    """A whole checkpoint of empty files."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    (folder / watcher.MARK).write_text(json.dumps({"files": dict.fromkeys(names, 0)}))
    return folder


def test_a_checkpoint_without_optimizer_or_random_state_is_told_apart(tmp_path):
    whole = checkpoint(tmp_path / "checkpoint-2", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    bare = checkpoint(tmp_path / "checkpoint-4", "model.safetensors", "trainer_state.json")
    assert watcher.lacks_state(whole) is None
    assert watcher.lacks_state(bare) == "optimizer and scheduler and random state"


def test_an_older_checkpoint_is_not_resumed_over_a_later_whole_one(tmp_path):
    first, second = (checkpoint(tmp_path / f"checkpoint-{step}", "weights") for step in (2, 10))
    reasons = {str(path): watcher.is_complete(path) for path in (second, first)}
    assert "checkpoint-10 is later, whole, and would be overwritten" in keeper.named_problem(first, reasons)
    assert keeper.named_problem(second, reasons) is None
    (second / "weights").unlink()
    assert keeper.named_problem(first, reasons | {str(second): "weights is missing"}) is None


def test_what_will_be_written_again_does_not_look_whole_meanwhile(tmp_path):
    first, second = (checkpoint(tmp_path / f"checkpoint-{step}", "weights") for step in (2, 4))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    keeper.forget_later(tmp_path, str(first))
    assert watcher.is_complete(first) is None and "no completeness mark" in watcher.is_complete(second)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_mark_lists_what_all_machines_see(tmp_path, monkeypatch):
    """A network file system may show a machine only its own files for a while."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    for name in ("mine", "theirs"):
        (folder / name).write_text(name)
    monkeypatch.setitem(watcher.RUN, "folder", tmp_path)
    monkeypatch.setattr(watcher, "listing", lambda _: {"mine": 4})
    monkeypatch.setattr(
        watcher, "exchange", lambda stage, value: [value, {"theirs": 6}] if "files" in stage else [value]
    )
    saver = SimpleNamespace(keep=None, clock=0.0, tell_save_time=lambda _: None)
    watcher.Watcher.on_save(saver, None, SimpleNamespace(global_step=2, best_model_checkpoint=None), None)
    assert json.loads((folder / watcher.MARK).read_text())["files"] == {"mine": 4, "theirs": 6}
    assert watcher.is_complete(folder) is None
    (folder / "theirs").unlink()
    assert "theirs is missing" in watcher.is_complete(folder)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, monkeypatch):
    monkeypatch.setitem(watcher.RUN, "folder", tmp_path)
    saver = SimpleNamespace(keep=1, clock=0.0, tell_save_time=lambda _: None)
    best = str(tmp_path / "checkpoint-1")
    for step in (1, 2, 3):
        checkpoint(tmp_path / f"checkpoint-{step}", "weights")
        watcher.Watcher.on_save(saver, None, SimpleNamespace(global_step=step, best_model_checkpoint=best), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


def test_content_is_compared_only_where_it_was_read_again(tmp_path, monkeypatch):
    """Fewer ranks may not read what more of them wrote."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345678")
    monkeypatch.setitem(watcher.RUN, "folder", tmp_path)
    saver = SimpleNamespace(keep=None, clock=0.0, tell_save_time=lambda _: None)
    watcher.Watcher.on_save(saver, None, SimpleNamespace(global_step=2, best_model_checkpoint=None), None)
    assert watcher.is_damaged(folder) is None
    (folder / "weights").write_bytes(b"1234567X")
    assert "weights is not what was written" in watcher.is_damaged(folder)
    monkeypatch.setattr(watcher, "GIB", 1 / 8)  # now a rank reads no more than one byte
    assert watcher.is_damaged(folder) is None


def test_loading_and_evaluating_leave_the_weights_as_they_were_built():
    """peft loads a bf16 adapter as fp32; bitsandbytes packs a 4-bit base anew when it evaluates on some CPUs."""
    torch.manual_seed(0)
    base = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    model = torch.nn.ModuleDict({"base": base, "adapter": torch.nn.Linear(4, 4, dtype=torch.bfloat16)})
    adapter, x = model["adapter"].weight, torch.randn(8, 64, dtype=torch.bfloat16)

    def load(_):
        adapter.data = adapter.data.float()

    trainer = SimpleNamespace(model=model, _load_from_checkpoint=load)
    watcher.keep_as_built(trainer)
    values, before = adapter.data.clone(), model["base"](x)
    trainer._load_from_checkpoint("checkpoint-2")
    assert adapter.dtype == torch.bfloat16 and torch.equal(adapter.data, values)
    with torch.no_grad():
        model.eval()["base"](x)
    assert torch.equal(model.train()["base"](x), before)


def test_machines_with_other_rows_are_named():
    same = ["one", "d1", 5]
    assert keeper.rows_problem([same, same, ["two", "d1", 5]]) is None
    assert "two made other training or evaluation rows than one" in keeper.rows_problem([same, same, ["two", "d2", 5]])
    assert "two made other" in keeper.rows_problem([same, ["two", "d1", 4]])


def test_offloaded_state_needs_host_memory_and_no_gpu(monkeypatch):
    monkeypatch.setitem(guard.RUN, "parameters", 0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99
    )
    arguments = SimpleNamespace(use_peft=False, dtype="bfloat16", load_in_4bit=False, load_in_8bit=False)

    def needs(strategy, host=False):
        return guard.state_bytes(config, arguments, "adamw_torch", strategy, 4, host)

    assert needs("zero3_offload") == 0 == needs("zero3", host=True)
    # A quarter of bf16 weights and gradients, fp32 weights and two moments: 16 bytes a parameter.
    assert needs("zero3_offload", host=True) == needs("zero3") == 16 * guard.RUN["parameters"] / 4 > 0


def test_fsdp_of_an_older_torch_is_refused_where_it_would_fail_at_its_first_save(monkeypatch):
    monkeypatch.setitem(guard.RUN, "strategy", "fsdp")
    monkeypatch.setattr(guard, "DTensor", torch.nn.Parameter)  # every parameter counts as sharded
    model = torch.nn.Linear(2, 2)

    def problem(version, evaluation):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        args = SimpleNamespace(eval_strategy=evaluation, optim=SimpleNamespace(value="adamw_torch"))
        return guard.strategy_problem(SimpleNamespace(args=args, model=model, model_wrapped=model))

    assert "Install torch 2.13" in problem("2.11.0+cu130", "steps")
    assert problem("2.11.0+cu130", "no") is None and problem("2.13.0", "steps") is None
    model.peft_config = {}
    assert problem("2.11.0+cu130", "steps") is None


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(keeper.RUN, "strategy", "fsdp")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "")  # so that it is taken back at the end
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    shards = tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"
    dcp.save({"weight": torch.ones(3, dtype=torch.bfloat16)}, storage_writer=dcp.FileSystemWriter(shards))
    assert keeper.code_problem(tmp_path / "checkpoint-2") is None
    with pytest.raises(pickle.UnpicklingError):  # from now on, for every torch.load of this process
        torch.save(Runs(), tmp_path / "weights.pt")
        torch.load(tmp_path / "weights.pt", weights_only=False)
    (shards / ".metadata").write_bytes(pickle.dumps(Runs()))
    assert "would run code" in keeper.code_problem(tmp_path / "checkpoint-2")


class Runs:
    def __reduce__(self):
        return os.getcwd, ()


def trainer_of(parameters: int, **changes):
    """As much of a trainer as the disk check reads."""
    arguments = {"optim": "adamw_torch", "save_strategy": SimpleNamespace(value="steps"), "num_train_epochs": 1}
    arguments |= {"save_only_model": False, "load_best_model_at_end": False} | changes
    model = SimpleNamespace(parameters=lambda: [torch.nn.Parameter(torch.empty(parameters, device="meta"))])
    return SimpleNamespace(
        args=SimpleNamespace(**arguments), state=SimpleNamespace(max_steps=100, save_steps=10), model=model
    )


def test_a_rank_that_fills_the_disk_again_does_not_leave_the_run_as_running(tmp_path, monkeypatch, capsys):
    """The first rank that fails makes room for run.json; one that is still saving takes it, and then fails, too."""
    monkeypatch.setattr(ranks, "RUN", {"folder": tmp_path, "record": {"outcome": "running"}})
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    cut_off = tmp_path / "checkpoint-4"
    write, refused = Path.write_text, []

    def write_text(path, text, encoding=None):
        if len(refused) < 3:
            cut_off.mkdir(exist_ok=True)  # by the other rank
            refused.append(cut_off.exists())
            raise OSError(errno.ENOSPC, "No space left on device")
        assert not cut_off.exists()
        return write(path, text, encoding=encoding)

    def write_shard():
        held.append(weakref.ref(file := (tmp_path / "shard").open("w")))
        raise OSError(errno.ENOSPC, "No space left on device", file.name)

    def save():
        try:
            write_shard()
        finally:  # as torch.save, which fails again when it closes the archive
            raise RuntimeError("No space left on device")

    held = []
    try:
        save()
    except RuntimeError as error:
        kind, failure, trace = type(error), error, error.__traceback__
    monkeypatch.setattr(Path, "write_text", write_text)
    ranks.on_exception(kind, failure, trace)
    monkeypatch.undo()
    assert len(refused) == 3 and held[0]() is None  # a removed file takes room until it is closed
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "failed"
    assert capsys.readouterr().err.count("is full (RuntimeError)") == 1


def test_a_rank_that_lives_on_does_not_write_over_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "RUN", {"folder": tmp_path, "record": {"outcome": "running"}})
    main = ranks.RUN
    ranks.record()
    monkeypatch.setattr(ranks, "RUN", {"folder": tmp_path, "record": {"outcome": "running"}})
    monkeypatch.setenv("RANK", "1")
    ranks.record(step=3)  # nobody but rank 0 writes while all is well
    assert "step" not in json.loads((tmp_path / "run.json").read_text())
    ranks.record(outcome="failed", error="why")
    monkeypatch.setattr(ranks, "RUN", main)
    monkeypatch.setenv("RANK", "0")
    ranks.record(save_seconds=1.0)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["outcome"] == "failed" and told["error"] == "why"


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(watcher.RUN, "folder", tmp_path)

    def problem(free_gib, keep, **changes):
        free = SimpleNamespace(free=free_gib * 2**30)
        monkeypatch.setattr(watcher.shutil, "disk_usage", lambda _: free)
        return watcher.disk_problem(trainer_of(2**30, **changes), keep)

    # 1 Gi of parameters: 12 GiB a checkpoint, 2 GiB for the result in bf16.
    assert problem(38, 2) is None
    assert "3 more checkpoint(s) of 12.0 GiB and the result need 38.0 GiB" in problem(37, 2)
    assert "10 more checkpoint(s)" in problem(121, None) and problem(122, None) is None
    assert "4 more checkpoint(s)" in problem(37, 2, load_best_model_at_end=True)
    assert problem(14, 2, save_only_model=True) is None
    assert problem(20, 2, optim="adamw_8bit") is None
    assert problem(2, 2, save_strategy=SimpleNamespace(value="no")) is None
    (tmp_path / "checkpoint-10").mkdir()
    assert problem(26, 2) is None


# ----------------------------------------------------------------------------------------- trackers, hub, secrets


@pytest.fixture(scope="module")
def broken_trackers(benches, tmp_path_factory):
    """A run with a tracker and an upload that always fail and with secrets everywhere: (launch result, its folder)."""
    bench, root = benches("llama-3.2-1b"), tmp_path_factory.mktemp("trackers")
    shutil.copytree(bench.folder, root / "recipes" / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("accelerate_configs", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = [
        "--max_steps",
        "4",
        "--report_to",
        "broken",
        "absent",
        "--hub_token",
        "hf_argumenttoken",
        "--run_name",
        "hf_namedtoken",
    ]
    return (
        launching.launch(
            root / "recipes" / "mine",
            "single",
            *bench.arguments(root / "run", 1),
            *words,
            log=root / "log",
            processes=1,
            wrapper=TROUBLED,
            environment={"TROUBLE": "trackers", "HF_HOME": str(bench.work / "cache")} | SECRETS,
        ),
        root,
    )


def test_a_tracker_or_an_upload_that_fails_costs_no_weight(broken_trackers):
    result, root = broken_trackers
    assert result.rc == 0, smoke.reason(result.output)
    for name in ("Broken.on_log", "SFTTrainer._push_from_checkpoint"):
        assert f"warning: {name} failed, training goes on" in result.output
    assert "the tracker Broken is switched off after three errors in a row" in result.output
    assert "warning: Absent.start failed" in result.output and "the tracker Absent is not used" in result.output
    assert json.loads((root / "run" / "run.json").read_text())["outcome"] == "done"
    assert (root / "run" / "final" / "model.safetensors").is_file()
    assert watcher.is_complete(root / "run" / "checkpoint-3") is None


def test_a_run_says_what_it_will_do_and_what_came_out(broken_trackers):
    result, root = broken_trackers
    run, said = root / "run", result.output
    tokens = json.loads((run / "run.json").read_text())["tokens"] / 20 * 4  # 20 rows are trained on, 4 a step
    for text in (
        f"about {tokens:,.0f} tokens a step, {4 * tokens:,.0f} in 4 steps to go",
        "weights, gradients and optimizer take about 0.0",
        f"into {run}: metrics.jsonl, a checkpoint every 3 steps (the newest 2 kept), final/",
    ):
        assert said.count(text) == 1 and said.index(text) < said.index("step 1/4  loss"), text
    lines = [line for line in launching.metrics(run) if "loss" in line]
    assert f"step 4/4  loss {lines[-1]['loss']:.4g}  grad_norm" in said
    last = said[said.index("done: ") :]
    assert f"{run / 'final'} after 4 steps; loss {lines[-1]['loss']:.4g}; eval_loss" in last
    for command in (f"chat_scores.py {run} --use_cpu true", f"report.py {run}", f"export.py {run} DEST"):
        assert f"next: python scripts/{command}\n" in last
    assert "\r" not in said and "it/s]" not in said  # no bar in a log


def test_a_tracker_that_does_not_answer_is_left_alone(monkeypatch, capsys):
    class Hangs(TrainerCallback):
        def on_log(self, *_, **__):
            calls.append(1)
            released.wait(20)

    calls, released = [], threading.Event()
    monkeypatch.setattr(run_log.atexit, "register", lambda _: None)  # it would end the tests
    monkeypatch.delitem(run_log.RUN, "leaves", raising=False)
    tracker = run_log.Tracker("Hangs", Hangs)
    monkeypatch.setattr(run_log, "PATIENCE", 1)
    for _ in range(5):
        tracker.on_log(None, None, None)
    released.set()
    assert calls == [1] and run_log.RUN["leaves"]
    assert "Hangs.on_log has not answered" in capsys.readouterr().out


def test_a_tracker_that_hangs_while_it_is_made_is_left_alone(monkeypatch, capsys):
    made, released = [], threading.Event()
    monkeypatch.setattr(run_log, "PATIENCE", 0.05)
    monkeypatch.setattr(run_log.atexit, "register", lambda _: None)
    monkeypatch.delitem(run_log.RUN, "leaves", raising=False)
    tracker = run_log.Tracker("Hangs", lambda: made.append(released.wait(20)))
    tracker.on_log(None, None, None)
    said = capsys.readouterr().out
    assert made == [] and "Hangs.start has not answered" in said and said.count("the tracker Hangs") == 1
    released.set()


def test_an_unknown_tracker_is_refused():
    arguments = SimpleNamespace(report_to=["tensorbord"])
    assert "no tracker 'tensorbord'; known are" in run_log.trackers_problem(arguments)
    assert run_log.trackers_problem(SimpleNamespace(report_to=["tensorboard"])) is None


def test_no_secret_is_left_anywhere(broken_trackers):
    _, root = broken_trackers
    secrets = [*SECRETS.values(), "pass-word", "hf_argumenttoken"]
    assert not any(secret in (root / "log").read_text() for secret in secrets)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    found = [(path.name, secret) for path in files for secret in secrets if secret.encode() in path.read_bytes()]
    assert found == []


def test_cpu_adam_goes_on_as_if_it_had_not_been_loaded():
    """DeepSpeed's CPU Adam rounds beta^t in another way after a load; without the mending, these weights differ."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def trained(loaded_at: int | None) -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(1000, generator=draw))
        adam = DeepSpeedCPUAdam([weights], lr=1e-2)
        for step in range(1, 21):
            weights.grad = torch.randn(1000, generator=draw)
            adam.step()
            if step == loaded_at:
                state, adam = copy.deepcopy(adam.state_dict()), DeepSpeedCPUAdam([weights], lr=1e-2)
                adam.load_state_dict(state)
                watcher.repeat_bias_correction(SimpleNamespace(optimizer=adam), step)
        return weights.detach()

    unbroken = trained(None)
    assert all(torch.equal(trained(step), unbroken) for step in (2, 5, 15, 19))
