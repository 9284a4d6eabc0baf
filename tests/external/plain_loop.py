"""A training loop as one writes it with transformers: one process, the whole batch at once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, get_scheduler

from tests.external.recipe import Outcome, Recipe
from tests.external.stand_ins import InDouble


def train(recipe: Recipe, folder: Path, rows: Tensor) -> Outcome:
    """Train on rows [steps x batch, s + 1] in their order."""
    dtype = torch.float64 if recipe.wide else torch.float32
    with InDouble() if recipe.wide else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1]},
                {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        schedule = get_scheduler(
            "cosine_warmup_with_min_lr",
            optimizer,
            num_warmup_steps=recipe.warmup + 1,
            num_training_steps=recipe.steps,
            scheduler_specific_kwargs={"min_lr": recipe.min_lr},
        )
        outcome = Outcome([], [], {n: p.detach() for n, p in model.named_parameters()})
        for batch in rows.split(recipe.batch):
            labels = batch[:, 1:].contiguous()
            given = {"labels": labels, "shift_labels": labels, "use_cache": False}
            loss = model(batch[:, :-1], **given).loss
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
            outcome.norms.append(norm.item())
    return outcome
