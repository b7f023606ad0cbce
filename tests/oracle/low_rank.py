"""PowerSGD with error feedback, matrix by matrix: what `LowRank` must compute."""

import torch


def orthogonalise(matrix):
    """Orthonormal columns by QR in f64, with the signs that Gram-Schmidt gives."""
    q, r = torch.linalg.qr(matrix.double())
    return (q * torch.sign(torch.diagonal(r))).to(matrix.dtype)


def power_step(gradients, errors, query, scale=1.0):
    """One round for one matrix of full column rank: gradients and errors of all ranks.

    Returns the result (in the dtype of the gradients), the new errors and the new query.
    """
    wide = errors[0].dtype
    m = [g.to(wide) / scale + e for g, e in zip(gradients, errors, strict=True)]
    p = orthogonalise(sum(one @ query for one in m))
    q = sum(one.T @ p for one in m) / len(m)
    result = ((p @ q.T) * scale).to(gradients[0].dtype)
    return result, [one - result.to(wide) / scale for one in m], q
