"""Context parallelism as data, without torch: the positions of each rank, and ring plans of
attention.

The module :mod:`~megapipe.context.positions` describes the positions that a tensor's rows hold, and
:mod:`~megapipe.context.split` splits sequences over ranks. The scores to compute between a block of
queries and a block of keys are listed by :mod:`~megapipe.context.score_rects` and grouped into
kernel calls by :mod:`~megapipe.context.packs`. A ring plan (:mod:`~megapipe.context.plan`) says
when ranks send queries or keys to each other, so that every score is computed once. The shapes and
types of the tensors that are sent are in :mod:`~megapipe.context.tensors`. The module
:mod:`megapipe.layers.ring_attention` executes a plan.
"""
