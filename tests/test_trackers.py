"""Trackers in their local modes, all in one run: each stored what metrics.jsonl holds, and no secret.

They are optional packages (requirements-trackers.txt): those that are not installed are skipped by name.
"""

import importlib.util
import json
import shutil
import sqlite3
import struct

import launching
import pytest
import smoke

STEPS = 4
SECRETS = {"WANDB_API_KEY": "0123456789abcdef0123", "HF_TOKEN": "hf_environmenttoken"}
LOCAL = {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def tensorboard(root) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (root / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert events.Scalars("train/tokens_per_second")
    return {event.step: event.value for event in events.Scalars("train/loss")}


def mlflow(root) -> dict:
    """Of MLflow's file store: a line for each value, "time value step"."""
    (file,) = (root / "mlruns").glob("0/*/metrics/loss")
    lines = [line.split() for line in file.read_text().splitlines()]
    return {int(step): float(value) for _, value, step in lines}


def trackio(root) -> dict:
    (file,) = (root / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics")]
    return {row["train/global_step"]: row["train/loss"] for row in rows if "train/loss" in row}


def wandb(root) -> dict:
    """Of the offline file: records in blocks of 32 KiB, each part with checksum, length and kind (LevelDB's log)."""
    from wandb.proto import wandb_internal_pb2

    (file,) = (root / "wandb").glob("offline-run-*/*.wandb")
    content, at, part, found = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part, at = part + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or a last part
            record = wandb_internal_pb2.Record.FromString(part)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "train/loss" in items:
                found[int(items["train/global_step"])] = float(items["train/loss"])
            part = b""
    return found


TRACKERS = {reader.__name__: reader for reader in (tensorboard, mlflow, wandb, trackio)}


@pytest.fixture(scope="module")
def tracked(benches, tmp_path_factory):
    """One run that reports to every tracker that is installed: (launch result, folder, their names)."""
    installed = [name for name in TRACKERS if importlib.util.find_spec(name)]
    if not installed:
        pytest.skip("no tracker is installed: pip install -r requirements-trackers.txt")
    bench, root = benches("llama-3.2-1b"), tmp_path_factory.mktemp("tracked")
    words = [*bench.arguments(root / "run", 1), "--max_steps", str(STEPS), "--report_to", *installed]
    words += ["--hub_token", "plain-argument-token"]
    local = LOCAL | {"MLFLOW_TRACKING_URI": f"file:{root / 'mlruns'}", "TRACKIO_DIR": str(root / "trackio")}
    local |= SECRETS | {"WANDB_DIR": str(root), "HF_HOME": str(bench.work / "cache")}
    # Fresh: trackers may read their variables when they are imported.
    options = {"log": root / "log", "processes": 1, "environment": local, "fresh": True}
    return launching.launch(bench.folder, "single", *words, **options), root, installed


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_the_losses_of_the_run(tracked, name):
    result, root, installed = tracked
    if name not in installed:
        pytest.skip(f"{name} is not installed: pip install -r requirements-trackers.txt")
    assert result.rc == 0, smoke.reason(result.output)
    assert "warning: " not in result.output.replace("FutureWarning: ", ""), result.output
    expected = {step: loss for step, loss in enumerate(launching.losses(root / "run"), 1)}
    assert len(expected) == STEPS and TRACKERS[name](root) == pytest.approx(expected, rel=1e-6)


def test_no_tracker_keeps_a_secret(tracked, tmp_path):
    _, root, _ = tracked
    secrets = [secret.encode() for secret in ("plain-argument-token", *SECRETS.values())]
    shutil.copytree(
        root, tmp_path / "kept", ignore=shutil.ignore_patterns("*.db-shm", "*.db-wal")
    )  # SQLite's, which go
    files = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert files and [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
