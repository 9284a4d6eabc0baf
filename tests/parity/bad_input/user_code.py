"""User code that cannot be used."""

from __future__ import annotations

from tests.parity.bad_folder import text
from tests.parity.bad_input.case import Bad

RULE, LOSS, SCHEDULE = (
    "optimizer.rule=own:Rule",
    "train.loss_function=own:loss",
    "pipeline.schedule=own:f",
)
DATA, MODEL, RATE = "data.source=own:data", "model.source=own:model", "optimizer.schedule=own:rate"
LAYERS = "from torch.nn import Embedding, Linear\n"
"""First line of a file of layers."""


def own(name: str, argv: str, code: int, words: tuple[str, ...], source: str,
        late: bool = False) -> Bad:  # fmt: skip
    """Make a mistake in a file ``own.py``, with the error that it should get."""
    without = ("model.",) if MODEL in argv else ("optimizer.warmup",) if RATE in argv else ()
    return Bad(name, argv, code, words, text("own.py", source), late=late, without=without)


OWN_CODE = [
    Bad("a schedule where code is refused", "pipeline.schedule=os:abort run.user_code=refuse", 2,
        ("command line: pipeline.schedule=os:abort: it names code to run, which run.user_code",)),
    Bad("a file that allows its own code", "theirs.yaml run.user_code=refuse", 2,
        ("theirs.yaml and command line: optimizer.rule=os:abort: it names code to run",),
        text("theirs.yaml", "run.user_code: allow\noptimizer.rule: os:abort\n")),
    Bad("a model where the environment refuses code", f"{MODEL} run.user_code=allow", 2,
        ("model.source=own:model: it names code to run, which MEGAPIPE_USER_CODE=refuse",),
        text("own.py", "raise SystemExit(0)"), environ={"MEGAPIPE_USER_CODE": "refuse"},
        without=("model.",)),
    Bad("no such module", "optimizer.rule=gone:Rule", 2,
        ("optimizer.rule=gone:Rule: there is no module 'gone' in",)),
    own("no such name", RULE, 2, ("optimizer.rule=own:Rule: module 'own' has no class 'Rule'",),
        "rule = 1"),
    own("not callable", LOSS, 2, ("train.loss_function=own:loss", "has no function 'loss'"),
        "loss = 3"),
    own("a mistake in its syntax", LOSS, 2,
        ("train.loss_function=own:loss: SyntaxError", "own.py, line 1"),
        "def loss(:"),
    own("it raises when it is loaded", SCHEDULE, 2,
        ("pipeline.schedule=own:f", "ZeroDivisionError", "(own.py, line 2)"), "x = 1\n1 / 0\n"),
    own("it exits when it is loaded", DATA, 2, ("data.source", "SystemExit: 0", "own.py, line 1"),
        "raise SystemExit(0)"),
    own("it needs another module", MODEL, 2, ("own:model", "No module named 'nowhere'"),
        "import nowhere"),
    own("its signature has one more", RATE, 2,
        ("optimizer.schedule=own:rate", "its parameter more needs a default", "step"),
        "def rate(step, more): return 1.0"),
    own("a schedule that is none", SCHEDULE, 2, ("own:f: it returned list", "Schedule"),
        "def f(ranks, microbatches): return []"),
    own("a schedule that raises", SCHEDULE, 2, ("own:f: ValueError: no", "(own.py, line 1)"),
        "def f(ranks, microbatches): raise ValueError('no\\nsuch\\nthing')"),
    own("a schedule that exits", SCHEDULE, 2, ("own:f: SystemExit: 0", "(own.py, line 2)"),
        "import sys\ndef f(ranks, microbatches): sys.exit(0)"),
    own("a rate that exits", RATE, 2, ("optimizer.schedule=own:rate", "SystemExit: 0"),
        "def rate(step): raise SystemExit(0)"),
    own("a loss that exits", LOSS, 2,
        ("train.loss_function=own:loss", "SystemExit", "own.py, line 1"),
        "def loss(logits, labels, mask): quit()", late=True),
    own("a rate that is no number", RATE, 2, ("optimizer.schedule=own:rate", "expected"),
        "def rate(step): return 'fast'"),
    own("a rate that is not finite", RATE, 2, ("optimizer.schedule=own:rate", "expected"),
        "def rate(step): return float('nan')"),
    own("a rule that is none", RULE, 2, ("optimizer.rule=own:Rule",), "class Rule: pass"),
    own("a loss without its arguments", LOSS, 2,
        ("train.loss_function=own:loss: it is called with (logits, labels, mask): too many",),
        "def loss(logits): return 0"),
    own("a loss that raises", LOSS, 2,
        ("train.loss_function=own:loss", "ValueError: no", "own.py, line 1"),
        "def loss(logits, labels, mask): raise ValueError('no')", late=True),
    own("a loss that is no sum", LOSS, 2, ("train.loss_function=own:loss",),
        "def loss(logits, labels, mask): return logits", late=True),
    own("a model without layers", MODEL, 2, ("model.source=own:model",),
        "def model(): return []"),
    own("a model of something else", MODEL, 2, ("model.source=own:model",),
        "def model(): return [1, 2]"),
    own("a model that raises", MODEL, 2, ("model.source=own:model", "RuntimeError: no"),
        "def model(): raise RuntimeError('no')"),
    own("a model whose layers do not fit", f"{MODEL} train.steps=1", 2, ("model.source=own:model",),
        f"{LAYERS}def model(vocab_size):\n"
        "    return [Embedding(vocab_size, 8), Linear(9, 8), Linear(8, vocab_size)]\n", late=True),
    own("data without samples", DATA, 3, ("data.source=own:data",),
        "def data(split, sequence_length): return []", late=True),
    own("data of another length", DATA, 3, ("data.source=own:data", "17"),
        "def data(split, sequence_length): return [[1, 2]] * 50", late=True),
    own("data with ids beyond the model", DATA, 3, ("data.source=own:data", "999"),
        "def data(split, sequence_length): return [[999] * (sequence_length + 1)] * 50", late=True),
    own("data that raises", DATA, 3, ("data.source=own:data", "KeyError", "own.py, line 1"),
        "def data(split, sequence_length): raise KeyError('no')", late=True),
    own("data that exits", DATA, 3, ("data.source=own:data", "SystemExit", "own.py, line 1"),
        "def data(split, sequence_length): raise SystemExit(3)", late=True),
    own("data that is another in each process", DATA, 3,
        ("data.source=own:data: rank 1 has other samples than rank 0",),
        "import os\n"
        "def data(split, sequence_length):\n"
        "    return [[os.getpid() % 251] * (sequence_length + 1)] * 50\n",
        late=True),
]  # fmt: skip
