"""`bagua plan`, and its formulae beside steps that were measured."""

import re
import sys
from pathlib import Path

import pytest
from bagua.__main__ import main
from bagua._tools.doctor.advice import advice
from bagua._tools.doctor.links import Measured
from bagua._tools.doctor.verdict import own_card
from bagua._tools.plan import MEASURED, lines
from bagua._tools.step_cost import ALGORITHMS, ROUNDS, Setting, step_seconds

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
GIVEN = ["--parameters", "124M", "--compute-seconds", "4", "--rate-mbit", "200", "--rtt-ms", "80"]
#: First cells of the README's table, and the formulae of these rows.
ROWS = {
    "`gradient_allreduce`": "gradient_allreduce",
    "`bytegrad`, 8 bits": "bytegrad, 8 bits",
    "`bytegrad`, 4 bits with error feedback": "bytegrad, 4 bits",
    "`power_sgd`, rank 4": "power_sgd, rank 4",
    "`diloco`, 4 bits, a round in 20 steps, overlap 10": ROUNDS,
}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(text, first):
    """Cells of the lines of a table, by the first one; the heads of its columns."""
    table = text[text.index(first) :].split("\n\n")[0].splitlines()
    return cells(table[0]), {row[0]: row[1:] for row in map(cells, table[2:])}


def links_of(heads):
    """Bytes a second and seconds of a message of columns such as `200 Mb/s, 20 ms, 0.01 %`."""
    for head in heads:
        rate, unit, trip = re.match(r"([\d.]+) ([MG])b/s, ([\d.]+) ms", head).groups()
        yield float(rate) * {"M": 125e3, "G": 125e6}[unit], float(trip) / 2e3


def page(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_measured_steps_of_the_first_page_lie_as_near_to_the_prediction_as_it_says():
    head, rows = rows_of(README, "| | 1 Gb/s, 1 ms |")
    parameters, least, most = map(
        float,
        re.search(
            r"model of ([\d.]+) million .*takes\s([\d.]+) to ([\d.]+) s", README, re.S
        ).groups(),
    )
    compute = (least + most) / 2
    ratios = {}
    for row, name in ROWS.items():
        *measured, sent = rows[row]
        for (rate, latency), cell in zip(links_of(head[1:-1]), measured, strict=True):
            setting = Setting(compute, 4e6 * parameters, rate, latency, interval=20)
            ratios[name, rate] = float(cell.split()[0]) / step_seconds(name, setting, 2)
        predicted = ALGORITHMS[name](setting, 2).bytes / 1e6
        shapes = 2 if name == "power_sgd, rank 4" else 1.01
        # A round of DiLoCo has the model's buffers in float32 too, and the table a few rounds.
        assert name == ROUNDS or 1 / shapes < predicted / float(sent) < shapes, name
    low, high = MEASURED
    assert low == round(min(ratios.values()), 1), ratios
    assert high == round(max(ratios.values()), 1), ratios


def test_steps_of_many_ranks_took_as_long_as_the_page_about_predictions_says():
    text = (REPOSITORY / "docs/scaling.md").read_text()
    _, rows = rows_of(text, "| ranks | compute | DDP |")
    arms = ("gradient_allreduce", *ALGORITHMS)  # DDP's steps are those of exact gradients
    for ranks, (compute, *steps) in rows.items():
        codec = 6e9 / int(ranks)
        setting = Setting(float(compute), 4 * 3343524, 50e6 / 8, 5e-5, codec=codec)
        for name, cell in zip(arms, steps, strict=False):
            seconds, times = map(float, re.findall(r"[\d.]+", cell))
            predicted = step_seconds(name, setting, int(ranks))
            assert seconds / predicted == pytest.approx(times, abs=0.02), (ranks, name)


def test_steps_of_gpt2_small_took_as_long_as_predicted_within_a_quarter():
    findings = (REPOSITORY / "docs/findings.md").read_text()
    _, rows = rows_of(findings, "| | MB a step | seconds a step |")
    measured = {name: tuple(map(float, row[:2])) for name, row in rows.items()}
    ddp, four_bits, rounds = measured.values()
    assert "124 million parameters, 2 ranks with one thread each over 200 Mb/s" in findings
    setting = Setting(1.0, 498e6, 25e6, 5e-5, interval=20)
    # Almost all of DiLoCo's step is the computation.
    setting = setting._replace(compute=rounds[1] - (step_seconds(ROUNDS, setting, 2) - 1.0))
    for name, (sent, seconds) in (("gradient_allreduce", ddp), ("bytegrad, 4 bits", four_bits)):
        assert 1 <= seconds / step_seconds(name, setting, 2) < 1.25, name
        assert ALGORITHMS[name](setting, 2).bytes / 1e6 == pytest.approx(sent, rel=0.01)


def test_bytes_are_those_of_the_table_of_algorithms():
    _, rows = rows_of((REPOSITORY / "docs/algorithms.md").read_text(), "| name | class |")
    for row, name in (
        ("gradient_allreduce", "gradient_allreduce"),
        ("bytegrad", "bytegrad, 8 bits"),
        ("low_precision_decentralized", "low_precision_decentralized"),
    ):
        counted = next(cells for key, cells in rows.items() if key.startswith(f"[`{row}`]"))[3:5]
        for ranks, text in zip((2, 4), counted, strict=True):
            sent = ALGORITHMS[name](Setting(1.0, 4e6, 1e9, 1e-4), ranks).bytes / 4e6
            assert sent == pytest.approx(float(text), rel=0.01), (name, ranks)


def test_the_lines_are_those_of_the_first_page_and_of_the_pages_of_algorithms(capsys):
    text = page(capsys, *GIVEN[:4], "--rate-mbit", "30", "--rtt-ms", "80", "--ranks", "4")
    codes = re.findall(r"^ +(bagua\.wrap\(.*\))$", text, re.M)
    assert len(codes) == 5
    power_sgd = codes.pop(3)
    assert power_sgd == "bagua.wrap(model, [optimizer], PowerSGDAlgorithm())"
    assert "`PowerSGDAlgorithm()`" in (REPOSITORY / "docs/which-algorithm.md").read_text()
    assert "a round in 100 steps" in text  # the default, which the line does not name
    for code in codes:
        assert f"`{code}`" in README, code


def test_a_page_names_the_given_the_choice_and_what_is_left_out(capsys):
    text = page(capsys, *GIVEN)
    told = " ".join(text.split())
    assert "124 million parameters in float32, of which a rank alone computes a step in 4 s" in told
    assert "2 ranks, 200 Mbit/s, 80 ms there and back" in told
    assert 'DiLoCoAlgorithm(interval=50, codec="int4_block")' in told
    assert "Take DiLoCo in 4 bits, a round in 50 steps, for thousands of steps" in told
    assert "Left out: packets that get lost" in told
    assert f"took {MEASURED[0]:g} to {MEASURED[1]:g} times as long" in told
    assert max(len(line) for line in text.splitlines() if "bagua.wrap(" not in line) <= 80


def test_the_command_of_the_page_about_predictions_prints_its_table(capsys):
    text = (REPOSITORY / "docs/scaling.md").read_text()
    arguments = re.search(r"^python -m bagua plan (.*)$", text, re.M).group(1).split()
    table = re.search(r"```text\n(.*?)```", text, re.S).group(1).splitlines()
    printed = page(capsys, *arguments).splitlines()
    assert len(table) == 6
    assert [line for line in printed if "bagua.wrap(" not in line][3:9] == table


def test_the_most_exact_gradients_that_hardly_wait_are_taken(capsys):
    for mbit, taken in (
        ("10000", "Take exact gradients: the most exact"),
        ("1000", "Take gradients in 8 bits: the most exact"),
        ("300", "Take gradients in 4 bits, error feedback: the most exact"),
        ("0.1", "Take DiLoCo in 4 bits, a round in 2000 steps, for thousands"),
    ):
        told = " ".join(page(capsys, *GIVEN[:4], "--rtt-ms", "0.2", "--rate-mbit", mbit).split())
        assert taken in told, told
    assert "also with the longest interval that is tried" in told


def test_power_sgd_is_a_line_where_its_steps_take_less_than_those_of_4_bits():
    for rate, count in ((1e10, 4), (1e6, 5)):
        assert len(lines(Setting(1.0, 4e8, rate, 1e-4), 2)) == count


def test_gradients_of_16_bits_are_half_of_exact_bytes_and_as_many_compressed_ones(capsys):
    sent = {
        dtype: re.findall(r"x +([\d.]+)  ", page(capsys, *GIVEN, "--dtype", dtype))
        for dtype in ("float32", "bfloat16")
    }
    assert [sent["float32"][0], sent["bfloat16"][0]] == ["496", "248"]
    assert sent["float32"][1:] == sent["bfloat16"][1:]


def test_far_ranks_wait_for_round_trips_and_send_buckets_beside_each_other():
    def waits(name, trip, megabytes, ranks=2):
        setting = Setting(1e-9, 1e6 * megabytes, 1e15, trip / 2, codec=1e18)
        return step_seconds(name, setting, ranks) / trip

    for name, trips in (
        ("gradient_allreduce", 1.5),
        ("sparse, 1 %", 1.5),
        ("decentralized, shift_one", 1.5),
        ("bytegrad, 4 bits", 2),
        ("power_sgd, rank 4", 2.5),
    ):
        assert waits(name, 0.16, 1) == pytest.approx(trips, rel=1e-3), name
    assert waits("gradient_allreduce", 0.16, 1, ranks=4) == pytest.approx(2, rel=1e-3)
    assert waits("gradient_allreduce", 1e-4, 1, ranks=4) == pytest.approx(3, rel=1e-3)
    sixteen_buckets = 16 * 10.4
    assert waits("bytegrad, 4 bits", 0.16, sixteen_buckets) == pytest.approx(4, rel=1e-3)
    assert waits("bytegrad, 4 bits", 1e-4, sixteen_buckets) == pytest.approx(16, rel=1e-2)


def test_wrong_use_names_the_argument_and_the_remedy(capsys):
    for arguments, words in (
        ([], "--parameters, --compute-seconds, --rate-mbit, --rtt-ms missing. `torchrun"),
        (GIVEN[:-2], "bagua plan: --rtt-ms missing. `torchrun --nproc-per-node 2 -m bagua doctor"),
        (["--parameters", "124X"], "argument --parameters: '124X' must be a number of parameters"),
        (["--parameters", "0"], "such as 124M, 7B or 124000000"),
        (["--parameters", "nan"], "such as 124M, 7B or 124000000"),
        (["--parameters", ""], "such as 124M, 7B or 124000000"),
        (["--rate-mbit", "0"], "argument --rate-mbit: 0 must be between 0.001 and 1e+09"),
        (["--compute-seconds", "inf"], "argument --compute-seconds: inf must be between"),
        (["--rtt-ms", "fast"], "argument --rtt-ms: 'fast' is not a number"),
        (["--ranks", "1"], "argument --ranks: '1' must be a whole number from 2 to 65536: a rank"),
        (["--ranks", "two"], "argument --ranks: 'two' must be a whole number from 2"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ):
        try:
            code = main(["plan", *arguments])
        except SystemExit as end:
            code = end.code
        assert code == 2
        assert words in capsys.readouterr().err, arguments


def test_extremes_that_are_allowed_give_a_page(capsys):
    for parameters, compute, rate, trip, ranks in (
        ("1", "1e-6", "1e9", "0", "2"),
        ("1e15", "1e9", "0.001", "1e6", "65536"),
        ("1e15", "1e-6", "0.001", "1e6", "65536"),
    ):
        given = ["--parameters", parameters, "--compute-seconds", compute, "--ranks", ranks]
        assert "Take " in page(capsys, *given, "--rate-mbit", rate, "--rtt-ms", trip)


def test_the_command_that_the_doctor_prints_is_taken_and_has_its_figures(capsys, monkeypatch):
    cards = {rank: own_card("cpu")._replace(node=rank) for rank in range(3)}
    link = Measured(0.0405, 0.0, 58 * 125e3, 70 * 125e3)
    _, command = advice(cards, {(0, 1): link}, parameters=1e8, compute=1.5)
    assert max(map(len, command.splitlines())) + 2 <= 80
    program, *arguments = command.replace("\\\n", " ").split(" -m bagua ")
    assert program == "python"
    monkeypatch.setattr(sys, "argv", ["bagua", *arguments[0].split()])
    assert main() == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "100 million parameters in float32, of which a rank alone computes a step in 1.5 s" in told
    )
    assert "3 ranks, 58 Mbit/s, 81 ms there and back" in told


#: Rows of docs/sharded-over-ethernet.md: over all ranks those in 8 bits of the three units that
#: FSDP2 sends (a unit is half an all-reduce), or the formula between copies of a shard.
OVER_ALL = {
    "FSDP2 or ZeRO-3 over all ranks": 0,
    "over all, gradients in 8 bits": 1,
    "over all, gradients and weights in 8 bits": 3,
}
BETWEEN_COPIES = {
    "HSDP, exact": "gradient_allreduce",
    "HSDP, 8 bits": "bytegrad, 8 bits",
    "HSDP, 4 bits with residuals": "bytegrad, 4 bits",
    "rounds of 100 steps, 4 bits": ROUNDS,
}


def of_boxes(way, size, boxes=2, ranks=8):
    """Bytes that a rank sends to other boxes, or over all to all, and those of a box's link."""
    setting = Setting(1.0, size, 1e9, 1e-4, interval=100)
    if way in BETWEEN_COPIES:
        shard = setting._replace(bytes=size / ranks)
        sent = ALGORITHMS[BETWEEN_COPIES[way]](shard, boxes).bytes
        return sent, ranks * sent
    everyone = boxes * ranks
    exact, eight = (
        units / 2 * ALGORITHMS[name](setting, everyone).bytes
        for units, name in (
            (3 - OVER_ALL[way], "gradient_allreduce"),
            (OVER_ALL[way], "bytegrad, 8 bits"),
        )
    )
    # A ring crosses a link once; compressed parts go directly to each of the ranks outside.
    outside = ranks * (everyone - ranks) / (everyone - 1)
    return exact + eight, exact + outside * eight


def test_the_page_about_sharded_models_has_the_bytes_and_seconds_of_the_formulae():
    text = (REPOSITORY / "docs/sharded-over-ethernet.md").read_text()
    _, rows = rows_of(text, "| way | a rank sends, GB |")
    assert list(rows) == [*OVER_ALL, *BETWEEN_COPIES]
    for way, (sent, carried, seconds) in rows.items():
        expected = [of_boxes(way, 4e9 * billions) for billions in (1, 7, 70)]
        on_link = expected[1][1] * 8
        assert sent == " · ".join(f"{a / 1e9:.3g}" for a, _ in expected), way
        assert carried == " · ".join(f"{b / 1e9:.3g}" for _, b in expected), way
        assert seconds == " · ".join(f"{on_link / rate:.3g}" for rate in (1e9, 1e10, 2.5e10)) + " s"


def test_measured_bytes_of_sharded_models_are_those_of_the_formulae():
    text = (REPOSITORY / "docs/sharded-over-ethernet.md").read_text()
    _, rows = rows_of(text, "| way | seconds per step | to FSDP2 |")
    numel = 709284  # of benchmarks/bench_fsdp.py --boxes
    for (way, (seconds, to_fsdp, measured)), name in zip(
        rows.items(), [*OVER_ALL, *BETWEEN_COPIES], strict=True
    ):
        carried = of_boxes(name, 4 * numel, ranks=2)[1] / 1e6
        if name == "FSDP2 or ZeRO-3 over all ranks":
            carried *= 4 / 3  # gloo sums the exact gradients of shards by an all-reduce
        if name == "rounds of 100 steps, 4 bits":
            carried *= 2  # measured with rounds of 50
        assert float(measured) == pytest.approx(carried, rel=0.04), way
        ratio = float(seconds) / float(next(iter(rows.values()))[0])
        assert float(to_fsdp) == pytest.approx(ratio, rel=0.03), way
