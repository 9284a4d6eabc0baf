"""Checkpoints of Megatron-LM: weights and arguments of its GPT, in either of its formats.

:mod:`~megapipe.convert.megatron.arguments` maps the arguments, :mod:`.names` the names; a
:mod:`.legacy` folder has a file for each rank, a :mod:`.distributed` one global tensors in torch's
DCP; :mod:`.folder` is what both are read as.
"""
