"""`guild bench --decode`: few tokens, no gradients, compared with the speed of the memory."""
