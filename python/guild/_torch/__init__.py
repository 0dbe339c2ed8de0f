"""What torch sees of Guild: the compiled library, its ops, their fake kernels and gradients."""
