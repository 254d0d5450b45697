"""For every test: no hub, caches of its own, the programs in scripts/ importable; `--matrix` runs all cells.

scripts/test.sh runs two workers of pytest-xdist; the tests of a file stay on one of them, for they share fixtures.
"""

import collections
import os
import shutil
import sys
import tempfile
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
# Before any test imports a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="cookbook-tests-")
if WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other workers compute, too
sys.path.insert(0, str(ROOT / "scripts"))


# Files that take minutes go first, so that no worker is left alone with one at the end.
LONG = ("test_strategies", "test_run_safety", "test_copied_recipe", "test_using", "test_faults", "test_engines_real")
LONG += ("test_trackers", "test_report", "test_check", "test_readme", "test_export_run")


def pytest_addoption(parser):
    parser.addoption("--matrix", action="store_true", help="every recipe under every strategy; writes the table's file")
    parser.addoption("--fresh", action="store_true", help="no launch is a fork of preloaded libraries")


def pytest_configure(config):
    config.addinivalue_line("markers", "matrix: runs only with --matrix")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if not config.getoption("--matrix"):
        for item in items:
            if item.get_closest_marker("matrix"):
                item.add_marker(pytest.mark.skip(reason="not one of the quick cells: scripts/test.sh --matrix runs it"))


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


seconds = collections.Counter()


def pytest_runtest_logreport(report):
    seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
    """What each file costs: the whole has a limit, and this shows where it went."""
    if not WORKER and len(seconds) > 1:
        told = ", ".join(f"{Path(file).stem} {count:.0f}" for file, count in seconds.most_common() if count >= 1)
        terminalreporter.write_line(f"seconds by file, {sum(seconds.values()):.0f} of all workers: {told}")


@pytest.fixture(scope="session", autouse=True)
def forked_launches(request):
    """Launches fork from a process that has imported the libraries; the first of each strategy and recipe does not."""
    if "launching" in sys.modules and sys.platform == "linux":
        sys.modules["launching"].FRESH = request.config.getoption("--fresh")


@pytest.fixture(scope="session")
def benches(tmp_path_factory):
    """Benches of smoke.py by recipe, configuration and precision; each trains its one-process curve once, for all workers."""
    import smoke
    from filelock import FileLock

    class Bench(smoke.Bench):
        def __init__(self, folder, work, *more):
            with FileLock(f"{work}.lock"):
                super().__init__(folder, work, *more)

        @cached_property
        def reference(self):
            with FileLock(f"{self.work}.lock"):
                return super().reference

    made, base = {}, tmp_path_factory.getbasetemp()

    def bench(recipe, config="config", precision="fp32"):
        key = recipe, config, precision
        if key not in made:
            work = (base.parent if WORKER else base) / f"bench-{'-'.join(key)}"
            made[key] = Bench(ROOT / "recipes" / recipe, work, config, precision)
        return made[key]

    return bench
