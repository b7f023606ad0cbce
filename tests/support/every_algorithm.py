"""Every algorithm by a separate name, for tests that hold for all of them."""

from bagua.torch_api.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer
from support import training

WARM_UP = 2
#: Names of the registered algorithms and their arguments. All of them work between single ranks.
ALGORITHMS = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
    "bytegrad-feedback": ("bytegrad", {"hierarchical": False, "error_feedback": True}),
    "decentralized-all": ("decentralized", {"hierarchical": False}),
    "decentralized-shift-one": (
        "decentralized",
        {"hierarchical": False, "peer_selection_mode": "shift_one"},
    ),
    "low_precision_decentralized": ("low_precision_decentralized", {"hierarchical": False}),
    "diloco": ("diloco", {"interval": 3}),
    "diloco-streaming": ("diloco", {"interval": 4, "overlap_steps": 2}),
    "qadam": ("qadam", {"hierarchical": False}),
    "power_sgd": ("power_sgd", {"rank": 2, "min_compression_rate": 1.0, "warmup_steps": 0}),
    "sparse": ("sparse", {"ratio": 0.1}),
    "auto": ("auto", {}),
    "async": ("async", {"sync_interval_ms": 1, "warmup_steps": WARM_UP}),
}
#: Other codecs, for tests in which they matter.
CODECS = {
    "bytegrad-minmax": ("bytegrad", {"hierarchical": False, "codec": "minmax_uint8"}),
    "bytegrad-fp16": ("bytegrad", {"hierarchical": False, "codec": "fp16"}),
    "bytegrad-bf16": ("bytegrad", {"hierarchical": False, "codec": "bf16"}),
}
_BY_NAME = ALGORITHMS | CODECS
#: Those whose results do not depend on time.
SYNCHRONOUS = [name for name in ALGORITHMS if name not in ("async", "auto")]
#: Those that average weights with peers while forward and backward run.
PEERS = ["decentralized-all", "decentralized-shift-one", "low_precision_decentralized"]
#: Those whose ranks train by themselves between rounds.
LOCAL = ["diloco", "diloco-streaming"]
#: Those whose ranks hold weights of their own.
OWN_WEIGHTS = [*PEERS, *LOCAL]


def made(name):
    """The algorithm of that name, which is not qadam."""
    registered, arguments = _BY_NAME[name]
    return Algorithm.init(registered, **arguments)


def wrapped(name, model, lr=0.05, **arguments_of_wrap):
    """`model` with the algorithm, and its optimizer."""
    registered, arguments = _BY_NAME[name]
    if registered == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=WARM_UP)
        chosen = QAdamAlgorithm(optimizer, **arguments)
    else:
        optimizer = training.sgd(model, lr=lr)
        chosen = made(name)
    return model.with_bagua([optimizer], chosen, **arguments_of_wrap), optimizer
