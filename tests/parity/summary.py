"""The summary of a run."""

SUMMARY = {
    "loss_first": 5.5512,
    "loss_last": 1.9021,
    "validation_loss": 1.95,
    "unigram_entropy": 3.25,
    "tokens_per_second": 57612.4,
    "run_folder": "runs/quickstart-1",
    "steps": 300,
    "seconds": 142.2,
}
