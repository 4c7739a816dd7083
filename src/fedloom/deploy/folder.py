"""What `fedloom deploy init` writes: a private certificate authority, keys, and settings for a server and its clients.

`DIR/ca.key` signs everything and stays where it was made. `DIR/server` goes to the server, `DIR/clients/NAME` to that
client, and to nobody else. The public keys in `DIR/server/clients` are the list of who may join; a client's number is
its place in that list, sorted by name.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le

from fedloom.errors import InputError
from fedloom.settings import checked

__all__ = [
    "Capacity",
    "ClientSettings",
    "Folder",
    "ServerSettings",
    "add_clients",
    "extra",
    "init",
    "settings",
    "table",
]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
DAYS = 825
Port = Annotated[int, Ge(1), Le(65535)]
Capacity = Annotated[float, Gt(0), Le(1)]
Kind = TypeVar("Kind")
PORT, PEERS = 8470, 8480  # the server's port; the first peer's, when peers talk to each other


def extra(name: str, error: ImportError) -> InputError:
    """The sentence for a missing optional dependency."""
    return InputError(f"this needs the extra '{name}' ({error.name} is missing): pip install 'fedloom[{name}]'")


@dataclass(frozen=True)
class ServerSettings:
    """What `server.toml` may say."""

    host: str = "0.0.0.0"
    port: Port | None = None
    rate: Annotated[float, Gt(0)] = 200.0


@dataclass(frozen=True)
class ClientSettings:
    """What `client.toml` may say."""

    name: str | None = None
    server: str = ""
    allow: tuple[str, ...] = ()
    capacity: Capacity = 1.0


def settings(path: Path, of: type[Kind]) -> Kind:
    """A settings file of a deployment, checked."""
    return of(**checked(str(path), of, table(path)))


def table(path: Path) -> dict[str, Any]:
    """A file of a deployment that is TOML."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        server, name = path.parent.parent, path.parent.name
        way = f"add {server.parent} {name}, and copy it here" if server.name == "clients" else f"init {server}"
        raise InputError(f"{path} does not exist; write one with: fedloom deploy {way}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class Folder:
    """A deployment's folder as its maker has it."""

    path: Path

    @property
    def server(self) -> Path:
        """What the server gets."""
        return self.path / "server"

    @property
    def registered(self) -> Path:
        """Public keys of the clients that may join."""
        return self.server / "clients"

    def client(self, name: str) -> Path:
        """What this client gets."""
        return self.path / "clients" / name


def init(path: Path, names: Sequence[str], hosts: Sequence[str] = ("127.0.0.1", "localhost"), port: int = PORT) -> None:
    """Write a new deployment; an existing one is never overwritten."""
    if path.exists() and any(path.iterdir()):
        raise InputError(f"{path} is not empty; choose another folder, or add clients with: fedloom deploy add {path}")
    folder = Folder(path)
    folder.registered.mkdir(parents=True)
    authority = _Authority.new()
    _secret(path / "ca.key", authority.key_bytes)
    for copy in (path, folder.server):
        (copy / "ca.crt").write_bytes(authority.certificate_bytes)
    key, certificate = authority.issue("fedloom server", hosts)
    _secret(folder.server / "server.key", key)
    (folder.server / "server.crt").write_bytes(certificate)
    (folder.server / "server.toml").write_text(_SERVER.format(port=port))
    _flower_app(folder.server / "flower")
    add_clients(path, names, f"{hosts[0]}:{port}")


def add_clients(path: Path, names: Sequence[str], server: str | None = None) -> None:
    """Make keys and settings for more clients, and put their public keys on the server's list."""
    try:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
        from flwr.supercore.primitives.asymmetric import generate_key_pairs
    except ImportError as error:
        raise extra("deploy", error) from error
    folder = Folder(path)
    authority = _Authority.load(path)
    _check_names(names, {file.stem for file in folder.registered.glob("*.pub")})
    address = server or settings(next((path / "clients").glob("*")) / "client.toml", ClientSettings).server
    for name in names:
        own = folder.client(name)
        own.mkdir(parents=True)
        private, public = generate_key_pairs()
        _secret(own / "client.key", private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (folder.registered / f"{name}.pub").write_bytes(line + f" {name}\n".encode())
        (own / "ca.crt").write_bytes(authority.certificate_bytes)
        key, certificate = authority.issue(name, ("127.0.0.1", "localhost"))
        _secret(own / "peer.key", key)
        (own / "peer.crt").write_bytes(certificate)
        (own / "client.toml").write_text(_CLIENT.format(name=name, server=address))
    everybody = sorted(file.stem for file in folder.registered.glob("*.pub"))
    peers = "".join(f'"{name}" = "127.0.0.1:{PEERS + place}"\n' for place, name in enumerate(everybody))
    for name in everybody:
        (folder.client(name) / "peers.toml").write_text(_PEERS + peers)


def _check_names(names: Sequence[str], taken: set[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(f"a client's name is letters, digits, '.', '_' and '-', at most 64; got '{name}'")
        if name in taken:
            raise InputError(f"there is a client '{name}' already; its key is not replaced")
        taken.add(name)


def _secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class _Authority:
    """The private certificate authority of a deployment."""

    key: Any
    certificate: Any

    @classmethod
    def new(cls) -> _Authority:
        try:
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise extra("deploy", error) from error
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _certificate("fedloom private authority", key.public_key(), None, key, ()))

    @classmethod
    def load(cls, path: Path) -> _Authority:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        try:
            key = load_pem_private_key((path / "ca.key").read_bytes(), None)
            return cls(key, load_pem_x509_certificate((path / "ca.crt").read_bytes()))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} has no certificate authority that can be read: {error}") from error

    @property
    def key_bytes(self) -> bytes:
        return _pem(self.key)

    @property
    def certificate_bytes(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        written: bytes = self.certificate.public_bytes(Encoding.PEM)
        return written

    def issue(self, name: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """A new key and its certificate, for these host names and addresses."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key.public_key(), self.certificate.subject, self.key, hosts)
        return _pem(key), certificate.public_bytes(Encoding.PEM)


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    written: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return written


def _certificate(name: str, public: Any, issuer: Any, signer: Any, hosts: Sequence[str]) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    own, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(issuer or own)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of devices differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
    )
    if issuer is not None:
        names = [x509.DNSName(name), *(_host(host) for host in hosts)] if NAME.fullmatch(name) else map(_host, hosts)
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), False)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
    else:
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), True)
    return builder.sign(signer, hashes.SHA256())


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _flower_app(path: Path) -> None:
    """A Flower app of two lines, for those who start the parts with Flower's own tools."""
    path.mkdir()
    (path / "pyproject.toml").write_text(_APP)
    (path / "deployed.py").write_text(_DEPLOYED)


_SERVER = """# Settings of `fedloom serve`.
host = "0.0.0.0"        # the address to listen on
port = {port}
rate = 200              # requests a second that one client may make
"""
_CLIENT = """# Settings of `fedloom join`; options of the command go before them.
name = "{name}"
server = "{server}"
allow = []              # import paths package.module:Name that a study may name, besides what fedloom knows
"""
_PEERS = """# Where the peers of a ring or graph listen. The same for all; a peer's number is its place by name.
"""
_APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "deployed"
version = "1.0.0"
description = "fedloom under Flower's own tools"
license = "MIT"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "deployed:server_app"
clientapp = "deployed:client_app"

[tool.flwr.app.config]
study = "study.toml"
keys = "server"
min = 0
test = ""
public = ""
"""
_DEPLOYED = """from fedloom.deploy.apps import client_app, server_app

__all__ = ["client_app", "server_app"]
"""
