"""For every test: no hub, caches of its own, the programs in scripts/ importable; `--matrix` runs all cells."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Before any test imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="cookbook-tests-")
sys.path.insert(0, str(ROOT / "scripts"))


def pytest_addoption(parser):
    parser.addoption("--matrix", action="store_true", help="every recipe under every strategy; writes the table's file")


def pytest_configure(config):
    config.addinivalue_line("markers", "matrix: runs only with --matrix")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--matrix"):
        for item in items:
            if item.get_closest_marker("matrix"):
                item.add_marker(pytest.mark.skip(reason="not one of the quick cells: scripts/test.sh --matrix runs it"))


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def benches(tmp_path_factory):
    """Benches of smoke.py by recipe, configuration and precision; each trains its one-process curve once."""
    import smoke

    made = {}

    def bench(recipe, config="config", precision="fp32"):
        key = recipe, config, precision
        if key not in made:
            work = tmp_path_factory.mktemp("-".join(key))
            made[key] = smoke.Bench(ROOT / "recipes" / recipe, work, config, precision)
        return made[key]

    return bench
