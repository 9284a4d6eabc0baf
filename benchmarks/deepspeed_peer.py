"""DeepSpeed's pipeline on the CPU: a peer of :mod:`peers`.

Its engine runs 1F1B over gloo, adds up and clips the gradients, and steps torch's AdamW. Its own
output is not shown.
"""

from __future__ import annotations

import logging
import os
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from peer_row import Part, Row, Side, adamw, plain_model, token_loss
from step import CLIP

from megapipe.distributed.mesh import ParallelMesh


def deepspeed_side(row: Row, mesh: ParallelMesh) -> Side:
    """Make the side of the plain GPT-2, each stage of which is one layer to DeepSpeed."""
    with redirect_stdout(StringIO()):
        engine = _engine(row, mesh)
    batches = row.batches()

    def step(i: int) -> float:
        parts = batches[i % len(batches)].split(row.size.batch)
        pairs = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]
        return float(engine.train_batch(iter(pairs)))

    return step


def _engine(row: Row, mesh: ParallelMesh) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(mesh.rank), "LOCAL_SIZE": str(row.pp)}
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    model = plain_model(row, tied=False)
    share = row.size.layers // row.pp
    stages = [
        LayerSpec(
            Part,
            model,
            range(stage * share, (stage + 1) * share),
            first=stage == 0,
            last=stage + 1 == row.pp,
        )
        for stage in range(row.pp)
    ]
    module = PipelineModule(stages, row.pp, loss_fn=token_loss, partition_method="uniform")
    for parameter in module.parameters():
        parameter.model_parallel = True  # otherwise only those of the first stage count in the norm
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(list(module.parameters())),
        config={
            "train_micro_batch_size_per_gpu": row.size.batch,
            "gradient_accumulation_steps": row.microbatches,
            "gradient_clipping": CLIP,
            "steps_per_print": None,
        },
    )
    return engine
