"""`python -m evoattn` is the `evoattn` command."""

from evoattn.cli.main import main

if __name__ == "__main__":
    main()
