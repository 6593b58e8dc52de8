"""The wire without I/O: whatever bytes come, decoding answers with a value or `RequestRefused`, within bounds."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw import model, wire
from kvgw.channel import ConnectionEnded, PlainChannel
from kvgw.errors import Code, Outage, RequestRefused, from_code
from kvgw.kvformat import CHUNK_BYTES_MAX
from kvgw.stream import FrameStream, data_frames
from kvgw.wire import Frame, Hello, Kind
from tests.support.aio import aio

REQUESTS: list[model.Request] = [
    model.RegisterRequest(b"canonical"),
    model.MatchRequest([b"f" * 32], [b"k"], "ns", 10),
    model.PutRequest(b"f" * 32, [b"a", b"b"], b"p", 3, "ns", 60_000, model.Durability.NVME, [model.Label("user", "u")]),
    model.GetRequest(b"f" * 32, [b"a"]),
    model.TouchRequest(b"f" * 32, [b"a"], ttl_ms=5),
    model.DeleteRequest(b"f" * 32, [b"a"]),
    model.StatRequest("ns"),
    model.StatusRequest(),
    model.NamespaceCreateRequest("name"),
    model.NamespacesRequest(),
]

frames = st.builds(
    Frame,
    st.sampled_from(Kind),
    st.integers(0, 2**32 - 1),
    st.integers(0, wire.HEADER_BYTES_MAX),
    st.integers(0, 2**32 - 1),
    st.just(0),
    st.integers(0, CHUNK_BYTES_MAX),
)

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(frames)
def test_a_prefix_comes_back_as_it_was(frame: Frame) -> None:
    assert wire.decode_prefix(wire.encode_prefix(frame)) == frame


@given(st.binary(min_size=wire.PREFIX.size, max_size=wire.PREFIX.size))
def test_any_prefix_is_a_bounded_frame_or_refused(data: bytes) -> None:
    for candidate in (data, b"KG\x01" + data[3:]):
        try:
            frame = wire.decode_prefix(candidate)
        except RequestRefused:
            continue
        assert frame.header_bytes <= wire.HEADER_BYTES_MAX
        assert frame.offset + frame.payload_bytes <= CHUNK_BYTES_MAX


@pytest.mark.parametrize(
    ("at", "value", "sentence"),
    [
        (0, b"XX", "wrong magic"),
        (2, b"\x00", "wire version 0; this side speaks 1 to 1"),
        (2, b"\x02", "wire version 2; this side speaks 1 to 1"),
        (3, b"\x00", "unknown kind of frame 0"),
        (3, b"\x0b", "unknown kind of frame 11"),
        (8, (wire.HEADER_BYTES_MAX + 1).to_bytes(4, "big"), "over the limit"),
        (8, b"\xff" * 4, "over the limit"),
        (16, (CHUNK_BYTES_MAX + 1).to_bytes(8, "big"), "payload ends"),
        (24, (CHUNK_BYTES_MAX + 1).to_bytes(8, "big"), "payload ends"),
        (16, b"\xff" * 16, "payload ends"),
    ],
)
def test_each_bound_of_a_prefix_is_kept(at: int, value: bytes, sentence: str) -> None:
    data = bytearray(wire.encode_prefix(Frame(Kind.DATA, 7, 0)))
    data[at : at + len(value)] = value
    with pytest.raises(RequestRefused, match=sentence):
        wire.decode_prefix(data)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_come_back_as_they_were(request_: model.Request) -> None:
    assert wire.decode_request(wire.encode(request_)) == request_


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_a_request_cut_anywhere_is_refused(request_: model.Request) -> None:
    whole = wire.encode(request_)
    for end in range(len(whole)):
        with pytest.raises(RequestRefused):
            wire.decode_request(whole[:end])
    with pytest.raises(RequestRefused):
        wire.decode_request(whole + b"\x00")


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for kind in (Hello, wire.Welcome, wire.Wanted, wire.Failure, model.GetReply, model.PutReply):
        try:
            assert isinstance(wire.decode(data, kind), kind)
        except RequestRefused:
            continue
    with pytest.raises(RequestRefused):
        wire.decode_request(data)


@given(st.sampled_from(REQUESTS), st.data())
def test_each_field_may_hold_anything_and_is_understood_or_refused(
    request_: model.Request, data: st.DataObject
) -> None:
    fields = msgspec.msgpack.decode(wire.encode(request_))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(documents)
    try:
        decoded = wire.decode_request(msgspec.msgpack.encode(fields))
    except RequestRefused as error:
        assert error.code in (Code.BAD_REQUEST, Code.TOO_MANY_KEYS)
        return
    assert wire.decode_request(wire.encode(decoded)) == decoded
    assert 1 <= decoded.deadline_ms <= model.DEADLINE_MS_MAX, "law 9: no request lasts for ever"


@given(st.sampled_from(REQUESTS), st.dictionaries(st.text(min_size=3, max_size=8), documents, max_size=3))
def test_R23_unknown_fields_of_a_newer_peer_are_ignored(request_: model.Request, extra: dict[str, object]) -> None:
    fields = msgspec.msgpack.decode(wire.encode(request_))
    assert (
        wire.decode_request(msgspec.msgpack.encode({**{f"new_{k}": v for k, v in extra.items()}, **fields})) == request_
    )


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RequestRefused):
        wire.decode_request(b"\x81\xa2op" + b"\x91" * 100_000)


@pytest.mark.parametrize("count", [model.KEYS_MAX + 1, 100_000])
def test_R51_too_many_keys_have_their_code_and_limit(count: int) -> None:
    fields = {"op": "match", "fingerprints": [b"f" * 32], "keys": [b"%d" % index for index in range(count)]}
    with pytest.raises(RequestRefused, match=str(model.KEYS_MAX)) as refusal:
        wire.decode_request(msgspec.msgpack.encode(fields))
    assert refusal.value.code is Code.TOO_MANY_KEYS


@pytest.mark.parametrize(("offered", "agreed"), [((1, 1), 1), ((0, 1), 1), ((1, 2), 1), ((0, 9), 1), ((-5, 2**31), 1)])
def test_R23_the_highest_common_version_is_taken(offered: tuple[int, int], agreed: int) -> None:
    assert wire.agree_version(offered) == agreed


@pytest.mark.parametrize("offered", [(0, 0), (2, 2), (2, 9), (5, 1)])
def test_R23_no_common_version_names_both_ranges(offered: tuple[int, int]) -> None:
    with pytest.raises(RequestRefused, match=rf"{offered[0]} to {offered[1]}.* 1 to 1") as refusal:
        wire.agree_version(offered)
    assert refusal.value.code is Code.UNSUPPORTED_VERSION
    assert isinstance(from_code(refusal.value.code, ""), Outage), "an engine sees an outage, which a roll-back heals"


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Hello((1, 1), "c", "secret"))


def test_what_no_header_can_hold_is_refused_before_it_is_sent() -> None:
    for value in (model.MatchRequest([b"f" * 32], [b"k"], "\ud800"), model.StatRequest(deadline_ms=2**70)):
        with pytest.raises(RequestRefused, match="cannot be sent"):
            wire.encode(value)


@aio
async def test_half_a_frame_is_the_end_of_the_connection() -> None:
    whole = wire.encode_prefix(Frame(Kind.DONE, 1, 4)) + b"head"
    for end in range(len(whole)):
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            stream = FrameStream(PlainChannel(ours))
            theirs.sendall(whole[:end])
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionEnded):
                await stream.receive()
            stream.close()
            stream.close()


@aio
async def test_nothing_is_allocated_for_what_is_out_of_bounds() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        stream = FrameStream(PlainChannel(ours))
        huge = bytearray(wire.encode_prefix(Frame(Kind.REQUEST, 1, 0)))
        huge[8:12] = b"\xff" * 4
        theirs.sendall(huge + wire.encode_prefix(Frame(Kind.HELLO, 0, 5000)))
        tracemalloc.start()
        with pytest.raises(RequestRefused, match="4294967295 bytes is over the limit"):
            await stream.receive()
        with pytest.raises(RequestRefused, match="5000 bytes is over the limit of 4096"):
            await stream.receive(4096)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        stream.close()
        assert peak < 256 * 1024


@aio
async def test_a_header_over_the_limit_is_never_sent() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        stream = FrameStream(PlainChannel(ours))
        with pytest.raises(RequestRefused, match="over the limit"):
            await stream.send(Kind.REQUEST, 1, model.RegisterRequest(b"x" * (wire.HEADER_BYTES_MAX + 1)))
        await stream.send(Kind.REQUEST, 1, model.StatRequest())
        assert theirs.recv(1 << 16).startswith(b"KG\x01\x03")
        stream.close()


@aio
async def test_frames_larger_than_the_socket_buffer_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    sender, receiver = FrameStream(PlainChannel(ours)), FrameStream(PlainChannel(theirs))
    payload = memoryview(bytes(range(256)) * 16384)
    target = bytearray(len(payload))

    async def receive() -> Frame:
        frame, _ = await receiver.receive()
        await receiver.receive_into(memoryview(target))
        return frame

    frame, _ = await asyncio.gather(receive(), sender.send_all(data_frames(9, [(3, payload)])))
    assert (frame.index, frame.payload_bytes, bytes(target)) == (3, len(payload), bytes(payload))
    sender.close()
    receiver.close()


@aio
async def test_a_peer_that_does_not_read_holds_no_thread() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    sender, receiver = FrameStream(PlainChannel(ours)), FrameStream(PlainChannel(theirs))
    payloads = [memoryview(bytes([number]) * 300_000) for number in range(16)]
    outgoing = data_frames(7, enumerate(payloads))
    left = await asyncio.to_thread(sender.push, outgoing, 0.05)
    assert left == 0.0, "it was given up when the patience was over"
    assert outgoing, "and what it did not take is still to be sent"
    sending = asyncio.create_task(sender.send_all(outgoing))
    for number, payload in enumerate(payloads):
        frame, _ = await receiver.receive()
        target = bytearray(frame.payload_bytes)
        await receiver.receive_into(memoryview(target))
        assert (frame.kind, frame.request_id, frame.index, bytes(target)) == (Kind.DATA, 7, number, bytes(payload))
    await sending
    assert not outgoing
    few = data_frames(8, enumerate(payloads[:1]))
    assert await asyncio.to_thread(sender.push, few, 5.0) > 0.0
    assert not few, "a peer with room takes it at once"
    theirs.close()
    with pytest.raises(ConnectionEnded):
        await asyncio.to_thread(sender.push, data_frames(9, enumerate(payloads)), 5.0)
    sender.close()
