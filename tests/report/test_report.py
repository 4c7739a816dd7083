"""The report: what it says is what the runs say, and it works as a page."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
from html.parser import HTMLParser
from statistics import fmean

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.report.board import Board
from fedloom.report.gather import groups_of, read_runs
from fedloom.report.html import CARDS, render, write_report
from fedloom.report.svg import Point, Series, heat, lines, nice, scatter
from fedloom.report.words import words
from tests.cli.conftest import Ended, command  # noqa: F401 (a fixture)

SECTIONS = ["summary", "curves", "costs", "clients", "data", "submodels", "selection", "settings"]


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("report") / "report.html", "heterofl")


def test_numbers_are_those_of_the_runs(runs, report):
    text = report.read_text()
    for method in ("heterofl", "fedrolex"):
        summaries = [json.loads(path.read_text()) for path in runs.glob(f"{method}*/summary.json")]
        assert len(summaries) == 2
        assert f"{100 * fmean(each['global_accuracy'] for each in summaries):.2f}" in text
        assert f"{fmean(each['upload_bytes'] for each in summaries) / 1e6:.3g}" in text


def test_it_is_one_file_that_asks_for_nothing(report):
    """No address in it but names of XML."""
    text = report.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
    assert not re.findall(r"https?://|@import|url\(", text)
    assert report.stat().st_size < 500_000


class Tags(HTMLParser):
    """Whether every tag that was opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_it_is_well_formed(report):
    tags = Tags()
    tags.feed(report.read_text())
    assert tags.open == []
    assert [each for each in tags.ids if each != "theme"] == SECTIONS


def test_groups_by_seed_and_what_sets_them_apart(runs, tmp_path):
    groups = groups_of(read_runs([runs]))
    assert sorted((group.label, [run.seed for run in group.runs]) for group in groups) == [
        ("fedrolex", [0, 1]), ("heterofl", [0, 1]),
    ]  # fmt: skip
    shutil.copytree(runs, tmp_path / "runs")
    other = next((tmp_path / "runs").glob("heterofl*0"))
    study = json.loads((other / ".study.json").read_text())
    study["train"]["lr"] = 0.5
    (other / ".study.json").write_text(json.dumps(study))
    labels = {group.label for group in groups_of(read_runs([tmp_path / "runs"]))}
    assert labels == {"fedrolex", "heterofl, train.lr 0.05", "heterofl, train.lr 0.5"}


def test_labels_stay_short_and_letters_are_told(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    one, other = sorted((tmp_path / "runs").glob("heterofl*"))
    other_study(one, train__lr=0.5, fleet__dropout=0.25, partition__name="iid")
    third = shutil.copytree(other, other.with_name("third"))
    other_study(third, train__lr=0.5, fleet__dropout=0.25, train__epochs=2)
    found = read_runs([tmp_path / "runs"])
    groups = {group.label: group.key for group in groups_of(found)}
    assert groups == {
        "fedrolex": "", "heterofl, iid": "",
        "heterofl, classes:2 (a)": "train.lr 0.05, train.epochs 1, fleet.dropout not set",
        "heterofl, classes:2 (b)": "train.lr 0.5, train.epochs 2, fleet.dropout 0.25",
    }  # fmt: skip
    text = render(found)
    assert cells(text, "What the letters stand for")["heterofl, classes:2 (b)"]["differs in"].startswith("train.lr 0.5")
    assert '<p class="key">' in Board([tmp_path / "runs"]).live()


def test_a_crowd_has_few_cards_and_every_line_its_own_switch(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    first = next((tmp_path / "runs").glob("heterofl*0"))
    for number in range(CARDS):
        other_study(shutil.copytree(first, first.with_name(f"more{number}")), fleet__dropout=number / 100)
    text = render(read_runs([tmp_path / "runs"]))
    assert text.count('<div class="card"') == CARDS
    assert f"The {CARDS} best of {CARDS + 2} have a card" in text
    assert len(set(re.findall(r'<button type="button" data-s="\d+" data-of="(\d+)"', text))) == CARDS + 2
    assert set(re.findall(r'<g data-s="\d+" data-of="(\d+)"', text)) == set(map(str, range(CARDS + 2)))


def test_curves_are_means_with_deviations(runs):
    (group,) = [group for group in groups_of(read_runs([runs])) if group.label == "heterofl"]
    curve = group.curve("global_accuracy")
    assert [point[0] for point in curve] == [1, 2, 3]
    last = [run.rows[-1]["global_accuracy"] for run in group.runs]
    mean, half = np.mean(last), np.std(last, ddof=1)
    assert curve[-1][1:] == pytest.approx((mean, mean - half, mean + half))
    spent = group.curve("global_accuracy", "upload_bytes+download_bytes")
    total = [run.summary["upload_bytes"] + run.summary["download_bytes"] for run in group.runs]
    assert spent[-1][0] == pytest.approx(np.mean(total))


def test_the_split_is_drawn_without_the_data(runs, monkeypatch):
    """A folder that was copied elsewhere still shows who held what."""
    monkeypatch.setattr("fedloom.runs.world.dataset_of", None)
    found = read_runs([runs])
    labels = found[0].split.labels
    assert labels.shape == (10, 6)
    assert ((labels > 0).sum(0) == 2).all()
    assert labels.sum(0).tolist() == found[0].split.train.sizes.tolist()
    assert "Training images by class and client" in render(found)


def stopped(place, done=2, accuracy=None):
    """Take a finished run back to where it stood after some rounds, in the middle of writing the next."""
    (place / "summary.json").unlink()
    rows = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    if accuracy is not None:
        rows[done - 1] = json.dumps(json.loads(rows[done - 1]) | {"global_accuracy": accuracy}) + "\n"
    (place / "metrics.jsonl").write_text("".join(rows[:done]) + rows[done][:40])


def cells(text, title):
    """A table of the page, as its CSV button copies it: head -> row -> cell."""
    copied = html.unescape(re.search(rf'<h3>{title}</h3>\s*<button[^>]*data-copy="([^"]*)"', text)[1])
    return {row.pop("method"): row for row in csv.DictReader(io.StringIO(copied))}


def test_a_run_under_way_is_shown_as_such(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    stopped(next((tmp_path / "runs").glob("fedrolex*1")))
    text = render(read_runs([tmp_path / "runs"]))
    assert "2 of 3" in text
    assert "stopped" in text
    assert "1 rounds to go" in text


def test_statistics_are_over_finished_runs(runs, tmp_path):
    """Of two seeds one was stopped at an accuracy of 98.76 %: it is named, and no mean has it."""
    shutil.copytree(runs, tmp_path / "runs")
    whole = json.loads(next(runs.glob("fedrolex*0/summary.json")).read_text())
    stopped(next((tmp_path / "runs").glob("fedrolex*1")), accuracy=0.9876)
    text = render(read_runs([tmp_path / "runs"]))
    assert "have not ended: fedrolex, seed 1 (stopped, 1 rounds to go)." in text
    assert "1 seed(s) in common" in text
    ended = f"{100 * whole['global_accuracy']:.2f}"
    assert (
        cells(text, "Accuracy")["fedrolex"] | {"seeds": "1", "global %": ended} == cells(text, "Accuracy")["fedrolex"]
    )
    assert cells(text, "What the seeds carry")["fedrolex"]["mean %"] == ended
    assert cells(text, "What the seeds carry")["heterofl"]["95 % interval"] == "-", "two seeds have none"
    assert "2 seeds, no interval" in text
    assert cells(text, "Cost of the whole run")["fedrolex"]["up MB"] == f"{whole['upload_bytes'] / 1e6:.3g}"
    assert "98.76" not in text


def test_a_method_none_of_whose_runs_ended_is_shown_as_far_as_it_got(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    for seed in (0, 1):
        stopped(next((tmp_path / "runs").glob(f"fedrolex*{seed}")), accuracy=0.9876)
    text = render(read_runs([tmp_path / "runs"]), "heterofl")
    assert "have not ended: fedrolex, seed 0 (stopped, 1 rounds to go); fedrolex, seed 1 (stopped, 1 round" in text
    assert cells(text, "Accuracy")["fedrolex"]["global %"] == "98.76 ± 0.00"
    assert cells(text, "Accuracy")["fedrolex"]["state"] == "1 rounds to go"
    assert cells(text, "What the seeds carry")["fedrolex"]["mean %"] == "-"
    assert "No winner: there is nothing to compare with." in text
    assert "98.76 to" not in text, "no interval"


def test_two_runs_of_one_seed_are_named_and_one_counts(runs, tmp_path):
    """A run and two copies, one of them stopped: of the two finished ones the later counts, at 98.76 %."""
    shutil.copytree(runs, tmp_path / "runs")
    first = next((tmp_path / "runs").glob("heterofl*0"))
    copies = [first.with_name(name) for name in ("a", "b")]
    for copy in copies:
        shutil.copytree(first, copy)
    stopped(copies[0])
    for file, change in (("summary.json", {"global_accuracy": 0.9876}), ("environment.json", {"started": "9999"})):
        (copies[1] / file).write_text(json.dumps(json.loads((copies[1] / file).read_text()) | change))
    found = read_runs([tmp_path / "runs"])
    (group,) = [group for group in groups_of(found) if group.label == "heterofl"]
    assert len(group.runs) == 4
    assert group.counted.values("global_accuracy")[0] == 0.9876
    text = render(found)
    assert "<li>2 seeds</li>" in text
    assert {row["seeds"] for row in cells(text, "Accuracy").values()} == {"2"}
    assert f"heterofl, seed 0 ({copies[1]} counts, not {copies[0]}, {first})." in text
    assert "means over 2 seeds" in text


def other_study(place, **changes):
    """A run whose folder says that it was asked for with other settings."""
    study = json.loads((place / ".study.json").read_text())
    for name, value in changes.items():
        section, _, key = name.partition("__")
        study[section][key] = value
    (place / ".study.json").write_text(json.dumps(study))


def test_the_paragraph_for_a_paper_names_what_was_set(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    changes = {
        "partition__name": "dirichlet", "partition__alpha": 0.3, "train__schedule": "cosine", "train__clip": 1.0,
        "fleet__dropout": 0.25, "fleet__deadline": 40.0, "merge__name": "trimmed", "merge__share": 0.2,
    }  # fmt: skip
    for place in (tmp_path / "runs").iterdir():
        other_study(place, **changes)
    text = words(groups_of(read_runs([tmp_path / "runs"])))
    for said in (
        "dirichlet (alpha 0.3, minimum 2)", "fleet high (deadline 40, dropout 0.25)", "merge.name trimmed",
        "merge.share 0.2", "SGD (clip 1, schedule cosine, decay 0.1)", "Numbers are means over 2 seeds (0, 1).",
        "a share of 0.5 of the clients trains, chosen by uniform,",
    ):  # fmt: skip
        assert said in text
    assert "t-test" not in text, "two seeds are not tested"
    assert "differ" not in text


def test_the_paragraph_says_of_mixed_runs_only_what_they_share(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    for place in (tmp_path / "runs").glob("heterofl*"):
        other_study(place, data__name="mnist", train__lr=0.5)
    shutil.rmtree(next((tmp_path / "runs").glob("fedrolex*1")))
    text = words(groups_of(read_runs([tmp_path / "runs"])))
    assert "The model is mlp." in text
    assert "data set" not in text
    assert "learning rate" not in text
    assert "Beside the method, the runs differ in data.name and train.lr." in text
    assert "fedrolex: of one seed (0)" in text
    assert "heterofl: means over 2 seeds (0, 1)" in text


def test_ticks_are_whole_rounds_and_stay_inside():
    drawn = lines([Series("a", 0, [(1, 0, 0, 0), (12, 1, 1, 1)])], "round", "loss", "name")
    assert ">2.5<" not in drawn
    assert ">9<" in drawn
    wide = lines([Series("a", 0, [(0, 0, 0, 0), (12.5e6, 1, 1, 1)])], "bytes", "loss", "name")
    assert 'text-anchor="end">12.5M<' in wide


def test_wrong_input(command, runs, tmp_path):  # noqa: F811
    ended: Ended = command("report", tmp_path / "nowhere")
    assert "is not a folder" in ended.sentence()
    (tmp_path / "empty").mkdir()
    assert "holds no run" in command("report", tmp_path / "empty").sentence()
    assert "HTML file" in command("report", runs, "-o", "report.pdf").sentence()
    (tmp_path / "file").touch()
    assert "is not a folder" in command("board", tmp_path / "file").sentence()
    assert "choose another --port" in command("board", runs, "--host", "192.0.2.1").sentence()
    ended = command("report", runs, "-o", "deep/er.html", "--baseline", "heterofl")
    assert ended.code == 0, ended.err
    assert "above heterofl" in (tmp_path / "deep" / "er.html").read_text()
    assert "fedrol" in command("report", runs, "--baseline", "fedroll").sentence()


def test_figures_by_hand():
    assert nice(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert lines([Series("a", 0, [])], "x", "y", "name") == ""
    drawn = lines([Series("a", 3, [(0, 0, 0, 0), (10, 100, 90, 110)])], "round", "accuracy, %", "name", 100.0)
    assert 'data-s="3"' in drawn
    (line,) = re.findall(r'class="line" d="M([\d. ]+)L([\d. ]+)"', drawn)
    assert [tuple(map(float, point.split())) for point in line] == [(44, 262), (448, 12)], "corner to corner"
    points = [Point("cheap", 0, 1, 50, 50, 50), Point("good", 1, 5, 80, 80, 80), Point("bad", 2, 6, 40, 40, 40)]
    (front,) = re.findall(r'class="front" d="([^"]+)"', scatter(points, "x", "y", "name"))
    assert front.count("L") == 1, "two on the front; the third is beaten in both"
    assert heat(["a<b"], [[1.0, 0.0]], "name").count("<rect") == 2
    assert heat(["a", "b"], [[1.0], [1.0, 2.0, 3.0]], "name").count('x="4') == 0, "rows of unequal lengths fit"
    assert "a&lt;b" in heat(["a<b"], [[1.0, 0.0]], "name")


def contrast(view, number):
    """Of a number in a heat map and its cell (WCAG 2)."""
    return number.evaluate(
        """text => {
            const parts = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const cell = text.previousElementSibling, shade = Number(cell.getAttribute("fill-opacity"));
            const card = parts(getComputedStyle(text.closest("figure")).backgroundColor);
            const mixed = parts(getComputedStyle(cell).fill).map((value, k) => shade * value + (1 - shade) * card[k]);
            const light = colour => colour.map(value => value / 255)
                .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
                .reduce((sum, value, k) => sum + value * [0.2126, 0.7152, 0.0722][k], 0.05);
            const [low, high] = [light(mixed), light(parts(getComputedStyle(text).fill))].sort((a, b) => a - b);
            return high / low;
        }"""
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark")])
def test_in_a_browser(page, report, width, scheme):
    view = page(report.as_uri(), width, scheme)
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
    figures = view.locator("figure svg")
    assert figures.count() >= 11
    for number in range(figures.count()):
        box = figures.nth(number).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 40
    assert view.locator("svg .line").count() >= 10
    assert view.locator("svg .band").count() >= 4
    first = view.locator("#summary td:first-child").first.bounding_box()
    assert first["width"] <= width / 2, "names leave room for numbers"
    shadows = view.locator("#summary .scroll").first.evaluate("table => getComputedStyle(table).backgroundAttachment")
    assert shadows == "local, local, scroll, scroll", "a table says at which end it goes on"
    for shade in ("pale", "middle", "deep"):
        assert all(contrast(view, number) > 4.3 for number in view.locator(f"svg text.{shade}").all()[:8])
    assert view.asked == [report.as_uri()], "nothing else was loaded"
    dark = view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 28)"
    assert dark == (scheme == "dark")
    view.click("#theme")
    assert (view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 28)") != dark


def test_tables_copy_and_methods_hide(page, report):
    view = page(report.as_uri())
    view.evaluate("navigator.clipboard.writeText = text => { window.got = text; return Promise.resolve(); }")
    view.locator("#summary button", has_text="CSV").first.click()
    rows = list(csv.reader(io.StringIO(view.evaluate("window.got"))))
    assert rows[0][:2] == ["method", "global %"]
    assert {row[0] for row in rows[1:]} == {"heterofl", "fedrolex"}
    view.locator("#summary button", has_text="LaTeX").first.click()
    text = view.evaluate("window.got")
    assert text.startswith("\\begin{tabular}{lrrrr")
    assert "global \\%" in text
    assert "$\\pm$" in text
    before = view.locator("#curves svg .line:visible").count()
    view.locator(".legend button", has_text="fedrolex").click()
    assert view.locator("#curves svg .line:visible").count() == before // 2


def test_it_prints(page, report):
    view = page(report.as_uri())
    view.emulate_media(media="print")
    assert view.locator("button.tool:visible").count() == 0
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(view.pdf()) > 10_000


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", ".study.json", "summary.json", "clients.jsonl", "environment.json", "split.npz"]
)
def test_a_damaged_run_among_others_is_told_and_left_out(runs, tmp_path, caplog, file):
    shutil.copytree(runs, tmp_path / "runs")
    bad = sorted((tmp_path / "runs").iterdir())[0]
    (bad / file).write_text("no JSON\n")
    assert len(read_runs([tmp_path / "runs"])) == 3
    assert f"left out: {bad / file} is damaged" in caplog.text
    with pytest.raises(InputError, match=f"{file} is damaged"):
        read_runs([bad])


def test_a_run_without_its_ledger_does_not_stop_the_report(runs, tmp_path, caplog):
    shutil.copytree(runs, tmp_path / "runs")
    bad = sorted((tmp_path / "runs").iterdir())[0]
    (bad / "clients.jsonl").unlink()
    write_report([tmp_path / "runs"], tmp_path / "report.html")
    assert f"left out: {bad / 'clients.jsonl'} is damaged" in caplog.text
