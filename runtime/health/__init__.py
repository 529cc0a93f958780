"""Whether the machines are fit for a job: compute, memory and collectives of each rank against what is expected."""
