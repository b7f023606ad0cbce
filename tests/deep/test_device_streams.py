"""Engine and ops on a fake device: nothing unordered, nothing freed too early, the CPU's results.

What it proves and what it cannot: csrc/codec/cuda/README.md, "Kernels on a CPU".
"""

import os
import subprocess
import sys

import pytest
import torch
from support.programs.device_work import build_fake_device
from support.programs.fake_nccl import build_fake_driver, build_fake_nccl

RUN = """
import ctypes, sys
import torch  # the libraries that the program is linked with
from bagua import _C
driver = ctypes.CDLL(sys.argv[2])
fake_nccl = sys.argv[3].encode() if len(sys.argv) > 3 else None
sys.exit(ctypes.CDLL(sys.argv[1]).device_streams(fake_nccl))
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
@pytest.mark.timeout(400)
def test_every_op_is_ordered_by_events_and_agrees_with_the_cpu():
    library, nccl = build_fake_device(), build_fake_nccl()
    ended = subprocess.run(
        [sys.executable, "-c", RUN, library, build_fake_driver(), *([nccl] if nccl else [])],
        env=os.environ | ({"LD_PRELOAD": nccl} if nccl else {}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    ran = ended.stdout.split("\n")
    some = {"all_reduce Float", "block_uint8 Half", "gossip of fp16 BFloat16", "sparse Float"}
    assert some <= set(ran)
