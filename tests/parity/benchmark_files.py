"""The programs of benchmarks/."""

from __future__ import annotations

from tests.parity.jobs import ROOT

SHARED = (
    "all.py",
    "autograd_llama.py",
    "common.py",
    "corpus.py",
    "deepspeed_peer.py",
    "fake_world.py",
    "timed_operations.py",
    "megatron_peer.py",
    "model_memory.py",
    "peer_row.py",
    "pipelines.py",
    "plain_gpt.py",
    "slow_link.py",
    "token_indices.py",
    "interleaved_timing.py",
)
BENCHMARKS = sorted(p for p in (ROOT / "benchmarks").glob("*.py") if p.name not in SHARED)
