"""Guild on several GPUs, by torch.distributed: experts spread over ranks, and what FSDP2 needs.

Nothing here is imported until it is asked for; the rest of the library needs no process group.
"""
