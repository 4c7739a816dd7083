"""Plain data as bytes, for the wire and for the disk, without pickle.

A tree of dicts, lists, tuples, strings, numbers, tensors, arrays and the few dataclasses listed in `known` becomes a
JSON skeleton and a list of tensors. On the wire that is one frame (length, skeleton, raw bytes), whose size is known
without building it; on the disk it is a safetensors file that other tools open.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import is_dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedloom.encoding import Sparse, Ternary
from fedloom.errors import FedloomError, InputError, kind_of
from fedloom.hints import fitting

__all__ = ["WireError", "fitting", "known", "load", "pack", "save", "size", "unpack"]

known: dict[str, type] = {"Sparse": Sparse, "Ternary": Ternary}
Class = TypeVar("Class", bound=type)
PLAIN = (str, int, float, bool, type(None))
EXACTLY = frozenset(PLAIN)
TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TYPES}
KINDS = {dtype: name for name, dtype in DTYPES.items()}
WRITE = json.JSONEncoder(separators=(",", ":")).encode
BROKEN = (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError)  # of bytes


class WireError(FedloomError, ValueError):
    """Bytes that are not a message: damaged, truncated, or of a kind that is not allowed."""


def travels(cls: Class) -> Class:
    """Let a dataclass of plain data travel; decoding builds these classes and no others, of what their fields say."""
    known[cls.__name__] = cls
    return cls


def _flatten(tree: Any, keep: Callable[[Tensor, str], int | str], path: str = "") -> Any:
    """Replace tensors by the marks `keep` gives them; tuples, dataclasses and dicts of other keys by tagged lists."""
    if type(tree) in EXACTLY:
        return tree
    if isinstance(tree, Tensor):
        return {"~tensor": keep(_sendable(tree.detach()), path)}
    if isinstance(tree, PLAIN):
        return tree
    above = f"{path}/" if path else ""
    if isinstance(tree, dict):
        if all(isinstance(key, str) and not key.startswith("~") for key in tree):
            return {key: _flatten(item, keep, above + key) for key, item in tree.items()}
        pairs = [
            [_flatten(key, keep, f"{above}key"), _flatten(item, keep, f"{above}{key}")] for key, item in tree.items()
        ]
        return {"~dict": pairs}
    if isinstance(tree, list):
        return [_flatten(item, keep, f"{above}{place}") for place, item in enumerate(tree)]
    if isinstance(tree, tuple):
        return {"~tuple": [_flatten(item, keep, f"{above}{place}") for place, item in enumerate(tree)]}
    if isinstance(tree, np.ndarray):
        return {"~array": keep(_sendable(torch.from_numpy(tree.copy(order="C"))), path)}
    if isinstance(tree, np.generic):
        return tree.item()
    if is_dataclass(tree) and type(tree).__name__ in known:
        names = tree.__dataclass_fields__
        return {"~" + type(tree).__name__: [_flatten(getattr(tree, name), keep, above + name) for name in names]}
    raise TypeError(f"{kind_of(tree)} cannot travel; use tensors, arrays, numbers, strings, lists and dicts of them")


def _sendable(tensor: Tensor) -> Tensor:
    if tensor.dtype not in KINDS:
        raise TypeError(f"a tensor of {tensor.dtype} cannot travel; use one of {', '.join(DTYPES)}")
    return tensor


def _restore(skeleton: Any, tensors: Any) -> Any:
    if isinstance(skeleton, list):
        return [_restore(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("~"):
        return {key: _restore(item, tensors) for key, item in skeleton.items()}
    body = skeleton[tag]
    if tag == "~tensor":
        return tensors[body]
    if tag == "~array":
        return tensors[body].cpu().numpy()
    if tag == "~tuple":
        return tuple(_restore(item, tensors) for item in body)
    if tag == "~dict":
        return {_restore(key, tensors): _restore(item, tensors) for key, item in body}
    if tag[1:] in known:
        return fitting(known[tag[1:]](*(_restore(item, tensors) for item in body)))
    raise WireError(f"a message holds an unknown kind of object '{tag[1:]}'")


def _frame(tree: Any) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []

    def keep(tensor: Tensor, path: str) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    skeleton = _flatten(tree, keep)
    kinds = [[KINDS[tensor.dtype], list(tensor.shape)] for tensor in tensors]
    return WRITE([kinds, skeleton]).encode(), tensors


def size(tree: Any) -> int:
    """How many bytes `pack` would make, without touching the tensors' values."""
    header, tensors = _frame(tree)
    return 8 + len(header) + sum(tensor.nbytes for tensor in tensors)


def pack(tree: Any) -> bytes:
    """A tree as one frame of bytes."""
    header, tensors = _frame(tree)
    flat = [tensor.cpu().contiguous().view(-1) for tensor in tensors]
    # A tensor of at most one element is contiguous whatever its stride; seen as bytes it must be 1.
    raw = (each.as_strided(each.shape, (1,)).view(torch.uint8).numpy().data for each in flat)
    return b"".join((struct.pack("<Q", len(header)), header, *raw))


def unpack(frame: bytes | bytearray | memoryview, device: torch.device | str = "cpu") -> Any:
    """The tree in a frame, tensors on a device; raises WireError for anything that `pack` would not have made."""
    view = memoryview(frame)
    try:
        (length,) = struct.unpack_from("<Q", view)
        kinds, skeleton = json.loads(bytes(view[8 : 8 + length]))
        tensors, start = [], 8 + length
        for kind, shape in kinds:
            dtype = DTYPES[kind]
            end = start + prod(shape) * dtype.itemsize
            if min([0, *shape]) < 0 or end > len(view):
                raise WireError("a message is shorter than its header says")
            tensors.append(torch.frombuffer(bytearray(view[start:end]), dtype=dtype).reshape(shape) if end > start
                           else torch.empty(shape, dtype=dtype))  # fmt: skip
            start = end
        if start != len(view):
            raise WireError("a message is longer than its header says")
        return _restore(skeleton, [tensor.to(device) for tensor in tensors])
    except WireError:
        raise
    except BROKEN as error:
        raise WireError(f"bytes that are not a message ({type(error).__name__}: {error})") from error


def save(tree: Any, path: Path) -> None:
    """Write a tree as a safetensors file, in place only once it is complete."""
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor, path: str) -> str:
        # Its own memory: safetensors refuses tensors that share storage, as views of one parameter do.
        while path in tensors:  # "a/b" and "a" over "b" read alike
            path += "'"
        tensors[path] = tensor.cpu().contiguous().clone()
        return path

    skeleton = json.dumps(_flatten(tree, keep))
    partial = path.with_suffix(".partial")
    safetensors.torch.save_file(tensors, partial, metadata={"tree": skeleton})
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # a manifest may name it only once it is really there
    partial.replace(path)


def load(path: Path, device: torch.device | str = "cpu") -> Any:
    """Read what `save` wrote, tensors onto a device."""
    try:
        with safetensors.safe_open(path, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a file, not a dict)
            return _restore(json.loads(file.metadata()["tree"]), tensors)
    except (safetensors.SafetensorError, OSError, *BROKEN) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
