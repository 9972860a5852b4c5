"""Entry point of the ``lynxkv`` command."""

import os
import sys


def main() -> None:
    """Run the command line."""
    # Before any library starts its threads: one busy thread a process, and idle ones asleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from lynxkv.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"lynxkv: the command line needs {error.name}, which is not installed: pip install 'lynxkv[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()
