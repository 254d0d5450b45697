"""The shape that keeps a recipe copyable: short files, few guard calls, one guard, no hidden module, strict files."""

import ast
import dataclasses
import difflib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from deepspeed.runtime import constants
from deepspeed.runtime.zero import config as zero_config
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py"))
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DEEPSPEED_FILES = sorted((ROOT / "deepspeed_configs").glob("*.json"))
OPTIONAL = {"flash_attn", "vllm"}  # requirements-hopper.txt, and an environment of its own: used where they are
CONFIGS = [path for recipe in RECIPES for path in sorted(recipe.glob("*.yaml"))]

sys.path.insert(0, str(RECIPES[0]))
import inputs  # noqa: E402


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes")) if path.is_relative_to(ROOT / "recipes") else path.name


def load_strictly(path: Path):
    return yaml.load(path.read_text(encoding="utf-8"), Loader=inputs.StrictLoader)


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_files_are_short_and_guard_calls_few(recipe):
    source = (recipe / "train.py").read_text(encoding="utf-8")
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert 0 < len([call for call in calls if call.startswith(("guard.", "keeper."))]) <= 6
    assert len(source.splitlines()) <= 120
    assert len((recipe / "guard.py").read_text(encoding="utf-8").splitlines()) <= 350


def below_the_docstring(recipe: Path) -> str:
    source = (recipe / "train.py").read_text(encoding="utf-8")
    return source[source.index('"""', source.index('"""') + 3) :]


def test_plain_chat_recipes_share_one_train_py():
    """A recipe that loads its model by name and has no function beside main() differs in its docstring alone."""
    plain = {}
    for recipe in RECIPES:
        source = (recipe / "train.py").read_text(encoding="utf-8")
        body = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        if len(body) == 1 and "AutoModel" not in source:
            plain.setdefault(below_the_docstring(recipe), []).append(recipe.name)
    assert len(plain) == 1 and len(*plain.values()) >= 5, plain.values()


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_a_configuration_tells_its_launch_line(path):
    """Tests, benchmark and chooser take a recipe's own strategy from there."""
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    (line,) = re.findall(r"^#   accelerate launch (.*)$", head, re.MULTILINE)
    config = "" if path.stem == "config" else f" --config {path.stem}"
    strategy = re.match(r"--config_file accelerate_configs/(\w+)\.yaml", line)[1]
    assert line == f"--config_file accelerate_configs/{strategy}.yaml recipes/{path.parent.name}/train.py{config}"
    assert "When not to use:" in head


def test_the_last_recipe_took_thirty_lines_of_python_or_fewer():
    """Lines of its Python files that are in no file of another recipe: `diff OTHER/train.py THIS/train.py | grep -c '^>'`."""
    last = ROOT / "recipes" / "qwen3.8-27b"
    others = [path for recipe in RECIPES if recipe != last for path in recipe.glob("*.py")]
    copies, added = {path.read_bytes() for path in others}, 0
    for file in last.glob("*.py"):
        if file.read_bytes() not in copies:
            lines = file.read_text(encoding="utf-8").splitlines()
            known = [path.read_text(encoding="utf-8").splitlines() for path in others if path.name == file.name]
            added += min(sum(x.startswith("+ ") for x in difflib.ndiff(old, lines)) for old in [*known, []])
    assert 0 < added <= 30


def test_guard_files_are_the_same_in_every_recipe():
    command = [sys.executable, str(ROOT / "scripts" / "sync_guard.py"), "--check", *map(str, RECIPES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", [ROOT / "scripts", *RECIPES], ids=name_of)
def test_no_file_hides_a_module(folder):
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert not names & taken


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_recipe_imports_only_its_own_files_and_packages(recipe):
    own = {path.stem for path in recipe.glob("*.py")}
    known = own | OPTIONAL | set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    for file in recipe.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= known, f"{file.name}, line {node.lineno}"


def test_a_launch_file_for_each_strategy_names_no_model_and_no_precision():
    assert [path.stem for path in LAUNCH_FILES] == sorted(
        ["single", "ddp", "fsdp", "zero1", "zero2", "zero3", "zero3_offload"]
    )


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=name_of)
def test_launch_file_has_only_keys_that_accelerate_knows(path):
    config = load_strictly(path)
    top = {field.name for field in dataclasses.fields(ClusterConfig)}
    flags = {action.dest for action in launch_command_parser()._actions}
    assert set(config) <= top
    assert set(config.get("fsdp_config", {})) <= {flag for flag in flags if flag.startswith("fsdp_")}
    # Nested keys are not checked by accelerate itself: a misspelt one is ignored in silence.
    assert set(config.get("deepspeed_config", {})) <= flags
    assert "mixed_precision" not in config
    if config["distributed_type"] == "DEEPSPEED":
        assert (ROOT / config["deepspeed_config"]["deepspeed_config_file"]).stem == path.stem
        assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    if config["distributed_type"] == "FSDP":
        assert config["fsdp_config"]["fsdp_version"] == 2 and "fsdp_auto_wrap_policy" in config["fsdp_config"]


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=name_of)
def test_deepspeed_file_has_only_keys_that_deepspeed_knows(path):
    def unique(pairs):
        assert len({key for key, _ in pairs}) == len(pairs), "a key stands twice"
        return dict(pairs)

    config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    known = {value for module in (constants, zero_config) for value in vars(module).values() if isinstance(value, str)}
    assert set(config) <= known
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    assert set(config["zero_optimization"]) <= _field_names(zero_config.DeepSpeedZeroConfig)
    parsed = zero_config.DeepSpeedZeroConfig(**zero)  # pydantic, extra keys forbidden
    assert path.stem.startswith(f"zero{int(parsed.stage)}")
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"  # the recipe owns them
    assert config["gradient_clipping"] == "auto"  # without the key max_grad_norm is inert


def _field_names(model) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()} | set(model.model_fields)


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_recipe_configuration_passes_the_strict_parser(path, monkeypatch):
    script = str(path.parent / "train.py")
    monkeypatch.setattr(sys, "argv", [script, "--config", path.stem, "--use_cpu", "true"])
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    inputs.strict_arguments(parser, script)
    script_args, training_args, model_args, _ = parser.parse_args_and_config()
    written = load_strictly(path)
    assert script_args.dataset_name == written["dataset_name"]
    assert training_args.learning_rate == written["learning_rate"] and training_args.max_length == written["max_length"]
    assert model_args.model_revision == written["model_revision"] and model_args.dtype == written["dtype"]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_plain_trl_reads_the_same_configuration(path):
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    *_, recipe_args = parser.parse_args_and_config(["--config", str(path), "--use_cpu", "true"])
    assert recipe_args.chat_template_kwargs == load_strictly(path).get("chat_template_kwargs", {})
