"""``python -m engine.compiled``: builds the compiled step into the cache, for instance while an image is built."""

from __future__ import annotations

import sys

from engine.compiled.build import CompiledStepError, build_library


def main() -> None:
    try:
        print(f"the compiled step is ready in {build_library(print)}")
    except CompiledStepError as error:
        sys.exit(f"headlong: {error}")


main()
