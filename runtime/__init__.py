"""What is done: a plan as a real torch.distributed job, measured."""

PRODUCT = "headway"
