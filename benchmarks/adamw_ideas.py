"""The ideas of adamw_compressors.py: name -> a rule of AdamW and a compressor."""

from collections.abc import Callable
from typing import Any

from emulated_compressors import Exact, Largest, LowRank, Part
from emulated_dion import Dion
from emulated_momenta import CorrectedMomenta, KeptMomenta
from emulated_rules import Differences, Gradients, Momenta, Residuals, Rule, Updates

Parts = list[Part]


TABLES = frozenset({"symbol.weight", "place.weight", "head.weight"})  # embeddings and the output
COARSE_TABLES: dict[str, Any] = {"exact": TABLES, "codec": "int4_block"}


def vectors(parts: Parts) -> frozenset[str]:
    return frozenset(part.name for part in parts if len(part.shape) < 2)


def low_rank(parts: Parts, rank: int = 4, kept: float = 1.0, **options: Any) -> Residuals:
    return Residuals(LowRank(parts, rank, **options), kept)


def largest(parts: Parts, ratio: float = 0.01, kept: float = 1.0, **options: Any) -> Residuals:
    return Residuals(Largest(parts, ratio, **options), kept)


def by_parameter(parts: Parts, ratio: float = 0.01, **options: Any) -> Residuals:
    """The largest of each matrix, and all vectors."""
    return largest(parts, ratio, scope="parameter", exact=vectors(parts), **options)


def in_4_bits(parts: Parts, ratio: float = 0.02, **options: Any) -> Residuals:
    """More elements of fewer bits: the bytes of 1 %."""
    return by_parameter(parts, ratio, codec="int4_block", **options)


def in_2_bits(parts: Parts, ratio: float = 1 / 64, **options: Any) -> Residuals:
    """As sparse_loco: 64 of each chunk of 4096 elements."""
    return largest(parts, ratio, scope="chunk", codec="bit2_block", **options)


def model_in_4_bits(parts: Parts) -> Largest:
    """2 % of the whole model's elements: the bytes of 1 %."""
    return Largest(parts, 0.02, codec="int4_block")


def dion(parts: Parts, rank: int, factor: float, others: frozenset[str] = frozenset()) -> Dion:
    """Dion; `others` by exact gradients and AdamW, as vectors are."""
    others = others | vectors(parts)
    rest = Gradients(Residuals(Exact([part for part in parts if part.name in others])))
    return Dion([part for part in parts if part.name not in others], rank, rest, factor)


def dion_beside_power(parts: Parts, factor: float) -> Dion:
    """Dion of rank 4; embeddings and the output by PowerSGD of rank 4 and AdamW."""
    others = TABLES | vectors(parts)
    rest = Gradients(low_rank([part for part in parts if part.name in others]))
    return Dion([part for part in parts if part.name not in others], 4, rest, factor)


#: Name -> (parts of the model, steps) -> rule.
IDEAS: dict[str, Callable[[Parts, int], Rule]] = {
    "exact": lambda p, n: Gradients(Residuals(Exact(p))),
    # PowerSGD of rank 4.
    "power": lambda p, n: Gradients(low_rank(p)),
    "power, tables exact": lambda p, n: Gradients(low_rank(p, exact=TABLES)),
    "power, warm-up": lambda p, n: Gradients(low_rank(p), n // 10),
    "power, tables exact, warm-up": lambda p, n: Gradients(low_rank(p, exact=TABLES), n // 10),
    "power, tables in 4 bits": lambda p, n: Gradients(low_rank(p, **COARSE_TABLES)),
    "power, tables in 4 bits, warm-up": lambda p, n: Gradients(
        low_rank(p, **COARSE_TABLES), n // 10
    ),
    "power, updates, tables in 4 bits, warm-up": lambda p, n: Updates(
        low_rank(p, **COARSE_TABLES), n // 10
    ),
    "power, tables of rank 16": lambda p, n: Gradients(low_rank(p, wide=TABLES)),
    "power, rank 8": lambda p, n: Gradients(low_rank(p, 8)),
    "power, two iterations": lambda p, n: Gradients(low_rank(p, iterations=2)),
    "power, residuals decay": lambda p, n: Gradients(low_rank(p, kept=0.9)),
    "power, released over 5 steps": lambda p, n: Gradients(low_rank(p), release=0.2),
    "power, local squares": lambda p, n: Gradients(low_rank(p), squares="local"),
    "power, factored squares": lambda p, n: Gradients(low_rank(p), squares="factored"),
    "power, momenta": lambda p, n: Momenta(low_rank(p), n * 15 // 100),
    "power, momenta, warm-up 5 %": lambda p, n: Momenta(low_rank(p), n // 20),
    "momenta, exact": lambda p, n: Momenta(Residuals(Exact(p)), n * 15 // 100),
    "momenta, exact, settled": lambda p, n: Momenta(
        Residuals(Exact(p)), n * 15 // 100, settled=True
    ),
    "power, momenta, settled": lambda p, n: Momenta(low_rank(p), n * 15 // 100, settled=True),
    "power, v frozen": lambda p, n: Gradients(low_rank(p), n * 15 // 100, squares="frozen"),
    "power, settled": lambda p, n: Gradients(
        low_rank(p), n * 15 // 100, squares="frozen", settled=True
    ),
    "power, corrected momenta, settled": lambda p, n: CorrectedMomenta(
        LowRank(p, 4), n * 15 // 100, masked=False, settled=True
    ),
    "momenta, exact, warm-up 5 %": lambda p, n: Momenta(Residuals(Exact(p)), n // 20),
    "updates, exact": lambda p, n: Updates(Residuals(Exact(p))),
    "power, momenta, v refreshed": lambda p, n: Momenta(low_rank(p), n // 10, 20),
    "power, updates": lambda p, n: Updates(low_rank(p)),
    "power, differences": lambda p, n: Differences(LowRank(p, 4)),
    # Ranks by layer, at the bytes of rank 4.
    "power, rank by error": lambda p, n: Gradients(low_rank(p, by="error")),
    "power, rank by relative error": lambda p, n: Gradients(low_rank(p, by="relative error")),
    "power, rank by relative error, warm-up": lambda p, n: Gradients(
        low_rank(p, by="relative error"), n // 10
    ),
    "power, momenta, rank by error": lambda p, n: Momenta(low_rank(p, by="error"), n * 15 // 100),
    "power, momenta, rank by relative error": lambda p, n: Momenta(
        low_rank(p, by="relative error"), n * 15 // 100
    ),
    # Dion, and its error feedback under AdamW.
    **{
        f"dion, rank {rank}, rate x {factor}": (
            lambda p, n, rank=rank, factor=factor: dion(p, rank, factor)
        )
        for rank in (4, 1000)
        for factor in (10, 20, 40, 80)
    },
    **{
        f"dion, tables exact, rank {rank}, rate x {factor}": (
            lambda p, n, rank=rank, factor=factor: dion(p, rank, factor, TABLES)
        )
        for rank in (4, 1000)
        for factor in (10, 20, 40, 80)
    },
    **{
        f"dion, tables by power, rate x {factor}": (
            lambda p, n, factor=factor: dion_beside_power(p, factor)
        )
        for factor in (10, 20, 40, 80)
    },
    "power, kept momenta": lambda p, n: KeptMomenta(LowRank(p, 4)),
    "power, kept momenta, v frozen": lambda p, n: KeptMomenta(LowRank(p, 4), n * 15 // 100),
    # Sparse, 1 %.
    "sparse": lambda p, n: Gradients(largest(p)),
    "sparse, by parameter": lambda p, n: Gradients(by_parameter(p)),
    "sparse, by parameter, warm-up": lambda p, n: Gradients(by_parameter(p), n // 10),
    "sparse, 4 bits": lambda p, n: Gradients(in_4_bits(p)),
    "sparse, ratio falls": lambda p, n: Gradients(by_parameter(p, falls=n // 5)),
    "sparse, residuals decay": lambda p, n: Gradients(by_parameter(p, kept=0.9)),
    "sparse, released over 10 steps": lambda p, n: Gradients(by_parameter(p), release=0.1),
    "sparse, local squares": lambda p, n: Gradients(by_parameter(p), squares="local"),
    "sparse, factored squares": lambda p, n: Gradients(by_parameter(p), squares="factored"),
    "sparse, momenta": lambda p, n: Momenta(by_parameter(p), n * 15 // 100),
    "sparse, momenta, 4 bits": lambda p, n: Momenta(in_4_bits(p), n * 15 // 100),
    "sparse, momenta of the model, 4 bits": lambda p, n: Momenta(
        largest(p, 0.02, codec="int4_block"), n * 15 // 100
    ),
    "sparse, momenta, v refreshed": lambda p, n: Momenta(by_parameter(p), n // 10, 20),
    "sparse, updates": lambda p, n: Updates(by_parameter(p)),
    "sparse, updates, warm-up": lambda p, n: Updates(by_parameter(p), n // 10),
    "sparse, updates, masked": lambda p, n: Updates(by_parameter(p), masked=True),
    "sparse, updates, 4 bits": lambda p, n: Updates(in_4_bits(p)),
    "sparse, updates of the model": lambda p, n: Updates(largest(p)),
    "sparse, updates of the model, 4 bits": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block")
    ),
    "sparse, updates of the model, 4 bits, warm-up": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block"), n // 10
    ),
    "sparse, updates in 2 bits": lambda p, n: Updates(in_2_bits(p)),
    "sparse, updates in 2 bits, 1/32": lambda p, n: Updates(in_2_bits(p, 1 / 32)),
    "sparse, updates of the model, 4 bits, v shared": lambda p, n: Updates(
        largest(p, 0.02, codec="int4_block"), share=10
    ),
    "sparse, updates of the model, 4 bits, 4 %": lambda p, n: Updates(
        largest(p, 0.04, codec="int4_block")
    ),
    "sparse, updates of the model, 4 bits, masked": lambda p, n: Updates(
        Residuals(model_in_4_bits(p)), masked=True
    ),
    "sparse, updates of the model, 4 bits, masked, warm-up": lambda p, n: Updates(
        Residuals(model_in_4_bits(p)), n // 10, masked=True
    ),
    "sparse, DGC": lambda p, n: CorrectedMomenta(Largest(p, 0.01)),
    "sparse, DGC, not masked": lambda p, n: CorrectedMomenta(Largest(p, 0.01), masked=False),
    "sparse, DGC, ratio falls": lambda p, n: CorrectedMomenta(Largest(p, 0.01, falls=n // 5)),
    "sparse, DGC, not masked, ratio falls": lambda p, n: CorrectedMomenta(
        Largest(p, 0.01, falls=n // 5), masked=False
    ),
    "sparse, DGC, warm-up": lambda p, n: CorrectedMomenta(Largest(p, 0.01), n // 10, frozen=False),
    "sparse, DGC, not masked, warm-up": lambda p, n: CorrectedMomenta(
        Largest(p, 0.01), n // 10, masked=False, frozen=False
    ),
    "sparse, DGC, 4 bits, v frozen": lambda p, n: CorrectedMomenta(
        model_in_4_bits(p), n * 15 // 100
    ),
    "sparse, DGC, 4 bits, v frozen, not masked": lambda p, n: CorrectedMomenta(
        model_in_4_bits(p), n * 15 // 100, masked=False
    ),
    "sparse, DGC, 4 bits, settled, not masked": lambda p, n: CorrectedMomenta(
        model_in_4_bits(p), n * 15 // 100, masked=False, settled=True
    ),
    "sparse, momenta of the model, 4 bits, settled": lambda p, n: Momenta(
        Residuals(model_in_4_bits(p)), n * 15 // 100, settled=True
    ),
    "sparse, 4 bits, v frozen": lambda p, n: Gradients(
        Residuals(model_in_4_bits(p)), n * 15 // 100, squares="frozen"
    ),
    "sparse, 4 bits, settled": lambda p, n: Gradients(
        Residuals(model_in_4_bits(p)), n * 15 // 100, squares="frozen", settled=True
    ),
    "sparse, DGC, v frozen, not masked": lambda p, n: CorrectedMomenta(
        Largest(p, 0.01), n * 15 // 100, masked=False
    ),
    "power, corrected momenta, v frozen": lambda p, n: CorrectedMomenta(
        LowRank(p, 4), n * 15 // 100, masked=False
    ),
    "power, corrected momenta, v frozen, warm-up 5 %": lambda p, n: CorrectedMomenta(
        LowRank(p, 4), n // 20, masked=False
    ),
    "sparse, kept momenta, 4 bits, v frozen": lambda p, n: KeptMomenta(
        model_in_4_bits(p), n * 15 // 100
    ),
    "sparse, differences": lambda p, n: Differences(by_parameter(p).compressor),
}
