"""Plain data between ranks, without running received code."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch

from bagua import _C
from bagua._core.eager.checks import check_rank
from bagua._core.eager.collectives import allgather, broadcast, recv, send
from bagua._core.group.process_group import Comm, member_of

# Memory for what comes is made as it comes: a wrong length costs no more than this.
_PIECE_BYTES = 64 * 1024**2
# torch.load reads older formats too; only torch.save's present one, a zip archive, is sent.
_ARCHIVE = b"PK\x03\x04"
# Limits of an error message, which may quote the bytes: classes, and letters.
_MOST_NAMES, _LONGEST = 5, 500


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Give every rank the object of rank ``src``.

    It travels as ``torch.save`` writes it and is read with ``weights_only=True``: tensors (which
    arrive on the CPU), numbers, strings, lists, tuples, dicts and the classes allowed by
    ``torch.serialization.add_safe_globals`` on every rank. Code that comes over the network is
    never run.

    Returns:
        ``obj`` itself on ``src`` (and on a rank outside the group), the received object elsewhere.

    Raises:
        ValueError: ``src`` is not a rank of the communicator.
        TypeError: on every rank, if the object of ``src`` cannot be sent this way.
        BaguaError: the message cannot be read, or has a class that this rank does not allow.
    """
    member = member_of(comm)
    if member is None:
        return obj
    # Checks
    check_rank("broadcast_object", "src", src, member)

    # 1. The length, or -1 if there is nothing to send: the others must not wait for a payload.
    payload, problem = _encode(obj) if member.rank() == src else (bytearray(), None)
    length = torch.tensor([-1 if problem else len(payload)], device="cpu")
    broadcast(length, src, member)
    if length.item() < 0:
        raise TypeError(
            f"broadcast_object: rank {src}'s object cannot be sent as plain data; send tensors, "
            "numbers, strings, lists, tuples and dicts, or allow its class on every rank with "
            f"torch.serialization.add_safe_globals ({problem or f'rank {src} says why'})"
        ) from problem
    # 2. The bytes.
    if member.rank() == src:
        for piece in torch.frombuffer(payload, dtype=torch.uint8).split(_PIECE_BYTES):
            broadcast(piece, src, member)
        return obj
    receive = functools.partial(broadcast, src=src, comm=member)
    return _read(_received(int(length.item()), receive), src, "broadcast_object")


def gather_plain_objects(obj: Any, dst: int = 0, comm: Comm = None) -> list[Any] | None:
    """Give rank ``dst`` the objects of all ranks, by rank; None on the others.

    Each travels as that of :func:`broadcast_object` does.

    Raises:
        ValueError: ``dst`` is not a rank of the communicator.
        TypeError: on every rank, if the object of one cannot be sent this way; names the ranks.
        BaguaError: a message cannot be read, or has a class that ``dst`` does not allow.
    """
    member = member_of(comm)
    if member is None:
        return None
    # Checks
    check_rank("gather_plain_objects", "dst", dst, member)

    # 1. All lengths to all, -1 where there is nothing to send; 2. the bytes, rank after rank.
    rank, payload, problem = member.rank(), bytearray(), None
    if rank != dst:
        payload, problem = _encode(obj)
    lengths = torch.empty(member.nranks(), dtype=torch.int64, device="cpu")
    allgather(torch.tensor([-1 if problem else len(payload)], device="cpu"), lengths, member)
    failed = [r for r, length in enumerate(lengths.tolist()) if length < 0]
    if failed:
        raise TypeError(
            f"gather_plain_objects: the objects of ranks {failed} cannot be sent as plain data; "
            "send tensors, numbers, strings, lists, tuples and dicts "
            f"({problem or 'they say why'})"
        ) from problem
    if rank != dst:
        for piece in torch.frombuffer(payload, dtype=torch.uint8).split(_PIECE_BYTES):
            send(piece, dst, member)
        return None
    objects = []
    for src, length in enumerate(lengths.tolist()):
        if src == dst:
            objects.append(obj)
            continue
        receive = functools.partial(recv, src=src, comm=member)
        objects.append(_read(_received(length, receive), src, "gather_plain_objects"))
    return objects


def _received(length: int, receive: Callable[[torch.Tensor], None]) -> bytearray:
    payload, left = bytearray(), length
    while left > 0:
        part = bytearray(min(left, _PIECE_BYTES))
        receive(torch.frombuffer(part, dtype=torch.uint8))
        payload += part
        left -= len(part)
    return payload


def _read(payload: bytearray, src: int, call: str) -> Any:
    """The object of rank ``src`` in what came from it; ``call`` is named in the error."""
    try:
        return _decode(payload)
    except Exception as error:
        raise _C.BaguaError(
            f"{call}: the {len(payload)} bytes that came from rank {src} cannot be read "
            f"as plain data: {error}. Run the same torch on every rank, and allow the same classes "
            "on every rank with torch.serialization.add_safe_globals."
        ) from error


def _encode(obj: Any) -> tuple[bytearray, Exception | None]:
    """The bytes of an object that :func:`_decode` can read, or what is wrong with it."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        payload = bytearray(buffer.getbuffer())
        _decode(payload)
    except Exception as error:  # noqa: BLE001 - an object's own code may raise anything
        return bytearray(), error
    return payload, None


def _decode(payload: bytearray) -> Any:
    if not payload.startswith(_ARCHIVE):
        raise ValueError("they are not an archive of torch.save")
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - the bytes may be anything
        raise ValueError(_why(payload, error)) from None


def _why(payload: bytearray, error: Exception) -> str:
    """Names the classes that are not allowed here: torch's text advises to read them anyway."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload))
    except Exception:  # noqa: BLE001 - as above
        found = []
    names = ", ".join(sorted(found)[:_MOST_NAMES])
    text = f"it needs {names}, which is not allowed here" if found else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])
