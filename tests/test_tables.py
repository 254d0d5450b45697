"""The numbers of the README are those of the measured files: each table there is what its program writes from them."""

from pathlib import Path

import pytest
import result_tables
import strategy_table

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", result_tables.TABLES)
def test_result_tables_are_written_by_their_program(name):
    between = README.split(f"<!-- {name} table -->\n")[1].split(f"\n<!-- end of {name} table -->")[0]
    assert between == result_tables.TABLES[name]()


def test_the_strategy_table_is_written_by_its_program():
    between = README.split(f"{strategy_table.BEGIN}\n")[1].split(f"\n{strategy_table.END}")[0]
    assert between == strategy_table.markdown(result_tables.read("strategy_matrix.json"))
