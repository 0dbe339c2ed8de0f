"""What `guild bench` measures: layers, their steps and memory, rounding, few tokens, FP8.

`guild.bench.parallel` measures layers over ranks.
"""
