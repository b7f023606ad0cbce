"""Scripts with asynchronous averaging that end without `abort`: a warning, no hang, no crash."""

from pathlib import Path

from ranks.test_exit import assert_ends

TESTS = str(Path(__file__).resolve().parents[1])

TRAINING = """
import time
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm

bagua.init_process_group()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms={interval}))
while model.bagua_stats()["rounds"] < 3 + {more}:
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
print("trained", model.bagua_stats()["rounds"], flush=True)
{after}
"""

WARNING = "asynchronous averaging was still running when its module or the program ended"


def script(after="", interval=1, more="0"):
    return TRAINING.format(after=after, interval=interval, more=more)


def test_scripts_that_just_end_warn_and_exit_with_zero(run_script):
    more = "50 * bagua.get_rank()"  # the first rank goes on averaging until the other ends
    for n, interval, averages in ((3, 0, "0"), (2, 500, "0"), (2, 1, more)):
        ends = run_script(n, script(interval=interval, more=averages), timeout=60.0)
        assert_ends(ends, 0, trained="trained")
        assert [end.stderr.count(WARNING) for end in ends] == [1] * n
    assert int(ends[1].stdout.split()[-1]) >= 53


def test_after_abort_nothing_is_said_and_deleting_the_module_frees_its_thread(run_script):
    after = f"""
import gc, sys
sys.path.append({TESTS!r})
from support.processes.thread_names import thread_names
threads = lambda: sum(name.startswith("bagua-average") for name in thread_names())
assert threads() == 1
model.bagua_algorithm.abort(model)
del model, optimizer
gc.collect()
assert threads() == 0, "the thread of the lane is still there"
print("trained and freed")
"""
    ends = run_script(2, script(after=after), timeout=60.0)
    assert_ends(ends, 0, trained="trained")
    for end in ends:
        assert WARNING not in end.stderr
        assert "trained and freed" in end.stdout
