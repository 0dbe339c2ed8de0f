"""What `guild train` runs: a small MoE language model that learns Python from source code."""
