"""One file a task. Each has `run(cfg, record)`: a short script over the rooms below."""
