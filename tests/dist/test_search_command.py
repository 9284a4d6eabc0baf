"""A search by the costs of a configuration, as the command is called."""

import json

from megapipe.cli import parse
from megapipe.layout.costs import placement_cost
from megapipe.layout.resolve import resolve
from megapipe.schedule.text import from_csv
from megapipe.schedule.timing.simulate import simulate
from tests.parity.launches import fork_script


def test_costs_of_a_configuration(tmp_path):
    path, file = tmp_path / "model.yaml", tmp_path / "found.csv"
    path.write_text("model: {layers: 6, vocab_size: 6144}\nparallel: {pp: 2}\n")
    size = ("--ranks", "2", "--microbatches", "4", "--evaluations", "9", "--placement", "v")
    words = ["search", *size, "--config", str(path), "-o", str(file), "--json"]
    done = fork_script(tmp_path, "scripts/schedule.py", *words)
    assert done.err == ""
    config, _ = resolve(parse([str(path)]).config, None, None, where=str(path))
    found = from_csv(file.read_text(encoding="utf-8"))
    timed = simulate(found, placement_cost(config, found.placement))
    assert json.loads(done.out)["value"] == timed.makespan
