"""What is asked: a model, a job, a layout, faults and prices on a cluster."""

PRODUCT = "headway"
