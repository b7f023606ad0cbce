"""Distributed algorithms, by class and by name."""

from typing import TYPE_CHECKING, Any

from bagua.torch_api.algorithms import (
    async_model_average as async_model_average,
    auto as auto,
    bytegrad as bytegrad,
    decentralized as decentralized,
    diloco as diloco,
    gradient_allreduce as gradient_allreduce,
    power_sgd as power_sgd,
    q_adam as q_adam,
    sparse as sparse,
)
from bagua.torch_api.algorithms.async_model_average import (
    AsyncModelAverageAlgorithm as AsyncModelAverageAlgorithm,
)
from bagua.torch_api.algorithms.auto import AutoAlgorithm as AutoAlgorithm
from bagua.torch_api.algorithms.base import (
    Algorithm as Algorithm,
    AlgorithmImpl as AlgorithmImpl,
    GlobalAlgorithmRegistry as GlobalAlgorithmRegistry,
    Traits as Traits,
)
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm as ByteGradAlgorithm
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm as DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm as LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.algorithms.diloco import (
    DiLoCoAlgorithm as DiLoCoAlgorithm,
    Elastic as Elastic,
    OuterSGD as OuterSGD,
)
from bagua.torch_api.algorithms.gradient_allreduce import (
    GradientAllReduce as GradientAllReduce,
    GradientAllReduceAlgorithm as GradientAllReduceAlgorithm,
)
from bagua.torch_api.algorithms.power_sgd import PowerSGDAlgorithm as PowerSGDAlgorithm
from bagua.torch_api.algorithms.q_adam import (
    QAdamAlgorithm as QAdamAlgorithm,
    QAdamOptimizer as QAdamOptimizer,
)
from bagua.torch_api.algorithms.sparse import SparseAlgorithm as SparseAlgorithm

if TYPE_CHECKING:
    from bagua._outer.mailbox import Mailbox as Mailbox


def __getattr__(name: str) -> Any:
    if name == "Mailbox":  # imported when it is used
        from bagua._outer.mailbox import Mailbox

        return Mailbox
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


for _name, _algorithm, _description in (
    ("gradient_allreduce", GradientAllReduceAlgorithm, "exact all-reduce of gradients"),
    ("bytegrad", ByteGradAlgorithm, "8-bit compressed all-reduce of gradients"),
    ("decentralized", DecentralizedAlgorithm, "weights averaged with all ranks or one peer a step"),
    (
        "low_precision_decentralized",
        LowPrecisionDecentralizedAlgorithm,
        "weights mixed with both neighbours on a ring, through 8-bit differences",
    ),
    ("async", AsyncModelAverageAlgorithm, "weights averaged during training"),
    ("diloco", DiLoCoAlgorithm, "local steps, joined by an outer optimizer every so many"),
    ("qadam", QAdamAlgorithm, "Adam with 8-bit momentum after a warm-up of exact gradients"),
    ("power_sgd", PowerSGDAlgorithm, "low-rank gradients with error feedback"),
    ("sparse", SparseAlgorithm, "the largest elements of gradients, with error feedback"),
    ("auto", AutoAlgorithm, "the fastest of exact and compressed gradients, by measuring"),
):
    GlobalAlgorithmRegistry.register(_name, _algorithm, _description)
