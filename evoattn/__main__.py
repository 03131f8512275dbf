"""`python -m evoattn` is the `evoattn` command."""

from evoattn.cli.entry import main

if __name__ == "__main__":
    main()
