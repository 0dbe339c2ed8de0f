"""Guild as torch sees it: the compiled library, its ops, their fake kernels and gradients."""
