"""The code blocks of README.md and the guide, and how each of them is run.

A block of Python that makes a process group is a script. The others of a page are run one after
the other in one namespace, which begins with what `namespace` has; a block that wraps a model gets
a new one. Commands match a line of COMMANDS, which names the test that runs them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
#: Pages for contributors, whose commands are for people who read them.
REFERENCE = {"api.md", "cuda.md", "cuda-evidence.md", "design.md", "wire-format.md"}
FENCE = re.compile(r"^( *)(`{3,})(.*?)\n(.*?)^\1\2$", re.M | re.S)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.M)

#: (regular expression of a command, the file that runs it)
COMMANDS = [
    (r"torchrun --nproc_per_node=\d+ (train|script)\.py", "tests/ranks/test_documented_code.py"),
    (r"(BAGUA_TOP=1|GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo) torchrun .* train\.py",
     "tests/ranks/test_documented_code.py"),
    (r"GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 .* train\.py", "tests/deep/test_two_nodes.py"),
    (r"torchrun .*docs/examples/(getting_started\.py|train\.py --folder checkpoints)",
     "tests/ranks/test_documented_code.py"),
    (r"torchrun .*docs/examples/resume\.py --folder checkpoints", "tests/deep/test_restarts.py"),
    (r"torchrun .*docs/examples/elastic(_islands\.py .*|\.py)",
     "tests/deep/test_elastic_example.py"),
    (r"python docs/examples/mailbox\.py .*", "tests/deep/test_mailbox_jobs.py"),
    (r"torchrun .*docs/examples/comm_hook\.py.*", "tests/ranks/test_comm_hook_example.py"),
    (r"torchrun .*docs/examples/lora\.py.*", "tests/integrations/test_adapters.py"),
    (r"torchrun .*docs/examples/integrations/fsdp\.py( --replicas 3)?",
     "tests/deep/test_fsdp_example.py"),
    (r"torchrun .*docs/examples/integrations/lightning_islands\.py",
     "tests/deep/test_island_example.py"),
    (r"(torchrun --nproc_per_node=2|python) docs/examples/integrations/\w+_digits\.py .*",
     "tests/deep/integrations/test_integration_examples.py"),
    (r"sbatch docs/examples/job\.sbatch", "tests/ranks/test_documented_code.py"),
    (r"export MASTER_ADDR=.*|(srun|mpirun) .* python train\.py", "tests/deep/test_launchers.py"),
    (r"torchrun --nproc-per-node 2 -m bagua doctor( --train)?", "tests/deep/test_doctor.py"),
    (r"python -m bagua plan .*", "tests/single/test_step_plan.py"),
    (r"bagua top( 10\.0\.0\.1:29500)?", "tests/deep/test_top.py"),
    (r"python -m bagua", "tests/deep/test_report.py"),
    (r"make wheel|pip install (scikit-build-core cmake ninja|\. --no-build-isolation)",
     "tools/check_wheel"),
    (r"python benchmarks/scaling\.py .*", "tests/ranks/test_documented_code.py"),
]  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path below the repository.
        line: of its first line.
        language: the first word behind the fence.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def is_script(self):
        return "init_process_group(" in self.text

    def commands(self):
        """Its lines without comments, backslashes joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.split(" #")[0].strip() for line in lines if line.split("#")[0].strip()]


def pages():
    """README.md and the pages for users."""
    guide = [path for path in sorted(DOCS.rglob("*.md")) if path.name not in REFERENCE]
    return [REPOSITORY / "README.md", *guide]


def blocks(page):
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent, _, info, body = found.groups()
        body = SNIPPET.sub(lambda name: (DOCS / name.group(1)).read_text(), body)
        words = info.replace("{", " ").replace("}", " ").replace(".", " ").split()
        yield Block(
            str(page.relative_to(REPOSITORY)),
            text.count("\n", 0, found.start()) + 1,
            words[0] if words else "",
            re.sub(f"^{indent}", "", body, flags=re.M),
        )


def fragments():
    """Blocks of Python that are not scripts, by page."""
    found = {}
    for page in pages():
        own = [b for b in blocks(page) if b.language == "python" and not b.is_script]
        if own:
            found[str(page.relative_to(REPOSITORY))] = own
    return found


#: Packages that the cells of these calls need: tests/integrations/test_documented_code.py.
CELLS_ELSEWHERE = re.compile(r"lightning|accelerator|trainer")


def cells(elsewhere=False):
    """Calls in cells of tables, as a reader pastes them below README's imports, by page."""
    found = {}
    for page in pages():
        rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
        spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
        calls = [span for span in spans if re.search(r"\bbagua\.\w[\w.]*\(.*\)$", span)]
        own = [span for span in calls if bool(CELLS_ELSEWHERE.search(span)) == elsewhere]
        if own:
            found[str(page.relative_to(REPOSITORY))] = list(dict.fromkeys(own))
    return found


def imports_of_readme():
    """The names that README's first script imports."""
    script = next(b for b in blocks(REPOSITORY / "README.md") if b.language == "python")
    names = {}
    exec("\n".join(re.findall(r"^(?:import|from) .*", script.text, re.M)), names)
    return names


def scripts():
    return [b for p in pages() for b in blocks(p) if b.language == "python" and b.is_script]
