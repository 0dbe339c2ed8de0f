"""Layers over ranks: what `guild.bench.parallel` is asked for, and other libraries' ways."""
