"""The `evoattn` command: one file per group of commands."""
