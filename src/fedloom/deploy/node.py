"""The client's end of the wire: a Flower node that keeps its ClientApp warm.

Flower's SuperNode starts a new process for every message, which costs seconds, and asks for work every three seconds.
This node makes the same calls of Flower's Fleet API and runs the ClientApp in its own process. It never takes code from
the server. It joins again by itself whenever the connection or the server was lost.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from fedloom.deploy.folder import extra
from fedloom.errors import InputError

try:
    import httpx
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.app.message import remove_content_from_message
    from flwr.common.constant import ErrorCode
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
    from flwr.proto.node_pb2 import Node as NodeProto
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    raise extra("deploy", error) from error

__all__ = ["Gone", "Node"]

BEAT = 10.0  # seconds between signs of life, the shortest that Flower allows; twice that without one is absence
LONGEST = 5.0  # seconds between attempts to reach a server that does not answer
App = Callable[[Message, Context], Message]


class Gone(Exception):
    """The server no longer knows this node, or does not answer."""


class Node:
    """One client at a server."""

    def __init__(self, server: str, keys: Path, config: dict[str, Any], say: Callable[[str], None]) -> None:
        self.server, self.config, self.say, self._memory = server, config, say, keys / ".node.json"
        private = _private_key(keys / "client.key")
        authority = keys / "ca.crt"
        if not authority.is_file():
            raise InputError(f"{authority} does not exist; copy this client's folder from where deploy init made it")
        self._public = public_key_to_bytes(private.public_key())
        self.client = FleetHttpClient.from_server_address(
            server, False, authority.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
        )  # fmt: skip
        self.id = 0

    def serve(self, app: App, stop: Callable[[Message], bool]) -> None:
        """Answer messages until one of them says so."""
        while True:
            with self._joined():
                try:
                    while True:
                        message = self._receive()
                        if message is None:
                            continue
                        reply = self._answer(app, message)
                        self._send(reply)
                        if stop(message):
                            return
                except Gone as gone:
                    self.say(f"{gone}; joining again")
                    time.sleep(0.5)

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Be a node of the server's: wait for it if need be, show signs of life, leave in the end."""
        self._activate()
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            with suppress(httpx.HTTPError, OSError):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.id))
                self._memory.unlink(missing_ok=True)

    def _activate(self) -> None:
        # A process that was killed did not say goodbye, and Flower would keep its place for a while.
        with suppress(OSError, ValueError, KeyError, httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=json.loads(self._memory.read_text())["node"]))
        said, pause = "", 0.2
        while True:
            try:
                answer = self.client.ActivateNode(ActivateNodeRequest(public_key=self._public, heartbeat_interval=BEAT))
                break
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:
                    raise InputError(
                        f"the server at {self.server} refused this client: its key is not registered there"
                    ) from None
                why = f"the server at {self.server} says {error.response.status_code}: {error.response.text[:200]}"
            except httpx.HTTPError as error:
                if _certificate_problem(error):
                    raise InputError(
                        f"the server at {self.server} cannot prove who it is: its certificate was not made by the "
                        "authority in ca.crt, or not for this address"
                    ) from None
                why = f"waiting for the server at {self.server}"
            if why != said:
                self.say(why)
                said = why
            time.sleep(pause)
            pause = min(LONGEST, pause * 1.5)
        self.id = answer.node_id
        partial = self._memory.with_suffix(".partial")
        partial.write_text(json.dumps({"node": self.id}))
        os.replace(partial, self._memory)
        self.say(f"joined the server at {self.server}")

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT * 0.8):
            with suppress(httpx.HTTPError):
                self.client.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=NodeProto(node_id=self.id), heartbeat_interval=BEAT)
                )

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """One call of the Fleet API; tried again while the network fails, for a while."""
        for pause in (0.1, 0.3, 1.0, None):
            try:
                return method(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.TOO_MANY_REQUESTS or pause is None:
                    raise
            except httpx.HTTPError as error:
                if pause is None:
                    raise Gone(f"the server at {self.server} does not answer ({type(error).__name__})") from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _receive(self) -> Message | None:
        """The next message, if one comes before the server lets go of the question."""
        node = NodeProto(node_id=self.id)
        try:
            found = self._call(self.client.PullMessages, PullMessagesRequest(node=node))
            if not found.messages_list:
                time.sleep(0.05)
                return None
            tree = found.message_object_trees[0]
            run = message_from_proto(found.messages_list[0]).metadata.run_id
            contents = {}
            for part in {each.object_id for each in iterate_object_tree(tree)}:
                contents[part] = self._pull(node, run, part)
            done = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=tree.object_id)
            self._call(self.client.ConfirmMessageReceived, done)
        except httpx.HTTPStatusError as error:
            raise Gone(f"the server no longer knows this client ({error.response.status_code})") from error
        message = cast(Message, inflate_object_from_contents(tree.object_id, contents))
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _pull(self, node: Any, run: int, part: str) -> bytes:
        for _ in range(600):
            answer = self._call(self.client.PullObject, PullObjectRequest(node=node, run_id=run, object_id=part))
            if not answer.object_found:
                break
            if answer.object_available:
                content: bytes = answer.object_content
                return content
            time.sleep(0.1)
        raise Gone("a message was taken back by the server")

    def _answer(self, app: App, message: Message) -> Message:
        context = Context(
            run_id=message.metadata.run_id, node_id=self.id, node_config=self.config, state=RecordDict(), run_config={}
        )
        try:
            return app(message, context)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever fails here is told to the server)
            self.say(f"a request failed: {type(error).__name__}: {error}")
            reason = f"{type(error).__name__}: {error}"[:300]
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)

    def _send(self, reply: Message) -> None:
        """Send an answer; one that is too large is replaced by the sentence that it is."""
        try:
            self._push(reply)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                raise Gone(f"the server did not take the answer ({error.response.status_code})") from error
            self.say(f"the server refused the answer: {error.response.text[:200]}")

    def _push(self, reply: Message) -> None:
        node, run = NodeProto(node_id=self.id), reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=node, messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)], clientapp_runtime_list=[0.0],
            )  # fmt: skip
            answer = self._call(self.client.PushMessages, request)
            for name in answer.objects_to_push:
                part = PushObjectRequest(
                    node=node, run_id=run, object_id=name, object_content=objects[name].deflate(),
                    session_id=answer.session_id,
                )  # fmt: skip
                self._call(self.client.PushObject, part)


def _private_key(path: Path) -> Any:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; make it with: fedloom deploy init DIR") from None
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is not a private key that can be used: {type(error).__name__}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} must be an elliptic-curve key, as deploy init makes them")
    return key


def _certificate_problem(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
