"""Codecs inside CUDA graphs: captured once, they work on what their buffers hold at each replay."""

import torch
from bagua import _C
from single.test_codec import DTYPES, NAMES, assert_same, randn
from support.devices import over_on_each_device

NUMEL = 3 * 6001


def captured(device, call):
    """A function that does again what `call` did; a graph's replay on CUDA."""
    if device == "cpu":
        return call
    # 1. Warm up on a side stream, as capturing asks for. 2. Capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@over_on_each_device(name=NAMES, dtype=DTYPES, step=["encode", "decode", "decode_add"])
def test_a_replay_uses_the_current_contents_of_the_buffers(name, dtype, step, device):
    codec, reference = _C.make_codec(name, device), _C.make_codec(name)
    chunks = 1 if step == "decode_add" else 3
    x = randn(NUMEL, dtype=dtype).to(device)
    payload = codec.encode(x, chunks)
    total = torch.zeros(NUMEL, device=device)
    replay = captured(
        device,
        {
            "encode": lambda: codec.encode_into(x, chunks, payload),
            "decode": lambda: codec.decode_into(payload, chunks, x),
            "decode_add": lambda: codec.decode_add(payload, dtype, total, 0.5),
        }[step],
    )
    for seed in (1, 2):
        values = randn(NUMEL, seed, dtype) * 10**seed
        expected = reference.encode(values, chunks)
        decoded = reference.decode(expected, chunks, dtype, NUMEL // chunks)
        total.zero_()
        if step == "encode":
            x.copy_(values)
            replay()
            assert torch.equal(payload.cpu(), expected)
        else:
            payload.copy_(expected)
            replay()
            if step == "decode":
                assert_same(x.cpu(), decoded.view(-1))
            else:
                sums = torch.zeros(NUMEL)
                reference.decode_add(expected, dtype, sums, 0.5)
                assert torch.equal(total.cpu(), sums)
