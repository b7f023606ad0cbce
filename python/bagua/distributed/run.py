"""``python -m bagua.distributed.run``: torchrun, with the arguments of Bagua's launcher too.

Those that there is nothing for here are named in a line on standard error, and have no effect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

__all__ = ["main"]

# Arguments of Bagua's launcher that torchrun does not know: whether a value follows.
_WITHOUT_EFFECT = {
    "--bagua_service_port": True,
    "--autotune_level": True,
    "--autotune_max_samples": True,
    "--autotune_sampling_confidence_time": True,
    "--autotune_warmup_time": True,
    "--is_output_autotune_log": False,
    "--report_metrics": False,
    "--set_additional_flag": False,
    "--enable_bagua_net": False,
    "--host_list": True,
    "--ssh_port": True,
}


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks of a job on this machine, as ``torchrun`` does.

    Args:
        arguments: None: those of the process.
    """
    parser = torchrun.get_args_parser()
    ours = parser.add_argument_group("arguments of Bagua's launcher")
    for name, has_value in _WITHOUT_EFFECT.items():
        ours.add_argument(
            name, action="store" if has_value else "store_true", default=None, help="no effect"
        )
    ours.add_argument(
        "--default_bucket_size", type=int, metavar="BYTES", help="sets BAGUA_DEFAULT_BUCKET_SIZE"
    )
    ours.add_argument("--logdir", metavar="DIR", help="as --log-dir DIR --redirects 3")
    chosen = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    given = [name for name in _WITHOUT_EFFECT if getattr(chosen, name[2:]) is not None]
    if given:
        sys.stderr.write(
            f"bagua.distributed: {', '.join(given)}: no effect; there is no autotuning service, "
            "and torchrun starts the ranks. Algorithm.init('auto') chooses an algorithm\n"
        )
    if chosen.default_bucket_size is not None:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(chosen.default_bucket_size)
    if chosen.logdir is not None:
        chosen.log_dir, chosen.redirects = chosen.logdir, "3"
    torchrun.run(chosen)


if __name__ == "__main__":
    main()
