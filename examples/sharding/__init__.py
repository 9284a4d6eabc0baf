"""A sharding planner for one block: rules, boxing, and published methods on top of them.

It plans and proves a block on simulated devices of one process. It does not drive the trainer.
"""
