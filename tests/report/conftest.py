"""A few small real runs, and a browser where there is one."""

from __future__ import annotations

import shutil

import pytest

from fedloom.runs.start import run

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two methods, two seeds, unequal devices, half of the clients a round: everything that a report can show."""
    out = tmp_path_factory.mktemp("runs")
    for method in ("heterofl", "fedrolex"):
        for seed in (0, 1):
            settings = {"data.limit": 120, "select.name": "uniform", "select.fraction": 0.5, "evaluate.target": 0.05}
            options = {"clients": 6, "rounds": 3, "fleet": "high", "partition": "classes:2", "engine": "local"}
            run(method, model="mlp", seed=seed, out=out, set=settings | {"evaluate.every": 1}, **options)
    return out


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser tests")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium on this machine: no browser tests")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that fails the test if anything is written to its console or anything is asked of the network."""
    opened = []

    def at(address, width=1280, scheme="light"):
        view = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        view.said, view.asked = [], []
        view.on("console", lambda message: view.said.append(message.text))
        view.on("pageerror", lambda error: view.said.append(str(error)))
        view.on("request", lambda request: view.asked.append(request.url))
        view.goto(address)
        opened.append(view)
        return view

    yield at
    for view in opened:
        assert view.said == []
        view.close()
