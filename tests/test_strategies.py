"""Every recipe trains the same under every strategy: killed, resumed, and reloaded; smoke.py does and judges the work.

By default each recipe runs under its own strategy and each strategy once. `--matrix` runs all recipes and their other
configurations under all strategies that they fit, in fp32 and under their own in the shipped precision, config.yaml under
all in both, and writes docs/strategy_matrix.json.
"""

from pathlib import Path

import launching
import pytest
import smoke
import strategy_table
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/train.py"))
# Each recipe under its own strategy, beside the one process that it is compared with; and the strategies that are no
# recipe's own.
QUICK = {(recipe, launching.own_strategy(ROOT / "recipes" / recipe)) for recipe in RECIPES}
QUICK |= {("llama-3.2-1b", "single"), ("qwen3-8b-invoice", "zero1"), ("gpt-oss-120b", "zero3_offload")}


def precisions_of(config: Path) -> list[str]:
    """The precisions to try: with a 4-bit base there is no fp32."""
    packed = launching.read_config(config.parent, config.stem).get("load_in_4bit")
    return ["shipped"] if packed else [*smoke.TOLERANCE]


def cells():
    """(recipe, configuration, strategy, precision), the quick ones unmarked, those of one bench in a row."""
    for recipe in RECIPES:
        folder = ROOT / "recipes" / recipe
        precisions = precisions_of(folder / "config.yaml")
        for precision in precisions:
            for strategy in smoke.fitting(folder):
                quick = precision == precisions[0] and (recipe, strategy) in QUICK
                marks = [] if quick else [pytest.mark.matrix]
                yield pytest.param(recipe, "config", strategy, precision, marks=marks)
        for config in sorted(path for path in folder.glob("*.yaml") if path.stem != "config"):
            fits, own = smoke.fitting(folder, config.stem), launching.own_strategy(folder, config.stem)
            if own == "single" and "ddp" in fits:
                own = "ddp"  # one process is what it is compared with
            precisions = precisions_of(config)
            for strategy in fits:
                for precision in precisions if strategy == own else precisions[:1]:
                    yield pytest.param(recipe, config.stem, strategy, precision, marks=pytest.mark.matrix)


@pytest.fixture(scope="session")  # of the session: workers share the cells, which tests with a module's fixture do not
def table(request, tmp_path_factory):
    """The cells measured so far by this worker; put into the table's file at the end of a matrix."""
    measured = []
    yield measured
    if request.config.getoption("--matrix"):
        with FileLock(tmp_path_factory.getbasetemp().parent / "strategy-table.lock"):
            strategy_table.write(measured)


def test_quick_cells_cover_each_recipe_and_each_strategy():
    assert {recipe for recipe, _ in QUICK} == set(RECIPES)
    assert {strategy for _, strategy in QUICK} == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert all(strategy in smoke.fitting(ROOT / "recipes" / recipe) for recipe, strategy in QUICK)


@pytest.mark.parametrize(("recipe", "config", "strategy", "precision"), list(cells()))
def test_trains_as_one_process_resumes_and_reloads(benches, table, recipe, config, strategy, precision):
    bench = benches(recipe, config, precision)
    # The guard is the same file everywhere, so one cell proves that a finished run is not trained again.
    cell = bench.cell(strategy, start_again=(recipe, config, strategy) == ("llama-3.2-1b", "config", "zero2"))
    print(smoke.line(cell))
    table.append(cell)
    assert cell.error is None, cell.error
