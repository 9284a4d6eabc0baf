"""Import of models from Hugging Face folders and foreign checkpoints, and export of checkpoints.

Import and export go tensor by tensor. A :class:`HuggingFaceFolder` is read like a checkpoint, by
regions; :func:`export` writes such a folder. The function :func:`import_model` makes a checkpoint
from any :class:`~megapipe.convert.weight_source.WeightSource`: a Hugging Face folder, or a
checkpoint of Megatron-LM (:mod:`megapipe.convert.megatron`) or torch (:mod:`megapipe.convert.dcp`).
"""

from megapipe.convert.export import check_export, export
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.convert.import_model import import_model

__all__ = ["HuggingFaceFolder", "check_export", "export", "import_model"]
