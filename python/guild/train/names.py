"""How a run's layers are called where they are shown."""

NAMES = {"fp8": "Guild in FP8", "guild": "Guild", "plain": "plain PyTorch"}
