"""The server's end of the wire: Flower's Fleet API over TLS, behind a guard, with the grid in the same process.

What listens is Flower's own SuperLink app. The guard before it lets through what clients need and nothing else: calls
of the Fleet API, from registered keys, of bounded size and rate. Flower's Control and Runtime APIs, through which runs
are started and code is submitted, cannot be reached. A client that asks for messages when there are none is kept
waiting a while instead of asking again and again, so that a round costs no polling.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from fedloom.deploy.folder import extra
from fedloom.deploy.messages import SMALL
from fedloom.deploy.roster import Traffic
from fedloom.errors import InputError, RunError

try:
    import uvicorn
    from flwr.app import Error, Message
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import (
        NOOP_ACCOUNT_NAME,
        NOOP_FLWR_AID,
        SUPERLINK_NODE_ID,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
        ErrorCode,
        SubStatus,
    )
    from flwr.serverapp import Grid
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        FLWR_IN_MEMORY_DB_NAME,
        NOOP_FEDERATION_ID,
        TaskType,
    )
    from flwr.supercore.date import now
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app
except ImportError as error:
    raise extra("deploy", error) from error

__all__ = ["Guard", "LinkGrid", "link"]

FLEET = "/v1/fleet/"
PULL, PUSH, OBJECT = (FLEET + name for name in ("pull-messages", "push-messages", "push-object"))
CALLS = frozenset(
    FLEET + name
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "push-object", "pull-object", "confirm-message-received",
    )
)  # fmt: skip
HOLD = 20.0  # seconds that a client without work is kept waiting; less than clients wait for an answer
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets registered clients make Fleet calls of bounded size and rate; counts what each sends and gets."""

    def __init__(self, app: App, keys: Iterable[bytes], *, rate: float = 200.0) -> None:
        self.app, self.rate, self.limit = app, rate, SMALL
        self.traffic = {key: Traffic() for key in keys}
        self.wanted: Callable[[bytes], bool] = lambda key: True  # whether there is a message for a key
        self.oversized: set[bytes] = set()  # keys whose last answer was too large
        self._spent: dict[bytes, int] = defaultdict(int)
        self._budget: dict[str, tuple[float, float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call of a client."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        path, key = scope["path"], _key(headers)
        known = key in self.traffic and _signed(key, headers)
        who = self.traffic[key] if known else None
        if path not in CALLS or scope["method"] != "POST":
            await _refuse(send, 404, "there is nothing here")
        elif not self._in_time(key.decode("latin-1") if who else str((scope.get("client") or ("",))[0])):
            await _refuse(send, 429, f"more than {self.rate:g} requests a second")
        elif who is None:
            await _refuse(send, 401, "unknown key: this client is not registered at the server")
        else:
            who.last_seen = time.time()
            if path == PUSH:
                self._spent[key] = 0
                self.oversized.discard(key)
            allowed = max(0, self.limit + SMALL - self._spent[key]) if path == OBJECT else SMALL
            length = headers.get("content-length", b"")
            # Without a length there could be no end; with one, the server below reads no more than that.
            if not length.isdigit() or int(length) > allowed:
                self.oversized.add(key)
                await _refuse(send, 413, f"a message larger than the limit of {self.limit} bytes")
                return
            self._spent[key] += int(length)
            who.received_bytes += int(length) + _size(scope["headers"])
            if path == PULL:
                await self._hold(key)
            await self.app(scope, receive, _counted(send, who))

    def _in_time(self, who: str) -> bool:
        """A bucket of one second's requests for everybody, always refilled."""
        moment = time.monotonic()
        left, before = self._budget.get(who, (self.rate, moment))
        left = min(self.rate, left + (moment - before) * self.rate) - 1
        if len(self._budget) > 10_000:
            self._budget.clear()
        self._budget[who] = max(left, 0.0), moment
        return left >= 0

    async def _hold(self, key: bytes) -> None:
        until, pause = time.monotonic() + HOLD, 0.005
        while not self.wanted(key) and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(0.05, pause * 1.2)


def _counted(send: Send, who: Traffic) -> Send:
    async def counting(event: MutableMapping[str, Any]) -> None:
        who.sent_bytes += len(event.get("body", b"")) + _size(event.get("headers", ()))
        await send(event)

    return counting


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _key(headers: Mapping[str, bytes]) -> bytes:
    try:
        return b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, b""), validate=True)
    except ValueError:
        return b""


def _signed(key: bytes, headers: Mapping[str, bytes]) -> bool:
    """Whether the caller holds the private key: before its body is read, and before it is kept waiting."""
    try:
        stamp, signature = headers[TIMESTAMP_HEADER], b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        age = abs((now() - datetime.fromisoformat(stamp.decode("ascii"))).total_seconds())
        return age < TIMESTAMP_TOLERANCE and bool(verify_signature(bytes_to_public_key(key), stamp, signature))
    except (KeyError, ValueError, TypeError):
        return False


async def _refuse(send: Send, status: int, why: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": why.encode()})


class LinkGrid(Grid):
    """Flower's grid, straight on the state of a SuperLink in this process."""

    def __init__(self, state: Any, guard: Guard) -> None:
        self.state, self.guard = state, guard
        self._run: Any = None
        self._arriving: dict[str, tuple[Any, list[str]]] = {}  # answers whose parts are still being sent
        guard.wanted = self._wanted

    @property
    def traffic(self) -> Mapping[bytes, Traffic]:
        """What each key sent and got."""
        return self.guard.traffic

    def set_run(self, run: Any) -> None:
        """The run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run that messages belong to."""
        return self._run

    def create_message(self, *args: Any, **named: Any) -> Message:
        """Not needed: messages are made by their own class."""
        raise RunError("messages are made with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """Nodes that are connected."""
        return [int(node) for node in self.state.get_nodes(self._run.run_id)]

    def get_nodes(self) -> Iterable[Any]:
        """Nodes that are connected, with their keys."""
        nodes: Iterable[Any] = self.state.get_node_info(node_ids=list(self.get_node_ids()))
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to Flower; gives their names, empty for one that cannot be delivered."""
        names = []
        with no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                tree, session = get_object_tree(message), self.state.start_session(self._run.run_id)
                objects = get_all_nested_objects(message)
                bare = remove_content_from_message(message)
                stored, missing = self.state.store_message_and_object_tree(bare, tree, session)
                for name in missing if stored else ():
                    self.state.store_object(self._run.run_id, session, name, objects[name].deflate())
                names.append(message.metadata.message_id if stored else "")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers to these messages that are here whole."""
        asked, found = (
            set(message_ids) - {reply.metadata.reply_to_message_id for reply, _ in self._arriving.values()},
            [],
        )
        for reply in self._replies(asked):
            self.state.delete_messages(message_ins_ids={reply.metadata.reply_to_message_id})
            name = reply.metadata.message_id
            tree = self.state.object_store.get_object_tree(name)
            self._arriving[name] = reply, [part.object_id for part in iterate_object_tree(tree)]
        for name, (reply, parts) in list(self._arriving.items()):
            if self._key(reply) in self.guard.oversized:
                found.append(self._useless(reply, f"it is larger than the limit of {self.guard.limit} bytes"))
                del self._arriving[name]
                continue
            contents = {part: self.state.get_object(self._run.run_id, part) for part in parts}
            if any(content == b"" for content in contents.values()):
                continue
            del self._arriving[name]
            self.state.object_store.delete(name)
            try:
                whole: Any = reply if reply.has_error() else inflate_object_from_contents(name, contents)
            except Exception as error:  # noqa: BLE001 (whatever a client sent)
                whole = self._useless(reply, f"it cannot be read: {type(error).__name__}")
            # Who answers what is what Flower checked, not what the inflated message says of itself.
            whole.metadata.__dict__.update(_message_id=name, _reply_to_message_id=reply.metadata.reply_to_message_id)
            found.append(whole)
        return found

    def _replies(self, asked: set[str]) -> list[Message]:
        """Answers first: Flower would call a node gone that answered and then left."""
        with self.state.lock:
            names = self.state.message_ins_id_to_message_res_id
            answered = {name: self.state.message_res_store[names[name]] for name in asked if name in names}
        rest = asked - answered.keys()
        others = self.state.get_message_res(message_ids=rest, run_id=self._run.run_id) if rest else ()
        return [*answered.values(), *others]

    def _key(self, reply: Message) -> bytes:
        nodes = self.state.get_node_info(node_ids=[reply.metadata.src_node_id])
        return bytes(nodes[0].public_key) if nodes else b""

    @staticmethod
    def _useless(reply: Message, why: str) -> Message:
        return make_message(metadata=reply.metadata, error=Error(code=ErrorCode.UNKNOWN, reason=why))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the answers."""
        names, found = set(self.push_messages(messages)) - {""}, []
        until = time.monotonic() + (timeout or 3600.0)
        while names and time.monotonic() < until:
            for reply in self.pull_messages(names):
                names.discard(reply.metadata.reply_to_message_id)
                found.append(reply)
            time.sleep(0.02)
        return found

    def _wanted(self, key: bytes) -> bool:
        """Whether there is something for this key that it did not get yet."""
        node, under_way = self.state.get_node_id_by_public_key(key), list(self.state.message_ins_store.values())
        return any(each.metadata.dst_node_id == node and not each.metadata.delivered_at for each in under_way)


@contextmanager
def link(keys: Mapping[str, bytes], folder: Path, host: str, port: int, rate: float) -> Iterator[LinkGrid]:
    """Listen for clients; gives the grid that reaches them."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    files = {name: folder / name for name in ("ca.crt", "server.crt", "server.key")}
    for path in files.values():
        if not path.is_file():
            raise InputError(f"{path} does not exist; write it with: fedloom deploy init DIR")
    app = create_app(_config(host, port), cast(Any, _Quiet))
    state = app.state.linkstate_factory.state()
    for name, key in keys.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)
    guard = Guard(app, keys.values(), rate=rate)
    grid = LinkGrid(state, guard)
    settings = uvicorn.Config(
        guard, host, port, ssl_certfile=str(files["server.crt"]), ssl_keyfile=str(files["server.key"]),
        log_level="warning", access_log=False, server_header=False, timeout_keep_alive=60, lifespan="off", ws="none",
    )  # fmt: skip
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, name="link", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.02)
    if not server.started:
        raise InputError(f"{host}:{port} cannot be listened on; is another server running there?")
    with _running(state, grid):
        try:
            yield grid
        finally:
            server.should_exit = True
            thread.join(timeout=2)
            server.force_exit = True


@contextmanager
def _running(state: Any, grid: LinkGrid) -> Iterator[None]:
    """A run of Flower's, alive as long as this lasts."""
    number = state.create_run(
        fab_id="fedloom/deployed", fab_version="1.0.0", fab_hash="", override_config={},
        federation_id=NOOP_FEDERATION_ID, federation_config=None, flwr_aid=NOOP_FLWR_AID,
        primary_task_type=TaskType.SERVER_APP,
    )  # fmt: skip
    (run,) = state.get_run_info(run_ids=[number])
    task = run.primary_task_id
    state.claim_task(task)
    state.activate_task(task)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, number, SUPERLINK_NODE_ID
    grid.set_run(run)
    beat = HeartbeatSender(lambda: bool(state.acknowledge_task_heartbeat(task)))
    beat.start()
    try:
        yield
    finally:
        beat.stop()
        state.finish_task(task, SubStatus.COMPLETED, "")


class _Quiet:
    """Flower would start its older gRPC servers here; there are none."""

    def __init__(self, *_: object) -> None:
        pass


def _config(host: str, port: int) -> SuperLinkLifespanConfig:
    nothing = dict.fromkeys(
        ("health_server_address", "certificates", "superexec_auth_secret", "event_log_plugin", "artifact_provider",
         "fleet_event_log_plugin", "fleet_api_address", "ssl_ca_certfile", "ssl_certfile", "ssl_keyfile"),
    )  # fmt: skip
    return SuperLinkLifespanConfig(
        control_address="", host=host, port=port, insecure=False, authn_plugin=NoOpControlAuthnPlugin(),
        enable_event_log=False, enable_supernode_auth=True, fleet_api_type="grpc-rere", simulation=False,
        database=FLWR_IN_MEMORY_DB_NAME, isolation="process", runtime_dependency_install=False, **nothing,
    )  # fmt: skip
