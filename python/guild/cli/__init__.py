"""The `guild` command."""
