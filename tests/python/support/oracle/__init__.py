"""What the tests compare Guild with: every function in plain torch.

Nothing of Guild is called. Rows are picked by index, so rows that belong to no expert (padding,
rows past the end, skipped slots) never enter a product, not even times zero; gradients are
autograd's, except in `steps`, which keeps what every step of forward and backward leaves in memory.
"""
