"""Every column of the committed tables is described in ``docs/columns.yaml``, and nothing else is."""

import csv

from experiments.common.files import KEPT, ROOT
from experiments.common.yaml_settings import load_yaml


def tables() -> dict[str, set[str]]:
    """Columns of every committed table, of all scales and machines together: ``policies/pairs.csv``."""
    columns: dict[str, set[str]] = {}
    for path in KEPT.rglob("*.csv"):
        scale, *rest = path.relative_to(KEPT).parts
        name = f"bench/{rest[-1]}" if scale == "bench" else "/".join(rest)
        with path.open(encoding="utf-8", newline="") as handle:
            columns.setdefault(name, set()).update(next(csv.reader(handle)))
    return columns


def test_every_column_is_described_and_every_description_has_a_column() -> None:
    about, kept = load_yaml(ROOT / "docs" / "columns.yaml"), tables()
    assert set(about) == {"suffixes", "columns", "tables"} and all(about.values())
    plain = {
        name: {name, *(name.removesuffix(end) for end in about["suffixes"])} for name in set().union(*kept.values())
    }
    lacking = {(table, name) for table, names in kept.items() for name in names
               if plain[name].isdisjoint({*about["columns"], *about["tables"].get(table, {})})}  # fmt: skip
    assert not lacking, "describe these under `columns`, or under `tables` where it is that table's alone"
    # A table may be described before it is kept.
    idle = set(about["columns"]) - set().union(*plain.values())
    assert not idle, "no table has these"
    for table, own in about["tables"].items():
        assert table not in kept or set(own) <= kept[table], f"{table} has no such column"
