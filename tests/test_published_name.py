"""An adapter trained on a folder that export.py wrote names the published model as its base, not a folder of this machine."""

import json
from pathlib import Path

import export
import launching
import tiny_model

ROOT = Path(__file__).resolve().parents[1]


def test_adapter_names_the_published_model(tmp_path):
    source = tiny_model.write_tiny_model("gpt-oss", tmp_path / "mxfp4", mxfp4=True)
    export.export_bf16(str(source), tmp_path / "bf16", base="openai/gpt-oss-20b")
    recipe = ROOT / "recipes" / "gpt-oss-20b"
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", recipe)
    arguments = ["--model_name_or_path", tmp_path / "bf16", "--dataset_name", rows, "--output_dir", tmp_path / "run"]
    arguments += ["--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    result = launching.launch(recipe, "single", *arguments, log=tmp_path / "log", processes=1)
    assert result.rc == 0, result.output
    adapter = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "openai/gpt-oss-20b"
