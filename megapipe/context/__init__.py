"""Context parallelism as data: which positions ranks hold, and who attends to what when. No torch.

:mod:`~megapipe.context.positions` says which rows hold which positions,
:mod:`~megapipe.context.split` cuts sequences over ranks, :mod:`~megapipe.context.entries` finds
what there is to compute between a block of queries and one of keys,
:mod:`~megapipe.context.packs` which of it one call of a kernel computes, and
:mod:`~megapipe.context.plan` what blocks travel so that all of it is computed once.
:mod:`~megapipe.context.tensors` has the shapes and types of what travels.
:mod:`megapipe.layers.ring_attention` executes a plan.
"""
