"""The command line: parse, call, show. Whatever is heavy is imported by the command that needs it."""

from __future__ import annotations

import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fedloom import __version__
from fedloom.errors import FedloomError, InputError, choose, oxford

if TYPE_CHECKING:
    from fedloom.registry import Entry
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
BENCHES = ("reference", "engine", "layout", "peers", "scale", "memory", "cutting", "augment", "select", "ray")

# The options that describe a study, the same for every command that takes one.
STUDY_OPTIONS: dict[str, Any] = {
    "dataset": Annotated[str | None, typer.Option(help="Data set: a name, a .npz file or an import path.")],
    "model": Annotated[str | None, typer.Option(help="Model: a name or an import path package.module:Net.")],
    "clients": Annotated[int | None, typer.Option(help="Number of clients.")],
    "rounds": Annotated[int | None, typer.Option(help="Number of rounds.")],
    "fleet": Annotated[str | None, typer.Option(help="Devices: uniform, low, high, mixed, measured.")],
    "partition": Annotated[str | None, typer.Option(help="Split: iid, classes:2, dirichlet:0.1, domain, writer.")],
    "select": Annotated[str | None, typer.Option(help="Who trains in a round.")],
    "share": Annotated[str | None, typer.Option(help="Which tensors travel.")],
    "engine": Annotated[str | None, typer.Option(help="auto, local, processes or ray.")],
    "device": Annotated[str | None, typer.Option(help="cpu or cuda.")],
    "seed": Annotated[int | None, typer.Option(help="Seed of everything that is drawn.")],
    "settings": Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting.")
    ],
    "out": Annotated[Path | None, typer.Option(help="Parent folder of what is written.")],
}
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[STUDY.toml] [METHOD]...", show_default=False)]
Jobs = Annotated[int, typer.Option(min=0, help="Runs at the same time; 0: as many as the machine allows.")]
RunDir = Annotated[Path, typer.Argument(help="Folder of a run.")]


def takes_study(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that describe a study; it gets them as `options` (and `settings`)."""

    def wrapped(**given: Any) -> None:
        options = {name: given.pop(name) for name in STUDY_OPTIONS}
        command(**given, settings=options.pop("settings") or [], options=options)

    own = [
        each for each in inspect.signature(command, eval_str=True).parameters.values() if each.default is not each.empty
    ]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in STUDY_OPTIONS.items()
    ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + shared
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


@app.command()
@takes_study
def run(settings: list[str], options: Mapping[str, Any], what: Words = None, as_json: AsJson = False) -> None:
    """Run a method, or the study of a file."""
    from fedloom.runs.start import renamed, sections_of, start
    from fedloom.runs.study import override, read, resolve

    file, methods = _file_and_methods(what or [])
    if len(methods) > 1:
        raise InputError(f"run takes one method; got {' '.join(methods)}. Did you mean 'fedloom compare'?")
    sections = override(renamed(read(file) if file else {}, options), settings)
    study = resolve(sections_of(methods[0] if methods else None, options, sections), str(file or ""))
    _watched(lambda watch: start(study, watch), study.method.name, study.run.rounds, as_json)


def _file_and_methods(words: list[str]) -> tuple[Path | None, list[str]]:
    files = [word for word in words if word.endswith(".toml")]
    if len(files) > 1:
        raise InputError(f"at most one study file; got {' '.join(files)}")
    methods = [word for word in words if not word.endswith(".toml")]
    for word in methods:
        if "/" in word or Path(word).is_file():
            raise InputError(f"'{word}' is no method, and no study file either: such a file is called NAME.toml")
    return Path(files[0]) if files else None, methods


@app.command()
def resume(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Go on with an interrupted run; a finished one prints its result."""
    from fedloom.runs.start import resume as go_on
    from fedloom.runs.store import Store

    store = Store.open(run_dir)
    study, done = store.study(), (store.manifest() or {"round": 0})["round"]
    _watched(lambda watch: go_on(run_dir, watch), study.method.name, study.run.rounds, as_json, done)


@app.command()
@takes_study
def compare(
    settings: list[str],
    options: Mapping[str, Any],
    what: Words = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with seeds 0, 1, ...")] = 1,
    baseline: Annotated[str | None, typer.Option(help="The method that others are compared with.")] = None,
    jobs: Jobs = 0,
    as_json: AsJson = False,
) -> None:
    """Run several methods over several seeds; repeat the command to go on after an interruption."""
    from fedloom.runs.grid import Grid
    from fedloom.runs.start import renamed, sections_of
    from fedloom.runs.study import override, read

    file, methods = _file_and_methods(what or [])
    if not methods:
        raise InputError("compare needs at least one method; see 'fedloom list methods'")
    if twice := [name for name in dict.fromkeys(methods) if methods.count(name) > 1]:
        raise InputError(f"compare takes each method once; got {oxford(twice, 'and')} again")
    if baseline is not None and baseline not in methods:
        raise choose("baseline", baseline, methods)
    study = override(renamed(read(file) if file else {}, options), settings)
    base = sections_of(None, {**options, "out": None}, study)
    first = base.get("run", {}).get("seed", 0)
    grid = Grid(
        base,
        {name: {"method": {"name": name}} for name in methods},
        seeds=range(first, first + seeds),
        origin=str(file or ""),
        lenient=True,
    )
    from fedloom.report.grids import run_shown

    out = options["out"] or Path("runs") / f"compare-{grid.name}"
    run_shown(grid, Path(out), as_json=as_json, baseline=baseline, jobs=jobs)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A published table; see --list.")] = None,
    scale: Annotated[str, typer.Option(help="smoke, small or paper.")] = "small",
    listed: Annotated[
        bool, typer.Option("--list", help="Show the tables there are, and how far they were run.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Write all results so far as a page; runs nothing.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Run this row only; may be repeated.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Run this column only; may be repeated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run the first seeds only, so many.")] = None,
    out: Annotated[Path, typer.Option(help="Parent folder of what is written.")] = Path("runs/papers"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    jobs: Jobs = 0,
    as_json: AsJson = False,
) -> None:
    """Run a published table again and show both, side by side."""
    from fedloom.report.published import list_papers, reproduce_shown, write_page

    if listed:
        list_papers(out, as_json)
    elif page is not None:
        write_page(page, out)
    elif name is None:
        raise InputError("reproduce needs the name of a table; 'fedloom reproduce --list' shows them")
    else:
        reproduce_shown(name, scale, out, device, as_json, rows=row or (), columns=column or (), seeds=seeds, jobs=jobs)


@app.command()
def check(study_file: Annotated[Path, typer.Argument(metavar="STUDY.toml")]) -> None:
    """Find every error of a study, draw its split and estimate what it costs."""
    from fedloom.report.checks import show_check

    show_check(study_file)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/demo")) -> None:
    """Compare three methods on bundled data in under a minute: a table, a picture, the next command."""
    from fedloom.report.demo import demo as show

    show(out)


@app.command("list", help=f"What there is, with its paper: {oxford(KINDS)}. With a name, its settings.")
def list_names(
    kind: Annotated[str, typer.Argument(metavar="KIND")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """All names of a kind, or one with its settings."""
    from fedloom.registry import SLOTS, entries

    if kind not in KINDS:
        raise choose("kind to list", kind, KINDS)
    kinds = (*SLOTS, "score") if kind == "policies" else (kind.removesuffix("s"),)
    found = [entry for each in kinds for entry in entries(each).values() if name in (None, entry.name)]
    if not found:
        raise choose(kind.removesuffix("s"), name, [each for one in kinds for each in entries(one)])
    if as_json:
        sys.stdout.write(json.dumps([entry._asdict() for entry in found]) + "\n")
    elif name is None:
        every = dict.fromkeys(trainer for entry in found for trainer in entry.trainers)
        _print_rows([_listed(entry, kind, every) for entry in found])
    else:
        for entry in found:
            _show_entry(entry)


def _listed(entry: Entry, kind: str, trainers: Iterable[str]) -> dict[str, Any]:
    """A line of a list. Methods, which are many, leave their settings to `list methods NAME`."""
    name = f"{entry.kind} {entry.name}" if kind == "policies" else entry.name
    told: dict[str, Any] = {"name": name, "what it is": entry.summary}
    if kind == "methods":
        missing = oxford(each for each in trainers if each not in entry.trainers)
        return told | {"paper": entry.paper, "trainers": f"not {missing}" if missing else "all"}
    words = (f"{each['name']}={each['default']}" if each["default"] else each["name"] for each in _settings(entry))
    return told | {"settings": ", ".join(words), "paper": entry.paper}


def _settings(entry: Entry) -> list[dict[str, str]]:
    """The settings of a thing that a user may set; the others are the program's or have a section of their own."""
    from fedloom.registry import SLOTS

    given: dict[str, tuple[str, ...]] = {
        "method": SLOTS, "partition": ("dataset", "clients", "generator"), "fleet": ("clients", "generator"),
        "model": ("channels", "classes", "size"), "engine": ("factory",),
    }  # fmt: skip
    return [each for each in entry.fields if each["name"] not in given.get(entry.kind, ())]


def _show_entry(entry: Entry) -> None:
    sys.stdout.write(f"{entry.kind} {entry.name}: {entry.summary}\n")
    if entry.paper:
        sys.stdout.write(f"paper: {entry.paper}\n")
    if entry.trainers:
        sys.stdout.write(f"trainers: {', '.join(entry.trainers)}\n")
    names = {"setting": "name", "default": "default", "type": "type", "meaning": "help"}
    if rows := [{head: each[key] for head, key in names.items()} for each in _settings(entry)]:
        _print_rows(rows)


@app.command("inspect")
def inspect_model(
    model: Annotated[str, typer.Argument(help="A name or an import path package.module:Net.")],
    capacity: Annotated[list[float] | None, typer.Option(help="Capacity in (0, 1]; may be repeated.")] = None,
    shape: Annotated[str, typer.Option(help="Channels x height x width of an image.")] = "3x32x32",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Groups of units of a model, and what a sub-model of some capacity costs."""
    from fedloom.report.checks import show_model

    show_model(model, capacity or [1.0, 0.5, 0.25, 0.125, 0.0625], shape, classes, as_json=as_json)


@app.command("partition")
def show_partition(
    dataset: Annotated[str, typer.Argument(help="Data set: a name, a .npz file or an import path.")],
    partition: Annotated[str, typer.Option(help="iid, classes:2, dirichlet:0.1, domain, writer.")] = "iid",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    validation: Annotated[float, typer.Option(help="Share of a client's data for validation.")] = 0.1,
    export: Annotated[Path | None, typer.Option(help="Folder for one .npz a client.")] = None,
    picture: Annotated[Path, typer.Option(help="File of the picture.")] = Path("partition.png"),
) -> None:
    """Deal a data set to clients, draw the split, and write one file a client if asked."""
    from fedloom.report.checks import show_split

    show_split(dataset, partition, clients, seed, validation, export, picture)


@app.command()
def profile(
    run_dir: RunDir,
    client: Annotated[
        list[int] | None, typer.Option(help="A client's number; may be repeated; default: 0 to 4.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="File of the picture; default: profiles.png in it.")] = None,
) -> None:
    """Which units the data of some clients excite under a run's model, drawn pair by pair."""
    from fedloom.report.plots import draw_profiles
    from fedloom.runs.profiles import profiles

    found = profiles(run_dir, list(dict.fromkeys(client or range(5))))
    if len(found) < 2:
        raise InputError("profile compares clients: name at least two")
    sys.stdout.write(f"picture: {draw_profiles(found, picture or run_dir / 'profiles.png')}\n")


@app.command()
def knowledge(
    run_dir: RunDir,
    picture: Annotated[Path | None, typer.Option(help="File of the heat map; default: knowledge.png in it.")] = None,
    as_json: AsJson = False,
) -> None:
    """What each participant of a run knows of the others' data and of every class, as a table and a heat map."""
    from fedloom.report.knowledge import show_knowledge

    show_knowledge(run_dir, picture, as_json=as_json)


@app.command()
def traffic(run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...")], as_json: AsJson = False) -> None:
    """Who carried how much in some runs: star, peer to peer, ring, from their ledgers."""
    from fedloom.report.knowledge import show_traffic

    show_traffic(run_dirs, as_json=as_json)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run; for trackers also one that holds several.")],
    file: Annotated[Path | None, typer.Argument(help="FILE.pt or FILE.safetensors")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard's event files.")] = None,
    mlflow: Annotated[str | None, typer.Option(help="Address of an MLflow server, or a folder.")] = None,
) -> None:
    """Write a run's final model as a file that plain torch loads, or its numbers for TensorBoard or MLflow."""
    if file is None and tensorboard is None and mlflow is None:
        raise InputError("export needs a file (FILE.pt, FILE.safetensors), --tensorboard FOLDER or --mlflow ADDRESS")
    if file is not None:
        from fedloom.runs.export import export as write

        sys.stdout.write(f"{file}: the state dict of {write(run_dir, file)}\n")
    if tensorboard is not None:
        from fedloom.report.trackers import to_tensorboard

        sys.stdout.write(f"{to_tensorboard([run_dir], tensorboard)} run(s); see: tensorboard --logdir {tensorboard}\n")
    if mlflow is not None:
        from fedloom.report.trackers import to_mlflow

        sys.stdout.write(f"{to_mlflow([run_dir], mlflow)} run(s) in MLflow at {mlflow}\n")


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders, or folders that hold some.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
    baseline: Annotated[str | None, typer.Option(help="The method that others are compared with.")] = None,
) -> None:
    """Write one self-contained HTML file about some runs."""
    from fedloom.report.html import write_report

    sys.stdout.write(f"report: {write_report(run_dirs, out, baseline)}\n")


@app.command()
def board(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders, or folders that hold some.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 8300,
    host: Annotated[str, typer.Option(help="Who may see it: by default this machine alone.")] = "127.0.0.1",
) -> None:
    """Follow running studies on a local page that only reads."""
    from fedloom.report.board import show_board

    show_board(run_dirs, host, port)


deploy = typer.Typer(help="Prepare real devices: certificates, keys, settings.", no_args_is_help=True)
app.add_typer(deploy, name="deploy")
Keys = Annotated[Path | None, typer.Option(help="Folder with keys and settings, as deploy init wrote it.")]


@deploy.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    clients: Annotated[int, typer.Option(min=1, help="Number of clients, called client_0, client_1, ...")] = 2,
    name: Annotated[list[str] | None, typer.Option(help="A client's name instead; may be repeated.")] = None,
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the server; may be repeated.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8470,
) -> None:
    """Write a private certificate authority, keys and settings for a server and its clients."""
    from fedloom.deploy.folder import init

    digits = len(str(clients - 1))
    names = name or [f"client_{number:0{digits}d}" for number in range(clients)]
    init(folder, names, host or ["127.0.0.1", "localhost"], port)
    sys.stdout.write(
        f"{folder / 'server'}: for the server\n{folder / 'clients'}/NAME: for each of {', '.join(names)}\n"
        f"{folder / 'ca.key'}: signs new clients; keep it to yourself\n"
    )


@deploy.command("add")
def deploy_add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of deploy init.")],
    name: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of new clients.")],
) -> None:
    """Make keys for more clients and register them."""
    from fedloom.deploy.folder import add_clients

    add_clients(folder, name)
    sys.stdout.write(f"{folder / 'clients'}: {', '.join(name)} added\n")


@app.command()
def serve(
    target: Annotated[
        Path, typer.Argument(metavar="STUDY.toml|RUN_DIR", help="A study, or a served run to go on with.")
    ],
    keys: Keys = Path("deploy/server"),
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    least: Annotated[int, typer.Option("--min", min=0, help="Clients to wait for; 0: all that are registered.")] = 0,
    test: Annotated[Path | None, typer.Option(help="FILE.npz with images to measure the global model on.")] = None,
    public: Annotated[Path | None, typer.Option(help="FILE.npz with public images that the server may use.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the server half of a study; clients come with 'fedloom join'."""
    for file in filter(None, (test, public)):
        if not file.is_file():  # before clients are waited for
            raise InputError(f"{file} does not exist")
    from fedloom.deploy.serve import rounds_of
    from fedloom.deploy.serve import serve as start

    name, rounds = rounds_of(target)
    _watched(
        lambda watch: start(
            target, keys or Path("deploy/server"), host=host, port=port, least=least, test=test, public=public,
            watch=watch, say=_say,
        ),
        name, rounds, as_json,
    )  # fmt: skip


def _row(row: Mapping[str, Any]) -> None:
    accuracy = row.get("local_accuracy")
    _say(f"round {row['round']}" + ("" if accuracy is None else f": own models {accuracy:.1%} on their own test parts"))


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


@app.command()
def join(
    study: Annotated[Path | None, typer.Argument(metavar="[STUDY.toml]", help="A method without a server.")] = None,
    *,
    data: Annotated[Path, typer.Option(help="This device's images: FILE.npz, or a folder with a folder a class.")],
    name: Annotated[str | None, typer.Option(help="This device's name, as it is registered.")] = None,
    server: Annotated[str | None, typer.Option(help="HOST:PORT of the server.")] = None,
    keys: Keys = None,
    capacity: Annotated[float | None, typer.Option(help="Share of the model it can train, in (0, 1].")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    allow: Annotated[list[str] | None, typer.Option(help="An import path that a study may name.")] = None,
    validation: Annotated[float, typer.Option(help="Share for validation where the data have no such part.")] = 0.1,
    stay: Annotated[bool, typer.Option(help="Wait for the next run when one is over.")] = False,
    least: Annotated[int, typer.Option("--min", min=0, help="Peers to wait for before the first round; 0: all.")] = 0,
) -> None:
    """Be a client: keep the data here, train when asked."""
    from fedloom.deploy.join import join as start

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves the server on its way out
    start(
        name, data, keys, server=server, capacity=capacity, allow=tuple(allow or ()), device=device,
        validation=validation, stay=stay, study=study, least=least, watch=_row, say=_say,
    )  # fmt: skip


@app.command("measure")
def measure_device(
    model: Annotated[str, typer.Option(help="A name or an import path package.module:Net.")] = "cnn",
    shape: Annotated[str, typer.Option(help="Channels x height x width of an image.")] = "3x32x32",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Images that this device trains on.")] = 1000,
    memory: Annotated[float | None, typer.Option(min=0, help="MiB it may use; default: what is free.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Longest time that an epoch may take.")] = None,
    write: Annotated[Path | None, typer.Option(help="client.toml that the capacity goes into.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory and speed of this device: the share of a model that it can train."""
    from fedloom.deploy.measure import measure
    from fedloom.report.checks import shape_of

    sides = shape_of(shape)
    room = None if memory is None else int(memory * 2**20)
    found = measure(model, sides, classes, samples=samples, memory=room, seconds=seconds)
    if write is not None:
        found.write(write)
    if as_json:
        sys.stdout.write(f"{found}\n")
        return
    sys.stdout.write(
        f"memory {found.memory_bytes / 2**20:.0f} MiB, speed {found.macs_per_second / 1e9:.2f} GMAC/s\n"
        f"capacity {found.capacity:g} of {model}: training takes {found.training_bytes / 2**20:.1f} MiB and "
        f"{found.seconds_per_epoch:.3g} s an epoch of {samples} images\n"
    )


@app.command(help=f"Measure speed on this machine: {oxford(BENCHES)}.")
def bench(
    name: Annotated[str, typer.Argument(metavar="[NAME]")] = "reference",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one.")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Rounds that are timed.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="peers: interleaved repeats.")] = None,
    works: Annotated[str | None, typer.Option(help="peers: workloads, such as W1,W3.")] = None,
    only: Annotated[str | None, typer.Option(help="peers: names of peers, separated by commas.")] = None,
    environments: Annotated[Path | None, typer.Option(help="peers: folder of their environments.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="scale: most clients a round.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="cutting: training pictures a client.")] = None,
    width: Annotated[float | None, typer.Option(min=0.01, help="cutting: width of the ResNet-18.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture of the result.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed on this machine."""
    if name not in BENCHES:
        raise choose("bench", name, BENCHES)
    given = {"device": device, "rounds": rounds, "repeats": repeats, "works": works, "only": only,
             "environments": environments, "most": most, "samples": samples, "width": width}  # fmt: skip
    from importlib import import_module

    from fedloom.bench.federation import device_of, machine

    module = import_module(f"fedloom.bench.{name}")
    measure, options = getattr(module, name), {key: value for key, value in given.items() if value is not None}
    for option in options.keys() - inspect.signature(measure).parameters.keys():
        raise InputError(f"bench {name} takes no --{option}; see 'fedloom bench --help'")
    if plot is not None and not hasattr(module, "plot"):
        raise InputError(f"bench {name} has no picture; leave --plot out")
    rows = measure(**options)
    if plot is not None:
        module.plot(rows, plot)
    if as_json:
        where = machine(device_of(device))
        sys.stdout.write(json.dumps({"bench": name, "machine": where, "rows": rows}) + "\n")
        return
    _print_rows(rows)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = dict.fromkeys(name for row in rows for name in row)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(names):  # a setting that is cut off cannot be looked up
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in names))
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def _watched(go: Callable[[Any], Result], label: str, rounds: int, as_json: bool, done: int = 0) -> None:
    """Run with progress, then show the result."""
    from fedloom.report.progress import watching
    from fedloom.report.tables import print_table, summary_rows, until

    with watching(label, rounds, done) as watch:
        result = go(watch)
    some = any(row["clients"] < result.summary["clients"] for row in result.rows("metrics"))
    picture = result.fairness() if some else None
    if as_json:
        sys.stdout.write(json.dumps(result.summary) + "\n")
        return
    from rich.console import Console

    print_table(Console(), "method", summary_rows([result.summary]))
    own = result.participants
    if result.summary["global_accuracy"] is None and result.has_model:
        sys.stdout.write("the global model was not measured: there are no test images\n")
    elif result.summary["global_accuracy"] is None and 0 < len(own) <= 20:
        each = " ".join(f"{100 * accuracy:.2f}" for accuracy in own)
        sys.stdout.write(f"no global model; every participant's own, %: {each}\n")
    if result.summary.get("target") is not None:
        sys.stdout.write(f"{until(result.summary)}\n")
    if picture is not None:
        sys.stdout.write(f"who was chosen: {picture}\n")
    sys.stdout.write(f"run folder: {result.folder}\n")


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"fedloom {__version__}\n")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Federated learning for unequal devices and unequal data."""


def _told(error: click.ClickException) -> str:
    """What was wrong with the words of a command; a setting that is no option is named as it must be given."""
    if isinstance(error, click.NoSuchOption):
        from fedloom.runs.study import SECTIONS, Study

        key = error.option_name.lstrip("-").replace("-", "_")
        closed = {section: getattr(Study(), section) for section in SECTIONS}
        places = [f"--set {name}.{key}=..." for name, given in closed.items() if key in type(given).model_fields]
        if places:
            return f"no such option: {error.option_name}; give the setting as {oxford(places)}"
    sentence, hint, again = error.format_message().partition(" Did you mean ")
    return sentence + hint + again.partition(" Did you mean ")[0]


def main() -> None:
    """Run the command line and end with its exit code: 0 done, 1 failed, 2 wrong input, 128 + n stopped by signal n."""
    sys.path.insert(0, "")  # import paths of the user's own modules start where the command is run
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError:
        sys.exit(2)  # the help it shows says it all
    except click.ClickException as error:
        sys.stderr.write(f"fedloom: {_told(error)}\n")
        sys.exit(2)
    except FedloomError as error:
        for sentence in str(error).splitlines():
            sys.stderr.write(f"fedloom: {sentence}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:  # nothing that the user named: a full disk, a line that broke
            sys.stderr.write(f"fedloom: {error.strerror or error}\n")
            sys.exit(1)
        sys.stderr.write(f"fedloom: {error.filename}: {error.strerror}\n")
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


if __name__ == "__main__":
    main()
