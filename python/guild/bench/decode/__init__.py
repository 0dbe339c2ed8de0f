"""`guild bench --decode`: few tokens, no gradients, beside the speed of the memory."""
