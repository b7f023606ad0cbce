"""Makes the folders of tests/ importable: `from single import communicator_conformance`."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
