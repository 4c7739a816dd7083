"""Settings of a deployment and of a study with real clients: whatever is wrong is said in a sentence."""

from __future__ import annotations

import pytest

from fedloom.deploy.device import Device
from fedloom.errors import InputError
from tests.deploy.federation import Federation

pytest.importorskip("flwr")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("settings"), clients=2, limit=100)


def joined(federation, text, name="client_0", **options):
    from fedloom.deploy.join import join

    keys = federation.folder / "deploy" / "clients" / "client_0"
    (keys / "client.toml").write_text(text)
    join(name, federation.folder / "data" / "client_0.npz", keys, **options)


def served(federation, text, study="study.toml", **options):
    from fedloom.deploy.serve import serve

    keys = federation.folder / "deploy" / "server"
    (keys / "server.toml").write_text(text)
    serve(federation.folder / study, keys, **options)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ('capacity = "half"', {}, "capacity of .*client.toml is wrong: .*number; got 'half'"),
        ("capacity = 0", {}, "capacity of .*client.toml is wrong: .*greater than 0; got 0"),
        ("capacity = nan", {}, "capacity of .*client.toml is wrong"),
        ("", {"capacity": 0.0, "server": "127.0.0.1:1"}, "capacity is wrong: .*greater than 0; got 0"),
        ("", {"name": None}, "client.toml does not say the client's name; give --name"),
        ("", {}, "client.toml does not say where the server is; give --server HOST:PORT"),
        ("", {"server": "fl.example.org"}, "the server's address is HOST:PORT; got 'fl.example.org'"),
        ("", {"server": ":8470"}, "the server's address is HOST:PORT; got ':8470'"),
        ("capasity = 0.5", {}, "unknown setting of .*client.toml 'capasity'; allowed: .* Did you mean 'capacity'"),
        ('allow = "mine:Net"', {}, "allow of .*client.toml is wrong"),
        ("name = 3", {}, "name of .*client.toml is wrong"),
    ],
)  # fmt: skip
def test_a_clients_settings_are_checked(federation, text, options, sentence):
    with pytest.raises(InputError, match=sentence):
        joined(federation, text, **options)


@pytest.mark.parametrize(
    ("folder", "way"), [("clients/nobody", "add .*deploy nobody, and copy it here"), ("nothing", "init .*deploy$")]
)
def test_a_settings_file_that_is_missing_is_said_with_how_to_make_it(federation, folder, way):
    from fedloom.deploy.folder import table

    with pytest.raises(InputError, match=f"does not exist; write one with: fedloom deploy {way}"):
        table(federation.folder / "deploy" / folder / "some.toml")


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "server.toml does not say the port to listen on; give --port"),
        ("", {"port": 0}, "--port is wrong: .* got 0"),
        ('port = "web"', {}, "port of .*server.toml is wrong: .* got 'web'"),
        ("port = 70000", {}, "port of .*server.toml is wrong: .* got 70000"),
        ('port = 8470\nrate = "fast"', {}, "rate of .*server.toml is wrong: .* got 'fast'"),
        ("prot = 8470", {}, "unknown setting of .*server.toml 'prot'; allowed: .* Did you mean 'port'"),
    ],
)  # fmt: skip
def test_a_servers_settings_are_checked(federation, text, options, sentence):
    with pytest.raises(InputError, match=sentence):
        served(federation, text, **options)


def test_a_nodes_capacity_is_checked(federation):
    from fedloom.deploy.apps import describe

    keys = federation.folder / "deploy" / "clients" / "client_0"
    (keys / "client.toml").write_text("capacity = 0.5")
    config = {"name": "client_0", "data": str(federation.folder / "data" / "client_0.npz"), "keys": str(keys)}
    assert describe(config).endswith("capacity 0.5")
    for wrong in (0, "half"):
        with pytest.raises(InputError, match="capacity is wrong"):
            describe(config | {"capacity": wrong})


def test_more_peers_than_there_are_cannot_be_waited_for(federation):
    pytest.importorskip("grpc")
    with pytest.raises(InputError, match="--min must be between 1 and the 2 registered clients; got 3"):
        joined(federation, "", study=federation.folder / "study.toml", least=3)


def test_a_peers_address_is_checked(federation):
    pytest.importorskip("grpc")
    peers = federation.folder / "deploy" / "clients" / "client_0" / "peers.toml"
    peers.write_text('client_0 = "127.0.0.1:8480"\nclient_1 = 8481\n')
    (federation.folder / "peers-study.toml").write_text('[method]\nname = "gossip"\n')
    with pytest.raises(InputError, match="a peer's address is HOST:PORT; got '8481'"):
        joined(federation, "", study=federation.folder / "peers-study.toml")


@pytest.mark.parametrize(("method", "server"), [("fedavg", True), ("gossip", False)])
def test_what_a_study_says_in_vain_is_said(federation, method, server):
    """The same for a server and for peers; `weak` and `deadline` count for both."""
    from fedloom.deploy.serve import has_server, study_of

    path, said = federation.folder / "vain.toml", []
    path.write_text(
        f'[method]\nname = "{method}"\n[fleet]\nname = "uniform"\nclients = 50\nweak = "exclude"\ndeadline = 5.0\n'
        '[partition]\nname = "dirichlet:0.5"\n'
    )
    study = study_of(path, 2, said.append)
    assert (study.fleet.clients, study.fleet.weak, study.fleet.deadline) == (2, "exclude", 5.0)
    assert study.partition.name == "iid"
    assert has_server(study) is server
    assert len(said) == 1
    assert said[0].endswith("not used: fleet.name, fleet.clients, partition")


def test_what_a_device_tells_is_what_others_need(federation):
    """Not which classes it holds."""
    device = Device("client_0", federation.folder / "data" / "client_0.npz", federation.folder / "state")
    assert device.facts().keys() == {
        "name", "protocol", "fedloom", "torch", "python", "samples", "capacity", "shape", "class_names", "levels",
    }  # fmt: skip
