"""`bagua_summary` says what `bagua_stats` counts."""

import re

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import training


@training.with_group
def summaries(steps):
    """Before and after steps, the statistics of the latter, and the summary with auto."""
    model = torch.nn.Linear(1024, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = bagua.wrap(model, [optimizer], ByteGradAlgorithm())
    before = model.bagua_summary()
    for step in range(steps):
        if step == steps - 1:
            model.with_bagua([optimizer])  # auto, whose first step is this one
            auto = model.bagua_summary()
            model.with_bagua([optimizer], ByteGradAlgorithm())
        optimizer.zero_grad()
        model(torch.ones(4, 1024)).sum().backward()
        optimizer.step()
    return before, model.bagua_summary(), auto, model.bagua_stats()


def test_a_summary_has_the_bytes_and_times_of_the_statistics(ranks):
    for before, after, auto, stats in ranks(2, summaries, 3):
        assert before == "ByteGrad, 2 ranks: no round yet"
        assert auto == "Auto (trying), 2 ranks: no round yet"
        first, second, third = after.splitlines()
        assert first.startswith("ByteGrad, 2 ranks, 1 rounds of 0.262 MB: CompressedAllReduce(")
        assert second == "sent 0.0659 MB per round and rank (an exact all-reduce: 0.262 MB)"
        blocked, longest = re.findall(r"([\d.e-]+) ms", third)
        assert float(blocked) == float(f"{stats['exposed_ns'] / 1e6:.3g}")
        assert float(longest) == float(f"{stats['longest_wait_ns'] / 1e6:.3g}")
        assert re.search(r"; \d+% of communication is hidden behind computation$", third)


def test_a_rank_alone_communicates_nothing(ranks):
    (alone,) = ranks(1, summaries, 2)
    assert alone[1] == "ByteGrad, 1 rank: nothing is communicated"
