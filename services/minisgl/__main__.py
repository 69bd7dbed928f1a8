"""`python -m minisgl` and the `minisgl` command: one program."""

import sys


def main() -> int:
    """Run the command line; an interrupt while it is still being imported ends it quietly too."""
    try:
        from minisgl.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
