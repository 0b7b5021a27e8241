"""Trials of an Optuna study that end early: where one is worse than most were by then, the rest of its time is better spent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from weldtrain.metrics.comparison import objective_of

STUDY = "WELDTRAIN_STUDY"  # the environment variable in which a sweep tells its jobs what they are trials of


def study_of(sweeper: Mapping[str, Any], overrides: list[str]) -> dict[str, str]:
    """What a job's environment is told where the sweeper keeps its study in a place that other processes reach."""
    if not (sweeper.get("storage") and sweeper.get("study_name")):
        return {}
    return {STUDY: json.dumps([str(sweeper["storage"]), sweeper["study_name"], overrides])}


class Pruner:
    """Tells the study how this trial does, and is told whether it is hopeless."""

    def __init__(self, objective: str) -> None:
        """Of the trial that this process was started as; of none, and nothing is hopeless, where it was not."""
        self._objective, self._trial = objective, None
        if STUDY not in os.environ:
            return
        import optuna

        storage, name, overrides = json.loads(os.environ[STUDY])
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # A trial is judged once five have been seen to their end, and not by its first evaluation.
        study = optuna.load_study(name, storage, pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2))
        running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        mine = [t for t in running if {f"{key}={value}" for key, value in t.params.items()} <= set(overrides)]
        if mine:
            self._trial = optuna.trial.Trial(study, mine[-1]._trial_id)

    def hopeless(self, epoch: int, metrics: Mapping[str, Any]) -> bool:
        """Whether to end the run after this evaluation."""
        value = objective_of(metrics, self._objective)
        if self._trial is None or value is None:
            return False
        self._trial.report(value, epoch)
        return bool(self._trial.should_prune())
