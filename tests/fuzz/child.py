"""One target under the fuzzer: python -m tests.fuzz.child TARGET [libFuzzer's options]"""

from __future__ import annotations

import sys

import atheris

from tests.fuzz.names import INSTRUMENTED

with atheris.instrument_imports(include=list(INSTRUMENTED)):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
