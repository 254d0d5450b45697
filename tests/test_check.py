"""scripts/check.py finds what people get wrong in a launch line, says nothing of what is right, and costs no GPU time.

check_corpus.yaml holds the broken lines. Each is applied to a copy of the cookbook and checked in this process.
"""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import check
import check_files
import check_launch
import check_machine
import check_memory
import launching
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CORPUS = yaml.safe_load((Path(__file__).parent / "check_corpus.yaml").read_text(encoding="utf-8"))
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
# Without the prediction of memory: which recipe fits which GPU is the business of memory.py, and tested there.
SHIPPED_ON = ["--gpu", "b200-180gb"]


def copy_cookbook(folder: Path, recipe: str) -> None:
    """The launch files and one recipe, with forty rows of data."""
    for name in ("accelerate_configs", "deepspeed_configs"):
        shutil.copytree(ROOT / name, folder / name)
    if (ROOT / "recipes" / recipe).is_dir():
        shutil.copytree(
            ROOT / "recipes" / recipe,
            folder / "recipes" / recipe,
            ignore=shutil.ignore_patterns("run", "run-*", "__pycache__"),
        )
    rows = [{"prompt": f"What is {n} + {n}?", "completion": str(n + n)} for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def report(words: list[str], capsys, memory: bool = False) -> tuple[int, dict]:
    """Exit code and the object that `--json` prints; the prediction of memory, which takes seconds, only where asked."""
    capsys.readouterr()
    with patch.object(check_memory, "check", check_memory.check if memory else lambda launch: ""):
        code = check.main(["--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CORPUS, ids=[case["id"] for case in CORPUS])
def test_a_broken_launch_line_is_found_and_nothing_else(case, tmp_path, monkeypatch, capsys):
    recipe = case.get("recipe", "llama-3.2-1b")
    copy_cookbook(tmp_path, recipe)
    monkeypatch.chdir(tmp_path)
    room = type(shutil.disk_usage("."))(2**50, 0, 2**50)  # checkpoints of 46 GiB need not fit the machine that tests
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: room)
    for file, old, new in case.get("edit", []):
        text = Path(file).read_text(encoding="utf-8")
        assert old in text, f"{file} no longer holds {old!r}"
        Path(file).write_text(text.replace(old, new, 1), encoding="utf-8")
    gpu = case.get("gpu", "h100-80gb")
    words = [] if gpu == "here" else ["--gpu", gpu]
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        words += ["--config_file", f"accelerate_configs/{case['launch']}.yaml"]
        words += shlex.split(case.get("before", "").replace("BUSY", str(busy.getsockname()[1])))
        words += [f"recipes/{recipe}/train.py", *shlex.split(case.get("after", "").replace('"', '\\"'))]
        code, told = report(words, capsys)
    found = [finding for finding in told["findings"] if finding["rule"] != "hub"]  # which no test reaches
    seen = sorted((f["rule"], f["key"], f["severity"]) for f in found)
    wanted = sorted((rule, key, (severity or ["error"])[0]) for rule, key, *severity in case["expect"])
    assert seen == wanted, [str(check_launch.Finding(**f)) for f in found]
    assert code == int(any(severity == "error" for _, _, severity in wanted))
    for finding in found:
        assert finding["why"] and finding["write"] and finding["file"] != "None", finding


def test_the_corpus_is_as_large_as_promised_and_each_line_is_drawn_from_a_report():
    assert len(CORPUS) >= 60
    assert len({case["id"] for case in CORPUS}) == len(CORPUS)
    assert all(case["report"] for case in CORPUS)
    assert len({rule for case in CORPUS for rule, *_ in case["expect"]}) >= 40


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_finding_on_a_shipped_recipe_under_any_strategy_that_it_fits(recipe, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, strategies = check_launch._parse_train(ROOT / "recipes" / recipe / "train.py")
    for config in sorted(path.stem for path in (ROOT / "recipes" / recipe).glob("*.yaml")):
        packed = config == "qlora" and recipe.startswith("gpt-oss")  # README: 4-bit experts are not sharded
        fits = [name for name in strategies if not packed or name in ("single", "ddp", "zero1", "zero2")]
        settings = launching.read_config(ROOT / "recipes" / recipe, config)
        if "8bit" in settings.get("optim", ""):
            fits.remove("fsdp")  # README: bitsandbytes' optimizer
        if settings["dtype"] == "bfloat16" and not settings.get("use_peft"):  # README: all weights fit no single GPU
            fits = [name for name in fits if name not in ("single", "ddp")]
        for strategy in fits:
            line = [
                "--config_file",
                f"accelerate_configs/{strategy}.yaml",
                f"recipes/{recipe}/train.py",
                "--config",
                config,
            ]
            _, told = report([*SHIPPED_ON, *line], capsys)
            assert not told["findings"], f"{recipe}, {config}, {strategy}: {told['findings']}"
            assert told["strategy"] == strategy and told["world"] == (1 if strategy == "single" else 8)


def own_line(recipe: str) -> str:
    """The launch line in the head of a recipe's config.yaml, without `accelerate launch`."""
    strategy = launching.own_strategy(ROOT / "recipes" / recipe)
    return f"--config_file accelerate_configs/{strategy}.yaml recipes/{recipe}/train.py"


def default_lines():
    """One recipe of each own strategy on GPUs of 80 GB; the others on GPUs that hold any of them, with --matrix."""
    seen = set()
    for recipe in RECIPES:
        strategy = launching.own_strategy(ROOT / "recipes" / recipe)
        if recipe == "gpt-oss-120b":
            continue  # its line runs from a shell below
        marks = [pytest.mark.matrix] if strategy in seen else []
        yield pytest.param(recipe, "b200-180gb" if marks else "h100-80gb", marks=marks)
        seen.add(strategy)


@pytest.mark.parametrize(("recipe", "gpu"), default_lines())
def test_the_default_line_of_a_recipe_passes_with_its_memory(recipe, gpu, monkeypatch, capsys):
    """On eight GPUs in a machine of 2 TiB."""
    monkeypatch.chdir(ROOT)
    line = ["--gpu", gpu, "--host-ram", "2048", *own_line(recipe).split()]
    code, told = report(line, capsys, memory=True)
    assert code == 0 and not told["findings"], told["findings"]
    assert f"*{told['strategy']}" in told["memory"] and "cheapest that fits" in told["memory"]


def test_what_does_not_fit_is_told_with_what_does(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    line = [
        "--config_file",
        "accelerate_configs/zero2.yaml",
        "--num_processes",
        "8",
        "recipes/qwen3-8b-invoice/train.py",
    ]
    code, told = report(["--gpu", "l4-24gb", *line], capsys, memory=True)
    (finding,) = told["findings"]
    assert code == 1 and finding["rule"] == "memory" and "zero2 on 8 GPU(s) needs" in finding["why"]
    cheapest = re.search(r"the cheapest that fits: (\w+)\.yaml", told["memory"])[1]
    assert finding["write"] == f"--config_file accelerate_configs/{cheapest}.yaml"
    # Each of eight processes would dequantize 234 GB: the guard of the recipe says the same.
    line = ["--config_file", "accelerate_configs/fsdp.yaml", "--num_processes", "8", "recipes/gpt-oss-120b/train.py"]
    code, told = report(["--gpu", "h100-80gb", "--host-ram", "1000", *line], capsys, memory=True)
    (finding,) = told["findings"]
    assert code == 1 and finding["rule"] == "memory-host"
    assert "python scripts/export.py openai/gpt-oss-120b DEST --bf16" in finding["write"]


def test_packed_experts_are_refused_where_they_would_not_be_sharded(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    line = ["--config_file", "accelerate_configs/zero3.yaml", "recipes/gpt-oss-120b/train.py", "--config", "qlora"]
    code, told = report([*SHIPPED_ON, *line], capsys)
    assert code == 1 and "4bit-experts-sharded" in {finding["rule"] for finding in told["findings"]}


def test_the_guard_and_the_check_read_a_line_alike(tmp_path, monkeypatch, capsys):
    """What the guard refuses when a run starts is an error here, too; the words of both name the same cure."""
    copy_cookbook(tmp_path, "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    for strategy in check_launch.STRATEGIES:
        words = ["--gpu", "h100-80gb", "--num_processes", "1" if strategy == "single" else "4"]
        words += ["--config_file", f"accelerate_configs/{strategy}.yaml", "recipes/llama-3.2-1b/train.py"]
        launch = check_launch.read(words)
        environment = {"WORLD_SIZE": str(launch.world), "RANK": "0"}
        if launch.accelerate.use_deepspeed:
            file = launch.accelerate.deepspeed_config_file
            environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}
        if launch.accelerate.use_fsdp:
            environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(launch.accelerate.fsdp_version)}
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            guard = check_launch.load_module((launch.recipe / "guard.py").resolve())
            assert guard.declared_strategy() == launch.strategy == strategy
    secret = re.search(r'^SECRET = r(".*")', (ROOT / "recipes/llama-3.2-1b/ranks.py").read_text(), re.MULTILINE)[1]
    assert secret == f'"{check_machine.SECRET}"'.replace('\\"', '"').replace('/\\s"]', '/\\s\\"]')


def test_a_copied_recipe_is_found_by_its_path(tmp_path, monkeypatch, capsys):
    copy_cookbook(tmp_path, "llama-3.2-1b")
    (tmp_path / "recipes" / "llama-3.2-1b").rename(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine" / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 2.0e-5", "learning_rte: 2.0e-5"))
    words = ["--gpu", "h100-80gb", "--config_file", "accelerate_configs/ddp.yaml", "mine/train.py"]
    code, told = report([*words, "--model_name_or_path", "nobody/nothing"], capsys)
    rules = {(finding["rule"], finding["severity"], finding["write"]) for finding in told["findings"]}
    assert code == 1 and ("unknown-key", "error", "learning_rate: 2e-05") in rules, rules
    assert "no-model" in {rule for rule, _, _ in rules}  # the checks against the model are left out, and that is said


def test_a_plan_counts_rows_steps_and_bytes(tmp_path, monkeypatch, capsys):
    copy_cookbook(tmp_path, "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    words = ["--gpu", "h100-80gb", "--num_processes", "2", "--config_file", "accelerate_configs/ddp.yaml"]
    words += ["recipes/llama-3.2-1b/train.py", "--dataset_name", "rows.jsonl", "--num_train_epochs", "3"]
    words += ["--packing", "false"]
    _, told = report(words, capsys)
    plan = told["plan"]
    assert (plan["rows"], plan["global_batch"], plan["steps"]) == (38, 4, 30)  # 40 rows, 2 held out; 10 steps an epoch
    assert plan["parameters"] == plan["trained"] == 1_235_814_400
    assert plan["checkpoint_bytes"] == 12 * plan["trained"] and plan["checkpoints"] == 1  # one at the end
    assert plan["tokens"] == 4 * 4096
    # 6 x 1.24e9 parameters and attention, for 16384 tokens, on two GPUs at 80 % of 989 TFLOP/s
    assert plan["fastest"] == pytest.approx(8.22e9 * 16384 / (2 * 0.8 * 989e12), rel=0.02)
    assert plan["usual"] > plan["fastest"]


def test_adapter_parameters_are_those_that_peft_makes(models_on_meta):
    import check_plan
    from peft import get_peft_model
    from trl import ModelConfig, get_peft_config

    for meta, arguments in models_on_meta:
        args = ModelConfig(use_peft=True, **arguments)
        counted = check_plan.adapter_parameters(meta, args)
        adapted = get_peft_model(meta, get_peft_config(args))
        assert counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad), arguments


@pytest.fixture
def models_on_meta():
    import tiny_model
    import torch
    from transformers import AutoModelForCausalLM

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    cases = [
        ("qwen3", {"lora_target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"lora_target_modules": ["all-linear"]}),
    ]
    cases += [
        ("llama", {}),
        (
            "gpt-oss",
            {"lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"], "lora_target_parameters": experts},
        ),
    ]
    made = []
    for family, arguments in cases:
        config = tiny_model.build_config(family, tiny_model.build_tokenizer(family))
        with torch.device("meta"):
            made.append((AutoModelForCausalLM.from_config(config), arguments))
    return made


def test_a_check_of_the_data_that_fails_is_an_error(tmp_path, monkeypatch, capsys):
    """Packed gpt-oss rows with eager attention: the rule reads the source, the inspection of the data asks the model."""
    import tiny_model

    copy_cookbook(tmp_path, "gpt-oss-20b")
    monkeypatch.chdir(tmp_path)
    tiny_model.write_tiny_model("gpt-oss", tmp_path / "tiny")
    words = ["--gpu", "h100-80gb", "--data", "40", "--config_file", "accelerate_configs/ddp.yaml"]
    words += ["recipes/gpt-oss-20b/train.py", "--dataset_name", "rows.jsonl", "--model_name_or_path", "tiny"]
    words += ["--model_revision", "main", "--max_steps", "400"]
    code, told = report(words, capsys)
    assert code == 0, told["findings"]
    speed = tmp_path / "recipes" / "gpt-oss-20b" / "speed.py"  # which switches packing off
    speed.write_text(speed.read_text().replace("training_args.packing = False", "pass"))
    shutil.move(tmp_path / "recipes" / "gpt-oss-20b", tmp_path / "recipes" / "mine")
    words[words.index("recipes/gpt-oss-20b/train.py")] = "recipes/mine/train.py"
    code, told = report([*words, "--packing", "true"], capsys)
    assert code == 1 and {"packing-leaks", "data"} == {finding["rule"] for finding in told["findings"]}, told[
        "findings"
    ]


def test_packing_leaks_where_the_model_mixes_documents():
    """The rule reads the model's source; here the same is asked of the models themselves."""
    import check_model
    import tiny_model
    import torch
    from transformers import AutoModelForCausalLM

    for family in ("llama", "qwen3", "gpt-oss"):
        torch.manual_seed(0)
        config = tiny_model.build_config(family, tiny_model.build_tokenizer(family))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        ids = torch.randint(10, 200, (1, 12))
        other = torch.cat([(ids[:, :6] + 7) % 200, ids[:, 6:]], dim=1)  # another first document
        places = torch.tensor([[*range(6), *range(6)]])
        with torch.no_grad():
            first, second = (model(x, position_ids=places, use_cache=False).logits[:, 6:] for x in (ids, other))
        assert check_model.passes_positions(type(model)) == torch.allclose(first, second, atol=1e-4), family


def test_what_stands_in_one_file_is_checked_without_the_others(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}, "gradient_clippin": 1, "comment": ""}'
    )
    found = {(finding.rule, finding.key, finding.severity) for finding in check_files.lint_file(file)}
    assert found == {
        ("wrong-value", "zero_optimization.reduce_bucket_size", "error"),
        ("unknown-key", "gradient_clippin", "error"),
        ("unknown-key", "comment", "warning"),
    }


def test_the_machine_is_described_without_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "https://user:pass-word@host/log")
    assert check.main(["--machine", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "abcdefgh" not in text and "pass-word" not in text and found["NCCL_DEBUG_FILE"] == "https://***@host/log"
    assert found["HF token"] == "set"
    for name, version in check_machine.tested().items():
        assert found[name].partition("+")[0].startswith(version), (
            name,
            found[name],
        )  # this environment is the tested one
    assert check.main(["--machine"]) == 0 and "cores" in capsys.readouterr().out


def test_a_version_that_was_not_tested_is_told(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    real = check_machine.installed
    monkeypatch.setattr(check_machine, "installed", lambda name: {"trl": "1.9.0", "peft": None}.get(name, real(name)))
    words = ["--num_processes", "2", "--main_process_port", "0", "--config_file", "accelerate_configs/ddp.yaml"]
    code, told = report([*words, "recipes/llama-3.2-1b/train.py", "--use_cpu", "true"], capsys)
    rules = {(finding["key"], finding["severity"]) for finding in told["findings"] if finding["rule"] == "version"}
    assert code == 1 and rules == {("trl", "warning"), ("peft", "error")}


def test_the_check_runs_from_a_shell():
    """As people type it, memory included; seconds are printed, and nothing of the libraries' noise is among the lines."""
    line = ["scripts/check.py", "--gpu", "h100-80gb", "--host-ram", "2048", "--num_processes", "8"]
    line += own_line("gpt-oss-120b").split()
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "recipes/gpt-oss-120b: fsdp over 8 process(es), 1 machine(s) of 8 x h100-80gb"
    assert re.fullmatch(r"0 error\(s\), 0 warning\(s\), [\d.]+ s", lines[-1])
    assert any(line.startswith("*fsdp") for line in lines)
    broken = subprocess.run(
        [sys.executable, "scripts/check.py", "--gpu", "none"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert broken.returncode == 2


def test_words_that_the_launcher_does_not_know_are_told_in_one_paragraph(capsys):
    for word, near in (
        ("--num_proceses", "--num_processes?"),
        ("--gpus-per-nod", "--gpus"),
        ("--fsdp_reshard_afterforward", "reshard_after_forward?"),
    ):
        with pytest.raises(SystemExit) as stopped:
            check.main([word, "8", "--config_file", "accelerate_configs/ddp.yaml", "recipes/llama-3.2-1b/train.py"])
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and word in said and near in said and len(said.splitlines()) == 1, said
    with pytest.raises(SystemExit):
        check.main(["--gpu", "h1000"])
    assert "h100-80gb" in capsys.readouterr().err  # the GPUs that there are


def test_local_rows_are_inspected_and_what_is_wrong_with_them_is_told(tmp_path, monkeypatch, capsys):
    import tiny_model

    copy_cookbook(tmp_path, "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    tiny_model.write_tiny_model("llama", tmp_path / "tiny")
    words = [
        "--gpu",
        "h100-80gb",
        "--data",
        "20",
        "--config_file",
        "accelerate_configs/ddp.yaml",
        "recipes/llama-3.2-1b/train.py",
    ]
    words += [
        "--dataset_name",
        "rows.jsonl",
        "--model_name_or_path",
        "tiny",
        "--model_revision",
        "main",
        "--max_steps",
        "400",
    ]
    code, told = report(words, capsys)
    assert code == 0 and not told["findings"], told["findings"]
    with open("rows.jsonl", "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"prompt": "What is 1 + 1?", "completion": ""}))
    words[3] = "all"
    assert report(words, capsys)[0] == 0  # config.yaml leaves unfit rows out, and counts them
    code, told = report([*words, "--unfit_rows", "error"], capsys)
    assert code == 1 and [finding["rule"] for finding in told["findings"]] == ["data"], told["findings"]
    assert "row 41" in told["findings"][0]["why"]


def test_files_as_other_projects_publish_them_get_no_false_error():
    """The files are not kept here; their list and what came out is. check_published.py FOLDER makes it anew."""
    import check_published

    kept = json.loads((ROOT / "docs" / "published_configs.json").read_text(encoding="utf-8"))["files"]
    quiet = [line for line in kept if line["library"] == "accepts" and not line["errors"]]
    assert len(quiet) >= 30 and not any(line["false_errors"] for line in kept)
    assert all(line["commit"] and line["repository"].count("/") == 1 for line in kept)
    for path in sorted([*ROOT.glob("accelerate_configs/*.yaml"), *ROOT.glob("deepspeed_configs/*.json")]):
        judged = check_published.judge(path)
        assert (
            judged == {"library": "accepts", "errors": [], "warnings": [], "false_errors": []} or "zero" in path.name
        ), judged
        assert not judged["errors"]


def test_the_judge_of_published_files_asks_the_library(tmp_path):
    import check_published

    file = tmp_path / "launch.yaml"
    text = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text().replace("num_processes: gpu", "num_processes: 2")
    file.write_text(text.replace("fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: FULL_SHARD"))
    assert check_published.library_says(file).startswith("ValueError") and check_published.judge(file)["errors"]
    file.write_text(text)
    assert check_published.library_says(file) is None
