"""Every command in the documentation is run or parsed, and what the README lists is what there is."""

import argparse
import ast
import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent for path in (ROOT / "recipes").glob("*/train.py"))
OTHERS = ("engines.md", "using.md")  # have tests of their own
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OTHERS]
PAGES += [page for recipe in RECIPES if (page := recipe / "README.md").is_file()]  # a test below misses one
PROGRAMS = ("accelerate launch ", "python ", "python3 ", "bash ", "pip ")

sys.path.insert(0, str(RECIPES[0]))
import inputs  # noqa: E402


def parse_only(words: list[str]) -> None:
    """Run a program up to the point where its arguments are parsed, and no further; ends this process."""
    gc.freeze()  # what the forked process holds is not looked through again
    parse, known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def parse_and_leave(self, *given, **more):
        parse(self, *given, **more)
        raise SystemExit(0)

    def parse_known_and_leave(self, *given, **more):
        found = known(self, *given, **more)
        if sys._getframe(1).f_code is not parse.__code__:  # what it leaves over goes to the recipe's own parser
            raise SystemExit(0)
        return found

    argparse.ArgumentParser.parse_args = parse_and_leave
    argparse.ArgumentParser.parse_known_args = parse_known_and_leave
    os.chdir(ROOT)
    sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
    runpy.run_path(words[0], run_name="__main__")
    sys.exit("the program parsed no arguments")


def blocks(text: str) -> list[list[str]]:
    """The commands of each ```bash block, one a line, without comments."""
    found = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [[re.sub(r"\s+# .*", "", line).strip() for line in block.splitlines()] for block in found]
    return [[line for line in block if line and not line.startswith("#")] for block in lines]


def walkthrough() -> list[str]:
    """The block of "Make a recipe yours", which a test below runs as it stands."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Make a recipe yours")[1].split("\n## ")[0]
    (block,) = blocks(section)
    return block


def commands() -> list[str]:
    """All commands of all pages, of blocks and of `code` in a line, but for the walkthrough's."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [line for block in blocks(text) for line in block if block != walkthrough()]
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        found += [x for x in spans if x.startswith(PROGRAMS) and re.search(r"\.(py|sh|txt)\b", x) and "..." not in x]
    # The headers of launch files and configs, and the docstrings of train.py, tell launch lines, too.
    for path in [*(ROOT / "accelerate_configs").glob("*.yaml"), *(f for r in RECIPES for f in r.iterdir())]:
        if path.suffix in (".yaml", ".py"):
            lines = re.findall(r"^#? +(accelerate launch .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            found += [line for line in lines if "train.py" in line and not line.endswith("\\") and "..." not in line]
    return sorted(dict.fromkeys(found))


def check_launch(words: list[str], monkeypatch) -> None:
    """The launch file and the program are there, the recipe fits the strategy, and its own parser takes the rest."""

    parser = launch_command_parser()
    parser.error = lambda message: pytest.fail(f"accelerate launch: {message}")
    launch = parser.parse_args(words)
    assert launch.config_file is None or (ROOT / launch.config_file).is_file(), launch.config_file
    script = ROOT / launch.training_script
    assert script.is_file(), script
    if script.name != "train.py":
        check_python([launch.training_script, *launch.training_script_args])
        return
    (fits,) = re.findall(r"guard\.check_launch\(parser, __file__, (\(.*?\))\)", script.read_text(encoding="utf-8"))
    assert launch.config_file and Path(launch.config_file).stem in ast.literal_eval(fits)
    monkeypatch.setattr(sys, "argv", [str(script), *launch.training_script_args, "--use_cpu", "true"])
    recipe_parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, inputs.RecipeArguments))
    inputs.strict_arguments(recipe_parser, str(script))
    recipe_parser.parse_args_and_config()


def check_python(words: list[str]) -> None:
    """The program is there and takes these arguments."""
    assert (ROOT / words[0]).is_file(), words[0]
    if len(words) == 1:  # the program's name, in a sentence
        return
    # Forked: what programs import takes seconds, and is here already.
    child = multiprocessing.get_context("fork").Process(target=parse_only, args=(words,))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def check_pip(words: list[str]) -> None:
    """The files are there; a package named by itself has the version of requirements.txt."""
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert words[0] == "install"
    for before, word in itertools.pairwise(words):
        if before in ("-r", "-c"):
            assert (ROOT / word).is_file(), word
        elif before == "--index-url":
            assert re.fullmatch(r"https://download\.pytorch\.org/whl/(cpu|cu\d+)", word)
        elif word not in ("-r", "-c", "--index-url"):
            assert word in pins, word


def check_bash(words: list[str]) -> None:
    """The program is there and is bash."""
    assert subprocess.run(["bash", "-n", str(ROOT / words[0])]).returncode == 0
    known = {"scripts/demo.sh": {"--tiny"}, "scripts/test.sh": {"--matrix"}, ".ci/run": set()}
    assert all(word in known[words[0]] or (ROOT / word).is_file() for word in words[1:])


@pytest.mark.parametrize("command", commands())
def test_command_of_a_page_is_understood(command, monkeypatch):
    check_command(shlex.split(command), monkeypatch)


def check_command(words: list[str], monkeypatch) -> None:
    match words:
        case ["accelerate", "launch", *rest]:
            check_launch(rest, monkeypatch)
        case ["python3", "-m", "venv", ".venv"] | ["source", ".venv/bin/activate"]:
            pass
        case ["python", "scripts/engines/node.py", *rest] if rest:
            check_command(rest, monkeypatch)
        case ["python", *rest]:
            check_python(rest)
        case ["pip", *rest]:
            check_pip(rest)
        case ["bash", *rest]:
            check_bash(rest)
        case ["export", *rest]:
            assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in rest)
        case ["sudo", "apt-get", "install", *_]:
            pass
        case ["docker", "build", "--build-arg", files, "-t", "cookbook", "."]:
            name, _, files = files.partition("=")
            assert f"ARG {name}=" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
            assert all((ROOT / file).is_file() for file in files.split())
        case ["docker", "run", *_, "cookbook"]:
            pass
        case _:
            pytest.fail(f"no rule covers this command: {' '.join(words)}")


def test_from_a_bare_machine_to_the_first_step_in_five_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = blocks(text.split("**From a bare GPU machine to the first step**")[1])[0]
    assert len(first) <= 5 and first[-1].startswith("accelerate launch ")


def test_walkthrough_from_a_csv_to_a_model_that_answers(tmp_path):
    lines = walkthrough()
    assert len(lines) <= 16
    for name in ("recipes", "accelerate_configs", "deepspeed_configs", "scripts"):
        shutil.copytree(
            ROOT / name, tmp_path / "cookbook" / name, ignore=shutil.ignore_patterns("__pycache__", "run", "run-*")
        )
    shutil.copy(ROOT / "requirements.txt", tmp_path / "cookbook")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=tmp_path / "cookbook",
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    mine = tmp_path / "mine"
    run = mine / "recipes" / "my-recipe" / "run"
    told = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert told["outcome"] == "done" and told["arguments"]["learning_rate"] == 1e-5
    assert told["dataset"]["counts"]["training"]["read"] == 40  # every line of the CSV
    scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    assert {"base", "tuned"} <= scores["held-out loss"].keys()
    assert "Held-out loss" in (run / "report.html").read_text(encoding="utf-8")
    assert "training moved the logits" in done.stdout and (mine / "my-model" / "config.json").is_file()
    assert "'role': 'assistant'" in done.stdout.splitlines()[-1]  # it answers


def test_list_of_recipe_arguments_is_the_dataclass():
    text = (
        (ROOT / "docs" / "reference.md")
        .read_text(encoding="utf-8")
        .split("**Eight keys beside TRL's**")[1]
        .split("\n## ")[0]
    )
    names = [field.name for field in dataclasses.fields(inputs.RecipeArguments)]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == names and len(names) == 8


def test_every_strategy_and_recipe_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")} == set(
        re.findall(r"^\| `(\w+\.yaml)` \|", text, re.MULTILINE)
    )
    for recipe in RECIPES:
        header = (recipe / "config.yaml").read_text(encoding="utf-8").splitlines()[1]
        assert f"`{header.removeprefix('#').strip()}`" in text, f"the launch line of {recipe.name}/config.yaml"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_variant_is_in_its_recipes_readme(recipe):
    rows = re.findall(r"^\| `(\w+\.yaml)` \|.*\| `(.*)` \|$", (recipe / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {path.name for path in recipe.glob("*.yaml")}
    for name, line in rows:
        given = shlex.split(line)
        named = given[given.index("--config") + 1] if "--config" in given else "config"
        assert f"{named}.yaml" == name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_readme_names_model_and_data_of_the_recipe(recipe):
    config = yaml.safe_load((recipe / "config.yaml").read_text(encoding="utf-8"))
    text = (recipe / "README.md").read_text(encoding="utf-8")
    assert config["model_name_or_path"] in text and config["dataset_name"] in text
