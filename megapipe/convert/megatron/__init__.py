"""Megatron-LM checkpoints: weights and arguments of a GPT, in either format of Megatron-LM.

:mod:`~megapipe.convert.megatron.arguments` maps the arguments and :mod:`.names` the names. A
:mod:`.legacy` folder has a file for each rank, a :mod:`.distributed` one has global tensors in
torch's DCP; :mod:`.folder` reads both.
"""
