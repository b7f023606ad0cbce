"""Chunked sparse means, from the formulas in plain torch, for all ranks at once.

    p_r = decay e_r + g_r;  c_r = C(p_r);  e_r <- p_r - c_r;  g <- (sum of c_r in rank order) / P

C keeps the k largest of each chunk of 4096 elements, in the two bits of bit2_block, and makes the
others zero. Every step is one IEEE operation, so results are compared bit for bit.
"""

import torch
from oracle import codec
from oracle.compressed_all_reduce import round_trip
from oracle.sparse import largest

CHUNK = 4096
BLOCK = 256


def chunks(x, k):
    """(a view of the chunk, the indices that it sends) of each chunk."""
    for chunk in x.split(CHUNK):
        sent = -(-chunk.numel() * k // CHUNK)
        yield chunk, largest(chunk, sent).nonzero().flatten()


def sent_of(p, k):
    """C(p), in p's dtype."""
    result = torch.zeros_like(p)
    for (chunk, chosen), out in zip(chunks(p, k), result.split(CHUNK), strict=True):
        out[chosen] = round_trip("bit2_block", chunk[chosen].float()).to(p.dtype)
    return result


def mean(brought, errors, k, decay):
    """The bucket that all ranks get, and every rank's new residual."""
    corrected = [e * decay + g for g, e in zip(brought, errors, strict=True)]
    if len(brought) == 1:
        return corrected[0], [torch.zeros_like(corrected[0])]
    sent = [sent_of(p, k) for p in corrected]
    result = torch.zeros_like(sent[0])
    for c in sent:
        result += c
    result /= len(brought)
    if not result.isfinite().all():
        return result, errors
    return result, [p - c for p, c in zip(corrected, sent, strict=True)]


def payload(x, k):
    """The message's bytes without its frame."""
    headers, codes, indices = b"", b"", b""
    bit2 = codec.CODECS["bit2_block"]
    for chunk, chosen in chunks(x, k) if x.numel() else []:
        for block in chunk[chosen].split(BLOCK):
            header, of_block = bit2.encode_rows(block.view(1, -1))
            headers += header.numpy().tobytes()
            codes += codec.pack(of_block, 2).numpy().tobytes()
        numel = chunk.numel()
        bits = (numel - 1).bit_length()
        if chosen.numel() * bits > numel:  # a bitmap is smaller
            mask = torch.zeros(-(-numel // 8) * 8, dtype=torch.int64)
            mask[chosen] = 1
            number = sum(int(bit) << i for i, bit in enumerate(mask.tolist()))
            size = -(-numel // 8)
        else:
            number = sum(int(index) << (i * bits) for i, index in enumerate(chosen.tolist()))
            size = -(-chosen.numel() * bits // 8)
        indices += codec.pad(number.to_bytes(size, "little"))
    return codec.pad(headers) + codec.pad(codes) + indices
