"""The commands that the pages of docs/ show, in the order of each page, from the root of the
repository, in a copy of what a fresh clone has.

Trainings are cut short and made narrow by settings behind the command, as anybody could; tests are
collected. What a page takes for granted (texts, a tokenizer, a model from elsewhere, a run) is made
before. `NOT_RUN` lists what is not for every machine, or takes minutes: of it the arguments are
looked at.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from tests.parity.chats import CHATML, conversation, tokenizer
from tests.parity.clone import make_clone, run
from tests.parity.megatron_files import write_legacy
from tests.parity.pages import DOCS, commands, wrong_files
from tests.parity.reference import init_random
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import model_of

PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
NOT_RUN = {
    r"-m gpu\b|gpu_\w+\.py|doctor\.py --spin": "it needs a GPU",
    r"--nnodes|s3://": "it needs a cluster, or a store",
    r"pip install|--tasks hellaswag": "it needs the network",
    r" scripts/test\.sh|-m mypy": "it runs these tests, or is run beside them",
    r"tests/external|-m tests|mutation/run\.py --count|campaigns/run\.py|step\.py": (
        "it takes minutes"
    ),
    r"^schedules\.md .*scripts/schedule\.py": "tests/unit/test_docs.py compares its lines",
}
if importlib.util.find_spec("lm_eval") is None:
    NOT_RUN[r"evaluate\.py harness"] = "lm-evaluation-harness is not installed"
SHORT = "train.steps=2 train.sequence_length=32 train.validation_samples=8 log.every=1"
NARROW = (
    "model.hidden=64 model.ffn_hidden=128 train.microbatch=1 train.global_batch=16 "
    "optimizer.warmup_steps=0 data.tokenizer=byte"
)
LARGE = {
    "from_deepspeed.md": NARROW,
    **dict.fromkeys(
        ("from_megatron.md", "from_others.md", "reliability.md"), f"{NARROW} model.layers=8"
    ),
}
"""Pages whose models are large, and the settings that change that."""
PLACES = {
    "CONFIG": "configs/qwen3_30b_a3b.yaml parallel.ep=8",
    "FOLDER": "Qwen3-0.6B",
    "OUTPUT": "runs/Qwen3-0.6B",
    "PATH": "checkpoints",
    "SECTION": "optimizer",
    "KEY": "lr",
    "COMMAND": "schedule --help",
    "RUN": "runs/latest",
}
"""What a user writes in place of such a word."""
TRAIN = f"python train.py {SHORT} data.source=text.jsonl"
BEFORE = {
    "data.md": {
        "prepare_data.py merge": (
            "python scripts/prepare_data.py --source code --tokenizer ./tokenizer "
            "--output data/books"
        ),
        "observe.sample_log": f"{TRAIN} log.sample_ids=true",
        "fim_rate": "cp marked/* tokenizer",
    },
    "evaluating.md": {
        "runs/large": f"{TRAIN} run.name=large",
        "runs/chat": f"{TRAIN} run.name=chat data.tokenizer=./tokenizer "
        "data.sample_format=supervised data.source=chats.jsonl train.sequence_length=64",
    },
    "models.md": {"runs/latest": TRAIN},
    "moe.md": {
        "runs/dense": f"{TRAIN} run.name=dense && echo 'run: {{name: upcycled}}' > moe.yaml",
    },
    "schedules.md": {"config.yaml": "echo 'model: {hidden: 64}' > config.yaml"},
}
"""Commands that a page takes for granted, before the first of its own with such words in it."""


def trains(command: str) -> bool:
    words = shlex.split(command)
    only_told = {"--dry-run", "--help", "--time-slices"}.intersection(words)
    return bool({"train.py", "train", "my_run.py"}.intersection(words)) and not only_told


def why_not(name: str, command: str) -> str | None:
    """Return why a command of a page is not run here; None if it is."""
    reasons = (why for pattern, why in NOT_RUN.items() if re.search(pattern, f"{name} {command}"))
    return next(reasons, None)


def is_run(name: str) -> bool:
    """Whether a page has a command that is run."""
    return any(why_not(name, command) is None for command in commands(PAGES[name]))


def as_run(name: str, command: str) -> str:
    """Return a command of a page as it is run here."""
    for word, place in PLACES.items():
        command = re.sub(rf"\b{word}\b", place, command)
    command = command.replace("-m pytest", "-m pytest --collect-only")
    if trains(command):
        command += f" {SHORT} {LARGE.get(name, '')}"
        if "data.source=" not in command:
            command += " data.source=text.jsonl"
    return command


def make_inputs(clone: Path) -> None:
    """Make texts, rows, a tokenizer, models from elsewhere and a task."""
    sentences = [f"def f{i}(x):\n    return x + {i}\n" for i in range(400)]
    for folder in ("texts", "code"):
        (clone / folder).mkdir()
        for i in range(40):
            (clone / folder / f"{i}.txt").write_text("\n".join(sentences[i : i + 40]))
    for name in ("text", "texts", "corpus"):
        rows = [json.dumps({"text": sentence}) for sentence in sentences[:100]]
        (clone / f"{name}.jsonl").write_text("\n".join(rows))
    chats = [{"messages": conversation(f"f{i}?", f"{i}.")} for i in range(40)]
    (clone / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    question = {"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    (clone / "questions.jsonl").write_text(json.dumps(question))
    (clone / "my_tasks").mkdir()
    (clone / "my_tasks/my_task.yaml").write_text(
        "task: my_task\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {clone / 'questions.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{prompt}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    marked = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="<|endoftext|>", chat_template=CHATML
    )
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    marked.add_special_tokens({"additional_special_tokens": marks})
    marked.save_pretrained(clone / "marked")
    sizes = Qwen3Config(
        vocab_size=len(marked),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    Qwen3ForCausalLM(sizes).save_pretrained(clone / "Qwen3-0.6B")
    marked.save_pretrained(clone / "Qwen3-0.6B")
    model = model_of("gpt2").model_copy(update={"dtype": "fp32", "vocab_size": 384})
    parameters = init_random(model, seed=5, dtype=torch.float32)
    write_legacy(clone / "checkpoints", model, parameters)


def script_of(name: str) -> list[str]:
    """Return the commands of a page that are run, with those that it takes for granted."""
    before, script = dict(BEFORE.get(name, {})), []
    if name != "data.md":  # which makes one
        script.append("cp -r marked tokenizer")
    for command in commands(PAGES[name]):
        if why_not(name, command) is not None:
            continue
        script += [before.pop(words) for words in [*before] if words in command]
        script.append(as_run(name, command))
    assert not before, "the page does not show these any more"
    unnamed = [i for i, line in enumerate(script) if trains(line) and "run.name=" not in line]
    for i in unnamed[1:]:  # the folder of the first is taken
        script[i] += f" run.name=run-{i}"
    return script


@in_parts("name", filter(is_run, PAGES), full=3)
def test_commands_work_one_after_the_other(name: str, tmp_path: Path) -> None:
    clone = tmp_path / "megapipe"
    make_clone(clone)
    make_inputs(clone)
    for source in re.findall(r"^```python\n(.*?)^```$", PAGES[name], re.M | re.S):
        if file := re.match(r'"""(\w+\.py): ', source):
            (clone / file[1]).write_text(source)
    script = script_of(name)
    printed = run(clone, script, binaries=clone / ".venv/bin")
    ends = re.findall(r"step 2/2 \| +[\d,]+ samples \| loss", printed)
    assert len(ends) == sum(map(trains, script))


@pytest.mark.parametrize("name", PAGES)
def test_what_is_not_run_names_what_is_there(name: str) -> None:
    for command in commands(PAGES[name]):
        if (why := why_not(name, command)) is None:
            continue
        words = shlex.split(command)
        files = [word.partition("::")[0] for word in words if "/" in word and "=" not in word]
        assert [*wrong_files(files)] == [], f"{command} is only looked at, as {why}"
        if trains(command):
            last = max(i for i, word in enumerate(words) if word in ("train.py", "train"))
            chosen = parse(words[last + 1 :]).config
            resolve(chosen, None, chosen.model.vocab_size or 50257)


def test_every_reason_not_to_run_a_command_has_one() -> None:
    reasons = {why_not(name, command) for name in PAGES for command in commands(PAGES[name])}
    assert reasons == {*NOT_RUN.values(), None}


def test_commands_of_every_kind_of_text_are_found() -> None:
    text = """
```sh
python a.py "b c" \\
    -d   # in a block
scripts/e.sh > f
```
Then `megapipe g --h` and `convert.py inspect i/j` (but `megapipe k` is only named):

    $ python l.py
    megapipe m n
    another line

```console
$ python o.py
its answer
```
"""
    assert commands(text) == [
        "python a.py 'b c' -d",
        "scripts/e.sh > f",
        "megapipe g --h",
        "python scripts/convert.py inspect i/j",
        "python l.py",
        "megapipe m n",
        "python o.py",
    ]
