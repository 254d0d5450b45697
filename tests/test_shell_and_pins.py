"""Shell files and the Dockerfile pass their linters; the requirement files agree with each other and with the recipes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELL = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / ".ci").iterdir()])


def tool(name: str) -> str:
    """The program beside this Python, or on PATH; else the test is skipped."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -r requirements-dev.txt has it for Linux on x86-64")
    return found


def pins(name: str) -> dict[str, str]:
    """Package (lower case, hyphens) -> version of a requirements file; every line must be an exact pin."""
    found = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        line = line.partition("  #")[0]
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line.strip() and not line.startswith("#"):
            pin = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[\w+\])?==([0-9A-Za-z.]+)(?:; .+)?", line)
            assert pin, f"{name}: {line!r} is no exact pin that PyPI has (no +local, no @)"
            found[pin[1].lower().replace("_", "-")] = pin[2]
    return found


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_file_passes_shellcheck(path):
    done = subprocess.run([tool("shellcheck"), "-x", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_is_short_and_passes_hadolint():
    assert len((ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()) <= 25
    done = subprocess.run([tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_lock_holds_every_pin():
    lock = pins("requirements.lock")
    for name in ("requirements.txt", "requirements-dev.txt"):
        for package, version in pins(name).items():
            assert lock.get(package) == version, f"{package} in {name} and requirements.lock"


def test_hopper_extras_do_not_contradict_the_lock():
    lock = pins("requirements.lock")
    hopper = pins("requirements-hopper.txt")
    assert all(lock.get(package, version) == version for package, version in hopper.items())
    assert len({version for package, version in hopper.items() if package.startswith("nvidia-cutlass-dsl")}) == 1


def test_recipes_ask_for_the_same_versions():
    wanted = pins("requirements.txt")
    for script in (ROOT / "recipes").glob("*/train.py"):
        for package, version in re.findall(r'"([\w-]+)==([\w.]+)"', script.read_text(encoding="utf-8")):
            assert wanted[package] == version, f"{package} in {script.parent.name}/train.py"


def test_workflow_and_ci_run_the_same_script():
    assert "run: bash .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
