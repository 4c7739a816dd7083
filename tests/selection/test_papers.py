"""Several tables over one grid of runs, and the grid of the ChFL paper."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.runs.grid import merged
from fedloom.runs.papers import grid_of, read_paper
from fedloom.runs.study import resolve
from tests.cli.conftest import command  # noqa: F401 (a fixture)

TABLES = """
title = "Two tables"
source = "Nobody et al., 2020"

[study]
data = { name = "digits", limit = 60 }
model = { name = "mlp" }
engine = { name = "local" }
fleet = { clients = 4, name = "mixed" }
select = { name = "uniform", fraction = 0.5 }
evaluate = { every = 1, target = 0.05 }
run = { rounds = 2 }

[rows.FedAvg]
method = { name = "fedavg" }
[rows.ChFL]
select = { name = "chfl", fraction = 0.5, scored_share = 1.0 }

[columns.IID]
partition = { name = "iid" }
[columns.skewed]
partition = { name = "dirichlet:1.0" }

[[tables]]
title = "Table 1"
rows = { Random = "FedAvg", "by quality" = "ChFL" }
columns = ["IID"]
measures = ["global_accuracy", "virtual_seconds_to_target"]
[tables.published.Random]
IID = [80.0, 123.0]
[tables.published."by quality"]
IID = [90.0, nan]

[[tables]]
title = "Table 2"
measures = ["rounds@0.01", "rounds@1.0", "bytes@0.01", "bytes_per_round"]

[scales.smoke]
differs = "everything"
"""


@pytest.fixture
def paper(tmp_path):
    def write(old="", new=""):
        assert old in TABLES
        path = tmp_path / "two.toml"
        path.write_text(TABLES.replace(old, new))
        return str(path)

    return write


def test_one_grid_makes_several_tables(command, paper, tmp_path):  # noqa: F811
    found = command("reproduce", paper(), "--scale", "smoke", "--out", tmp_path, "--json")
    assert found.code == 0, found.err
    cells = {(each["table"], each["row"], each["column"], each["measure"]): each for each in found.last["cells"]}
    assert len(cells) == 2 * 2 + 2 * 2 * 4
    place = ("Table 1", "Random", "IID")
    assert cells[*place, "global_accuracy"]["published"] == 80.0
    assert cells[*place, "virtual_seconds_to_target"]["published"] == 123.0
    assert cells["Table 1", "by quality", "IID", "virtual_seconds_to_target"]["published"] is None
    for row in ("FedAvg", "ChFL"):
        for column in ("IID", "skewed"):
            numbers = {key[3]: each["measured"] for key, each in cells.items() if key[:3] == ("Table 2", row, column)}
            assert numbers["rounds@0.01"] == [1.0]
            assert numbers["rounds@1.0"] is None, "never reached"
            assert numbers["bytes@0.01"] == pytest.approx(numbers["bytes_per_round"], rel=0.01), "MB of one round"
    text = (tmp_path / "two-smoke" / "result.md").read_text()
    accuracy = cells[*place, "global_accuracy"]["measured"][0]
    seconds = cells[*place, "virtual_seconds_to_target"]["measured"][0]
    assert f"| Random | {accuracy:.2f} (80, {accuracy - 80:+.2f}) | {seconds:.2f} (123) |" in text
    assert "| | IID % | IID virtual s to target |" in text.replace("|  |", "| |")
    assert "IID rounds to 1%" in text
    assert "4 of 4 runs" in text


def test_some_rows_and_columns_at_a_time(command, paper, tmp_path):  # noqa: F811
    words = ["reproduce", paper(), "--scale", "smoke", "--out", tmp_path, "--json"]
    part = command(*words, "--row", "ChFL", "--column", "skewed")
    assert part.code == 0, part.err
    ran = {(each["row"], each["column"]) for each in part.last["cells"] if each["measured"]}
    assert ran == {("ChFL", "skewed")}
    assert "1 of 4 runs" in (tmp_path / "two-smoke" / "result.md").read_text()
    assert "Did you mean 'ChFL'?" in command(*words, "--row", "ChFl").sentence()
    assert command(*words).code == 0


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("IID = [80.0, 123.0]", "IID = [80.0]", "Random, IID needs one published number a measure"),
        ('Random = "FedAvg"', 'Random = "FedAv"', "Did you mean 'FedAvg'?"),
        ('columns = ["IID"]', 'columns = ["ID"]', "Did you mean 'IID'?"),
        ("[tables.published.Random]", "[tables.published.Rando]", "Did you mean 'Random'?"),
        ('measures = ["global_accuracy", "virtual_seconds_to_target"]', "measures = []", "measures"),
        ('title = "Table 2"', 'titel = "Table 2"', "titel"),
        ("[scales.smoke]", "[published.FedAvg]\nIID = 3.0\n[scales.smoke]", "[published] and [[tables]]"),
        ("rounds@1.0", "rounds@many", "rounds@many"),
        ("rounds@1.0", "laps@0.5", "laps@0.5"),
    ],
)
def test_what_is_wrong_with_a_table(paper, old, new, part):
    with pytest.raises(InputError) as error:
        read_paper(paper(old, new))
    assert part in str(error.value)


def test_the_chfl_grid_is_sound():
    """Every row and column resolves; nothing is loaded or run."""
    published = read_paper("selection")
    for scale in published.paper.scales:
        grid = grid_of(published, scale)
        for row in grid.rows.values():
            for column in grid.columns.values():
                study = resolve(merged(grid.base, column, row))
                assert study.select.fields["fraction"] == 0.1
                assert study.evaluate.target == 0.8
                assert study.train.epochs == 2
    assert set(grid_of(published, "paper").columns) == {"MNIST", "EMNIST", "FEMNIST", "CIFAR-10"}


def test_the_published_numbers_are_those_of_the_paper():
    """Spot checks of every table, and what its text says of them."""
    tables = {table.title.partition(":")[0]: table for table in read_paper("selection").paper.shown}
    assert tables["Table 2"].published["ChFL-Time"]["CINIC-10"] == [75.3, 3546]
    assert tables["Table 3"].published["ChFL+FedNova"]["EMNIST"] == [93.1]
    gain = {column: tables["Table 3"].published["ChFL+FedAvg"][column][0] - base[0]
            for column, base in tables["Table 3"].published["FedAvg"].items()}  # fmt: skip
    assert gain["MNIST"] == pytest.approx(4.8)
    assert gain["CINIC-10"] == pytest.approx(4.9)
    assert tables["Table 4"].published["ChFL+FedProx"]["FEMNIST"] == [70, 962, 93, 1128, 135, 1470, 209, 2756]
    assert tables["Table 5"].published["FedNova"]["CIFAR-10"][-2:] == [238, 1127]
    assert tables["Table 6"].published["ChFL+FedAvg"]["EMNIST"] == [23, 1141]
    both = [table for table in read_paper("selection").paper.shown if table.title.startswith("Table 7")]
    assert both[0].published == both[1].published
    assert both[0].rows["alpha = 0.2"] == "ChFL, share 0.2"
    assert both[1].rows["alpha = 0.2"] == "ChFL, share 0.8"
