"""The command line: parse, call, show. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fedloom import __version__
from fedloom.errors import FedloomError, InputError, choose

if TYPE_CHECKING:
    from fedloom.runs.result import Result

__all__ = ["main"]

app = typer.Typer(
    help="Federated learning for unequal devices and unequal data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
KINDS = ("methods", "datasets", "models", "partitions", "fleets", "policies", "engines")

Dataset = Annotated[str | None, typer.Option(help="Data set: a name, a .npz file or an import path.")]
Model = Annotated[str | None, typer.Option(help="Model: a name or an import path package.module:Net.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Fleet = Annotated[str | None, typer.Option(help="Devices: uniform, low, high, ...")]
Partition = Annotated[str | None, typer.Option(help="Split: iid, classes:2, dirichlet:0.1, domain, writer, ...")]
Select = Annotated[str | None, typer.Option(help="Who trains in a round.")]
Share = Annotated[str | None, typer.Option(help="Which tensors travel.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="auto, local, processes, ray.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything that is drawn.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting.")]
Out = Annotated[Path | None, typer.Option(help="Parent folder of the run's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")]


@app.command()
def run(
    what: Annotated[list[str] | None, typer.Argument(metavar="[STUDY.toml] [METHOD]", show_default=False)] = None,
    dataset: Dataset = None,
    model: Model = None,
    clients: Clients = None,
    rounds: Rounds = None,
    fleet: Fleet = None,
    partition: Partition = None,
    select: Select = None,
    share: Share = None,
    engine: EngineName = None,
    device: Device = None,
    seed: Seed = None,
    settings: Settings = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run a method, or the study of a file."""
    from fedloom.runs.start import sections_of, start
    from fedloom.runs.study import override, read, resolve

    file, method = _study_and_method(what or [])
    options = {
        "dataset": dataset, "model": model, "clients": clients, "rounds": rounds, "fleet": fleet,
        "partition": partition, "select": select, "share": share, "engine": engine, "device": device, "seed": seed,
        "out": out,
    }  # fmt: skip
    sections = override(read(file) if file else {}, settings or [])
    study = resolve(sections_of(method, options, sections), str(file or ""))
    _watched(lambda watch: start(study, watch), study.method.name, study.run.rounds, as_json)


def _study_and_method(words: list[str]) -> tuple[Path | None, str | None]:
    files = [word for word in words if word.endswith(".toml")]
    methods = [word for word in words if not word.endswith(".toml")]
    if len(files) > 1 or len(methods) > 1:
        raise InputError(f"run takes at most one study file and one method; got {' '.join(words)}")
    return Path(files[0]) if files else None, methods[0] if methods else None


@app.command()
def resume(run_dir: Annotated[Path, typer.Argument(help="Folder of the run.")], as_json: AsJson = False) -> None:
    """Go on with an interrupted run; a finished one prints its result."""
    from fedloom.runs.start import resume as go_on
    from fedloom.runs.store import Store

    study = Store.open(run_dir).read("study.json") or {}
    _watched(lambda watch: go_on(run_dir, watch), study["method"]["name"], study["run"]["rounds"], as_json)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo")) -> None:
    """Compare two methods on bundled data in under a minute: a table, a picture, the next command."""
    from fedloom.report.demo import demo as show

    show(out)


@app.command("list")
def list_names(
    kind: Annotated[str, typer.Argument(help="methods, datasets, models, partitions, fleets, policies or engines.")],
    as_json: AsJson = False,
) -> None:
    """What there is, with its settings and its paper."""
    from fedloom.registry import SLOTS, entries

    if kind not in KINDS:
        raise choose("kind to list", kind, KINDS)
    kinds = SLOTS if kind == "policies" else (kind.removesuffix("s"),)
    found = [entry for each in kinds for entry in entries(each).values()]
    if as_json:
        sys.stdout.write(json.dumps([entry._asdict() for entry in found]) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it is", "settings", "paper", box=None, pad_edge=False, header_style="bold")
    for entry in found:
        own = [field for field in entry.fields if field["name"] not in SLOTS]
        settings = ", ".join(
            f"{field['name']}={field['default']}" if field["default"] else field["name"] for field in own
        )
        name = f"{entry.kind} {entry.name}" if kind == "policies" else entry.name
        table.add_row(name, entry.summary, settings, entry.paper)
    Console().print(table)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="What to measure: reference.")] = "reference") -> None:
    """Measure speed on this machine."""
    from rich.console import Console
    from rich.table import Table

    from fedloom.bench import reference

    benches = {"reference": reference.reference}
    if name not in benches:
        raise choose("bench", name, benches)
    rows = benches[name]()
    table = Table(*rows[0], box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def _watched(go: Any, label: str, rounds: int, as_json: bool) -> None:
    """Run with progress, then show the result."""
    from fedloom.report.progress import watching
    from fedloom.report.tables import summary_table

    with watching(label, rounds) as watch:
        result: Result = go(watch)
    if as_json:
        sys.stdout.write(json.dumps(result.summary) + "\n")
        return
    from rich.console import Console

    Console().print(summary_table([result.summary]))
    sys.stdout.write(f"run folder: {result.folder}\n")


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"fedloom {__version__}\n")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning for unequal devices and unequal data."""


def main() -> None:
    """Run the command line and end with its exit code: 0 done, 1 failed, 2 wrong input, 128 + n stopped by signal n."""
    try:
        # A click error is the user's input; a number is an exit code that a command chose itself.
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except FedloomError as error:
        for sentence in str(error).splitlines():
            sys.stderr.write(f"fedloom: {sentence}\n")
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


if __name__ == "__main__":
    main()
