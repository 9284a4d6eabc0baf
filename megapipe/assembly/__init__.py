"""Makes kernels, sharding, context parallelism and expert replicas of stages, for one process."""
