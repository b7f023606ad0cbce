"""Low-precision decentralized SGD of all ranks in one process, from the formulas and nothing else.

    d_r = x_r + wl W_left + wr W_right - (1 + wl + wr) W_r, x_r being r's weights after its own step
    W_r <- W_r + decode(encode(d_r)), x_r <- W_r

W_r is what r's neighbours hold of it, too. Nothing here calls the library.
"""

import torch
from oracle import codec as oracle_codec


def round_trip(codec, values):
    """Decoded values of the receiver of f32 `values`."""
    payload = oracle_codec.encode(codec, values)
    return oracle_codec.decode(codec, payload, values.dtype, values.numel())


def mixing_weights(sizes, member):
    """Weights of the left and the right neighbour: Metropolis-Hastings on the ring."""
    neighbours = (sizes[member - 1], sizes[(member + 1) % len(sizes)])
    return [min(1.0, size / sizes[member]) / 3 for size in neighbours]


class Ring:
    """`weights[r]` is W of member r, f32 and flat; `sizes[r]` the number of ranks it stands for."""

    def __init__(self, start, codec, sizes):
        self.weights = [start.float().clone() for _ in sizes]
        self.codec = codec
        self.sizes = sizes

    def mix(self, members):
        """Every member's weights after one round, from those after its own step."""
        size = len(members)
        if size == 1:
            return members
        sums = []
        for r, x in enumerate(members):
            own, left, right = (self.weights[i % size] for i in (r, r - 1, r + 1))
            wl, wr = mixing_weights(self.sizes, r)
            d = ((x.float() + left * wl) + right * wr) - own * (1 + wl + wr)
            sums.append(own + round_trip(self.codec, d))
        self.weights = [
            torch.where(new.isfinite(), new, old)
            for new, old in zip(sums, self.weights, strict=True)
        ]
        mixed = []
        for r, x in enumerate(members):
            bad = ~(sums[r - 1].isfinite() & sums[(r + 1) % size].isfinite())
            mixed.append(sums[r].masked_fill(bad, float("nan")).to(x.dtype))
        return mixed


class Ranks:
    """n ranks that train: `models[rank]` after every `step`.

    nodes: the node of every rank; the exact mean inside, the ring between the first ranks of all.
    Parameters of a dtype make one bucket, in the order of the model.
    """

    def __init__(self, models, make_optimizers, codec="block_uint8", interval=1, nodes=None):
        self.models = models
        self.optimizers = [make_optimizers(model) for model in models]
        self.nodes = list(range(len(models))) if nodes is None else nodes
        order = sorted(set(self.nodes), key=self.nodes.index)
        self.members = [[r for r, n in enumerate(self.nodes) if n == node] for node in order]
        sizes = [len(ranks) for ranks in self.members]
        self.rings = {
            dtype: Ring(flat, codec, sizes) for dtype, flat in self.flats(models[0]).items()
        }
        self.interval = interval
        self.iterations = 0

    def flats(self, model):
        """The parameters, one flat tensor for each dtype."""
        dtypes = dict.fromkeys(p.dtype for p in model.parameters())
        return {
            dtype: torch.cat([p.detach().flatten() for p in model.parameters() if p.dtype == dtype])
            for dtype in dtypes
        }

    def step(self, loss, batches, skipping=()):
        """One iteration: `batches[rank]` is what the rank sees; those in `skipping` do not step."""
        for rank, (model, batch) in enumerate(zip(self.models, batches, strict=True)):
            for optimizer in self.optimizers[rank]:
                optimizer.zero_grad()
            loss(model, batch).backward()
            for optimizer in self.optimizers[rank]:
                if rank not in skipping:
                    optimizer.step()
        if self.iterations % self.interval == 0:
            self.mix()
        self.iterations += 1

    def mix(self):
        for dtype, ring in self.rings.items():
            flats = [self.flats(model)[dtype] for model in self.models]
            means = [sum(flats[r] / len(ranks) for r in ranks) for ranks in self.members]
            for ranks, mixed in zip(self.members, ring.mix(means), strict=True):
                for rank in ranks:
                    write(self.models[rank], dtype, mixed)


@torch.no_grad()
def write(model, dtype, flat):
    parameters = [p for p in model.parameters() if p.dtype == dtype]
    for p, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.copy_(values.view_as(p))
