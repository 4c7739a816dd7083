"""Calls between peers: streaming gRPC with mutual TLS, frames of `fedloom.wire` in both directions.

Both ends prove who they are with a certificate of the deployment's own authority, and the name in it is the name that
counts. Frames go in pieces, so that their size is bounded by our limit and not by gRPC's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedloom import wire
from fedloom.deploy.folder import extra
from fedloom.deploy.messages import SMALL
from fedloom.errors import FedloomError, InputError

try:
    import grpc
except ImportError as error:
    raise extra("ring", error) from error

__all__ = ["Calls", "Unreachable"]

METHOD = "/fedloom.Peer/Call"
PIECE = 2**20
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0), ("grpc.initial_reconnect_backoff_ms", 200),
           ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.keepalive_time_ms", 10_000),
           ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.max_pings_without_data", 0)]  # fmt: skip
Answer = Callable[[str, str, dict[str, Any]], dict[str, Any]]  # caller's name, kind, body -> body


class Unreachable(Exception):
    """A peer that does not answer, or whose answer cannot be used."""


class Calls:
    """This peer's end: it answers the others, and calls them."""

    def __init__(
        self, name: str, keys: Path, addresses: Mapping[str, str], answer: Answer, limit: int, device: str = "cpu"
    ) -> None:
        self.name, self.addresses, self.answer, self.limit, self.device = name, dict(addresses), answer, limit, device
        files = [keys / part for part in ("ca.crt", "peer.key", "peer.crt")]
        try:
            self._authority, self._key, self._certificate = (path.read_bytes() for path in files)
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read; copy this client's folder from deploy init") from error
        listening = {each: _here(address) for each, address in addresses.items()}
        self._channels: dict[str, Any] = {}
        handler = grpc.method_handlers_generic_handler(
            METHOD.split("/")[1], {METHOD.split("/")[2]: grpc.stream_stream_rpc_method_handler(self._serve)}
        )
        self._server = grpc.server(ThreadPoolExecutor(32), options=OPTIONS)
        self._server.add_generic_rpc_handlers((handler,))
        credentials = grpc.ssl_server_credentials(
            [(self._key, self._certificate)], root_certificates=self._authority, require_client_auth=True
        )
        try:
            self._server.add_secure_port(listening[name], credentials)
        except RuntimeError as error:
            raise InputError(f"{addresses[name]} cannot be listened on; is another peer running there?") from error
        self._server.start()

    def call(self, name: str, kind: str, body: Mapping[str, Any], seconds: float = 5.0) -> dict[str, Any]:
        """Ask another peer something; Unreachable if no answer comes. A refusal is an answer: {"refuses": reason}."""
        if name not in self._channels:
            credentials = grpc.ssl_channel_credentials(self._authority, self._key, self._certificate)
            options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]  # the name counts, not the address
            channel = grpc.secure_channel(self.addresses[name], credentials, options)
            self._channels[name] = channel.stream_stream(METHOD)
        try:
            pieces = self._channels[name](_pieces(wire.pack({"kind": kind, "body": dict(body)})), timeout=seconds)
            found = wire.unpack(self._gather(pieces), self.device)
        except grpc.RpcError as error:
            raise Unreachable(f"{name}: {error.code().name.lower()}") from error
        except wire.WireError as error:
            raise Unreachable(f"{name}: {error}") from error
        if not isinstance(found, dict):
            raise Unreachable(f"{name}: no answer")
        return found

    def _serve(self, pieces: Iterable[bytes], context: Any) -> Iterator[bytes]:
        caller = b"".join(context.auth_context().get("x509_common_name", [])).decode("utf-8", "replace")
        if caller not in self.addresses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "unknown peer")
        try:
            request = wire.unpack(self._gather(pieces), self.device)
            found = self.answer(caller, str(request["kind"]), request["body"])
        except (wire.WireError, KeyError, TypeError) as error:
            found = {"refuses": f"a request makes no sense: {error}"}
        except (FedloomError, Unreachable) as error:
            found = {"refuses": str(error)}
        yield from _pieces(wire.pack(found))

    def _gather(self, pieces: Iterable[bytes]) -> bytearray:
        frame = bytearray()
        for piece in pieces:
            frame += piece
            if len(frame) > self.limit + SMALL:
                raise wire.WireError(f"a message larger than the limit of {self.limit} bytes")
        return frame

    def close(self) -> None:
        """Stop answering."""
        self._server.stop(0.5)


def _pieces(frame: bytes) -> Iterator[bytes]:
    view = memoryview(frame)
    return (bytes(view[start : start + PIECE]) for start in range(0, len(frame), PIECE))


def _here(address: str) -> str:
    """Where to listen: on all interfaces unless the address is this machine's own."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"a peer's address is HOST:PORT; got '{address}'")
    return address if host in ("127.0.0.1", "localhost", "[::1]") else f"0.0.0.0:{port}"
