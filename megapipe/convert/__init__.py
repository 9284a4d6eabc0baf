"""Models in and out: folders as Hugging Face's libraries read and write them, and checkpoints.

Both ways go tensor by tensor. :class:`HuggingFaceFolder` is read like a checkpoint, by regions;
:func:`export` writes such a folder of a checkpoint, :func:`import_model` a checkpoint of such a
folder, or of any :class:`~megapipe.convert.source.WeightSource`: :mod:`megapipe.convert.megatron`
and :mod:`megapipe.convert.dcp` have those of Megatron-LM and of torch.distributed.checkpoint.
"""

from megapipe.convert.adopt import import_model
from megapipe.convert.export import check_export, export
from megapipe.convert.folder import HuggingFaceFolder

__all__ = ["HuggingFaceFolder", "check_export", "export", "import_model"]
