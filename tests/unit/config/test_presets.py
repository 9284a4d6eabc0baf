"""Every file in configs/ is a possible run, and the known models have their known sizes."""

import re
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.memory_fit import demand, fit_text
from megapipe.plan.step_time import simulate_step
from megapipe.plan.units import Units
from megapipe.schedule.timing.simulate import simulate
from tests.parity.families import count
from tests.parity.tiers import in_parts

CONFIGS = Path(__file__).parents[3] / "configs"

PARAMETERS = {
    "gpt2_124m": 124_439_808,
    "gpt2_124m_2bw": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "gpt3_125m": 125_226_240,
    "gpt3_350m": 355_871_744,
    "gpt3_760m": 760_300_032,
    "gpt3_1.3b": 1_315_723_264,
    "gpt3_2.7b": 2_651_553_280,
    "gpt3_6.7b": 6_658_404_352,
    "gpt3_13b": 12_853_386_240,
    "gpt3_175b": 174_604_259_328,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_8b_128k": 8_030_261_248,
    "llama_8b_1m": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "pythia_160m": 162_322_944,
    "pythia_6.9b": 6_857_302_016,
    "bloom_176b": 176_247_271_424,
    "mt_nlg_530b": 529_581_506_560,
    "gpt2_switch": 1_909_814_016,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}
"""Published counts, but for GPT-3 and MT-NLG: 12 L h^2 + 13 L h + (V + s + 2) h, as theirs are
rounded; and for gpt2_switch: GPT-2 with 63 more MLPs and a router in each of six layers."""
ACTIVE = {
    "gpt2_switch": 124_439_808 + 6 * 64 * 768,
    "mixtral_8x7b": 12_879_925_248,
    "qwen3_30b_a3b": 3_353_032_704,
}
"""Parameters that a token meets, of models with experts; 12.9B and 3.3B are published."""


def test_all_presets_are_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {*PARAMETERS, "quickstart"}


FILES = sorted(CONFIGS.glob("*.yaml"))
PATHS = [
    pytest.param(path, marks=pytest.mark.full if path.stem == "mt_nlg_530b" else (), id=path.stem)
    for path in FILES
]
"""Presets; one has a schedule of 35 ranks and 1,920 micro-batches, which takes seconds to plan."""
BUBBLES = {"mt_nlg_530b": 0.07, "bloom_176b": 0.07, "gpt2_124m_2bw": 0.16}
"""Largest share of a step that is idle: 0.04 but for three presets. The first has 105 layers over
35 stages and a head. The second reduces and gathers over a slow network, which takes 5% of a step
in which no rank computes. The third has 12 layers over 4 stages, in five steps that fill an empty
pipeline; the head on its last stage has a fifth more FLOPs than 4 layers."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_preset(path: Path, replicas: int) -> None:
    config = parse([str(path)]).config
    inner = config.parallel.tp * config.parallel.cp * config.parallel.pp
    if config.parallel.dp is not None and config.parallel.dp != replicas:
        return
    config, layout = resolve(config, replicas * inner, None)
    assert layout.dp == replicas
    assert config.run.name == path.stem
    if path.stem in PARAMETERS:
        assert count(config.model) == PARAMETERS[path.stem]
        assert layout.model.active_parameters() == ACTIVE.get(path.stem, PARAMETERS[path.stem])


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n.startswith(("gpt3", "mt_nlg"))])
def test_gpt3_sizes_by_formula(name: str) -> None:
    model = parse([str(CONFIGS / f"{name}.yaml")]).config.model
    layers, h = model.layers, model.hidden
    assert PARAMETERS[name] == 12 * layers * h * h + 13 * layers * h + (50257 + 2048 + 2) * h


def laid_out_for(path: Path) -> tuple[int | None, int]:
    """Return the number of GPUs that a preset's comment names (None: it is for a CPU), and the GB
    that each has."""
    comment = path.read_text().partition("\nrun:")[0].replace("\n# ", " ")
    said = re.search(r"laid out for ([\d,]+) GPUs of (\d+) GB", comment)
    return (int(said[1].replace(",", "")), int(said[2])) if said else (None, 1)


def test_the_gpus_that_are_planned_are_those_of_the_comment() -> None:
    for path in FILES:
        gpus, _ = laid_out_for(path)
        assert parse([str(path)]).config.plan.gpus == gpus, path
        assert (gpus is None) == path.stem.startswith("quickstart"), path


@in_parts("path", FILES, default=8, full=2, ids=lambda path: path.stem)
def test_it_fits_what_it_is_laid_out_for(path: Path) -> None:
    """It fits with a single replica, too, which shares its states with no other, unless its weights
    are sharded over replicas."""
    gpus, memory_gb = laid_out_for(path)
    is_sharded = parse([str(path)]).config.optimizer.zero == 3
    for fewest in (False,) if is_sharded else (False, True):
        keys = ["plan.gpus=unset"] if fewest else []
        config, layout = resolve(parse([str(path), *keys]).config, None, None)
        assert fewest or layout.world == (gpus or 8)
        speeds = Speeds.of(config)
        assert speeds.memory_gb == memory_gb
        need = demand(Units(config, layout)).most.total
        assert fit_text(need, speeds).startswith(f"fits in {memory_gb} GB")
        if not path.stem.startswith("quickstart"):
            assert speeds.tflops is not None
            by_flops = simulate(layout.run_schedule, layout.cost).bubble_makespan
            bubble = max(simulate_step(Units(config, layout), speeds).bubble_makespan, by_flops)
            assert bubble < BUBBLES.get(path.stem, 0.04)


def test_quickstart_is_what_it_says() -> None:
    config, layout = resolve(parse([str(CONFIGS / "quickstart.yaml")]).config, 8, 257)
    assert (layout.dp, layout.tp, layout.pp, layout.chunks) == (2, 2, 2, 2)
    assert config.pipeline.schedule == "interleaved_1f1b"
    assert (config.data.source, config.data.tokenizer) == ("stdlib", "byte")
