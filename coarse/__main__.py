"""`python -m coarse` is the `coarse` command."""

from coarse.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
