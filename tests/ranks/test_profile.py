"""`bagua profile` and BAGUA_PROFILE: the profile of a training script."""

from bagua._foresight import profile_file
from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import predict
from support.processes.pool import run_script

TRAIN = """
import copy
import sys
from pathlib import Path
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

torch.set_num_threads(1)
bagua.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
generator = torch.Generator().manual_seed(bagua.get_rank())
copied = copy.deepcopy(model)
assert "Recorder" not in repr(copied._forward_pre_hooks)
for _ in range(20):
    inputs = torch.randn(4, 64, generator=generator)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
flat = torch.cat([p.detach().flatten() for p in model.parameters()])
flats = [torch.empty_like(flat) for _ in range(bagua.get_world_size())]
torch.distributed.all_gather(flats, flat)
assert all(torch.equal(flats[0], other) for other in flats)
Path(sys.argv[1]).write_text("trained")
"""
NUMEL = 64 * 128 + 128 + 128 * 8 + 8


def test_a_training_writes_its_profile_and_goes_on(tmp_path):
    script, output = tmp_path / "train.py", tmp_path / "profile.json"
    script.write_text(TRAIN)
    env = {"BAGUA_PROFILE": str(output)}
    run_script(2, script, [str(tmp_path / "end")], env=env)
    assert (tmp_path / "end").read_text() == "trained"
    profile = profile_file.read_profile(output)
    assert (profile.ranks, profile.nodes, profile.numel) == (2, (2,), NUMEL)
    (bucket,) = profile.buckets
    assert bucket.shapes == ((8, 1), (8, 128), (128, 1), (128, 64))
    assert 0 < bucket.ready <= profile.compute - profile.optimizer + 1e-9
    assert profile.between.bandwidth > 1e6
    assert predict(profile, Candidate("gradient_allreduce")).step >= profile.compute


def test_the_command_ends_a_script_when_its_profile_is_written(tmp_path):
    script, output = tmp_path / "train.py", tmp_path / "one.json"
    script.write_text(TRAIN)
    program = tmp_path / "profile.py"
    program.write_text(
        "import sys\nfrom bagua._tools.command import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    words = ["profile", "--output", str(output), str(script), str(tmp_path / "end")]
    run_script(1, program, words)
    assert not (tmp_path / "end").exists()
    assert profile_file.read_profile(output).ranks == 1
