"""Predicted memory: to the byte where it is counted, against other counts where it is traced, in the table as predicted."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import launching
import measure_memory
import memory
import memory_chooser
import pytest
import tiny_model
from transformers import AutoConfig
from trl import SFTConfig

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def predicted(model, recipe, name, strategy):
    """What memory.py says that each of two ranks holds of the tiny model, from the recipe's own arguments."""
    _, settings = memory.of_recipe(recipe, name, 2, 2)
    return memory.sharded(AutoConfig.from_pretrained(model), dataclasses.replace(settings, strategy=strategy))


@pytest.mark.parametrize(
    ("recipe", "name", "family", "strategy"),
    [
        ("llama-3.2-1b", "config", "llama", "fsdp"),
        ("llama-3.2-1b", "config", "llama", "zero2"),
        pytest.param("llama-3.2-1b", "config", "llama", "zero1", marks=pytest.mark.matrix),
        pytest.param("llama-3.2-1b", "config", "llama", "zero3", marks=pytest.mark.matrix),
        pytest.param("llama-3.2-1b", "lora", "llama", "zero2", marks=pytest.mark.matrix),
        pytest.param("gpt-oss-120b", "config", "gpt-oss", "fsdp", marks=pytest.mark.matrix),
        pytest.param("gpt-oss-120b", "config", "gpt-oss", "zero3", marks=pytest.mark.matrix),
        pytest.param("gpt-oss-120b", "expert_lora", "gpt-oss", "fsdp", marks=pytest.mark.matrix),
    ],
)
def test_sharded_bytes_are_exact(recipe, name, family, strategy, tmp_path):
    model = tiny_model.write_tiny_model(family, tmp_path / "model", layers=3, hidden=96)
    rows = launching.tiny_rows(tmp_path / "rows.jsonl", ROOT / "recipes" / recipe, name)
    arguments = [
        "--config",
        name,
        "--model_name_or_path",
        model,
        "--dataset_name",
        rows,
        "--output_dir",
        tmp_path / "run",
    ]
    arguments += ["--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no", "--unfit_rows", "drop"]
    wrapper = ROOT / "scripts" / "memory_record.py"
    folder, log = ROOT / "recipes" / recipe, tmp_path / "log"
    result = launching.launch(folder, strategy, *arguments, "--max_length", "512", log=log, wrapper=wrapper)
    assert result.rc == 0, result.output[-3000:]
    ranks = [json.loads(file.read_text()) for file in sorted((tmp_path / "run").glob("memory-*.json"))]
    assert ranks == [predicted(model, recipe, name, strategy)] * 2


def test_a_traced_step_holds_what_can_be_counted_by_hand():
    """Tiny Llama in pure fp32: weights and gradients by element; the activations grow with rows and layers alike."""
    config = tiny_model.build_config("llama", tiny_model.build_tokenizer("llama"), layers=5)
    settings = memory.Settings(strategy="python", micro_batch=2, length=256, bf16=False)
    elements = sum(p.size for p in memory.parameters(config, settings))
    peaks = memory.peaks(config, settings)
    assert peaks["head"]["Parameter"] == 4 * elements
    last = peaks["end of backward"]
    assert last["Gradient"] + last["Temp"] + last["Head"] >= 4 * elements
    # Extrapolated from two and three layers, to the byte what a trace of all five layers says.
    whole = memory.memory_trace.trace(config, settings, 5, "autocast")
    for phase in ("forward", "head", "backward of the first layer"):
        assert peaks[phase]["Total"] == whole[phase]["Total"], phase
    between = memory._between(config, settings, 3)
    exact = memory.peaks(config, dataclasses.replace(settings, micro_batch=3))
    assert between["head"]["Total"] == pytest.approx(exact["head"]["Total"], rel=0.01)


def test_what_is_switched_on_moves_memory_the_right_way():
    config, settings = memory.of_recipe("llama-3.2-1b")

    def peak(**changes):
        return memory.predict(config, dataclasses.replace(settings, strategy="python", **changes)).peak

    base = peak()
    assert peak(checkpointing=True) < 0.6 * base
    assert peak(optim="adamw_8bit") < base - 3 * GIB  # of 9.2 GiB of moments; the tied embedding keeps fp32
    assert peak(attention="eager") > base + 10 * GIB  # scores of 32 heads x 4096 x 4096, in every layer
    # An adapter on the experts rebuilds both expert stacks of a layer, and takes gradients of them.
    moe, small = memory.of_recipe("gpt-oss-20b", "expert_lora")
    stacks = 2 * sum(p.size for p in memory.parameters(moe, small) if p.unit == 0 and p.packs)
    experts = memory.predict(moe, dataclasses.replace(small, strategy="python")).step["experts' working set"]
    assert stacks < experts < 3.5 * stacks


def test_fused_experts_keep_one_tensor_a_layer():
    """Per token and choice, the output of the first product in bf16, 2 I wide."""
    config = memory.real_config("gpt-oss", "20b", None)
    settings = memory.Settings(length=4096, packing=True, dtype="bfloat16", attention="flash_attention_4", lora_r=8)
    settings = dataclasses.replace(settings, lora_targets=("q_proj",), experts="fused")
    found = memory.predict(config, settings)
    rows = config.num_hidden_layers * 4096 * config.num_experts_per_tok
    kept = rows * 2 * 2 * config.intermediate_size
    assert found.step["experts' working set"] == pytest.approx(kept, rel=0.02)
    plain = memory.predict(config, dataclasses.replace(settings, experts="grouped_mm"))
    assert plain.step["experts' working set"] > 3 * kept


def test_the_start_up_check_never_asks_for_more(monkeypatch):
    """What guard.py refuses at the start, from weights, gradients and optimizer alone, does not fit here either."""
    folder = ROOT / "recipes" / "llama-3.2-1b"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("guard_for_memory", folder / "guard.py")
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    for recipe, name in (("llama-3.2-1b", "config"), ("gpt-oss-20b", "expert_lora")):
        config, settings = memory.of_recipe(recipe, name, 8, 8)
        arguments = memory.ModelConfig(
            dtype=settings.dtype,
            use_peft=bool(settings.lora_r),
            lora_r=settings.lora_r or 16,
            lora_dropout=settings.lora_dropout,
            lora_target_modules=list(settings.lora_targets) or None,
            lora_target_parameters=list(settings.lora_parameters) or None,
        )
        for strategy in memory.STRATEGIES[1:]:
            needs = memory.predict(config, dataclasses.replace(settings, strategy=strategy)).needs
            assert guard.state_bytes(config, arguments, settings.optim, strategy, 8) <= needs, (recipe, strategy)


def test_nothing_that_fits_comes_with_what_to_change():
    config, settings = memory.of_recipe("qwen3-8b-invoice", "config", 1, 1)
    found = memory.table(config, settings, 24 * GIB, 16 * GIB, ("single",))
    assert found["cheapest"] is None
    assert found["rows"][0]["largest_batch"] == 0
    assert "lora" in found["change"][0]
    found = memory.table(
        config, dataclasses.replace(settings, world=8, local=8), 80 * GIB, 1024 * GIB, ("ddp", "zero2", "fsdp")
    )
    assert found["cheapest"] == "zero2"
    row = found["rows"][1]
    at = dataclasses.replace(settings, world=8, local=8, strategy="zero2", micro_batch=row["largest_batch"])
    assert memory.predict(config, at).needs <= 81 * GIB
    more = dataclasses.replace(at, micro_batch=row["largest_batch"] + 1)
    assert memory.predict(config, more).needs > 79 * GIB


def test_the_chooser_is_what_memory_predicts():
    report = json.loads(memory_chooser.FILE.read_text())
    assert set(report["recipes"]) == {folder.name for folder in (ROOT / "recipes").iterdir()}
    assert report["recipes"]["llama-3.2-1b"] == memory_chooser.choose("llama-3.2-1b")


def test_the_campaign_covers_what_it_must():
    """At least 24 settings: four models, full and three lighter ways, both checkpointing, three lengths, three attentions."""
    settings = [(family, size, one) for family, size, _, one in measure_memory.campaign().values()]
    assert len(settings) >= 24
    models = {("llama", "1b"), ("qwen3", "8b"), ("gpt-oss", "20b"), ("gpt-oss", "120b")}
    assert {(family, size) for family, size, _ in settings} >= models
    assert {one.attention for *_, one in settings} == {"eager", "sdpa", "flash_attention_4"}
    assert {one.length for *_, one in settings} >= {1024, 2048, 4096}
    assert {one.checkpointing for *_, one in settings} == {True, False}
    assert {(bool(one.lora_r), bool(one.lora_parameters)) for *_, one in settings} >= {
        (False, False),
        (True, False),
        (True, True),
    }
    assert any("8bit" in one.optim for *_, one in settings)


def test_predictions_hold_against_the_measured_peaks():
    """Of the kept campaign: mean error at most 5 %, worst 10 %. What is stored is what memory.py predicts today."""
    report = json.loads((ROOT / "docs" / "memory.json").read_text())
    lines = [line for line in report["settings"] if "measured" in line]
    assert len(lines) >= 24
    assert report["gpus"] and report["versions"]["torch"]
    # One of each: an adapter with dropout, full weights with eager attention, and experts.
    again = [
        "llama-1b, whole, LoRA bfloat16, 4 x 2048, sdpa",
        "llama-1b, whole, full float32, 1 x 4096, eager, checkpointing",
        "gpt-oss-20b, 8 layers, expert LoRA bfloat16, 1 x 1024, eager",
    ]
    stored = {line["name"]: line["predicted"] for line in lines}
    fresh = memory.compare({"settings": [dict(line) for line in lines if line["name"] in again]})
    assert {line["name"]: line["predicted"] for line in fresh} == {name: stored[name] for name in again}
    errors = [abs(memory.error(line)) for line in lines]
    assert sum(errors) / len(errors) <= 0.05
    assert max(errors) <= 0.10


def test_what_earlier_settings_held_is_not_counted(tmp_path):
    """The kept file is net of it, says so, and names the machine of the lines, not the one that writes the file."""
    machine = {"gpus": ["a GPU"], "date": "2026-01-01", "versions": {"torch": "9.9"}}
    sizes = {"load": 30, "first_step": 40, "step": 50, "reserved": 60, "context": 7}
    first = {"name": "a", "machine": machine, "measured": {"before": 10} | sizes}
    later = {
        "name": "b",
        "machine": machine,
        "measured": {name: size + 100 for name, size in first["measured"].items()},
    }
    failed = {"name": "c", "machine": machine, "error": "out of memory"}
    lines, kept = tmp_path / "lines.jsonl", tmp_path / "kept.json"
    lines.write_text("".join(json.dumps(line) + "\n" for line in (first, later, failed)))
    measure_memory.to_json(lines, kept)
    report = json.loads(kept.read_text())
    assert (report["gpus"], report["versions"]) == (["a GPU"], {"torch": "9.9"})
    assert report["settings"][0]["measured"] == {"before": 10, "held": 0} | sizes
    # What lies outside torch's allocator is no setting's to hold.
    assert report["settings"][1]["measured"] == {"before": 10, "held": 100} | sizes | {"context": 107}
    other = {"name": "d", "machine": machine | {"gpus": ["another"]}, "error": ""}
    lines.write_text(lines.read_text() + json.dumps(other) + "\n")
    with pytest.raises(SystemExit, match="2 machines"):
        measure_memory.to_json(lines, kept)


def test_a_single_target_names_modules_as_peft_matches_it():
    """TRL makes a string of a list of one target."""
    config, training = memory.real_config("llama", "1b"), SFTConfig(use_cpu=True, output_dir="unused")

    def targets(*asked):
        arguments = memory.ModelConfig(use_peft=True, lora_target_modules=list(asked))
        return memory.settings_from(config, arguments, training, "single", 1, 1).lora_targets

    assert set(targets("all-linear")) == set(measure_memory.LINEAR)
    assert targets(r".*\.(q|v)_proj") == ("q_proj", "v_proj")
    assert targets("q_proj", "up_proj") == ("q_proj", "up_proj")
