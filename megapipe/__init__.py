"""megapipe: pretraining of GPT-style models with data, tensor and pipeline parallelism.

Start reading at :mod:`megapipe.train.step` (one training step) or :mod:`megapipe.schedule`
(pipeline schedules as data). ``docs/design.md`` has the whole picture.
"""

__version__ = "0.1.0"
