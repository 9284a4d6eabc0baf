"""A whole training step on one CPU core: ``python benchmarks/step.py``.

It is forward, backward, clipping and AdamW of a small GPT-2 and a small Llama, against Hugging
Face's classes and against a plain GPT-2 written for one device (:mod:`plain_gpt`). All sides of a
family start from the same weights, see the same batches, and must report the same losses.

Every side lives in a separate process, with one thread; the processes do a step one after the
other. Times are processor time, and the fastest steps of each side are compared. The Llama is also
timed against itself with a part left to autograd (:mod:`autograd_llama`), by turns in one process,
with the median over the rounds. Memory is the most that torch has allocated, from before the model
is built to the end of the second step, in a fresh process.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal
from unittest import mock

from common import Result, compare, parser, report, seconds

CHECKED_STEPS = 3
"""First steps whose losses are compared."""
TOLERANCE = 1e-5
LR, CLIP, DECAY, BETAS = 1e-3, 1.0, 0.1, (0.9, 0.95)

Family = Literal["gpt2", "llama", "mixtral"]
Step = Callable[[int], float]
"""Function that runs optimizer step i (from 0) and returns its loss."""


@dataclass(frozen=True)
class Size:
    """Size of model and batch; everything in fp32."""

    family: Family
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocab: int = 8192
    sequence: int = 256
    batch: int = 4

    def config(self) -> Any:
        """Return the resolved configuration of a run on one process, and its layout."""
        from megapipe.config.config import Config
        from megapipe.layout.resolve import resolve

        llama = {
            "norm": "rmsnorm",
            "positions": "rotary",
            "activation": "swiglu",
            "bias": False,
        }
        parts: dict[Family, dict[str, Any]] = {
            "gpt2": {},
            "llama": llama,
            "mixtral": {**llama, "moe": {"num_experts": 8, "top_k": 2, "aux_loss_coeff": 0.0}},
        }
        config = Config.model_validate(
            {
                "model": {
                    "layers": self.layers,
                    "hidden": self.hidden,
                    "heads": self.heads,
                    "vocab_size": self.vocab,
                    **parts[self.family],
                },
                "optimizer": {
                    "lr": LR,
                    "warmup_steps": 0,
                    "schedule": "constant",
                    "options": {"betas": list(BETAS)},
                    "weight_decay": DECAY,
                    "max_grad_norm": CLIP,
                },
                "train": {
                    "sequence_length": self.sequence,
                    "global_batch": self.batch,
                    "microbatch": self.batch,
                },
            }
        )
        return resolve(config, 1, self.vocab)

    def tokens(self) -> Any:
        """Draw a few batches, [n, b, s + 1]."""
        import torch

        generator = torch.Generator().manual_seed(0)
        shape = (CHECKED_STEPS, self.batch, self.sequence + 1)
        return torch.randint(self.vocab, shape, generator=generator)


def megapipe_side(size: Size, **kernels: Any) -> Step:
    """Make megapipe's side, with some `kernels` in place of its own."""
    import torch
    import torch.distributed as dist

    from megapipe import TrainStep
    from megapipe.distributed.mesh import Grid, ParallelMesh
    from megapipe.train.kernel_selection import agreed_kernels

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = ParallelMesh(Grid(), device=torch.device("cpu"), timeout_s=60.0)
    config, layout = size.config()
    used = replace(agreed_kernels(config, layout, mesh, layout.schedule), **kernels)
    train = TrainStep(config, layout, mesh, kernels=used)
    tokens = size.tokens()
    mask = torch.ones(size.batch, size.sequence, dtype=torch.bool)

    def rows(indices: Sequence[int]) -> Any:
        batch = tokens[indices[0] // size.batch % len(tokens)]
        return batch[:, :-1], batch[:, 1:], mask

    def step(i: int) -> float:
        (result,) = train.train(i, rows)
        return result.loss

    return step


def gate_side(size: Size) -> Step:
    from autograd_llama import swiglu

    return megapipe_side(size, swiglu=swiglu)


def rotation_side(size: Size) -> Step:
    from autograd_llama import Rotating

    from megapipe.model.gpt import block

    with mock.patch.object(block, "Attention", Rotating):
        return megapipe_side(size)


def initial_weights(size: Size, *, tied: bool = True) -> Any:
    """Return megapipe's initial weights as Hugging Face's state dict."""
    import torch

    from megapipe.distributed.mesh import Axis
    from megapipe.layers.parameter import Sharding, spec_of
    from megapipe.model.gpt.hf.weights import to_hf
    from megapipe.model.gpt.stage import GPTStage
    from megapipe.model.partition import StageSpec

    config, _ = size.config()
    model = config.model.model_copy(update={"tied_embeddings": tied})
    spec = StageSpec(embedding=True, layers=range(size.layers), head=True)
    stage = GPTStage(model, spec, Sharding(Axis.alone(), False, torch.float32))
    full = {}
    for parameter in stage.parameters():
        spec_ = spec_of(parameter)
        if spec_.name not in full:
            values = torch.empty(spec_.sizes)
            spec_.initialise(values, config.run.seed)
            full[spec_.name] = values[tuple(map(slice, spec_.shape))].clone()
    return to_hf(full, model)


def hugging_face_side(size: Size, **kernels: str) -> Step:
    from transformers import AutoModelForCausalLM

    from megapipe.model.gpt.hf.config import config_to_hf

    config, _ = size.config()
    given = config_to_hf(config.model, attn_implementation="sdpa", **kernels)
    model = AutoModelForCausalLM.from_config(given).train()
    model.load_state_dict(initial_weights(size))

    def loss(tokens: Any, labels: Any) -> Any:
        return model(tokens, labels=labels, shift_labels=labels, use_cache=False).loss

    return training(model, loss, size)


def plain_side(size: Size) -> Step:
    from plain_gpt import PlainGPT

    config, _ = size.config()
    model = PlainGPT(config.model)
    model.load_gpt2(initial_weights(size))
    return training(model, model, size)


def decayed(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: matrices with weight decay, vectors without."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def training(model: Any, loss_of: Callable[[Any, Any], Any], size: Size) -> Step:
    """Return the usual loop: fused AdamW, vectors without weight decay, clipping by the global
    norm."""
    import torch

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(decayed(parameters), lr=LR, betas=BETAS, fused=True)
    tokens = size.tokens()

    def step(i: int) -> float:
        batch = tokens[i % len(tokens)]
        loss = loss_of(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


BY_AUTOGRAD = {"its gate by autograd": gate_side, "its rotation by autograd": rotation_side}
"""Sides of megapipe with one part of a Llama as it is usually written. The difference is smaller
than between two processes of one side."""
OF_EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Modes of Hugging Face to compute experts."""
SIDES: dict[str, Callable[[Size], Step]] = {
    "megapipe": megapipe_side,
    "Hugging Face": hugging_face_side,
    "plain": plain_side,
    **BY_AUTOGRAD,
    **{name: partial(hugging_face_side, experts_implementation=name) for name in OF_EXPERTS},
}


def serve(side: str, size: Size, pipe: Connection) -> None:
    """Run the step that each message names; answer its loss and its seconds."""
    import torch

    torch.set_num_threads(1)
    step = SIDES[side](size)
    for i in iter(pipe.recv, None):
        start = time.process_time()
        loss = step(i)
        pipe.send((loss, time.process_time() - start))


def serve_beside(form: str, size: Size, rounds: int, pipe: Connection) -> None:
    """Answer the time of a step over that of a side of BY_AUTOGRAD, the median over the rounds."""
    import torch

    torch.set_num_threads(1)
    sides = megapipe_side(size), BY_AUTOGRAD[form](size)
    for i in range(CHECKED_STEPS):
        ours, theirs = (step(i) for step in sides)
        assert abs(ours - theirs) <= TOLERANCE * ours, f"step {i}: {form}: {ours}, {theirs}"
    numbers, cpu = itertools.count(CHECKED_STEPS), torch.device("cpu")

    def timed(step: Step) -> float:
        return seconds(lambda: step(next(numbers)), cpu)

    found = compare(partial(timed, sides[0]), partial(timed, sides[1]), rounds=rounds)
    pipe.send(found.ratio)


def weigh(side: str, size: Size, pipe: Connection) -> None:
    """Answer the most bytes that torch had allocated, in building the side and two steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step = SIDES[side](size)
        for i in range(2):
            step(i)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    pipe.send(max(itertools.accumulate(e.nbytes() for e in events)))


@contextmanager
def process(function: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Start a fresh process that runs `function(*args, pipe)`; yield our end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megapipe.train.train_step", "transformers"])
    ours, theirs = context.Pipe()
    child = context.Process(target=function, args=(*args, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()
        ours.close()


def times(size: Size, sides: Sequence[str], rounds: int) -> dict[str, float]:
    """Return seconds of the fastest step of each side; their losses are compared first."""
    with ExitStack() as stack:
        pipes = {s: stack.enter_context(process(serve, s, size)) for s in sides}

        def ask(side: str, i: int) -> tuple[float, float]:
            pipes[side].send(i)
            return pipes[side].recv()

        for i in range(CHECKED_STEPS):
            losses = {side: ask(side, i)[0] for side in sides}
            worst = max(abs(loss - losses[sides[0]]) for loss in losses.values())
            assert worst <= TOLERANCE * losses[sides[0]], f"step {i}: losses differ: {losses}"
        measured: dict[str, list[float]] = {side: [] for side in sides}
        for i in range(rounds):
            for turn in range(len(sides)):
                side = sides[(i + turn) % len(sides)]
                measured[side].append(ask(side, CHECKED_STEPS + i)[1])
    return {side: min(values) for side, values in measured.items()}


def peak(side: str, size: Size) -> float:
    with process(weigh, side, size) as pipe:
        return float(pipe.recv())


def beside(form: str, size: Size, rounds: int) -> float:
    with process(serve_beside, form, size, rounds) as pipe:
        return float(pipe.recv())


def measure(size: Size, rounds: int) -> list[Result]:
    hf = f"Hugging Face {'GPT-2' if size.family == 'gpt2' else 'Llama'}"
    names = {"Hugging Face": hf}
    targets = {"Hugging Face": 0.97}
    if size.family == "gpt2":
        names["plain"] = "plain GPT-2"
        targets["plain"] = 1.0
    forms = list(BY_AUTOGRAD) if size.family == "llama" else []
    sides = ["megapipe", *names]
    fastest = times(size, sides, rounds)
    peaks = {side: peak(side, size) for side in (*sides, *forms)}
    for side in sides:
        print(
            f"{size.family:6}{names.get(side, side):20}{fastest[side] * 1e3:8.1f} ms "
            f"{peaks[side] / 2**20:8.1f} MiB"
        )
    results = []
    for side, peer in names.items():
        of = f"of one step, {size.family}"
        ratio = fastest["megapipe"] / fastest[side]
        results.append(Result(f"time {of}, against {side}", ratio, targets[side], "x", peer))
        ratio = peaks["megapipe"] / peaks[side]
        results.append(Result(f"peak memory {of}, against {side}", ratio, 0.9, "x", peer))
    for form in forms:
        ratio = beside(form, size, rounds)
        results.append(Result(f"time {of}, against {form}", ratio, 1.0, "x", "megapipe"))
        ratio = peaks["megapipe"] / peaks[form]
        results.append(Result(f"peak memory {of}, against {form}", ratio, 1.0, "x", "megapipe"))
    if size.family == "gpt2":
        ratio = fastest["plain"] / fastest["Hugging Face"]
        claim = "time of one step of the plain GPT-2 (above 1: its row is void)"
        results.append(Result(claim, ratio, 1.0, "x", hf))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=20, help="timed steps per side (20)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    families: tuple[Family, Family] = ("gpt2", "llama")
    if given.quick:
        sizes = [Size(f, layers=1, hidden=16, heads=2, vocab=32, sequence=8) for f in families]
    else:
        sizes = [Size(f) for f in families]
    rounds = 2 if given.quick else given.rounds
    results = [result for size in sizes for result in measure(size, rounds)]
    report("One training step", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
